"""What several figures share: rows of one pair, limits, ticks, and values beyond the axis."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvferry.results.rows import ResultRow
from kvferry.results.views import pairs_of

LEAST_KL = 1e-5
# A random cache retains -9: drawn to scale it would press everything of interest together.
FLOOR = -0.6
CEILING = 1.12


def of_pair(rows: Sequence[ResultRow], pair: str | None) -> list[ResultRow]:
    """Rows of one pair, of the first one where None."""
    chosen = pair or next(iter(pairs_of(rows)), None)
    return [row for row in rows if row.pair == chosen]


def beyond(axes: Axes, value: float, y: float, color: str, index: int) -> None:
    """An arrow at the edge of a horizontal axis, with the value that lies behind it."""
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


def decade_ticks(axes: Axes) -> None:
    """Few round numbers on a logarithmic horizontal axis, written out."""
    low, high = axes.get_xlim()
    multiples = (1, 3) if high / low > 30 else (1, 2, 5)
    steps = [multiple * 10.0**power for power in range(-6, 4) for multiple in multiples]
    ticks_at(axes.xaxis, steps)


def ticks_at(axis: Axis, steps: Sequence[float]) -> None:
    """Those of ``steps`` that are in view, written out, and no ticks between them."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
