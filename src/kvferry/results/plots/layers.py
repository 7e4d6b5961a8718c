"""Held-out fit of each target layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvferry.results.catalogue import LAYER_METRICS, METRICS
from kvferry.results.plot_style import PALETTES, Theme, new_figure, themed
from kvferry.results.rows import ResultRow
from kvferry.results.views import Profile, layer_profiles, pairs_of


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
