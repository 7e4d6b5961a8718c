"""What the target writes from a cache, for people who would rather read than compare numbers."""

from __future__ import annotations

from kvferry.evals.contexts import EvalContext
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.mapped import MappedCache


def continue_text(
    handoff: Handoff, mapped: MappedCache, context: EvalContext, max_new_tokens: int
) -> str:
    """Greedy continuation, the true next token given so that every cache starts alike."""
    target = handoff.reader.target
    first = context.continuation[:1]
    made = target.generate(mapped.cache, first, mapped.mask, max_new_tokens)
    return target.text_of([*first, *made])
