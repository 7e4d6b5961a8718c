"""Rows pivoted for display: quality blocks, latency blocks and layer profiles.

Terminal tables, markdown, figures and the report all read these, so they cannot disagree.
Several seeds of one measurement become one cell: the mean value, the widest interval, the sum of n.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.results.catalogue import (
    CONDITIONS,
    LADDER_TASKS,
    LATENCY_TASK,
    MAPPED_CONDITIONS,
    MAPPER_FREE_CONDITIONS,
    METRICS,
    MULTI_TURN_TASK,
    QUALITY_METRICS,
    TURN_METRICS,
    condition_label,
)
from kvferry.results.rows import ResultRow

CONDITION_ORDER = tuple(CONDITIONS)


@dataclass(frozen=True)
class Cell:
    """A displayed number: value, interval (nan where none), passages or repeats, seeds."""

    value: float
    low: float
    high: float
    n: int
    seeds: int = 1

    @property
    def has_interval(self) -> bool:
        """Whether both limits are numbers."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def pooled(rows: Sequence[ResultRow]) -> Cell:
    """One cell from the rows of one measurement, a row a seed."""
    lows, highs = [row.ci_low for row in rows], [row.ci_high for row in rows]
    whole = all(row.has_interval for row in rows)
    return Cell(
        value=sum(row.value for row in rows) / len(rows),
        low=min(lows) if whole else math.nan,
        high=max(highs) if whole else math.nan,
        n=sum(row.n for row in rows),
        seeds=len({row.seed for row in rows}),
    )


@dataclass(frozen=True)
class Line:
    """One mapper under one condition; `mapper` is empty where no mapper takes part."""

    mapper: str
    condition: str
    cells: Mapping[str, Cell]

    @property
    def is_mapped(self) -> bool:
        """Whether this is the thing under test rather than an anchor or control."""
        return self.condition in MAPPED_CONDITIONS


@dataclass(frozen=True)
class Block:
    """The quality table of one pair on one split at one context length, and at one turn if any."""

    pair: str
    source: str
    target: str
    task: str
    split: str
    context_tokens: int
    metrics: tuple[str, ...]
    lines: tuple[Line, ...]
    turn: int | None = None

    @property
    def mappers(self) -> tuple[str, ...]:
        """Mappers in order of first appearance."""
        return tuple(dict.fromkeys(line.mapper for line in self.lines if line.mapper))

    def label(self, line: Line) -> str:
        """How to call a line here: the mapper's name only where there are several."""
        words = condition_label(line.condition)
        if len(self.mappers) < 2 or not line.mapper:
            return words
        if line.condition == "mapped":
            return line.mapper
        if line.condition == "mapped_tail":
            return f"{line.mapper} + native tail"
        return f"{line.mapper}: {words}"

    def find(self, condition: str, mapper: str = "") -> Line | None:
        """The first line of this condition (and mapper, where given)."""
        for line in self.lines:
            if line.condition == condition and mapper in ("", line.mapper):
                return line
        return None

    def best(self, metric: str) -> Line | None:
        """The mapped line with the best value of `metric`."""
        rivals = [
            line
            for line in self.lines
            if line.is_mapped and metric in line.cells and not math.isnan(line.cells[metric].value)
        ]
        if not rivals or METRICS[metric].better == "neither":
            return None
        choose = min if METRICS[metric].better == "lower" else max
        return choose(rivals, key=lambda line: line.cells[metric].value)

    @property
    def n(self) -> str:
        """Passages behind the block's numbers: one count, or a range."""
        counts = sorted({cell.n for line in self.lines for cell in line.cells.values()})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"


class MapperNames:
    """Display names: the mapper, and its hash where one pair was run with several variants."""

    def __init__(self, rows: Iterable[ResultRow]) -> None:
        hashes: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        for row in rows:
            if row.condition not in MAPPER_FREE_CONDITIONS:
                hashes[row.pair, row.mapper, row.seed].add(row.mapper_hash)
        self._variants = {
            (pair, mapper) for (pair, mapper, _), found in hashes.items() if len(found) > 1
        }

    def __call__(self, row: ResultRow) -> str:
        if row.condition in MAPPER_FREE_CONDITIONS:
            return ""
        if (row.pair, row.mapper) in self._variants:
            return f"{row.mapper} {row.mapper_hash[:6]}"
        return row.mapper


def pairs_of(rows: Sequence[ResultRow]) -> tuple[str, ...]:
    """Pair names in order of first appearance."""
    return tuple(dict.fromkeys(row.pair for row in rows))


def quality_blocks(rows: Sequence[ResultRow]) -> list[Block]:
    """One block a pair, task, split, turn and context length.

    Continuation and recall share a block.
    """
    names = MapperNames(rows)
    groups: dict[tuple[str, str, str, int | None, int], list[ResultRow]] = defaultdict(list)
    for row in rows:
        if row.task != LATENCY_TASK and row.layer is None:
            task = "" if row.task in LADDER_TASKS else row.task
            groups[row.pair, task, row.split, row.turn, row.context_tokens].append(row)
    order = {pair: index for index, pair in enumerate(pairs_of(rows))}
    blocks = []
    for (pair, task, split, turn, context), members in groups.items():
        present = dict.fromkeys(row.metric for row in members)
        wanted = {"": QUALITY_METRICS, MULTI_TURN_TASK: TURN_METRICS}.get(task, tuple(METRICS))
        metrics = tuple(name for name in wanted if name in present)
        if not metrics:
            continue
        blocks.append(
            Block(
                pair,
                members[0].source,
                members[0].target,
                task,
                split,
                context,
                metrics,
                _lines(members, names),
                turn,
            )
        )
    return sorted(blocks, key=lambda block: (order[block.pair], block.task != ""))


def turn_blocks(rows: Sequence[ResultRow], pair: str | None = None) -> list[Block]:
    """The blocks of one pair's first split, hand-off by hand-off.

    Args:
        pair: the first one with turns where None.
    """
    blocks = [block for block in quality_blocks(rows) if block.turn is not None]
    blocks = [block for block in blocks if block.pair == (pair or blocks[0].pair)]
    same = [block for block in blocks if block.split == blocks[0].split]
    return sorted(same, key=lambda block: block.turn or 0)


def _lines(rows: Sequence[ResultRow], names: MapperNames) -> tuple[Line, ...]:
    found: dict[tuple[str, str], dict[str, list[ResultRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        found[names(row), row.condition][row.metric].append(row)
    mappers = list(dict.fromkeys(mapper for mapper, _ in found))

    def rank(key: tuple[str, str]) -> tuple[int, int, int]:
        mapper, condition = key
        place = CONDITION_ORDER.index(condition)
        if condition in MAPPED_CONDITIONS:  # a mapper stays together with its own tail
            return CONDITION_ORDER.index("mapped"), mappers.index(mapper), place
        return place, mappers.index(mapper), 0

    return tuple(
        Line(
            mapper,
            condition,
            {name: pooled(_distinct(cells)) for name, cells in found[mapper, condition].items()},
        )
        for mapper, condition in sorted(found, key=rank)
    )


def _distinct(rows: Sequence[ResultRow]) -> list[ResultRow]:
    # Anchors are measured again beside every mapper: keep one a seed, the one with most passages.
    kept: dict[int, ResultRow] = {}
    for row in rows:
        if row.seed not in kept or row.n > kept[row.seed].n:
            kept[row.seed] = row
    return list(kept.values())


TIMINGS: dict[str, tuple[str, str]] = {
    "source_prefill": ("prefill_ms", "source"),
    "align": ("align_ms", "mapped"),
    "map": ("map_ms", "mapped"),
    "native_prefill": ("prefill_ms", "native"),
    "native_ttft": ("ttft_ms", "native"),
    "mapped_ttft": ("ttft_ms", "mapped"),
    "tail_ttft": ("ttft_ms", "mapped_tail"),
    "speedup": ("speedup", "mapped"),
    "native_peak": ("peak_bytes", "native"),
    "mapped_peak": ("peak_bytes", "mapped"),
}


@dataclass(frozen=True)
class Timing:
    """Median (with its interval) and 95th percentile, nan where absent."""

    p50: Cell
    p95: float


@dataclass(frozen=True)
class LatencyLine:
    """All timings at one context length, by the names in `TIMINGS`."""

    context_tokens: int
    timings: Mapping[str, Timing]


@dataclass(frozen=True)
class LatencyBlock:
    """Latency of one mapper of one pair on one device."""

    pair: str
    source: str
    target: str
    mapper: str
    device: str
    dtype: str
    lines: tuple[LatencyLine, ...]

    def series(self, name: str) -> list[tuple[int, Timing]]:
        """(context length, timing) where that timing was measured, by length."""
        return [
            (line.context_tokens, line.timings[name]) for line in self.lines if name in line.timings
        ]


def latency_blocks(rows: Sequence[ResultRow]) -> list[LatencyBlock]:
    """One block a pair, mapper, device and dtype."""
    names = MapperNames(rows)
    groups: dict[tuple[str, str, str, str], list[ResultRow]] = defaultdict(list)
    timed = [row for row in rows if row.task == LATENCY_TASK]
    for row in timed:
        groups[row.pair, row.mapper, row.device, row.dtype].append(row)
    blocks = []
    for (pair, _, device, dtype), members in groups.items():
        anchors = [row for row in members if row.condition in MAPPER_FREE_CONDITIONS]
        owned: dict[str, list[ResultRow]] = defaultdict(list)
        for row in members:
            if row.condition not in MAPPER_FREE_CONDITIONS:
                owned[names(row)].append(row)
        for name, mine in (owned or {"": []}).items():
            lines = _latency_lines([*mine, *anchors])
            first = members[0]
            blocks.append(
                LatencyBlock(pair, first.source, first.target, name, device, dtype, lines)
            )
    return blocks


def _latency_lines(rows: Sequence[ResultRow]) -> tuple[LatencyLine, ...]:
    found: dict[tuple[int, str, str, str], list[ResultRow]] = defaultdict(list)
    for row in rows:
        found[row.context_tokens, row.metric, row.condition, row.split].append(row)
    lines = []
    for context in sorted({row.context_tokens for row in rows}):
        timings = {}
        for name, (metric, condition) in TIMINGS.items():
            middle = found.get((context, metric, condition, "p50"))
            if middle:
                tail = found.get((context, metric, condition, "p95"))
                p95 = pooled(_distinct(tail)).value if tail else math.nan
                timings[name] = Timing(pooled(_distinct(middle)), p95)
        lines.append(LatencyLine(context, timings))
    return tuple(lines)


@dataclass(frozen=True)
class Profile:
    """One per-layer curve; `values[i]` belongs to target layer `layers[i]`."""

    label: str
    layers: tuple[int, ...]
    values: tuple[float, ...]


def layer_profiles(rows: Sequence[ResultRow], pair: str, metric: str) -> list[Profile]:
    """Per-layer curves of one metric for one pair, a curve a mapper, condition and split."""
    names = MapperNames(rows)
    found: dict[tuple[str, str, str], dict[int, list[ResultRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if row.pair == pair and row.metric == metric and row.layer is not None:
            found[names(row), row.condition, row.split][row.layer].append(row)
    mappers = {mapper for mapper, _, _ in found}
    conditions = {condition for _, condition, _ in found}
    profiles = []
    for (mapper, condition, split), by_layer in sorted(
        found.items(), key=lambda item: CONDITION_ORDER.index(item[0][1])
    ):
        parts = [
            mapper if len(mappers) > 1 else "",
            condition_label(condition) if len(conditions) > 1 else "",
            split,
        ]
        layers = tuple(sorted(by_layer))
        values = tuple(pooled(_distinct(by_layer[layer])).value for layer in layers)
        profiles.append(Profile(", ".join(part for part in parts if part), layers, values))
    return profiles
