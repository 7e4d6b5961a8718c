"""HeteroFold: structural alignment, a map to the receiver's covariance, then to its behaviour."""

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
class HeteroFold(MapperMethod):
    """Source layers at the same relative depth, ridge, recolouring, behavioural calibration.

    All heads are mapped to all heads, and every step folds into one affine map a layer.

    Args:
        window: source layers that each target layer reads (the paper: 3), or "all".
        selector: which ones, see :class:`LayerSelector`; by relative depth as published.
        ridge: penalty as a share of the inputs' mean variance, or "auto", see :func:`fit_chosen`.
        recolour_metric: "whitened" as published, "raw" for least error at that covariance.
        recolour_keys, recolour_values: strength; 1 restores the receiver's covariance, "auto"
            takes for each layer what brings held-out attention outputs nearest to native ones.
        behavioural_keys_rank: of the correction that brings attention back; 0 leaves it out.
        steps, learning_rate: of that correction, see :func:`refit_keys`.
        behavioural_values: correct values so that attention outputs come out right.
        pointwise: weight of the values themselves in that, see :func:`refit_values`.
        directions: leading directions of the inputs that both corrections read.
        passages, held_out, rows, seed: see :class:`Reading`.
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`; off as published.
        planted_sinks: see :class:`AffineMapper`; off as published.

    Source: arXiv 2609.32259; it names the behavioural calibration, how it is done here is ours.
    """

    window: LayerCount = 3
    selector: Selector = "relative_depth"
    ridge: float | Literal["auto"] = 1e-3
    recolour_metric: Metric = "whitened"
    recolour_keys: Strength = 1.0
    recolour_values: Strength = 1.0
    behavioural_keys_rank: int = 0
    steps: int = 300
    learning_rate: float = 2e-3
    behavioural_values: bool = False
    pointwise: Pointwise = "auto"
    directions: int = 256
    passages: int = 24
    held_out: int = 8
    rows: int = 64
    seed: int = 0
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    pretty_name: ClassVar[str] = "HeteroFold"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2609.32259"

    def __post_init__(self) -> None:
        require(
            {
                **self._selector.rules("window"),
                **self._anchors.rules(),
                **self._behaviour.rules(),
                **strength_rules(
                    recolour_keys=self.recolour_keys, recolour_values=self.recolour_values
                ),
                "planted_sinks must lie in 0..8": 0 <= self.planted_sinks <= 8,
                "ridge must be auto or at least 0": self.ridge == "auto" or self.ridge >= 0,
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours, self.native_layers)

    @property
    def _selector(self) -> LayerSelector:
        return LayerSelector(self.selector, self.window)

    @property
    def _reading(self) -> Reading:
        return Reading(self.passages, self.held_out, self.rows, self.seed)

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
        """Layers of the same relative depth, ridge, recolouring; then keys, then values."""
        if self.ridge == "auto":
            plain = replace(self, behavioural_keys_rank=0, behavioural_values=False)
            mapper = fit_chosen(plain, statistics)
            return self._behaviour.apply(statistics, mapper, mapper.report["chosen_ridge"])
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
