"""Dense Latent: a gated MLP for each KV head, taught content first, then the target's answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.anchors import NativeLayers, OffersAnchors
from kvferry.mappers.base import (
    MapperMethod,
    Recolouring,
    Statistics,
    fit_affine,
    layer_reads,
    require,
)
from kvferry.mappers.cachebridge import plain_groups
from kvferry.mappers.dense_refiner import DenseRefiner
from kvferry.mappers.head_support import HeadLocalSupport, matched_heads
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock
from kvferry.mappers.learning import Answering, OffersSchedule, Reconstruction, Schedule
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.refined import RefinedMapper
from kvferry.mappers.selection import LayerSelector, Selector
from kvferry.mappers.sites import Site


@dataclass(frozen=True)
class DenseLatent(OffersAnchors, OffersSchedule, MapperMethod):
    """``g_a (A x) + g_m W2 silu(W1 x + b1) + b2`` from one source layer to each target layer.

    A is head-local ridge at first, g_a one and g_m small; keys and values have their own weights.
    Phase one learns native content. Phase two learns what the target itself answers when it has
    read everything: on the mapped cache, once with the text before it again and once without. The
    paper gives structure and phases; sizes of steps, gates and losses are ours.

    Args:
        heads: "index" for the same head, or the same relative one where counts differ; "hungarian"
            for the assignment with the largest single-head R²; "all" lets each head read all.
        selector, source_layers: see :class:`LayerSelector`; one layer and pairs in order, as
            published.
        ridge: penalty of A as a share of the inputs' mean variance.
        expansion: hidden width, in head dims of the target.
        gate: g_m at the start.
        training_steps, learning_rate, tokens: of phase one, see :class:`Reconstruction`; 0 steps
            leave it out.
        answer_steps, answer_rate: of phase two; 0 steps leave it out.
        answers, answer_tokens, context_tokens, temperature, aware, unaware, pointwise: see
            :class:`Answering`.
        warmup, weight_decay, passages, held_out, validate_every, patience, seed: of both, see
            :class:`Schedule`.
        anchor_context, neighbours, native_layers, planted_sinks: of A, see :class:`AnchorReads`;
            off as published.

    Source: arXiv 2606.13594.
    """

    heads: Literal["index", "hungarian", "all"] = "index"
    selector: Selector = "cka"
    source_layers: int = 1
    ridge: float = 1e-3
    expansion: int = 16
    gate: float = 0.01
    training_steps: int = 600
    learning_rate: float = 1e-3
    tokens: int = 256
    answer_steps: int = 150
    answer_rate: float = 1e-4
    answers: int = 64
    answer_tokens: int = 48
    context_tokens: int = 384
    temperature: float = 0.0
    aware: float = 0.5
    unaware: float = 0.5
    pointwise: float = 0.1
    warmup: int = 20
    weight_decay: float = 0.0
    passages: int = 200
    held_out: int = 8
    validate_every: int = 50
    patience: int = 0
    seed: int = 0
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    pretty_name: ClassVar[str] = "Dense Latent"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2606.13594"

    def __post_init__(self) -> None:
        weights = self.aware, self.unaware, self.pointwise
        known = ("index", "hungarian", "all")
        require(
            {
                **LayerSelector(self.selector, self.source_layers).rules(),
                **self._anchors.rules(),
                **replace(self._schedule, steps=1).rules(),
                "heads must be index, hungarian or all": self.heads in known,
                "ridge, gate, temperature and tokens must not be negative": min(
                    self.ridge, self.gate, self.temperature, self.tokens
                )
                >= 0,
                "expansion, answers, answer_tokens and context_tokens must be at least 1": min(
                    self.expansion, self.answers, self.answer_tokens, self.context_tokens
                )
                >= 1,
                "training_steps and answer_steps must not be negative": min(
                    self.training_steps, self.answer_steps
                )
                >= 0,
                "answer_rate must be positive": self.answer_rate > 0,
                "aware, unaware and pointwise must not be negative, nor all be zero": (
                    min(weights) >= 0 < max(weights)
                ),
            }
        )

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Reconstruction, then answers; a phase without steps is left out."""
        return tuple(s for s in (self._schedule, self._answering.schedule) if s.steps)

    def fit(self, statistics: Statistics) -> Mapper:
        """Head-local ridge, then the two phases.

        Raises:
            ConfigurationError: there is no trainer, or no text to learn from.
            InputError: a model whose layers differ in their number of heads.
        """
        base, reads = self._ridge(statistics)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            refiner = DenseRefiner(
                statistics.source,
                statistics.target,
                sites=[
                    Site(component, layer, _sources(by_head)).record()
                    for component in COMPONENTS
                    for layer, by_head in enumerate(reads[component])
                    if layer >= base.native_layers
                ],
                expansion=self.expansion,
                gate=self.gate,
            )
        refiner.measure(statistics)
        mapper = RefinedMapper(base, refiner.to(statistics.moments["keys"].device))
        if self.training_steps:
            mapper = statistics.learned(mapper, Reconstruction(self._schedule, tokens=self.tokens))
        if self.answer_steps:
            mapper = statistics.learned(mapper, self._answering)
        return mapper

    @property
    def _answering(self) -> Answering:
        return Answering(
            replace(
                self._schedule,
                steps=self.answer_steps,
                learning_rate=self.answer_rate,
                done_before=self.training_steps,
            ),
            answers=self.answers,
            answer_tokens=self.answer_tokens,
            context_tokens=self.context_tokens,
            temperature=self.temperature,
            aware=self.aware,
            unaware=self.unaware,
            pointwise=self.pointwise,
        )

    def _ridge(
        self, statistics: Statistics
    ) -> tuple[AffineMapper, dict[Component, list[list[tuple[FeatureBlock, ...]]]]]:
        """A, and by component, target layer and reader what is read."""
        anchors = self._anchors
        native = anchors.native_depth(statistics.target)
        layers = LayerSelector(self.selector, self.source_layers).support(statistics)
        if self.heads == "all":
            whole = {c: layer_reads(statistics, c, layers, anchors) for c in COMPONENTS}
            base = fit_affine(
                statistics,
                whole,
                relative_ridge=self.ridge,
                recolouring=Recolouring(),
                native_layers=native,
                planted_sinks=self.planted_sinks,
            )
            return base, {c: [[blocks] for blocks in by_layer] for c, by_layer in whole.items()}
        support = HeadLocalSupport(layers, matched_heads(statistics, self.heads))
        reads = {c: support.reads(statistics, c, anchors) for c in COMPONENTS}
        groups: list[AffineGroup] = []
        for component, by_layer in reads.items():
            groups += plain_groups(
                statistics, component, by_layer, native, relative=self.ridge, absolute=None
            )
        base = AffineMapper(
            source=statistics.source,
            target=statistics.target,
            groups=tuple(groups),
            code=statistics.code if self.neighbours else None,
            native_layers=native,
            planted_sinks=self.planted_sinks,
        )
        return base, reads


def _sources(
    by_reader: list[tuple[FeatureBlock, ...]],
) -> tuple[tuple[FeatureBlock, ...], ...]:
    """The MLPs read the source alone, whatever A reads besides."""
    return tuple(tuple(b for b in blocks if b.kind == "source") for blocks in by_reader)
