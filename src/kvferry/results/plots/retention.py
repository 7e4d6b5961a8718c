"""Every condition of one pair, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from kvferry.results.plot_style import MARKERS, PALETTES, Theme, color_of, new_figure, themed
from kvferry.results.plots.axes import CEILING, FLOOR, LEAST_KL, beyond, decade_ticks, of_pair
from kvferry.results.rows import ResultRow
from kvferry.results.tables import head
from kvferry.results.views import Block, quality_blocks

RETENTION_METRICS = ("kl", "nll_retention", "top1_agreement", "recall_kept")


def retention_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """Every condition of one pair with its interval: a panel a metric, a colour a split.

    KL is on a logarithmic axis, where native (0) cannot stand; the retention axes are cut
    at both ends, with an arrow and the value at each point that lies beyond.

    Args:
        pair: which pair; the first one of `rows` where None.
    """
    blocks = [block for block in quality_blocks(of_pair(rows, pair)) if not block.task]
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
                beyond(axes, cell.value, y, color, index)
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
        decade_ticks(axes)
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
