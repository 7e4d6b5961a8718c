"""Anchored mapping, ours: what the target knows for free makes a mapped cache recall."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

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
from kvferry.mappers.full_head_ridge import select_layers
from kvferry.mappers.layout import COMPONENTS
from kvferry.stats.recolour import Metric


@dataclass(frozen=True)
class Anchored(MapperMethod):
    """Ridge from source layers, neighbouring source tokens and the target's own free anchors.

    To copy, a key must say which token stood before it. That cannot be read off one source token,
    but layer-0 keys and values of a token and its predecessors say it, and they are functions of
    the token ids: no forward pass is run for them.

    Args:
        source_layers: source layers by single-source R², or "all".
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`.
        planted_sinks: tokens of each windowed layer that give way to the target's own prefix, once
            that has left the window. Attention that has no use for the context then rests there, as
            natively it rests on tokens that the target turns into sinks, which nothing in the
            source foretells.
        ridge: penalty as a share of the inputs' mean variance.
        recolour_metric, recolour_keys, recolour_values: see :class:`HeteroFold`.
    """

    source_layers: int | Literal["all"] = "all"
    anchor_context: int = 3
    neighbours: bool = True
    native_layers: NativeLayers = "auto"
    planted_sinks: int = 1
    ridge: float = 1e-3
    recolour_metric: Metric = "raw"
    recolour_keys: float = 0.8
    recolour_values: float = 0.0

    pretty_name: ClassVar[str] = "Anchored"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"

    def __post_init__(self) -> None:
        require(
            {
                "source_layers must be all or at least 1": positive_or_all(self.source_layers),
                **self._anchors.rules(),
                "planted_sinks must lie in 0..8": 0 <= self.planted_sinks <= 8,
                "ridge must not be negative": self.ridge >= 0,
                "recolour_keys must lie in 0..1": 0 <= self.recolour_keys <= 1,
                "recolour_values must lie in 0..1": 0 <= self.recolour_values <= 1,
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours, self.native_layers)

    def fit(self, statistics: Statistics) -> AffineMapper:
        """One factorisation a component when all source layers are read."""
        support = select_layers(statistics, self.source_layers)
        anchors = self._anchors
        mapper = fit_affine(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            relative_ridge=self.ridge,
            recolouring=Recolouring(self.recolour_keys, self.recolour_values, self.recolour_metric),
            native_layers=anchors.native_depth(statistics.target),
        )
        return replace(mapper, planted_sinks=self.planted_sinks)
