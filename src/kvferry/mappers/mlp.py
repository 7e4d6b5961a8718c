"""MLP mapping: two hidden layers on the inputs of ridge, in its place or behind it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.affine_start import affine_start
from kvferry.mappers.anchors import AnchorReads
from kvferry.mappers.base import (
    MapperMethod,
    Statistics,
    layer_reads,
    output_columns,
    require,
)
from kvferry.mappers.behaviour import Reading, attention_error
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.learning import (
    Aim,
    LayerJudge,
    OffersGeneration,
    Reconstruction,
    Schedule,
)
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.mlp_refiner import MLPRefiner
from kvferry.mappers.refined import RefinedMapper
from kvferry.mappers.selection import LayerCount, LayerSelector, Selector
from kvferry.mappers.sites import Site


@dataclass(frozen=True)
class MLP(OffersGeneration, MapperMethod):
    """An MLP for every target layer, from all heads of the source layers that explain it best.

    Args:
        form: "plain" as published: no linear map; what the MLP has learned at the end of training
            or where the held-out loss was least. "residual", ours: behind ``start``, its inputs
            normalised, its last layer zero at first, and each target layer in that state in which
            its held-out attention outputs came out best, the start among them.
        start: the affine method that the residual form begins with.
        aim: "reconstruction" as published: the target's own keys and values. "generation", ours:
            what the target says on the mapped cache, in the one state of least held-out loss.
        source_layers, selector: what the MLP reads, see :class:`LayerSelector`.
        anchor_context, neighbours: what it reads besides, see :class:`AnchorReads`.
        hidden: width of both hidden layers.
        per_head: hidden layers for each KV head, as published; else heads of a layer share them.
        tokens: length of the stretch of a text that a step reconstructs; 0: the whole text.
        rows: queries of each held-out text that judge a layer of the residual form.
        continuation, recall, text, pointwise, attention: weights of the parts of the loss of
            generation.
        recall_spans, shortest_context: see :class:`Generation`.
        training_steps, learning_rate, warmup, weight_decay, passages, held_out, validate_every,
        patience, seed: see :class:`Schedule`.

    Source: arXiv 2608.03893.
    """

    form: Literal["residual", "plain"] = "residual"
    start: MapperMethod = field(default_factory=FullHeadRidge)
    aim: Literal["reconstruction", "generation"] = "reconstruction"
    source_layers: LayerCount = 4
    selector: Selector = "r2"
    anchor_context: int = -1
    neighbours: bool = False
    hidden: int = 1024
    per_head: bool = False
    tokens: int = 256
    rows: int = 64
    continuation: float = 2.0
    recall: float = 1.0
    text: float = 1.0
    pointwise: float = 0.0
    attention: float = 0.5
    recall_spans: int = 4
    shortest_context: int = 256
    training_steps: int = 600
    learning_rate: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.0
    passages: int = 200
    held_out: int = 8
    validate_every: int = 100
    patience: int = 0
    seed: int = 0

    pretty_name: ClassVar[str] = "MLP"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2608.03893"

    def __post_init__(self) -> None:
        require(
            {
                **LayerSelector(self.selector, self.source_layers).rules(),
                **self._anchors.rules(),
                **self._schedule.rules(),
                **self._generation_rules(),
                "aim must be reconstruction or generation": self.aim
                in ("reconstruction", "generation"),
                "form must be residual or plain": self.form in ("residual", "plain"),
                "hidden and rows must be at least 1": min(self.hidden, self.rows) >= 1,
                "tokens must not be negative": self.tokens >= 0,
            }
        )

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(self.anchor_context, self.neighbours)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """One phase."""
        return (self._schedule,)

    def native_depth(self, target: KVGeometry) -> int:
        """That of the start, where there is one."""
        return self.start.native_depth(target) if self.form == "residual" else 0

    def fit(self, statistics: Statistics) -> Mapper:
        """The start, then the MLPs, all layers in the same steps.

        Raises:
            ConfigurationError: the start is not affine, or there is no trainer or text to learn
                from.
        """
        residual = self.form == "residual"
        base = (
            affine_start(self.start, statistics, "The residual form")
            if residual
            else means_alone(statistics)
        )
        if self.neighbours:
            base = replace(base, code=statistics.code)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            refiner = MLPRefiner(
                statistics.source,
                statistics.target,
                sites=[site.record() for site in self._sites(statistics, base.native_layers)],
                hidden=self.hidden,
                per_head=self.per_head,
                residual=residual,
            )
        refiner.measure(statistics)
        refiner = refiner.to(statistics.moments["keys"].device)
        return statistics.learned(RefinedMapper(base, refiner), self._aim(statistics))

    def _aim(self, statistics: Statistics) -> Aim:
        if self.aim == "generation":
            return self._generation
        judge = self._judge(statistics) if self.form == "residual" else None
        return Reconstruction(self._schedule, tokens=self.tokens, judge=judge)

    def _sites(self, statistics: Statistics, native_layers: int) -> list[Site]:
        support = LayerSelector(self.selector, self.source_layers).support(statistics)
        return [
            Site(component, layer, (blocks,))
            for component in COMPONENTS
            for layer, blocks in enumerate(
                layer_reads(statistics, component, support, self._anchors)
            )
            if layer >= native_layers
        ]

    def _judge(self, statistics: Statistics) -> LayerJudge:
        """Attention outputs on held-out texts, which stay in memory."""
        reading = Reading(held_out=self.held_out, rows=self.rows, seed=self.seed)
        texts = list(reading.judging(statistics))
        return lambda mapper: attention_error(mapper, texts, reading.rows, reading.seed)


def means_alone(statistics: Statistics) -> AffineMapper:
    """An affine map that reads nothing: each target layer's mean."""
    target = statistics.target
    windows = dict.fromkeys(layer.window for layer in target.layers)
    groups = []
    for component in COMPONENTS:
        mean = statistics.moments[component].mean_y.float()
        for window in windows:
            layers = [i for i, layer in enumerate(target.layers) if layer.window == window]
            here = mean[output_columns(target, layers)]
            groups.append(
                AffineGroup(
                    component=component,
                    target_layers=tuple(layers),
                    blocks=(),
                    weight=here.new_zeros(0, len(here)),
                    input_mean=here.new_zeros(0),
                    output_mean=here,
                )
            )
    return AffineMapper(statistics.source, target, tuple(groups))
