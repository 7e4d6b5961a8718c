"""What the target itself says to a text that it has read: its right answers, or how it goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.calibration.questions import Question, is_right
from kvferry.calibration.reader import PairReader, TokenPair
from kvferry.lm.model import LanguageModel
from kvferry.lm.store import new_file

CUE = "\nAnswer:"
ROWS = 8
"""Answers that are written at once."""
TRIES = 4
"""Questions that are asked for each right answer that is wanted."""


@dataclass(frozen=True)
class OwnAnswer:
    """What the target says when it has read a text itself.

    Args:
        pair: the text in the tokens of both models.
        context: first target tokens, prefix included, that are carried over.
        cue: target tokens between them and the answer, at least one.
        tokens: the answer, at least one.
        right: it answers a question, and rightly; False where it just goes on.
    """

    pair: TokenPair
    context: int
    cue: tuple[int, ...]
    tokens: tuple[int, ...]
    right: bool

    @property
    def prompt(self) -> list[int]:
        """Context and cue."""
        return [*self.pair.target_ids[: self.context], *self.cue]


@dataclass(frozen=True)
class Answerer:
    """Lets the target answer, and keeps what it said on disk.

    Args:
        reader: both models; the target answers.
        folder: of its answers, one small file each.
        tokens: longest answer.
        passage_tokens: source tokens that a text may have.
        temperature: 0 takes the likeliest token.
        seed: of draws.
    """

    reader: PairReader
    folder: Path
    tokens: int = 48
    passage_tokens: int = 1000
    temperature: float = 0.0
    seed: int = 0

    def right_answers(self, questions: Sequence[Question], wanted: int) -> list[OwnAnswer]:
        """Up to ``wanted`` of its answers that are right, to their first line break."""
        found: list[OwnAnswer] = []
        target = self.reader.target
        cue = tuple(target.encode(CUE))
        asked = questions[: TRIES * wanted]
        for first in range(0, len(asked), ROWS):
            if len(found) >= wanted:
                break
            some = asked[first : first + ROWS]
            pairs = [self.reader.tokenize(question.text) for question in some]
            fit = [len(pair.source_ids) <= self.passage_tokens for pair in pairs]
            prompts = [
                (question, OwnAnswer(pair, len(pair.target_ids), cue, (), True))
                for question, pair, fits in zip(some, pairs, fit, strict=True)
                if fits
            ]
            said = self._said([answer.prompt for _, answer in prompts])
            for (question, answer), ids in zip(prompts, said, strict=True):
                line = first_line(target, ids)
                if line and is_right(target.text_of(line), question.answers):
                    found.append(
                        OwnAnswer(answer.pair, answer.context, answer.cue, tuple(line), True)
                    )
        return found[:wanted]

    def continuations(self, pairs: Sequence[TokenPair], longest: int) -> list[OwnAnswer]:
        """How it goes on after each text, cut at random to at most ``longest`` target tokens.

        The next true token is the cue.
        """
        prefix, generator = len(self.reader.target.sink_ids), _generator(self.seed)
        cuts: list[OwnAnswer] = []
        for pair in pairs:
            last = min(longest, len(pair.target_ids) - prefix - 1)
            if last >= 1:
                low = max(1, last // 4)
                cut = prefix + int(torch.randint(low, last + 1, (), generator=generator))
                cuts.append(OwnAnswer(pair, cut, (pair.target_ids[cut],), (), False))
        said = self._said([cut.prompt for cut in cuts])
        return [
            OwnAnswer(cut.pair, cut.context, cut.cue, tuple(ids), False)
            for cut, ids in zip(cuts, said, strict=True)
            if ids
        ]

    def _said(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What the target says to each prompt, from disk where it has said it before."""
        paths = [self._path(prompt) for prompt in prompts]
        missing = [i for i, path in enumerate(paths) if not path.is_file()]
        # Rows of about one length waste little on padding.
        missing.sort(key=lambda i: len(prompts[i]))
        for first in range(0, len(missing), ROWS):
            some = missing[first : first + ROWS]
            rows = write(
                self.reader.target,
                [prompts[i] for i in some],
                self.tokens,
                temperature=self.temperature,
                generator=_generator(self.seed),
            )
            for i, ids in zip(some, rows, strict=True):
                with new_file(paths[i]) as temporary:
                    temporary.write_text(json.dumps(ids))
        return [json.loads(path.read_text()) for path in paths]

    def _path(self, prompt: Sequence[int]) -> Path:
        target = self.reader.target
        settings = [
            target.revision,
            target.tokenizer_hash,
            str(target.dtype),
            self.tokens,
            self.temperature,
            self.seed if self.temperature else 0,
        ]
        key = hashlib.sha256(json.dumps([settings, list(prompt)]).encode()).hexdigest()
        return self.folder / f"{key[:24]}.json"


def first_line(target: LanguageModel, ids: Sequence[int]) -> list[int]:
    """Tokens up to the first line break after some text."""
    for count in range(1, len(ids) + 1):
        if "\n" in target.text_of(ids[:count]).lstrip():
            return list(ids[: count - 1])
    return list(ids)


@torch.inference_mode()
def write(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Decode several rows at once, each until a stop token or ``tokens``."""
    ids, mask = target.batch(prompts)
    read = target.prefill(ids, mask)
    logits, out = read.logits, []
    going = torch.ones(len(prompts), dtype=torch.bool, device=target.device)
    stops = torch.tensor(sorted(target.stop_ids), device=target.device)
    for _ in range(tokens):
        chosen = _choose(logits, temperature, generator)
        going = going & ~torch.isin(chosen, stops)
        if not bool(going.any()):
            break
        out.append(torch.where(going, chosen, -1))
        logits = target.extend(read.cache, chosen[:, None], mask, keep_logits=1)[:, -1]
        mask = torch.cat((mask, torch.ones_like(chosen[:, None], dtype=torch.bool)), dim=1)
    return [list(_until_stop(row)) for row in zip(*(x.tolist() for x in out), strict=True)] or [
        [] for _ in prompts
    ]


def _choose(
    logits: Float[Tensor, "rows vocab"], temperature: float, generator: torch.Generator | None
) -> Int64[Tensor, " rows"]:
    if not temperature:
        return logits.argmax(dim=-1)
    shares = (logits.float() / temperature).softmax(dim=-1).cpu()
    return torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)


def _until_stop(row: Sequence[int]) -> Iterator[int]:
    for token in row:
        if token < 0:
            return
        yield token


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
