"""What is kept against how much text a map was fitted on."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvferry.results.plot_style import MARKERS, PALETTES, Theme, color_of, new_figure, themed
from kvferry.results.plots.axes import CEILING, of_pair
from kvferry.results.rows import ResultRow
from kvferry.results.sample_efficiency import SampleCurve, sample_curves
from kvferry.results.tables import head

LOWEST = -0.25
"""Where the vertical axis ends at the latest: a map without enough text falls far below zero."""
_APART = 1.06  # markers of one number of tokens stand beside each other


def sample_efficiency_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """Retention of mapped caches against calibration tokens: a line a mapper, with its intervals.

    A column a metric, a row a split. None unless some mapper was fitted to two numbers of tokens.

    Args:
        pair: which pair; the first one of `rows` where None.
    """
    curves = sample_curves(of_pair(rows, pair))
    if not any(len(curve.points) > 1 for curve in curves):
        return None
    splits, metrics, mappers = (
        list(dict.fromkeys(getattr(curve, name) for curve in curves))
        for name in ("split", "metric", "mapper")
    )
    with themed(theme):
        figure = new_figure(3.4 * len(metrics) + 1.0, 2.6 * len(splits) + 1.2)
        grid = figure.subplots(len(splits), len(metrics), sharex=True, sharey=True, squeeze=False)
        for split, line in zip(splits, grid, strict=True):
            for metric, axes in zip(metrics, line, strict=True):
                found = [c for c in curves if (c.split, c.metric) == (split, metric)]
                _panel(axes, found, mappers, theme)
                if split == splits[0]:
                    axes.set_title(head(metric))
            first = next(curve for curve in curves if curve.split == split)
            line[0].set_ylabel(f"{split} (n = {first.n})")
        _token_axis(grid[0][0], curves)
        for axes in grid[-1]:
            axes.set_xlabel("calibration tokens, log axis")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(mappers))
        where = f"{curves[0].source} to {curves[0].target}"
        what = "what is kept by text to fit on (0 = zero context, 1 = native)"
        figure.suptitle(f"{where}: {what}", x=0.01, ha="left", fontsize=11)
    return figure


def _panel(axes: Axes, curves: Sequence[SampleCurve], mappers: Sequence[str], theme: Theme) -> None:
    palette = PALETTES[theme]
    axes.axhline(1, color=palette.text, linewidth=1, linestyle=(0, (4, 3)))
    axes.axhline(0, color=palette.faint, linewidth=1)
    for curve in curves:
        index = mappers.index(curve.mapper)
        color, marker = color_of(index, theme), MARKERS[index % len(MARKERS)]
        aside = _APART ** (index - (len(mappers) - 1) / 2)
        xs = [tokens * aside for tokens, _ in curve.points]
        ys = [cell.value for _, cell in curve.points]
        axes.plot(xs, ys, marker=marker, color=color, label=curve.mapper, markersize=5)
        for x, (_, cell) in zip(xs, curve.points, strict=True):
            if cell.has_interval:
                axes.plot([x, x], [cell.low, cell.high], color=color, linewidth=1.2)
            if cell.value < LOWEST:
                axes.plot(x, LOWEST + 0.05, "v", color=color, markersize=5)
                axes.annotate(
                    f"{cell.value:.1f}",
                    (x, LOWEST + 0.05),
                    xytext=(7, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=6.5,
                    color=color,
                )
    axes.set_ylim(LOWEST, CEILING)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.grid(axis="y")


def _token_axis(axes: Axes, curves: Sequence[SampleCurve]) -> None:
    """Ticks where something was measured, as far apart as their numbers need."""
    tokens = sorted({tokens for curve in curves for tokens, _ in curve.points})
    axes.set_xscale("log")
    shown = tokens[:1]
    for value in tokens[1:]:
        if value / shown[-1] > 1.7:
            shown.append(value)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.set_xlim(tokens[0] / 1.5, tokens[-1] * 1.5)


def _thousands(value: float, _: int | None) -> str:
    return f"{value / 1000:.3g}K" if value >= 1000 else f"{value:.0f}"
