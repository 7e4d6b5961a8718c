"""Hand-offs back and forth over a growing conversation: what a turn costs, and what adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvferry.align.spans import TokenText
from kvferry.errors import ArtefactError, InputError
from kvferry.evals.ladder import finish_prefix
from kvferry.evals.scoring import NativeReference, Scores, scores_of
from kvferry.handoff.handoff import Handoff
from kvferry.lm.cache import copy_cache
from kvferry.lm.model import LanguageModel, Prefill

LEAST_TURN = 8
"""Tokens of the first model; the second may spell them with fewer, and two are needed to score."""


@dataclass(frozen=True)
class ConversationShape:
    """How a text is cut into turns, in tokens of the model that starts.

    Args:
        turns: hand-offs; the models alternate.
        first_tokens: read by the first model before any hand-off.
        turn_tokens: read after each hand-off by the model that receives.
        recall_start, recall_tokens: a span of what was read first, asked for again at every turn;
            in tokens of the model that is asked.
        recall_prompt_tokens: first tokens of that span, given and not scored.
    """

    turns: int = 3
    first_tokens: int = 512
    turn_tokens: int = 96
    recall_start: int = 96
    recall_tokens: int = 64
    recall_prompt_tokens: int = 16

    def __post_init__(self) -> None:
        if self.turns < 1 or self.turn_tokens < LEAST_TURN:
            raise InputError(
                "A conversation has turns, and each of them something to score.",
                found=f"{self.turns} turns of {self.turn_tokens} tokens",
                expected=f"at least one, of {LEAST_TURN} tokens or more",
                fix="raise turns and turn_tokens",
            )
        if self.recall_start + self.recall_tokens > self.first_tokens:
            raise InputError(
                "The span to recall lies outside what is read first.",
                found=f"tokens {self.recall_start} to {self.recall_start + self.recall_tokens}",
                expected=f"at most {self.first_tokens}",
                fix="raise first_tokens",
            )

    def context_tokens(self, turn: int) -> int:
        """Tokens that the ``turn``-th hand-off carries, counted from 1."""
        return self.first_tokens + (turn - 1) * self.turn_tokens


@dataclass(frozen=True)
class Conversation:
    """A real text, cut.

    Args:
        first_ids: what the first model reads, its sink prefix included.
        pieces: the text of each turn.
    """

    first_ids: list[int]
    pieces: list[str]


def cut_conversation(
    model: LanguageModel, spelling: TokenText, text: str, shape: ConversationShape
) -> Conversation:
    """Cut ``text`` at token boundaries of ``model``, never inside a character.

    Raises:
        InputError: the text is shorter than the conversation.
    """
    ids = [*model.sink_ids, *model.encode(text)]
    spelled, spans = spelling.character_spans(ids)
    cuts: list[int] = []
    count = len(model.sink_ids) + shape.first_tokens
    for _ in range(shape.turns + 1):
        while count < len(ids) and spans[count, 0] < spans[count - 1, 1]:
            count += 1
        cuts.append(count)
        count += shape.turn_tokens
    if cuts[-1] > len(ids):
        raise InputError(
            "A passage is too short for the conversation.",
            found=f"{len(ids)} tokens of {model.name}",
            expected=f"at least {cuts[-1]}",
            fix="use longer passages, fewer turns, or lower first_tokens or turn_tokens",
        )
    ends = [int(spans[count - 1, 1]) for count in cuts]
    pieces = [spelled[start:end] for start, end in pairwise(ends)]
    return Conversation(ids[: cuts[0]], pieces)


class MultiTurn:
    """Scores every turn of conversations under four caches.

    ``native``: the receiver has read everything itself. ``zero``: nothing of it. ``mapped``: it was
    handed the sender's cache, which is in part what an earlier hand-off mapped. ``fresh``: it was
    handed the cache of a sender that has read the same tokens itself, which is what one hand-off
    costs. KL of ``mapped`` beyond that of ``fresh`` is drift; at the first turn the two are one.

    Args:
        there, back: hand-offs from the first model to the second, and from the second to the first.
        shape: of the conversations.

    Raises:
        ArtefactError: ``back`` is not the way back of ``there``.
    """

    def __init__(self, there: Handoff, back: Handoff, shape: ConversationShape) -> None:
        for start, end in (
            (there.reader.source, back.reader.target),
            (there.reader.target, back.reader.source),
        ):
            if _identity(start) != _identity(end):
                raise ArtefactError(
                    "The second mapper is not the way back of the first.",
                    found=f"{back.reader.source.name} to {back.reader.target.name}",
                    expected=f"{there.reader.target.name} to {there.reader.source.name}, in the "
                    "same revisions",
                    fix="name a run of the opposite pair",
                )
        self.there = there
        self.back = back
        self.shape = shape

    @torch.inference_mode()
    def score(self, text: str, each: Callable[[], None] = lambda: None) -> list[dict[str, Scores]]:
        """By turn and condition, what the receiver's cache is worth on the turn's text.

        Args:
            each: called after every turn, for a progress bar.

        Raises:
            InputError: the text is too short, or the span to recall is not in what is read first.
        """
        reader = self.there.reader
        conversation = cut_conversation(reader.source, reader.source_text, text, self.shape)
        read = reader.source.prefill(*reader.source.batch([conversation.first_ids]))
        characters = len(reader.source_text.text(conversation.first_ids))
        held = {"mapped": read, "fresh": read}
        turns = []
        for turn, piece in enumerate(conversation.pieces):
            handoff = (self.there, self.back)[turn % 2]
            scores, held = self._turn(handoff, held, piece, characters)
            turns.append(scores)
            each()
        return turns

    def _turn(
        self, handoff: Handoff, held: Mapping[str, Prefill], piece: str, first_characters: int
    ) -> tuple[dict[str, Scores], dict[str, Prefill]]:
        """Scores of one turn, and what the receiver then holds: handed over, and read by itself.

        Both senders hold the same ids, so that every condition is asked for the same tokens.
        """
        target = handoff.reader.target
        carried = {c: handoff.transfer(p, piece, full_length=True) for c, p in held.items()}
        ids, mask = carried["mapped"].ids, carried["mapped"].mask
        new = torch.tensor(carried["mapped"].suffix_ids, device=target.device)
        span = self._span(handoff, ids[0].tolist(), first_characters)

        native = target.prefill(ids, mask)
        recall = _recall(target, native.cache, mask, span)
        logits = target.extend(native.cache, new, mask)
        reference = NativeReference.of(logits[0])
        after = {"fresh": native.grown(new, logits)}

        def judge(logits: Tensor, recall: Tensor) -> Scores:
            asked = (logits[0], new[0]), (recall, span)
            return scores_of(reference, *asked, prompt=self.shape.recall_prompt_tokens)

        scores = {"native": judge(logits, recall)}
        zero = finish_prefix(handoff)
        recall = _recall(target, zero.cache, zero.mask, span)
        scores["zero"] = judge(target.extend(zero.cache, new, zero.mask), recall)
        for condition, mapped in carried.items():
            recall = _recall(target, mapped.cache, mask, span)
            prefill, logits = handoff.read_on(mapped, new)
            scores[condition] = judge(logits, recall)
            if condition == "mapped":
                after[condition] = prefill
        return scores, after

    def _span(self, handoff: Handoff, ids: Sequence[int], first_characters: int) -> Tensor:
        """The receiver's tokens of the span that is asked for again."""
        reader = handoff.reader
        start = len(reader.target.sink_ids) + self.shape.recall_start
        stop = start + self.shape.recall_tokens
        _, spans = reader.target_text.character_spans(ids)
        if stop > len(ids) or int(spans[stop - 1, 1]) > first_characters:
            raise InputError(
                f"The span to recall reaches beyond what was read first, in tokens of "
                f"{reader.target.name}.",
                found=f"tokens {start} to {stop}",
                fix="raise first_tokens",
            )
        return torch.tensor(ids[start:stop], device=reader.target.device)


def _recall(
    target: LanguageModel,
    cache: Any,
    mask: Bool[Tensor, "1 past"],
    span: Int[Tensor, " span"],
) -> Float[Tensor, "span vocab"]:
    """Logits of ``span`` right after the context; ``cache`` stays as it is."""
    return target.extend(copy_cache(cache), span[None], mask)[0]


def _identity(model: LanguageModel) -> tuple[str, str, str]:
    return model.geometry.fingerprint(), model.revision, model.tokenizer_hash
