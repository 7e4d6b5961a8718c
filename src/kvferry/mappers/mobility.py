"""Context mobility: a mapper that has learned what the target says, from any affine start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import ClassVar

import torch

from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.affine_start import LearnsBehindStart
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod, Statistics, output_columns, require
from kvferry.mappers.correction import group_outputs
from kvferry.mappers.gated_residual import GatedResidual
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock, FeatureLayout
from kvferry.mappers.refined import RefinedMapper
from kvferry.stats.directions import predictive_directions, whitened_directions


@dataclass(frozen=True)
class Mobility(LearnsBehindStart):
    """A gated low-rank residual on an affine map, learned through the frozen target.

    The context-reuse layer (arXiv 2608.30963) names the goal: a transport that need not match the
    cache element by element. It publishes no recipe; this one is ours. The loss is KL from what the
    target says on its own cache to what it says on the mapped one, where a text goes on and where
    early stretches of it are repeated, so that recall is learned as well as fluency; and
    cross-entropy of the text itself in both places.

    Args:
        start: the affine method that is fitted first.
        rank: of the residual of each layer, keys and values apart.
        directions: features of the inputs' code, of one component; see :class:`GatedResidual`.
        mixers, kernel, width: causal mixers that let a token look at those before it; 0 mixers
            leave each token to itself.
        training_steps, learning_rate, warmup, weight_decay, passages, held_out, validate_every,
        patience, seed: see :class:`Schedule`.
        continuation, recall, text, pointwise, attention: weights of the parts of the loss.
        recall_spans, shortest_context: see :class:`Generation`.
    """

    start: MapperMethod = field(default_factory=Anchored)
    rank: int = 64
    directions: int = 512
    mixers: int = 2
    kernel: int = 8
    width: int = 512
    training_steps: int = 250
    learning_rate: float = 7e-4
    warmup: int = 20
    weight_decay: float = 0.0
    passages: int = 96
    held_out: int = 8
    validate_every: int = 50
    patience: int = 0
    continuation: float = 2.0
    recall: float = 1.0
    text: float = 1.0
    pointwise: float = 0.0
    attention: float = 0.5
    recall_spans: int = 4
    shortest_context: int = 256
    seed: int = 0

    pretty_name: ClassVar[str] = "Context mobility"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2608.30963"

    def __post_init__(self) -> None:
        require(
            {
                **self._schedule.rules(),
                "rank, directions, kernel and width must be at least 1": min(
                    self.rank, self.directions, self.kernel, self.width
                )
                >= 1,
                "mixers must not be negative": self.mixers >= 0,
                **self._generation_rules(),
            }
        )

    def fit(self, statistics: Statistics) -> RefinedMapper:
        """The start, then the residual; see :class:`LearnsBehindStart` for what it raises."""
        return self._learned(statistics)

    def _residual(self, statistics: Statistics, affine: AffineMapper) -> GatedResidual:
        codes = {c: self._code(statistics, affine, c) for c in COMPONENTS}
        refiner = GatedResidual(
            statistics.source,
            statistics.target,
            blocks={c: [list(astuple(b)) for b in blocks] for c, (blocks, _, _) in codes.items()},
            directions={c: basis.shape[1] for c, (_, _, basis) in codes.items()},
            rank=self.rank,
            width=self.width,
            mixers=self.mixers,
            kernel=self.kernel,
            native_layers=affine.native_layers,
        )
        for component, (_, mean, basis) in codes.items():
            refiner.set_code(component, mean.float(), basis.float())
        for place, (component, layer) in enumerate(refiner.sites):
            refiner.get_buffer("scale")[place] = statistics.variance(component, layer) ** 0.5
            columns = output_columns(statistics.target, [layer])
            mean = statistics.moments[component].mean_y[columns]
            refiner.get_buffer(f"mean_{place}").copy_(mean)
        return refiner.to(affine.groups[0].weight.device)

    def _code(
        self, statistics: Statistics, base: AffineMapper, component: Component
    ) -> tuple[tuple[FeatureBlock, ...], torch.Tensor, torch.Tensor]:
        """Half of the directions by what the start makes of them, half by how much they vary."""
        layout, moments = statistics.layouts[component], statistics.moments[component]
        groups = [g for g in base.groups if g.component == component]
        blocks = _read_in_every_window(base, groups, layout)
        columns = layout.columns(blocks)
        row_of = torch.full((layout.width,), -1)
        row_of[columns] = torch.arange(len(columns))
        part = moments.select(columns, slice(0, 1))
        scaled = []
        for group in groups:
            rows = row_of[layout.columns(group.blocks)].to(group.weight.device)
            for layer, outputs in group_outputs(base, group):
                told = group.weight.new_zeros(len(columns), outputs.stop - outputs.start)
                told[rows[rows >= 0]] = group.weight[rows >= 0, outputs]
                scaled.append(told / statistics.variance(component, layer) ** 0.5)
        told = predictive_directions(
            part.scatter_xx, part.weight, torch.cat(scaled, dim=1), self.directions // 2, self.seed
        )
        varied = whitened_directions(
            part.scatter_xx, part.weight, self.directions - told.shape[1], self.seed
        )
        return blocks, part.mean_x, torch.cat([told, varied], dim=1)


def _read_in_every_window(
    base: AffineMapper, groups: Sequence[AffineGroup], layout: FeatureLayout
) -> tuple[FeatureBlock, ...]:
    """Whole blocks that some map reads whatever its window: only those are there at every token."""
    by_window: dict[int | None, set[FeatureBlock]] = {}
    for group in groups:
        window = base.target.layers[group.target_layers[0]].window
        by_window.setdefault(window, set()).update(layout.whole(b) for b in group.blocks)
    everywhere = set.intersection(*by_window.values())
    return tuple(block for block in layout.blocks if block in everywhere)
