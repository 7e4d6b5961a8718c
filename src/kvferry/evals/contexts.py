"""Held-out contexts: what is carried over, and what the target is then asked to continue."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.calibration.reader import PairReader, PairTrace
from kvferry.calibration.trace_store import TraceStore
from kvferry.errors import InputError


@dataclass(frozen=True)
class ContextShape:
    """Lengths in target tokens, the prefix not counted.

    Args:
        context_tokens: carried over.
        continuation_tokens: scored right after it.
        recall_start, recall_tokens: an early span of the context that is repeated after it.
        recall_prompt_tokens: first tokens of that span, given and not scored.
    """

    context_tokens: int = 768
    continuation_tokens: int = 64
    recall_start: int = 96
    recall_tokens: int = 64
    recall_prompt_tokens: int = 16

    def __post_init__(self) -> None:
        if self.recall_start + self.recall_tokens > self.context_tokens:
            raise InputError(
                "The span to recall lies outside the context.",
                found=f"tokens {self.recall_start} to {self.recall_start + self.recall_tokens}",
                expected=f"at most {self.context_tokens}",
                fix="lower eval.recall_start or raise eval.context_tokens",
            )


@dataclass(frozen=True)
class EvalContext:
    """One held-out context, read by both models.

    Args:
        trace: position-free caches of context tokens only.
        continuation: the target tokens that follow in the text.
        recall: an early span of the context, to be asked for again.
        source_continuation: source tokens of the continuation, for the source's own score.
        source_characters: characters that the scored ones of them spell.
        continuation_characters: characters that the scored continuation tokens spell.
    """

    trace: PairTrace
    continuation: list[int]
    recall: list[int]
    source_continuation: list[int]
    source_characters: int
    continuation_characters: int


def read_context(
    reader: PairReader, text: str, shape: ContextShape, store: TraceStore | None = None
) -> EvalContext:
    """Cut a context and its continuation from ``text`` and read it with both models.

    Args:
        store: keeps what the models have read for the next mapper.

    Source tokens that end after the context are not read: nothing of the continuation leaks.

    Raises:
        InputError: the text is shorter than context and continuation.
    """
    prefix = len(reader.target.sink_ids)
    body = reader.target.encode(text)
    needed = shape.context_tokens + shape.continuation_tokens
    if len(body) < needed:
        raise InputError(
            "A held-out passage is too short.",
            found=f"{len(body)} target tokens",
            expected=f"at least {needed}",
            fix="use longer passages or lower eval.context_tokens",
        )
    target_ids = [*reader.target.sink_ids, *body[:needed]]
    target_spans = reader.target_text.character_spans(target_ids)[1]
    whole_source = [*reader.source.sink_ids, *reader.source.encode(text)]
    source_text, source_spans = reader.source_text.character_spans(whole_source)
    end = int(target_spans[prefix + shape.context_tokens - 1, 1])
    last = int(target_spans[-1, 1])
    ends = source_spans[:, 1]
    count, covered = int((ends <= end).sum()), int((ends <= last).sum())
    tokens = reader.align(
        whole_source[:count],
        source_spans[:count],
        target_ids[: prefix + shape.context_tokens],
        source_text[:end],
    )
    trace = reader.read([tokens])[0] if store is None else store.read(tokens)
    first_scored = int(target_spans[prefix + shape.context_tokens, 1])
    span = body[shape.recall_start : shape.recall_start + shape.recall_tokens]
    return EvalContext(
        trace=trace,
        continuation=body[shape.context_tokens : needed],
        recall=span,
        source_continuation=whole_source[count:covered],
        source_characters=int(ends[covered - 1] - ends[count]) if covered > count else 0,
        continuation_characters=last - first_scored,
    )
