"""The look of every figure, in a light and a dark theme, without touching global settings.

Colours are the Okabe-Ito set, which readers with any common colour blindness can tell apart; every
series also differs by marker.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure

Theme = Literal["light", "dark"]

DPI = 110
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")


@dataclass(frozen=True)
class Palette:
    """Colours of one theme."""

    background: str
    text: str
    faint: str
    grid: str
    series: tuple[str, ...]
    colormap: str


PALETTES: dict[Theme, Palette] = {
    "light": Palette(
        background="#ffffff",
        text="#1c2430",
        faint="#68707c",
        grid="#e3e6ea",
        series=("#0072b2", "#d55e00", "#009e73", "#a3559b", "#b07d00", "#3a9bd1", "#555555"),
        colormap="viridis",
    ),
    "dark": Palette(
        background="#171b21",
        text="#e4e8ee",
        faint="#98a2b0",
        grid="#2c333d",
        series=("#56b4e9", "#e69f00", "#2fc79a", "#d59bcb", "#f0e442", "#7f9fff", "#bbbbbb"),
        colormap="viridis",
    ),
}


def themed(theme: Theme) -> AbstractContextManager[None]:
    """A context in which new matplotlib artists take this theme; restores everything after."""
    palette = PALETTES[theme]
    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9.5,
        "axes.labelcolor": palette.text,
        "axes.titlecolor": palette.text,
        "axes.edgecolor": palette.faint,
        "axes.facecolor": palette.background,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "figure.facecolor": palette.background,
        "savefig.facecolor": palette.background,
        "text.color": palette.text,
        "text.parse_math": False,  # a dollar sign in a file name is no formula
        "xtick.color": palette.faint,
        "ytick.color": palette.faint,
        "xtick.labelcolor": palette.text,
        "ytick.labelcolor": palette.text,
        "grid.color": palette.grid,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.labelcolor": palette.text,
        "lines.linewidth": 1.8,
    }
    return matplotlib.rc_context(settings)


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many inches with its own Agg canvas, unknown to pyplot."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def color_of(index: int, theme: Theme) -> str:
    """The colour of the index-th series."""
    series = PALETTES[theme].series
    return series[index % len(series)]


Box = tuple[float, float, float, float]

# Offsets in points from a marker to its label, nearest first; the far ones get a leader line.
_SPOTS = tuple(
    (dx, dy, "left" if dx > 0 else "right" if dx < 0 else "center", va)
    for reach in (9, 20, 34, 50)
    for dx, dy, va in (
        (reach, 0, "center"),
        (-reach, 0, "center"),
        (0, reach, "bottom"),
        (0, -reach, "top"),
        (reach * 0.7, reach * 0.8, "bottom"),
        (reach * 0.7, -reach * 0.8, "top"),
        (-reach * 0.7, reach * 0.8, "bottom"),
        (-reach * 0.7, -reach * 0.8, "top"),
    )
)


def place_labels(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    colors: Sequence[str],
    segments: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
    *,
    size: float = 8.5,
) -> None:
    """Label points so that no label covers a label, a point or a segment, where there is room.

    Args:
        points: data coordinates, one a label; the axes' limits and layout must be final.
        segments: straight lines in data coordinates that labels should not cross.
    """
    figure = axes.get_figure(root=True)
    if figure is None:
        return
    renderer: RendererAgg = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    spots = [tuple(axes.transData.transform(point)) for point in points]
    frame = axes.get_window_extent(renderer)
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in spots]
    for segment in segments:
        start, end = axes.transData.transform(segment)
        taken += _along(tuple(start), tuple(end))
    scale = figure.dpi / 72
    for point, spot, label, color in zip(points, spots, labels, colors, strict=True):
        note = axes.annotate(
            label,
            point,
            xytext=(0, 0),
            textcoords="offset points",
            color=color,
            fontsize=size,
            annotation_clip=False,
        )
        note.set_in_layout(False)
        trials = []
        for rank, (dx, dy, ha, va) in enumerate(_SPOTS):
            note.set(position=(dx, dy), ha=ha, va=va)
            extent = note.get_window_extent(renderer)
            box = (extent.x0, extent.y0, extent.x1, extent.y1)
            leader = _along(spot, (spot[0] + dx * scale, spot[1] + dy * scale))
            leader = leader[2:] if rank >= 8 else []
            clash = sum(_overlap(part, other) for part in (box, *leader) for other in taken)
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 + 4
            inside = inside and frame.y0 <= box[1] and box[3] <= frame.y1
            trials.append((clash + (0 if inside else 1e4), rank, box, leader))
        _, rank, box, leader = min(trials, key=lambda trial: trial[:2])
        dx, dy, ha, va = _SPOTS[rank]
        note.set(position=(dx, dy), ha=ha, va=va)
        if leader:
            line = axes.annotate(
                "",
                point,
                xytext=(dx, dy),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "linestyle": ":"},
            )
            line.set_in_layout(False)
        taken += [box, *leader]


def _along(start: Sequence[float], end: Sequence[float], step: float = 6.0) -> list[Box]:
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    count = max(1, int(length / step))
    middles = [
        tuple(a + (b - a) * index / count for a, b in zip(start, end, strict=True))
        for index in range(count + 1)
    ]
    return [(x - 1.5, y - 1.5, x + 1.5, y + 1.5) for x, y in middles]


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
