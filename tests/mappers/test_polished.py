"""A polish changes a map as it was learned to, and is gone: what is left is affine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.foldable import FoldableResidual
from kvferry.mappers.heterofold import HeteroFold
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.polished import Polished
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.carrying import context_inputs
from tests.pairs import learnable, statistics_of, traces_of

SMALL = Polished(
    start=HeteroFold(window="all", recolour_values=0.0),
    rank=3,
    directions=16,
    training_steps=24,
    learning_rate=3e-3,
    warmup=2,
    passages=4,
    held_out=2,
    validate_every=8,
    shortest_context=32,
)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "start",
    [
        SMALL.start,
        Anchored(native_layers=2, planted_sinks=1, behavioural_keys=False),
        CacheBridge(source_layers=2, passages=6, boundaries=8),
    ],
    ids=["HeteroFold", "native layers and a planted sink", "head by head"],
)
@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("gemma3", "llama")])
def test_folded_is_what_was_learned(
    source: str, target: str, start: MapperMethod, rank: int
) -> None:
    """Both components, windows and all; what is not mapped stays as it is."""
    seen: list[RefinedMapper] = []

    def moved(mapper: RefinedMapper, aim: object) -> RefinedMapper:
        for parameter in mapper.refiner.parameters():
            parameter.data.normal_(std=0.3)
        seen.append(mapper)
        return mapper

    statistics = statistics_of(source, target)
    folded = replace(SMALL, start=start, rank=rank).fit(replace(statistics, learn=moved))
    learned = seen[0]
    trace = traces_of(source, target, 2)[0]
    tokens = trace.target.tokens - 8
    inputs, _ = context_inputs(trace, tokens)
    first = learned.first_tokens(tokens)
    assert isinstance(folded, AffineMapper) and folded.native_layers == learned.native_layers
    assert folded.parameters == learned.affine.parameters, "no larger than its start"
    with torch.no_grad():
        wanted, before = learned.map(inputs, first), learned.affine.map(inputs, first)
    got = folded.map(inputs, first)
    for component in COMPONENTS:
        for layer, x in getattr(wanted, component).items():
            old, new = (getattr(c, component)[layer] for c in (before, got))
            moved_by = float((x - old).abs().max())
            assert (moved_by > 0.05) == (layer >= folded.native_layers)
            torch.testing.assert_close(new, x, atol=1e-4 * max(moved_by, 1.0), rtol=1e-4)


def test_it_begins_at_its_start_and_learns(tmp_path: Path) -> None:
    statistics = learnable("gemma3", "llama", tmp_path)
    start = SMALL.start.fit(statistics)
    still = SMALL.fit(replace(statistics, learn=lambda mapper, aim: mapper))
    for mine, theirs in zip(still.groups, start.affine.groups, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
        assert torch.equal(mine.output_mean, theirs.output_mean)
    polished = SMALL.fit(statistics)
    report = polished.report
    assert report["generation_loss_after"] < report["generation_loss_before"]
    assert any(
        not torch.equal(a.weight, b.weight)
        for a, b in zip(polished.groups, still.groups, strict=True)
    )


def test_a_network_is_no_part_of_what_is_saved() -> None:
    """Its settings alone would do to build it again, as for every refiner."""
    seen: list[RefinedMapper] = []

    def kept(mapper: RefinedMapper, aim: object) -> RefinedMapper:
        seen.append(mapper)
        return mapper

    SMALL.fit(replace(statistics_of("llama", "gemma3"), learn=kept))
    refiner = seen[0].refiner
    again = FoldableResidual(refiner.source, refiner.target, **refiner.settings)
    again.load_state_dict(refiner.state_dict())
