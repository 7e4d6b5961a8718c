"""The next words against long-range recall."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvferry.results.plot_style import PALETTES, Theme, color_of, new_figure, place_labels, themed
from kvferry.results.plots.axes import CEILING, FLOOR, LEAST_KL, decade_ticks
from kvferry.results.rows import ResultRow
from kvferry.results.views import Block, Line, quality_blocks


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
    decade_ticks(axes)
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
