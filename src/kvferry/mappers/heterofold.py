"""HeteroFold: structural alignment, then a map to the receiver's mean and covariance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import AnchorReads, NativeLayers
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
from kvferry.stats.recolour import Metric


@dataclass(frozen=True)
class HeteroFold(MapperMethod):
    """Source layers at the same relative depth, ridge, recolouring; all heads to all heads.

    Args:
        window: source layers that each target layer reads (the paper: 3), or "all".
        selector: which ones, see :class:`LayerSelector`; by relative depth as published.
        ridge: penalty as a share of the inputs' mean variance, or "auto", see :func:`fit_chosen`.
        recolour_metric: "whitened" as published, "raw" for least error at that covariance.
        recolour_keys, recolour_values: strength; 1 restores the receiver's covariance.
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`; off as published.

    Source: arXiv 2609.32259, without its behavioural calibration.
    """

    window: LayerCount = 3
    selector: Selector = "relative_depth"
    ridge: float | Literal["auto"] = 1e-3
    recolour_metric: Metric = "whitened"
    recolour_keys: float = 1.0
    recolour_values: float = 1.0
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0

    pretty_name: ClassVar[str] = "HeteroFold"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2609.32259"

    def __post_init__(self) -> None:
        require(
            {
                **self._selector.rules("window"),
                **self._anchors.rules(),
                "ridge must be auto or at least 0": self.ridge == "auto" or self.ridge >= 0,
                "recolour_keys must lie in 0..1": 0 <= self.recolour_keys <= 1,
                "recolour_values must lie in 0..1": 0 <= self.recolour_values <= 1,
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours, self.native_layers)

    @property
    def _selector(self) -> LayerSelector:
        return LayerSelector(self.selector, self.window)

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Layers of the same relative depth, ridge, recolouring."""
        if self.ridge == "auto":
            return fit_chosen(self, statistics)
        support = self._selector.support(statistics)
        anchors = self._anchors
        return fit_affine(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            relative_ridge=self.ridge,
            recolouring=Recolouring(self.recolour_keys, self.recolour_values, self.recolour_metric),
            native_layers=anchors.native_depth(statistics.target),
        )
