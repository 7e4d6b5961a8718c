"""Several runs in one table a pair: quality, long-range recall, other domains, size, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.results.catalogue import CALIBRATION_TOKENS, LATENCY_TASK, METRICS, condition_label
from kvferry.results.rows import ResultRow
from kvferry.results.tables import NOTHING, format_value, markdown_lines
from kvferry.results.verdict import CONTROLS
from kvferry.results.views import pairs_of

BELOW = ("zero", *CONTROLS)
"""Conditions that stand once, below the runs."""
QUALITY = ("kl", "recall_kept", "nll_retention", "top1_agreement", "attention_cosine")
BEST = {"kl": min, "recall_kept": max}


@dataclass(frozen=True)
class Contender:
    """One run in a comparison.

    Args:
        label: what it is called.
        rows: all that it measured, at least on one text.
        fit_seconds: from the calibration text read to the mapper; None where nobody noted it.
    """

    label: str
    rows: Sequence[ResultRow]
    fit_seconds: float | None = None

    def value(self, metric: str, condition: str, split: str) -> ResultRow | None:
        """The row of the whole model, timings and conversations apart."""
        for row in self.rows:
            whole = row.layer is None and row.turn is None and row.task != LATENCY_TASK
            if whole and (row.metric, row.condition, row.split) == (metric, condition, split):
                return row
        return None

    @property
    def splits(self) -> tuple[str, ...]:
        """Domains in the order in which they were measured; the run's own is the first."""
        scored = (row.split for row in self.rows if row.metric == "kl" and row.turn is None)
        return tuple(dict.fromkeys(scored))

    def size(self, metric: str) -> float | None:
        """A number that the mapper has whatever it is measured on."""
        return next((row.value for row in self.rows if row.metric == metric), None)

    @property
    def speedups(self) -> dict[int, float]:
        """By context length, native prefill over map time."""
        timed = [row for row in self.rows if row.metric == "speedup" and row.split == "p50"]
        return {row.context_tokens: row.value for row in timed}


def comparison_tables(contenders: Sequence[Contender], *, intervals: bool = False) -> str:
    """Markdown, one table a pair: a line a run, then the controls of the runs that have them.

    Args:
        intervals: behind KL and recall kept in the first domain.
    """
    rows = [row for contender in contenders for row in contender.rows]
    parts = []
    for pair in pairs_of(rows):
        mine = [c for c in contenders if c.rows and c.rows[0].pair == pair]
        parts.append(_table(mine, intervals))
    return "\n\n".join(parts)


def _table(contenders: Sequence[Contender], intervals: bool) -> str:
    domain, *others = dict.fromkeys(split for c in contenders for split in c.splits)
    tail = any(c.value("kl", "mapped_tail", domain) for c in contenders)
    length = _length_of_most(contenders)
    heads = [
        "",
        *(METRICS[metric].label for metric in QUALITY),
        *(["with a native tail"] if tail else []),
        *others,
        "M weights",
        "MB",
        "tokens",
        "fit",
        f"prefill / map, {length:,}" if length else "prefill / map",
    ]
    best = {metric: _best(contenders, metric, domain) for metric in BEST}
    body = []
    for contender in contenders:
        cells = [contender.label]
        for metric in QUALITY:
            row = contender.value(metric, "mapped", domain)
            shown = _with_interval(row) if intervals and metric in BEST else _plain(row)
            cells.append(f"**{shown}**" if row is not None and row is best.get(metric) else shown)
        cells += [_both(contender, "mapped_tail", domain)] if tail else []
        cells += [_both(contender, "mapped", split) for split in others]
        cells += [
            _number(contender.size("parameters"), lambda x: f"{x / 1e6:.1f}"),
            _number(contender.size("storage_bytes"), lambda x: f"{x / 1e6:,.0f}"),
            _number(contender.size(CALIBRATION_TOKENS), lambda x: f"{x:,.0f}"),
            _number(contender.fit_seconds, _duration),
            _number(contender.speedups.get(length), partial(format_value, "speedup")),
        ]
        body.append(cells)
    for condition in BELOW:
        having = [c for c in contenders if c.value("kl", condition, domain)]
        if having:
            control = having[0]
            cells = [condition_label(condition)]
            cells += [_plain(control.value(metric, condition, domain)) for metric in QUALITY]
            cells += [NOTHING] if tail else []
            cells += [_both(control, condition, split) for split in others]
            body.append([*cells, *[NOTHING] * (len(heads) - len(cells))])
    return markdown_lines(_title(contenders, domain, others), heads, body)


def _title(contenders: Sequence[Contender], domain: str, others: Sequence[str]) -> str:
    first = contenders[0].rows[0]

    def count(split: str) -> str:
        found = [c.value("kl", "mapped", split) for c in contenders]
        counts = sorted({row.n for row in found if row is not None})
        return f"{split} n = {'-'.join(str(n) for n in (counts[0], counts[-1])[: len(counts)])}"

    sides = "; KL / recall kept where two numbers stand" if others else ""
    return f"{first.source} to {first.target}: {', '.join(map(count, (domain, *others)))}{sides}"


def _length_of_most(contenders: Sequence[Contender]) -> int:
    """The context length that most of them were timed at, the shortest of several; 0: none."""
    lengths = Counter(length for c in contenders for length in sorted(c.speedups))
    return min(lengths, key=lambda length: (-lengths[length], length), default=0)


def _best(contenders: Sequence[Contender], metric: str, split: str) -> ResultRow | None:
    found = [c.value(metric, "mapped", split) for c in contenders]
    rows = [row for row in found if row is not None]
    return BEST[metric](rows, key=lambda row: row.value) if rows else None


def _both(contender: Contender, condition: str, split: str) -> str:
    pair = [contender.value(metric, condition, split) for metric in ("kl", "recall_kept")]
    return NOTHING if pair[0] is None else " / ".join(map(_plain, pair))


def _plain(row: ResultRow | None) -> str:
    return NOTHING if row is None else format_value(row.metric, row.value)


def _with_interval(row: ResultRow | None) -> str:
    if row is None or not row.has_interval:
        return _plain(row)
    low, high = (format_value(row.metric, x) for x in (row.ci_low, row.ci_high))
    return f"{_plain(row)} [{low}, {high}]"


def _number(value: float | None, shown: Callable[[float], str]) -> str:
    return NOTHING if value is None else shown(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
