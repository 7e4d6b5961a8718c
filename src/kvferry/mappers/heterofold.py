"""HeteroFold: structural alignment, a map to the receiver's covariance, then to its behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.align.layers import all_layers, relative_depth
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import AnchorReads, NativeLayers
from kvferry.mappers.base import (
    MapperMethod,
    Statistics,
    layer_reads,
    positive_or_all,
    require,
)
from kvferry.mappers.behaviour import Pointwise, Reading, refit_keys, refit_values
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.strength import Strength, fit_recoloured, strength_rules
from kvferry.stats.recolour import Metric


@dataclass(frozen=True)
class HeteroFold(MapperMethod):
    """Source layers at the same relative depth, ridge, recolouring, behavioural calibration.

    All heads are mapped to all heads, and every step folds into one affine map a layer.

    Args:
        window: source layers around the same relative depth (the paper: 3), or "all".
        ridge: penalty as a share of the inputs' mean variance.
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

    window: int | Literal["all"] = 3
    ridge: float = 1e-3
    recolour_metric: Metric = "whitened"
    recolour_keys: Strength = 1.0
    recolour_values: Strength = 1.0
    behavioural_keys_rank: int = 32
    steps: int = 300
    learning_rate: float = 2e-3
    behavioural_values: bool = True
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
                "window must be all or at least 1": positive_or_all(self.window),
                **self._anchors.rules(),
                **self._reading.rules(),
                **strength_rules(
                    recolour_keys=self.recolour_keys, recolour_values=self.recolour_values
                ),
                "planted_sinks must lie in 0..8": 0 <= self.planted_sinks <= 8,
                "ridge must not be negative": self.ridge >= 0,
                "behavioural_keys_rank must not be negative": self.behavioural_keys_rank >= 0,
                "steps and directions must be at least 1": min(self.steps, self.directions) >= 1,
                "learning_rate must be positive": self.learning_rate > 0,
                "pointwise must be auto or not negative": self.pointwise == "auto"
                or self.pointwise >= 0,
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours, self.native_layers)

    @property
    def _reading(self) -> Reading:
        return Reading(self.passages, self.held_out, self.rows, self.seed)

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Relative-depth support, ridge, recolouring; then keys, then values under those keys."""
        depth, target_depth = len(statistics.source.layers), len(statistics.target.layers)
        support = (
            all_layers(depth, target_depth)
            if self.window == "all"
            else relative_depth(depth, target_depth, self.window)
        )
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
        if self.behavioural_keys_rank:
            mapper = refit_keys(
                statistics,
                mapper,
                self._reading,
                directions=self.directions,
                rank=self.behavioural_keys_rank,
                steps=self.steps,
                learning_rate=self.learning_rate,
            )
        if self.behavioural_values:
            mapper = refit_values(
                statistics,
                mapper,
                self._reading,
                rank=self.directions,
                pointwise=self.pointwise,
                ridge=self.ridge,
            )
        return mapper
