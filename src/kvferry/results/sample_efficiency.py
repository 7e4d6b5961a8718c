"""Rows pivoted for one question: how much text does a mapper need?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.results.catalogue import CALIBRATION_TOKENS, LADDER_TASKS
from kvferry.results.rows import ResultRow
from kvferry.results.views import Cell, pooled

SAMPLE_METRICS = ("kl_retention", "nll_retention", "recall_kept")


@dataclass(frozen=True)
class SampleCurve:
    """One metric of one mapper's caches on one split, by how many tokens it was fitted on.

    Attributes:
        points: calibration tokens, ascending, and what was measured.
    """

    pair: str
    source: str
    target: str
    mapper: str
    split: str
    metric: str
    points: tuple[tuple[int, Cell], ...]

    @property
    def n(self) -> str:
        """Contexts behind a point: one count, or a range."""
        counts = sorted({cell.n for _, cell in self.points})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"


def sample_curves(rows: Sequence[ResultRow]) -> list[SampleCurve]:
    """A curve a pair, mapper, split and metric, by metric; left out: rows of no known tokens.

    Seeds are pooled. Where one seed was measured twice on as many tokens (other settings of the
    same mapper) the later one counts.
    """
    tokens = {
        (row.pair, row.mapper, row.mapper_hash, row.seed): int(row.value)
        for row in rows
        if row.metric == CALIBRATION_TOKENS
    }
    found: dict[tuple[str, str, str, str], dict[int, dict[int, ResultRow]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in sorted(rows, key=lambda row: row.created):
        count = tokens.get((row.pair, row.mapper, row.mapper_hash, row.seed))
        measured = row.task in LADDER_TASKS and row.metric in SAMPLE_METRICS
        if count and measured and row.condition == "mapped":
            found[row.pair, row.mapper, row.split, row.metric][count][row.seed] = row
    curves = []
    for (pair, mapper, split, metric), by_tokens in found.items():
        first = next(iter(by_tokens[min(by_tokens)].values()))
        points = tuple(
            (count, pooled(list(by_tokens[count].values()))) for count in sorted(by_tokens)
        )
        curves.append(SampleCurve(pair, first.source, first.target, mapper, split, metric, points))
    return sorted(curves, key=lambda curve: SAMPLE_METRICS.index(curve.metric))
