"""What HeteroFold and anchored mapping share: ridge, recolouring, behavioural calibration."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal, cast

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import OffersAnchors
from kvferry.mappers.base import MapperMethod, Statistics, layer_reads
from kvferry.mappers.behaviour import Reading
from kvferry.mappers.behavioural_fit import BehaviouralCalibration, Pointwise
from kvferry.mappers.correction import with_key_gain
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.selection import LayerSelector
from kvferry.mappers.strength import Strength, fit_recoloured, strength_rules
from kvferry.mappers.tuning import fit_chosen, undecided
from kvferry.stats.recolour import Metric


class RecolouredMethod(OffersAnchors, MapperMethod):
    """A method whose settings name these steps; it adds how layers are chosen and its defaults."""

    ridge: float | Literal["auto"]
    recolour_metric: Metric
    recolour_keys: Strength
    recolour_values: Strength
    behavioural_keys: bool
    key_gain: float
    steps: int
    learning_rate: float
    recall: float
    behavioural_values: bool
    pointwise: Pointwise
    directions: int

    @property
    @abstractmethod
    def _selector(self) -> LayerSelector:
        """How source layers are found."""

    @property
    @abstractmethod
    def _reading(self) -> Reading:
        """The texts of behavioural calibration."""

    @property
    def _behaviour(self) -> BehaviouralCalibration:
        return BehaviouralCalibration(
            keys=self.behavioural_keys,
            steps=self.steps,
            learning_rate=self.learning_rate,
            recall=self.recall,
            values=self.behavioural_values,
            pointwise=self.pointwise,
            directions=self.directions,
            reading=self._reading,
        )

    def _rules(self) -> dict[str, bool]:
        """What the settings of these steps must be, and whether they are."""
        return {
            **self._anchors.rules(),
            "ridge must be auto or at least 0": self.ridge == "auto" or self.ridge >= 0,
            **self._behaviour.rules(),
            "key_gain must be positive": self.key_gain > 0,
            **strength_rules(
                recolour_keys=self.recolour_keys, recolour_values=self.recolour_values
            ),
        }

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Layers, ridge, recolouring; then keys, then values under those keys; then the gain."""
        if undecided(self):
            plain = replace(cast(Any, self), behavioural_keys=False, behavioural_values=False)
            mapper = fit_chosen(plain, statistics)
            ridge = mapper.report.get("chosen_ridge", self.ridge)
        else:
            mapper, ridge = self._recoloured(statistics), self.ridge
        mapper = self._behaviour.apply(statistics, mapper, float(ridge))
        return with_key_gain(mapper, self.key_gain)

    def _recoloured(self, statistics: Statistics) -> AffineMapper:
        support, anchors = self._selector.support(statistics), self._anchors
        return fit_recoloured(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            ridge=float(self.ridge),
            keys=self.recolour_keys,
            values=self.recolour_values,
            metric=self.recolour_metric,
            native_layers=anchors.native_depth(statistics.target),
            reading=self._reading,
            planted_sinks=self.planted_sinks,
        )
