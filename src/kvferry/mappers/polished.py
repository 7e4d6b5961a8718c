"""An affine map polished end to end through the frozen target, and affine again when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.affine_start import LearnsBehindStart
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod, Statistics, require
from kvferry.mappers.correction import input_codes
from kvferry.mappers.foldable import FoldableResidual, foldable_residual
from kvferry.mappers.layout import COMPONENTS


@dataclass(frozen=True)
class Polished(LearnsBehindStart):
    """Any affine map, its weights moved by what the target says on the mapped cache.

    The loss is that of context mobility; what is learned is a change of each layer's weights that
    folds: the mapper has the size and the speed of its start.

    Args:
        start: the affine method that is fitted first.
        rank: of the change in the inputs of each layer, keys and values apart; 0 only mixes what
            the start predicts.
        directions: leading directions of the inputs that this change may read.
        training_steps, learning_rate, warmup, weight_decay, passages, held_out, validate_every,
        patience, seed: see :class:`Schedule`.
        continuation, recall, text, pointwise, attention: weights of the parts of the loss.
        recall_spans, shortest_context: see :class:`Generation`.
    """

    start: MapperMethod = field(default_factory=Anchored)
    rank: int = 16
    directions: int = 256
    training_steps: int = 200
    learning_rate: float = 7e-4
    warmup: int = 20
    weight_decay: float = 0.0
    passages: int = 96
    held_out: int = 8
    validate_every: int = 50
    patience: int = 0
    continuation: float = 2.0
    recall: float = 1.0
    text: float = 0.5
    pointwise: float = 0.0
    attention: float = 0.5
    recall_spans: int = 4
    shortest_context: int = 256
    seed: int = 0

    pretty_name: ClassVar[str] = "Polished (ours)"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"

    def __post_init__(self) -> None:
        require(
            {
                **self._schedule.rules(),
                "rank must not be negative": self.rank >= 0,
                "directions must be at least 1": self.directions >= 1,
                **self._generation_rules(),
            }
        )

    def fit(self, statistics: Statistics) -> AffineMapper:
        """The start, then the change, folded; see :class:`LearnsBehindStart` for what it raises."""
        learned = self._learned(statistics)
        assert isinstance(learned.refiner, FoldableResidual)
        return replace(learned.refiner.folded(learned.affine), report=learned.report)

    def _residual(self, statistics: Statistics, affine: AffineMapper) -> FoldableResidual:
        scales = {
            (component, layer): statistics.variance(component, layer) ** 0.5
            for component in COMPONENTS
            for layer in range(len(statistics.target.layers))
        }
        codes = {
            (component, blocks): code.basis
            for component in (COMPONENTS if self.rank else ())
            for blocks, code in input_codes(
                statistics, affine, component, self.directions, self.seed
            ).items()
        }
        return foldable_residual(affine, scales, codes, self.rank)
