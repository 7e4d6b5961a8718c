"""Full-head ridge (KV Ridge): all heads of the best source layers, closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import NativeLayers, OffersAnchors
from kvferry.mappers.base import (
    MapperMethod,
    Recolouring,
    Statistics,
    fit_affine,
    layer_reads,
    require,
)
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.selection import LayerCount, LayerSelector, Selector
from kvferry.mappers.tuning import fit_chosen


@dataclass(frozen=True)
class FullHeadRidge(OffersAnchors, MapperMethod):
    """Ridge from all heads of the source layers that explain a target layer best.

    Args:
        source_layers: how many, "all", or "auto", see :func:`fit_chosen`.
        selector: by what they are chosen, see :class:`LayerSelector`.
        ridge: penalty as a share of the inputs' mean variance, or "auto".
        absolute_ridge: the penalty itself, instead of ``ridge`` (the paper: 0.01).
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`; off as published.
        planted_sinks: see :class:`AffineMapper`; off as published.

    Source: arXiv 2608.03893.
    """

    source_layers: LayerCount | Literal["auto"] = "all"
    selector: Selector = "r2"
    ridge: float | Literal["auto"] = 1e-3
    absolute_ridge: float | None = None
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    pretty_name: ClassVar[str] = "Full-head ridge"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2608.03893"

    def __post_init__(self) -> None:
        require(
            {
                **self._selector.rules("source_layers"),
                **self._anchors.rules(),
                "ridge must be auto or at least 0": self.ridge == "auto" or self.ridge >= 0,
                "ridge must be a number beside absolute_ridge": self.ridge != "auto"
                or self.absolute_ridge is None,
                "absolute_ridge must not be negative": (self.absolute_ridge or 0) >= 0,
            }
        )

    @property
    def _selector(self) -> LayerSelector:
        return LayerSelector.starting(self.selector, self.source_layers)

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Select layers, then one ridge solve for each distinct selection."""
        if self.ridge == "auto" or self.source_layers == "auto":
            return fit_chosen(self, statistics)
        support = self._selector.support(statistics)
        anchors = self._anchors
        return fit_affine(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            relative_ridge=None if self.absolute_ridge is not None else self.ridge,
            absolute_ridge=self.absolute_ridge,
            recolouring=Recolouring(),
            native_layers=anchors.native_depth(statistics.target),
            planted_sinks=self.planted_sinks,
        )
