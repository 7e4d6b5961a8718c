"""Anchored mapping, ours: what the target knows for free makes a mapped cache recall."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import AnchorReads, NativeLayers
from kvferry.mappers.base import (
    MapperMethod,
    Statistics,
    layer_reads,
    require,
)
from kvferry.mappers.behaviour import BehaviouralCalibration, Pointwise, Reading
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.selection import LayerCount, LayerSelector, Selector
from kvferry.mappers.strength import Strength, fit_recoloured, strength_rules
from kvferry.mappers.tuning import fit_chosen
from kvferry.stats.recolour import Metric


@dataclass(frozen=True)
class Anchored(MapperMethod):
    """Ridge from source layers, neighbouring source tokens and the target's own free anchors.

    To copy, a key must say which token stood before it. That cannot be read off one source token,
    but layer-0 keys and values of a token and its predecessors say it, and they are functions of
    the token ids: no forward pass is run for them.

    Args:
        source_layers: how many each target layer reads, "all", or "auto", see :func:`fit_chosen`.
        selector: by what they are chosen, see :class:`LayerSelector`.
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`.
        planted_sinks: tokens of each windowed layer that give way to the target's own prefix, once
            that has left the window. Attention that has no use for the context then rests there, as
            natively it rests on tokens that the target turns into sinks, which nothing in the
            source foretells.
        ridge: penalty as a share of the inputs' mean variance, or "auto".
        recolour_metric, recolour_keys, recolour_values: see :class:`HeteroFold`.
        behavioural_keys_rank, steps, learning_rate, behavioural_values, pointwise, directions: see
            :class:`BehaviouralCalibration`; off by default.
        passages, held_out, rows, copies, seed: of its reading, see :class:`Reading`.
    """

    source_layers: LayerCount | Literal["auto"] = "all"
    selector: Selector = "r2"
    anchor_context: int = 3
    neighbours: bool = True
    native_layers: NativeLayers = "auto"
    planted_sinks: int = 1
    ridge: float | Literal["auto"] = 1e-3
    recolour_metric: Metric = "raw"
    recolour_keys: Strength = 0.8
    recolour_values: Strength = 0.0
    behavioural_keys_rank: int = 0
    steps: int = 300
    learning_rate: float = 2e-3
    behavioural_values: bool = False
    pointwise: Pointwise = "auto"
    directions: int = 256
    passages: int = 24
    held_out: int = 8
    rows: int = 64
    copies: bool = True
    seed: int = 0

    pretty_name: ClassVar[str] = "Anchored"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"

    def __post_init__(self) -> None:
        require(
            {
                **self._selector.rules("source_layers"),
                **self._anchors.rules(),
                "planted_sinks must lie in 0..8": 0 <= self.planted_sinks <= 8,
                "ridge must be auto or at least 0": self.ridge == "auto" or self.ridge >= 0,
                **self._behaviour.rules(),
                **strength_rules(
                    recolour_keys=self.recolour_keys, recolour_values=self.recolour_values
                ),
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours, self.native_layers)

    @property
    def _selector(self) -> LayerSelector:
        # Which count is best only fits with several can tell.
        count = "all" if self.source_layers == "auto" else self.source_layers
        return LayerSelector(self.selector, count)

    @property
    def _reading(self) -> Reading:
        return Reading(self.passages, self.held_out, self.rows, self.seed, self.copies)

    @property
    def _behaviour(self) -> BehaviouralCalibration:
        return BehaviouralCalibration(
            keys_rank=self.behavioural_keys_rank,
            steps=self.steps,
            learning_rate=self.learning_rate,
            values=self.behavioural_values,
            pointwise=self.pointwise,
            directions=self.directions,
            reading=self._reading,
        )

    def fit(self, statistics: Statistics) -> AffineMapper:
        """One factorisation a component when all source layers are read."""
        if self.ridge == "auto" or self.source_layers == "auto":
            plain = replace(self, behavioural_keys_rank=0, behavioural_values=False)
            mapper = fit_chosen(plain, statistics)
            ridge = mapper.report.get("chosen_ridge", self.ridge)
            return self._behaviour.apply(statistics, mapper, float(ridge))
        support = self._selector.support(statistics)
        anchors = self._anchors
        mapper = fit_recoloured(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            ridge=self.ridge,
            keys=self.recolour_keys,
            values=self.recolour_values,
            metric=self.recolour_metric,
            native_layers=anchors.native_depth(statistics.target),
            reading=self._reading,
            planted_sinks=self.planted_sinks,
        )
        return self._behaviour.apply(statistics, mapper, self.ridge)
