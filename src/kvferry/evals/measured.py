"""From result rows to the facts that a hand-off's policy decides on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.evals.rows import LADDER_TASK
from kvferry.handoff.costs import LEAST_LENGTHS, CostModel
from kvferry.handoff.measured import Measured
from kvferry.results.catalogue import LATENCY_TASK
from kvferry.results.rows import ResultRow

QUALITY = ("kl_retention", "nll_retention", "recall_kept", "top1_agreement")


def measured_of(rows: Sequence[ResultRow], weights_sha256: str, device: str) -> Measured:
    """What one run's rows say of its mapper: quality by domain, and both ways' time by length.

    Carrying is alignment and map; both are medians, as is the target's prefill.

    Args:
        weights_sha256: of the mapper that was evaluated.
        device: kind of device that the target ran on.
    """
    scored = [row for row in rows if (row.task, row.condition) == (LADDER_TASK, "mapped")]
    quality: dict[str, dict[str, float]] = {}
    for row in scored:
        if row.metric in QUALITY and math.isfinite(row.value):
            quality.setdefault(row.split, {})[row.metric] = row.value
    timed: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if (row.task, row.split) == (LATENCY_TASK, "p50"):
            timed.setdefault((row.condition, row.metric), {})[row.context_tokens] = row.value
    prefill = timed.get(("native", "prefill_ms"), {})
    aligned, mapped = timed.get(("mapped", "align_ms"), {}), timed.get(("mapped", "map_ms"), {})
    lengths = sorted(prefill.keys() & aligned.keys() & mapped.keys())
    enough = len(lengths) >= LEAST_LENGTHS
    return Measured(
        weights_sha256=weights_sha256,
        device=device,
        quality=quality,
        context_tokens=max((row.context_tokens for row in scored), default=0),
        carry=CostModel.fit(lengths, [aligned[n] + mapped[n] for n in lengths]) if enough else None,
        prefill=CostModel.fit(lengths, [prefill[n] for n in lengths]) if enough else None,
        timed_tokens=(lengths[0], lengths[-1]) if enough else None,
    )
