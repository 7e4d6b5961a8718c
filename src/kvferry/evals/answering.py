"""Answers without the text: what a target says of its own when it has a cache and a cue alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.calibration.trace_store import TraceStore
from kvferry.handoff.handoff import Handoff
from kvferry.lm.content import ContentKV
from kvferry.mappers.controls import identity_content
from kvferry.training.answers import OwnAnswer
from kvferry.training.losses import text_nll

CONDITIONS = ("native", "mapped", "zero")


@dataclass(frozen=True)
class AnswerScore:
    """One answer from one cache.

    Args:
        nll: nats a token of what the target said when it had read the text itself.
        exact: decoded greedily, it would say just that.
    """

    nll: float
    exact: bool


@torch.inference_mode()
def score_answer(handoff: Handoff, answer: OwnAnswer, store: TraceStore) -> dict[str, AnswerScore]:
    """By condition: native, mapped, and zero, the target's prefix alone.

    Under "native" the answer is what greedy decoding gives, up to rounding.
    """
    trace = store.read(answer.pair)
    native = trace.target.slice_tokens(0, answer.context)
    read = int(answer.pair.alignment.indices[: answer.context].max()) + 1
    source = trace.source.slice_tokens(0, read)
    windows = handoff.mapper.first_tokens(answer.context)
    left = len(answer.pair.target_ids) - answer.context
    contents = {
        "native": identity_content(native, windows),
        "mapped": handoff.map_content(source, answer.pair, left),
        "zero": handoff.prefix,
    }
    return {name: _score(handoff, content, answer) for name, content in contents.items()}


def score_answers(
    handoff: Handoff,
    answers: Sequence[OwnAnswer],
    store: TraceStore,
    each: Callable[[], None] = lambda: None,
) -> dict[str, list[AnswerScore]]:
    """By condition, the scores of all answers in order; ``each`` is called after every one."""
    found: dict[str, list[AnswerScore]] = {name: [] for name in CONDITIONS}
    for answer in answers:
        for name, score in score_answer(handoff, answer, store).items():
            found[name].append(score)
        each()
    return found


def _score(handoff: Handoff, content: ContentKV, answer: OwnAnswer) -> AnswerScore:
    target = handoff.reader.target
    ids = torch.tensor([[*answer.cue, *answer.tokens[:-1]]], device=target.device)
    cache = target.cache_from(content)
    logits = target.extend(cache, ids, content.mask, keep_logits=len(answer.tokens))[0]
    wanted = torch.tensor(answer.tokens, device=target.device)
    exact = bool((logits.argmax(dim=-1) == wanted).all())
    return AnswerScore(float(text_nll(logits, wanted).mean()), exact)
