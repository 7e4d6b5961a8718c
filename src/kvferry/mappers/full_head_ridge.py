"""Full-head ridge (KV Ridge): all heads of the best source layers, closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvferry.align.layers import LayerSupport, all_layers, top_layers_by_r2
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import AnchorReads, NativeLayers
from kvferry.mappers.base import (
    MapperMethod,
    Recolouring,
    Statistics,
    fit_affine,
    layer_reads,
    positive_or_all,
    require,
)
from kvferry.mappers.layout import COMPONENTS
from kvferry.stats.ridge import single_source_r2


@dataclass(frozen=True)
class FullHeadRidge(MapperMethod):
    """Ridge from all heads of the source layers that explain a target layer best.

    Args:
        source_layers: how many, by single-source R² averaged over keys and values, or "all".
        ridge: penalty as a share of the inputs' mean variance.
        absolute_ridge: the penalty itself, instead of ``ridge`` (the paper: 0.01).
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`; off as published.

    Source: arXiv 2608.03893.
    """

    source_layers: int | Literal["all"] = "all"
    ridge: float = 1e-3
    absolute_ridge: float | None = None
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0

    pretty_name: ClassVar[str] = "Full-head ridge"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2608.03893"

    def __post_init__(self) -> None:
        require(
            {
                "source_layers must be all or at least 1": positive_or_all(self.source_layers),
                **self._anchors.rules(),
                "ridge must not be negative": self.ridge >= 0,
                "absolute_ridge must not be negative": (self.absolute_ridge or 0) >= 0,
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours, self.native_layers)

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Select layers, then one ridge solve for each distinct selection."""
        support = select_layers(statistics, self.source_layers)
        anchors = self._anchors
        return fit_affine(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            relative_ridge=None if self.absolute_ridge is not None else self.ridge,
            absolute_ridge=self.absolute_ridge,
            recolouring=Recolouring(),
            native_layers=anchors.native_depth(statistics.target),
        )


def select_layers(statistics: Statistics, count: int | Literal["all"]) -> LayerSupport:
    """The ``count`` source layers of each target layer with the highest single-source R²."""
    depth = len(statistics.source.layers)
    if count == "all" or count >= depth:
        return all_layers(depth, len(statistics.target.layers))
    scores: list[Tensor] = []
    for component in COMPONENTS:
        layout = statistics.layouts[component]
        sources = [layout.slices[block] for block in layout.of_kind("source")]
        scores.append(single_source_r2(statistics.moments[component], sources))
    return top_layers_by_r2(torch.stack(scores).mean(dim=0), count)
