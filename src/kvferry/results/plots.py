"""Figures from result rows: each a matplotlib `Figure`, or None where its rows are absent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvferry.results.catalogue import LAYER_METRICS, METRICS
from kvferry.results.plot_style import (
    MARKERS,
    PALETTES,
    Theme,
    color_of,
    new_figure,
    place_labels,
    themed,
)
from kvferry.results.rows import ResultRow
from kvferry.results.tables import format_value, head
from kvferry.results.views import (
    Block,
    LatencyBlock,
    Line,
    Profile,
    latency_blocks,
    layer_profiles,
    pairs_of,
    quality_blocks,
)

LEAST_KL = 1e-5
RETENTION_METRICS = ("kl", "nll_retention", "top1_agreement", "recall_kept")
# A random cache retains -9: drawn to scale it would press everything of interest together.
FLOOR = -0.6
CEILING = 1.12


def _of_pair(rows: Sequence[ResultRow], pair: str | None) -> list[ResultRow]:
    chosen = pair or next(iter(pairs_of(rows)), None)
    return [row for row in rows if row.pair == chosen]


def retention_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """Every condition of one pair with its interval: a panel a metric, a colour a split.

    KL is on a logarithmic axis, where native (0) cannot stand; the retention axes are cut
    at both ends, with an arrow and the value at each point that lies beyond.

    Args:
        pair: which pair; the first one of `rows` where None.
    """
    blocks = [block for block in quality_blocks(_of_pair(rows, pair)) if not block.task]
    metrics = [m for m in RETENTION_METRICS if any(m in block.metrics for block in blocks)]
    if not blocks or not metrics:
        return None
    several = len({mapper for block in blocks for mapper in block.mappers}) > 1
    labels: dict[str, None] = {}
    for block in blocks:
        for line in block.lines:
            shown = any(metric in line.cells for metric in metrics)
            if shown and (not several or line.is_mapped or line.condition in ("zero", "identity")):
                labels.setdefault(block.label(line))
    names = [name for name in labels if name != "native"]
    height = 1.5 + max(3, len(names)) * (0.2 + 0.1 * len(blocks))
    with themed(theme):
        figure = new_figure(3.1 * len(metrics) + 1.5, height)
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            _retention_panel(axes, blocks, names, metric, theme)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.45, -0.55)
        handles, texts = panels[0].get_legend_handles_labels()
        if len(blocks) > 1:
            figure.legend(handles, texts, loc="outside lower center", ncols=len(blocks))
        where = f"{blocks[0].source} to {blocks[0].target}"
        alone = f", {texts[0]}" if len(blocks) == 1 and texts else ""
        figure.suptitle(f"{where}{alone}", x=0.01, ha="left", fontsize=11)
    return figure


def _split_label(block: Block, blocks: Sequence[Block]) -> str:
    lengths = {other.context_tokens for other in blocks}
    length = f", {block.context_tokens:,} tokens" if len(lengths) > 1 else ""
    return f"{block.split}{length} (n = {block.n})"


def _retention_panel(
    axes: Axes, blocks: Sequence[Block], names: Sequence[str], metric: str, theme: Theme
) -> None:
    palette = PALETTES[theme]
    spread = min(0.24, 0.6 / len(blocks))
    logarithmic = metric == "kl"
    for index, block in enumerate(blocks):
        offset = (index - (len(blocks) - 1) / 2) * spread
        color, marker = color_of(index, theme), MARKERS[index % len(MARKERS)]
        axes.plot([], [], marker, color=color, label=_split_label(block, blocks), markersize=5)
        for line in block.lines:
            name, cell = block.label(line), line.cells.get(metric)
            if name not in names or cell is None or math.isnan(cell.value):
                continue
            y = names.index(name) + offset
            if logarithmic and cell.value <= LEAST_KL:
                continue
            if not logarithmic and not FLOOR < cell.value < CEILING:
                _beyond(axes, cell.value, y, color, index)
                continue
            axes.plot(cell.value, y, marker, color=color, markersize=5)
            if cell.has_interval:
                low = max(cell.low, cell.value / 20 if logarithmic else FLOOR)
                high = cell.high if logarithmic else min(cell.high, CEILING)
                axes.plot([low, high], [y, y], color=color, linewidth=1.4)
    axes.set_title(head(metric))
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    if logarithmic:
        axes.set_xscale("log")
        _decade_ticks(axes)
        axes.set_xlabel("nats per token, log axis (native = 0)")
        return
    axes.set_xlim(FLOOR, CEILING)
    axes.axvline(1, color=palette.text, linewidth=1, linestyle=(0, (4, 3)))
    if metric == "top1_agreement":
        axes.set_xlim(0, 1.04)
        axes.set_xlabel("share of next tokens (native = 1)")
        axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    else:
        axes.axvline(0, color=palette.faint, linewidth=1)
        axes.set_xlabel("0 = zero context, 1 = native")
        axes.xaxis.set_major_locator(FixedLocator([-0.5, 0, 0.5, 1]))


def _beyond(axes: Axes, value: float, y: float, color: str, index: int) -> None:
    low = value < 0
    edge = FLOOR + 0.05 if low else CEILING - 0.05
    axes.plot(edge, y, "<" if low else ">", color=color, markersize=5)
    axes.annotate(
        f"{value:.1f}",
        (edge, y),
        xytext=((6, 0) if low else (-6, 0)),
        textcoords="offset points",
        ha="left" if low else "right",
        va="center",
        fontsize=6.5,
        color=color,
    )


def _decade_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    multiples = (1, 3) if high / low > 30 else (1, 2, 5)
    steps = [multiple * 10.0**power for power in range(-6, 4) for multiple in multiples]
    axes.xaxis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def layer_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """Heat maps over the target's layers: a panel a metric, a line a mapper, condition and split.

    With several mappers only the first split is drawn, so that lines can be compared.
    """
    chosen = pair or next(iter(pairs_of(rows)), "")
    rows = [row for row in rows if row.pair == chosen and row.layer is not None]
    if len({row.mapper for row in rows}) > 1:
        rows = [row for row in rows if row.split == rows[0].split]
    panels = [
        (metric, profiles)
        for metric in LAYER_METRICS
        if (profiles := layer_profiles(rows, chosen, metric))
    ]
    if not panels:
        return None
    layers = sorted({layer for _, found in panels for curve in found for layer in curve.layers})
    first = rows[0]
    heights = [len(profiles) for _, profiles in panels]
    with themed(theme):
        width = min(17.0, max(7.5, 2.6 + 0.37 * len(layers)))
        figure = new_figure(width, 0.8 + sum(0.58 + 0.33 * height for height in heights))
        axes_list = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, height_ratios=[h + 0.2 for h in heights]
        )[:, 0]
        for axes, (metric, profiles) in zip(axes_list, panels, strict=True):
            _heat_map(axes, metric, profiles, layers, theme)
        axes_list[-1].set_xlabel(f"layer of {first.target}")
        figure.suptitle(f"{first.source} to {first.target}", x=0.01, ha="left", fontsize=11)
    return figure


def _heat_map(
    axes: Axes, metric: str, profiles: Sequence[Profile], layers: Sequence[int], theme: Theme
) -> None:
    grid = np.full((len(profiles), len(layers)), np.nan)
    for row, profile in enumerate(profiles):
        for layer, value in zip(profile.layers, profile.values, strict=True):
            grid[row, layers.index(layer)] = value
    axes.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap=PALETTES[theme].colormap)
    for (row, column), value in np.ndenumerate(grid):
        if math.isfinite(value):
            text = f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"
            axes.text(
                column,
                row,
                text.replace("0.", ".", 1) if abs(value) < 1 else text,
                ha="center",
                va="center",
                fontsize=7.5,
                color="#ffffff" if value < 0.6 else "#14181d",
            )
    axes.set_title(f"{METRICS[metric].label} (0 to 1, higher is better)")
    axes.set_yticks(range(len(profiles)), [profile.label for profile in profiles])
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def latency_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """Time against context length, both logarithmic; whiskers reach from the median to p95."""
    blocks = latency_blocks(_of_pair(rows, pair))
    if not blocks:
        return None
    palette = PALETTES[theme]
    with themed(theme):
        figure = new_figure(8.2, 4.8)
        axes = figure.subplots()
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _curve(axes, blocks[0], "native_prefill", "native prefill", palette.text, "o", "-")
        for index, block in enumerate(blocks):
            color, marker = color_of(index, theme), MARKERS[(index + 1) % len(MARKERS)]
            if len(blocks) == 1:
                _curve(axes, block, "map", "map", color, marker, "-")
                second = color_of(1, theme)
                _curve(axes, block, "mapped_ttft", "hand-off to first token", second, "^", "--")
            else:
                _curve(axes, block, "map", _speedup_label(block), color, marker, "-")
        lengths = sorted({line.context_tokens for block in blocks for line in block.lines})
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(_duration))
        axes.set_xlim(lengths[0] / 1.35, lengths[-1] * 1.25)
        axes.grid(which="major")
        axes.set_xlabel("context length in tokens")
        axes.set_ylabel("time (median, whisker to p95)")
        if len(blocks) == 1:
            _annotate_speedup(axes, blocks[0])
        block = blocks[0]
        axes.set_title(f"{block.source} to {block.target} ({block.device}, {block.dtype})")
        axes.legend(loc="upper left")
    return figure


def _speedup_label(block: LatencyBlock) -> str:
    gains = block.series("speedup")
    if not gains:
        return f"{block.mapper}: map"
    length, timing = gains[-1]
    gain = format_value("speedup", timing.p50.value)
    return f"{block.mapper}: map ({gain} at {length:,})"


def _duration(value: float, _: int | None) -> str:
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"


def _curve(
    axes: Axes, block: LatencyBlock, name: str, label: str, color: str, marker: str, style: str
) -> None:
    series = block.series(name)
    if not series:
        return
    middle = [timing.p50.value for _, timing in series]
    whisker = [max(0.0, t.p95 - t.p50.value) if t.p95 > 0 else 0.0 for _, t in series]
    axes.errorbar(
        [length for length, _ in series],
        middle,
        yerr=[[0.0] * len(middle), whisker],
        color=color,
        marker=marker,
        linestyle=style,
        label=label,
        capsize=2.5,
        elinewidth=1,
        markersize=5.5,
    )


def _annotate_speedup(axes: Axes, block: LatencyBlock) -> None:
    prefill = dict(block.series("native_prefill"))
    for length, timing in block.series("speedup"):
        if length in prefill:
            axes.annotate(
                f"{format_value('speedup', timing.p50.value)}",
                (length, prefill[length].p50.value),
                xytext=(-7, 9),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                fontweight="bold",
            )
    if block.series("speedup"):
        axes.text(
            0.99,
            0.02,
            "bold: native prefill / map",
            transform=axes.transAxes,
            ha="right",
            fontsize=8.5,
        )


def tradeoff_figure(rows: Sequence[ResultRow], *, theme: Theme = "light") -> Figure | None:
    """KL of the next words against recall kept, a panel a pair: both ends decide.

    Taken from the split of each pair that has most lines with both numbers.
    """
    best: dict[str, tuple[int, Block]] = {}
    for block in quality_blocks(rows):
        usable = sum("kl" in line.cells and "recall_kept" in line.cells for line in block.lines)
        if usable and not block.task and usable > best.get(block.pair, (0, block))[0]:
            best[block.pair] = (usable, block)
    if not best:
        return None
    with themed(theme):
        figure = new_figure(max(7.0, 6.2 * len(best)), 5.2)
        panels = figure.subplots(1, len(best), squeeze=False)[0]
        for axes, (_, block) in zip(panels, best.values(), strict=True):
            _tradeoff_panel(axes, block, theme)
        figure.canvas.draw()
        figure.set_layout_engine("none")
        for axes, (_, block) in zip(panels, best.values(), strict=True):
            _tradeoff_labels(axes, block, theme)
    return figure


def _tradeoff_points(block: Block, theme: Theme) -> list[tuple[Line, float, float, str]]:
    points = []
    for line in block.lines:
        kl, recall = line.cells.get("kl"), line.cells.get("recall_kept")
        # Rounding alone gives native caches a KL of 1e-8, which would stretch the axis to nothing.
        if kl is None or recall is None or not kl.value > LEAST_KL or math.isnan(recall.value):
            continue
        several = len(block.mappers) > 1
        if several and not (line.is_mapped or line.condition in ("zero", "identity")):
            continue
        faint = PALETTES[theme].faint
        color = color_of(block.mappers.index(line.mapper), theme) if line.is_mapped else faint
        points.append((line, kl.value, max(recall.value, FLOOR + 0.05), color))
    return points


def _tradeoff_panel(axes: Axes, block: Block, theme: Theme) -> None:
    palette = PALETTES[theme]
    axes.set_xscale("log")
    for line, x, y, color in _tradeoff_points(block, theme):
        below = line.cells["recall_kept"].value < FLOOR
        marker = "v" if below else "D" if line.condition == "mapped_tail" else "o"
        axes.plot(x, y, marker, color=color, markersize=7)
        for metric, across in (("kl", True), ("recall_kept", False)):
            cell = line.cells[metric]
            if cell.has_interval and not below and (cell.low > 0 or not across):
                span = [cell.low, cell.high]
                xs, ys = (span, [y, y]) if across else ([x, x], span)
                axes.plot(xs, ys, color=color, linewidth=1, alpha=0.7)
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.35, high * 1.35)
    deepest = min((y for _, _, y, _ in _tradeoff_points(block, theme)), default=0.0)
    axes.set_ylim(FLOOR if deepest < -0.1 else -0.2, CEILING)
    axes.axhline(1, color=palette.text, linewidth=1, linestyle=(0, (4, 3)))
    axes.axhline(0, color=palette.faint, linewidth=1)
    axes.annotate(
        "native recall",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.grid()
    _decade_ticks(axes)
    axes.set_xlabel("KL to native, nats per token, log axis (left is better)")
    axes.set_ylabel("recall kept (up is better)")
    axes.set_title(f"{block.source} to {block.target}, {block.split} (n = {block.n})")


def _tradeoff_labels(axes: Axes, block: Block, theme: Theme) -> None:
    points = _tradeoff_points(block, theme)
    labels = []
    left, right = axes.get_xlim()
    segments = [((left, level), (right, level)) for level in (0.0, 1.0)]
    for line, x, y, _ in points:
        kl, recall = line.cells["kl"], line.cells["recall_kept"]
        label = block.label(line)
        labels.append(f"{label} ({recall.value:.1f})" if recall.value < FLOOR else label)
        if kl.has_interval and kl.low > 0:
            segments.append(((kl.low, y), (kl.high, y)))
        if recall.has_interval and recall.low > FLOOR:
            segments.append(((x, recall.low), (x, recall.high)))
    spots = [(x, y) for _, x, y, _ in points]
    place_labels(axes, spots, labels, [color for *_, color in points], segments)
