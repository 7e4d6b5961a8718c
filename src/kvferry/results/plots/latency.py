"""Time against context length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvferry.results.plot_style import MARKERS, PALETTES, Theme, color_of, new_figure, themed
from kvferry.results.plots.axes import of_pair
from kvferry.results.rows import ResultRow
from kvferry.results.tables import format_value
from kvferry.results.views import LatencyBlock, latency_blocks


def latency_figure(
    rows: Sequence[ResultRow], pair: str | None = None, *, theme: Theme = "light"
) -> Figure | None:
    """Time against context length, both logarithmic; whiskers reach from the median to p95."""
    blocks = latency_blocks(of_pair(rows, pair))
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
        axes.yaxis.set_minor_formatter(FuncFormatter(partial(_between_decades, axes)))
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


def _between_decades(axes: Axes, value: float, _: int | None) -> str:
    """Written only where too few decades are in view to read the axis by them."""
    low, high = axes.get_ylim()
    return _duration(round(value, 9), None) if high < 10 * low else ""


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
