"""Terminal and markdown tables of result rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvferry.results.catalogue import METRICS
from kvferry.results.rows import ResultRow
from kvferry.results.views import (
    Block,
    Cell,
    LatencyBlock,
    LatencyLine,
    latency_blocks,
    quality_blocks,
)

NOTHING = "-"
ARROWS = {"higher": "↑", "lower": "↓", "neither": ""}
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")

LATENCY_COLUMNS: dict[str, str] = {
    "source_prefill": "source prefill",
    "align": "align",
    "map": "map",
    "native_prefill": "native prefill",
    "speedup": "prefill / map",
    "native_ttft": "native TTFT",
    "mapped_ttft": "hand-off TTFT",
    "tail_ttft": "TTFT + tail",
    "mapped_peak": "peak memory",
}


def format_value(metric: str, value: float) -> str:
    """A value with the digits and suffix that its unit deserves."""
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else str(value)
    unit = METRICS[metric].unit
    if unit == "ms" and abs(value) >= 10_000:
        return f"{value / 1000:.1f} s"
    if unit == "ms":
        return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"
    if unit == "bytes":
        power = min(len(BINARY_UNITS) - 1, int(math.log(max(value, 1), 1024)))
        return f"{value / 1024**power:.{0 if power == 0 else 1}f} {BINARY_UNITS[power]}"
    if unit == "count":
        return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value:,.0f}"
    if metric == "speedup":
        return f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"
    # A control that is exactly nothing may come out as -1e-17.
    return f"{round(value, 3) + 0.0:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def format_interval(metric: str, cell: Cell) -> str:
    """`[low, high]`, or nothing where there is none or it has no width."""
    if not cell.has_interval or cell.low == cell.high:
        return ""
    return f"[{format_value(metric, cell.low)}, {format_value(metric, cell.high)}]"


def _narrow_interval(metric: str, cell: Cell) -> str:
    # Six columns with intervals must fit a terminal of 80: three digits, no leading zero.
    def narrow(value: float) -> str:
        digits = 3 if 0 <= value < 1 else 2
        return f"{value:.{digits}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"

    if not format_interval(metric, cell):
        return ""
    if METRICS[metric].unit not in ("fraction", "cosine", "nats/token"):
        return f"{format_value(metric, cell.low)} to {format_value(metric, cell.high)}"
    return f"{narrow(cell.low)}\N{EN DASH}{narrow(cell.high)}"


def head(metric: str) -> str:
    """Column head of a metric: its label and which direction is good."""
    return f"{METRICS[metric].label} {ARROWS[METRICS[metric].better]}".strip()


def block_title(block: Block) -> str:
    """What a quality block shows, for captions."""
    parts = [f"{block.source} to {block.target}", block.split]
    if block.turn is not None:
        parts.append(f"hand-off {block.turn}")
    elif block.task:
        parts.append(block.task)
    elif len(block.mappers) == 1:
        parts.append(f"mapper {block.mappers[0]}")
    if block.context_tokens:
        parts.append(f"{block.context_tokens:,} context tokens")
    return " · ".join([*parts, f"n = {block.n}"])


def latency_title(block: LatencyBlock) -> str:
    """What a latency block shows, for captions."""
    mapper = f" · mapper {block.mapper}" if block.mapper else ""
    return (
        f"{block.source} to {block.target}{mapper} · {block.device} {block.dtype} · "
        "ms or s, median (p95)"
    )


def line_n(block: Block, index: int) -> str:
    """Passages behind one line: one count, or a range."""
    counts = sorted({cell.n for cell in block.lines[index].cells.values()})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"


def quality_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """One rich table a pair, split and context length; the best mapped value is bold."""
    return [_quality_table(block) for block in quality_blocks(rows)]


def _quality_table(block: Block) -> Table:
    table = Table(
        title=block_title(block),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="below each value its 95 % bootstrap interval; best mapped value in bold",
        caption_justify="left",
    )
    several_n = "-" in block.n
    table.add_column("condition", min_width=10, max_width=18)
    for metric in block.metrics:
        table.add_column(head(metric).replace(" ", "\n", 1), justify="right", overflow="fold")
    if several_n:
        table.add_column("n", justify="right")
    best = {metric: block.best(metric) for metric in block.metrics}
    for index, line in enumerate(block.lines):
        cells = []
        for metric in block.metrics:
            cell = line.cells.get(metric)
            if cell is None:
                cells.append(Text(NOTHING, style="dim"))
                continue
            text = Text()
            text.append(
                format_value(metric, cell.value), style="bold" if line is best[metric] else ""
            )
            if interval := _narrow_interval(metric, cell):
                text.append(f"\n{interval}", style="dim")
            cells.append(text)
        table.add_row(
            Text(block.label(line)), *cells, *([line_n(block, index)] if several_n else [])
        )
    return table


def latency_cells(line: LatencyLine, columns: Sequence[str]) -> list[tuple[str, str]]:
    """(median, p95 or empty) of each column at one context length."""
    cells = []
    for name in columns:
        timing = line.timings.get(name)
        if timing is None:
            cells.append((NOTHING, ""))
            continue
        metric = "speedup" if name == "speedup" else "peak_bytes" if "peak" in name else "map_ms"
        tail = "" if math.isnan(timing.p95) or metric != "map_ms" else timing.p95
        cells.append(
            (
                format_value(metric, timing.p50.value),
                f"({format_value(metric, tail)})" if isinstance(tail, float) else "",
            )
        )
    return cells


def latency_columns(block: LatencyBlock) -> list[str]:
    """The columns for which at least one timing exists."""
    return [name for name in LATENCY_COLUMNS if any(name in line.timings for line in block.lines)]


def latency_tables(rows: Sequence[ResultRow]) -> list[Table]:
    """One rich table a pair and mapper: context length against every stage, median (p95)."""
    tables = []
    for block in latency_blocks(rows):
        table = Table(
            title=latency_title(block),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 0, 0, 1),
        )
        table.add_column("context", justify="right", no_wrap=True)
        columns = latency_columns(block)
        for name in columns:
            table.add_column(
                LATENCY_COLUMNS[name].replace(" ", "\n", 1), justify="right", no_wrap=True
            )
        for line in block.lines:
            table.add_row(
                f"{line.context_tokens:,}",
                *(
                    Text.assemble(middle, (f"\n{tail}" if tail else "", "dim"))
                    for middle, tail in latency_cells(line, columns)
                ),
            )
        tables.append(table)
    return tables


def print_tables(rows: Sequence[ResultRow], console: Console) -> None:
    """All quality tables, then all latency tables."""
    console.print(Group(*quality_tables(rows), *latency_tables(rows)))


def markdown_lines(title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A titled table; numbers to the right, bars in cells escaped."""

    def render(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join(["---", *["---:"] * (len(heads) - 1)]) + "|"
    return "\n".join([title, "", render(heads), rule, *(render(cells) for cells in body)])


def markdown_table(rows: Sequence[ResultRow]) -> str:
    """The same tables in markdown, for a README; empty without rows."""
    parts = []
    for block in quality_blocks(rows):
        best = {metric: block.best(metric) for metric in block.metrics}
        body = []
        for index, line in enumerate(block.lines):
            cells = [block.label(line)]
            for metric in block.metrics:
                cell = line.cells.get(metric)
                text = format_value(metric, cell.value) if cell else NOTHING
                text = f"**{text}**" if cell and line is best[metric] else text
                cells.append(f"{text} {format_interval(metric, cell)}".strip() if cell else text)
            body.append([*cells, line_n(block, index)])
        heads = ["condition", *(head(metric) for metric in block.metrics), "n"]
        parts.append(markdown_lines(block_title(block), heads, body))
    for timed in latency_blocks(rows):
        columns = latency_columns(timed)
        body = [
            [
                f"{line.context_tokens:,}",
                *(f"{middle} {tail}".strip() for middle, tail in latency_cells(line, columns)),
            ]
            for line in timed.lines
        ]
        heads = ["context", *(LATENCY_COLUMNS[name] for name in columns)]
        parts.append(markdown_lines(latency_title(timed), heads, body))
    return "\n\n".join(parts)
