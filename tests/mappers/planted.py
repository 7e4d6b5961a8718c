"""Pairs whose target content is a known function of the source's, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kvferry.align.layers import relative_depth
from kvferry.align.tokens import gather_aligned
from kvferry.calibration.reader import PairTrace, TokenPair
from kvferry.calibration.statistics import MomentsModule, empty_moments
from kvferry.calibration.trace_store import TraceStore
from kvferry.lm.content import ContentKV
from kvferry.mappers.base import Statistics
from kvferry.mappers.layout import COMPONENTS, Component
from kvferry.mappers.observation import Observation, ReplaySplit
from kvferry.training.learn import TraceLearner
from tests.pairs import learnable, reader_of, traces_of

Truth = Callable[[torch.Tensor, int], torch.Tensor]
"""Rows of the matched source layer and a target layer to the rows of the latter, before Q."""

DIRECTIONS = 4


def folded(x: torch.Tensor, layer: int) -> torch.Tensor:
    """relu(x) + relu(-x): no linear map explains any of it."""
    return x.relu() + (-x).relu()


def straight(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Ridge explains all of it."""
    return x


def folded_even_layers(x: torch.Tensor, layer: int) -> torch.Tensor:
    """Of odd layers ridge can explain everything."""
    return folded(x, layer) if layer % 2 == 0 else straight(x, layer)


class Planted:
    """A truth put in place of the target's content.

    Args:
        source, target: miniatures.
        truth: of the target.
    """

    def __init__(self, source: str, target: str, truth: Truth) -> None:
        self.reader, self.truth = reader_of(source, target), truth
        geometry = self.reader.target.geometry
        support = relative_depth(len(self.reader.source.geometry.layers), len(geometry.layers), 1)
        self.matched = [layers[0] for layers in support.layers]
        self.statistics = learnable(source, target, Path("/nonexistent"))
        generator = torch.Generator().manual_seed(0)
        self.maps: dict[tuple[Component, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for component in COMPONENTS:
            moments = self.statistics.moments[component]
            layout = self.statistics.layouts[component]
            for layer, shape in enumerate(geometry.layers):
                columns = layout.columns([layout.blocks[self.matched[layer]]])
                part = moments.select(columns, slice(0, 1))
                inward = torch.randn(len(columns), DIRECTIONS, generator=generator)
                inward = inward / (inward * (part.c_xx.float() @ inward)).sum(0).sqrt()
                outward = torch.randn(DIRECTIONS, shape.width, generator=generator)
                self.maps[component, layer] = part.mean_x.float(), inward, outward

    def content(self, source: ContentKV, like: ContentKV, tokens: TokenPair) -> ContentKV:
        """What the truth makes of a source that both models read as ``tokens``."""
        out: dict[Component, dict[int, torch.Tensor]] = {"keys": {}, "values": {}}
        for (component, layer), (mean, inward, outward) in self.maps.items():
            by_layer = getattr(source, component)
            x = gather_aligned(by_layer[self.matched[layer]], tokens.alignment)[0]
            rows = x.transpose(0, 1).flatten(1)
            y = self.truth((rows - mean) @ inward, layer) @ outward
            shape = self.reader.target.geometry.layers[layer]
            heads = y.view(len(y), shape.kv_heads, -1).transpose(0, 1)[None]
            out[component][layer] = heads.contiguous()
        return replace(like, keys=out["keys"], values=out["values"])

    def trace(self, trace: PairTrace) -> PairTrace:
        """With the planted target."""
        return replace(trace, target=self.content(trace.source, trace.target, trace.tokens))

    def calibrated(self, folder: Path) -> Statistics:
        """Statistics of the planted content, with a trainer and held-out texts."""
        names = self.reader.source, self.reader.target
        source, target = (model.name.removeprefix("pico-") for model in names)
        layouts = self.statistics.layouts
        moments = {c: empty_moments(self.reader, layouts[c]) for c in COMPONENTS}
        module = MomentsModule(self.reader, layouts, self.statistics.code, moments, False)
        for trace in traces_of(source, target, 12):
            module.add(self.trace(trace))
        statistics = replace(learnable(source, target, folder), moments=moments)
        statistics = replace(statistics, replay=_PlantedReplay(self, statistics))
        learner = statistics.learn
        assert isinstance(learner, TraceLearner)
        layers = range(len(statistics.target.layers))
        variance = {c: {i: statistics.head_variance(c, i) for i in layers} for c in COMPONENTS}
        store = _PlantedStore(self, folder / "traces")
        material = replace(learner.material, store=store, variance=variance)
        return replace(statistics, learn=replace(learner, material=material))


class _PlantedStore(TraceStore):
    def __init__(self, planted: Planted, folder: Path) -> None:
        super().__init__(folder, planted.reader)
        self.planted = planted

    def read(self, tokens: TokenPair) -> PairTrace:
        return self.planted.trace(super().read(tokens))


class _PlantedReplay:
    def __init__(self, planted: Planted, statistics: Statistics) -> None:
        self.planted = planted
        assert statistics.replay is not None
        self.replay = statistics.replay

    def __call__(
        self, passages: int, split: ReplaySplit = "calibration", *, copies: bool = False
    ) -> Iterator[Observation]:
        for seen in self.replay(passages, split, copies=copies):
            tokens = TokenPair([], [], seen.inputs.alignment, "")
            target = self.planted.content(seen.inputs.source, seen.target, tokens)
            inputs = replace(seen.inputs, anchors=target, native=target)
            yield replace(seen, target=target, inputs=inputs)

    def count(self, split: ReplaySplit) -> int:
        return self.replay.count(split)
