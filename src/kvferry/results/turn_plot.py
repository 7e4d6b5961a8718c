"""What becomes of a conversation that is handed over again and again, as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from kvferry.results.plot_style import MARKERS, PALETTES, Theme, color_of, new_figure, themed
from kvferry.results.plots.axes import ticks_at
from kvferry.results.rows import ResultRow
from kvferry.results.tables import head
from kvferry.results.views import Block, Cell, turn_blocks

PANELS = ("kl", "recall_kept")


def turns_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """KL and recall by hand-off: carried on, one fresh hand-off, and no context.

    Args:
        pair: which pair; the first one with turns where None. Its first split is drawn.
    """
    blocks = turn_blocks(rows, pair)
    if not blocks:
        return None
    with themed(theme):
        figure = new_figure(8.4, 3.9)
        panels = figure.subplots(1, len(PANELS))
        for axes, metric in zip(panels, PANELS, strict=True):
            _panel(axes, blocks, metric, theme)
        handles, texts = panels[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=4)
        first = blocks[0]
        title = f"{first.source} and {first.target} in turns, {first.split} (n = {first.n})"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _panel(axes: Axes, blocks: Sequence[Block], metric: str, theme: Theme) -> None:
    palette = PALETTES[theme]
    labels = dict.fromkeys(
        (line.condition, line.mapper, block.label(line))
        for block in blocks
        for line in block.lines
        if line.condition != "native"
    )
    for index, (condition, mapper, label) in enumerate(labels):
        series = [
            (block.turn or 0, line.cells[metric])
            for block in blocks
            if (line := block.find(condition, mapper)) and metric in line.cells
        ]
        color = palette.faint if condition == "zero" else color_of(index, theme)
        _curve(axes, series, label, color, MARKERS[index % len(MARKERS)])
    turns = [block.turn or 0 for block in blocks]
    axes.set_xlim(turns[0] - 0.4, turns[-1] + 0.4)
    axes.xaxis.set_major_locator(FixedLocator(turns))
    first = blocks[0]
    axes.set_xlabel(f"hand-off (odd: to {first.target},\neven: to {first.source})")
    axes.set_title(head(metric))
    axes.grid(axis="y")
    if metric == "kl":
        axes.set_yscale("log")
        ticks_at(axes.yaxis, [m * 10.0**power for power in range(-6, 4) for m in (1, 2, 5)])
        axes.set_ylabel("nats per token, log axis")
    else:
        axes.axhline(1, color=palette.text, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_ylabel("0 = zero context, 1 = native")
        ticks_at(axes.yaxis, [step / 4 for step in range(-20, 9)])


def _curve(
    axes: Axes, series: Sequence[tuple[int, Cell]], label: str, color: str, marker: str
) -> None:
    """One condition over the turns, with whiskers where there are intervals."""
    shown = [(turn, cell) for turn, cell in series if math.isfinite(cell.value)]
    axes.plot(
        [turn for turn, _ in shown],
        [cell.value for _, cell in shown],
        color=color,
        marker=marker,
        markersize=5.5,
        label=label,
    )
    for turn, cell in shown:
        if cell.has_interval:
            axes.plot([turn, turn], [cell.low, cell.high], color=color, linewidth=1.2)
