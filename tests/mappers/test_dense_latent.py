"""Dense Latent: it starts at head-local ridge, reads what it says, and has two phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from kvferry.errors import ConfigurationError
from kvferry.mappers.base import Statistics
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.dense_latent import DenseLatent
from kvferry.mappers.dense_refiner import DenseRefiner
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.learning import Aim
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.refined import RefinedMapper
from tests.mappers.planted import Planted, folded
from tests.mappers.test_mlp import unexplained
from tests.pairs import learnable, statistics_of, traces_of

SMALL = DenseLatent(
    expansion=4,
    training_steps=8,
    answer_steps=8,
    learning_rate=3e-3,
    answer_rate=3e-3,
    tokens=0,
    answers=4,
    answer_tokens=12,
    context_tokens=48,
    passages=4,
    held_out=2,
    validate_every=4,
    warmup=2,
)


def untrained(method: DenseLatent, statistics: Statistics) -> RefinedMapper:
    """As it is before the first step."""
    mapper = method.fit(replace(statistics, learn=lambda mapper, aim: mapper))
    assert isinstance(mapper, RefinedMapper)
    return mapper


@pytest.mark.parametrize(
    ("source", "target"), [("qwen3", "qwen3"), ("llama", "gemma3"), ("gemma3", "llama")]
)
def test_without_the_mlp_it_is_head_local_ridge(source: str, target: str) -> None:
    """One layer a target layer, in order; equal, more and fewer heads, other head dims."""
    statistics, trace = statistics_of(source, target), traces_of(source, target, 1)[0]
    mapper = untrained(replace(SMALL, gate=0.0, selector="relative_depth"), statistics)
    inputs, first = trace.inputs(None), [0] * len(mapper.target.layers)
    out = mapper.map(inputs, first)
    affine = mapper.affine.map(inputs, first)
    for component in COMPONENTS:
        for layer, x in getattr(affine, component).items():
            assert torch.allclose(getattr(out, component)[layer], x, atol=1e-5)
    read = [block for group in mapper.affine.groups for block in group.blocks]
    heads = statistics.source.layers[0].kv_heads, statistics.target.layers[0].kv_heads
    assert {block.head for block in read} == {h * heads[0] // heads[1] for h in range(heads[1])}
    wide = untrained(replace(SMALL, heads="all", gate=0.0), statistics)
    coefficients = [sum(g.weight.numel() for g in m.affine.groups) for m in (mapper, wide)]
    assert coefficients[0] == coefficients[1] // heads[0], "one head in so many"
    if source == target:
        bridge = CacheBridge(source_layers=1, weigh_keys=False, weigh_values=False)
        same = bridge.fit(statistics).map(inputs, first)
        assert torch.allclose(same.keys[1], affine.keys[1], atol=1e-4), "layer l reads layer l"


def test_all_heads_at_once_equal_one_at_a_time() -> None:
    """Against the formula, head by head; head-local and all heads."""
    source, target = "qwen2", "gemma2"
    statistics, trace = statistics_of(source, target), traces_of(source, target, 1)[0]
    for heads in ("index", "all"):
        mapper = untrained(replace(SMALL, heads=heads), statistics)  # type: ignore[arg-type]
        refiner = mapper.refiner
        assert isinstance(refiner, DenseRefiner)
        inputs, first = trace.inputs(None), [0] * len(mapper.target.layers)
        with torch.no_grad():
            for parameter in refiner.parameters():
                parameter.normal_(std=0.3)
            out, base = mapper.map(inputs, first), mapper.affine.map(inputs, first)
        for stack in refiner.stacks:
            net = {name: p.detach() for name, p in stack.network.named_parameters()}
            for place, site in enumerate(stack.sites):
                for head in range(mapper.target.layers[site.layer].kv_heads):
                    reader = min(head, len(site.reads) - 1)
                    x = inputs.rows(site.reads[reader], 0, inputs.tokens)
                    x = (x - stack.mean[place, reader]) / stack.spread[place, reader]  # type: ignore[index]
                    here = {name: p[place, head] for name, p in net.items()}
                    u = functional.silu(x @ here["enter"] + here["enter_bias"]) @ here["leave"]
                    scale = stack.scale[place, head]  # type: ignore[index]
                    ax = getattr(base, site.component)[site.layer][0, head]
                    ax = ax + scale * (x @ here["skip"])
                    said = here["gate"] * u + here["leave_bias"]
                    wanted = here["skip_gate"] * ax + scale * said
                    got = getattr(out, site.component)[site.layer][0, head]
                    assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-3)


def test_phase_one_finds_a_planted_fold(tmp_path: Path) -> None:
    """Which its skip, left alone, does not."""
    names = ("gemma3", "llama")
    planted = Planted(*names, folded)
    statistics = planted.calibrated(tmp_path)
    method = replace(
        SMALL,
        selector="relative_depth",
        expansion=16,
        training_steps=200,
        validate_every=50,
        learning_rate=1e-2,
        passages=12,
        answer_steps=0,
    )
    linear = unexplained(untrained(method, statistics).affine, planted, names)
    learned = unexplained(method.fit(statistics), planted, names)
    assert min(linear.values()) > 0.7, "control"
    assert max(learned.values()) < 0.6 * min(linear.values())


def test_phase_two_starts_where_phase_one_ended_and_lowers_its_loss(tmp_path: Path) -> None:
    """Judged on the texts that it learns from: random weights hold nothing that carries over."""
    statistics = learnable("qwen3", "mistral", tmp_path)
    learner: Any = statistics.learn
    texts = learner.material.texts["training"][:2]
    material = replace(learner.material, texts={"training": texts, "selection": texts})
    statistics = replace(statistics, learn=replace(learner, material=material))
    method = replace(SMALL, training_steps=24, passages=2, answers=2, validate_every=8)
    first = replace(method, answer_steps=0).fit(statistics)
    both = replace(method, answer_steps=24).fit(statistics)
    report = both.report
    assert report["reconstruction_loss_after"] == first.report["reconstruction_loss_after"]
    assert report["reconstruction_loss_after"] < report["reconstruction_loss_before"]
    assert report["answering_loss_after"] < report["answering_loss_before"]
    assert report["answering_unaware_nll_after"] < report["answering_unaware_nll_before"]
    assert report["answering_right_answers"] == 0 and report["answering_continuations"] == 2
    weights = _weights(first), _weights(both)
    assert any(not torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _weights(mapper: Mapper) -> list[torch.Tensor]:
    assert mapper.refiner is not None
    return list(mapper.refiner.state_dict().values())


def test_the_phases_are_asked_for_in_their_order() -> None:
    asked: list[Aim] = []

    def learn(mapper: RefinedMapper, aim: Aim) -> RefinedMapper:
        asked.append(aim)
        return mapper

    statistics = replace(statistics_of("qwen3", "mistral"), learn=learn)
    SMALL.fit(statistics)
    assert [aim.name for aim in asked] == ["reconstruction", "answering"]
    assert [aim.schedule.done_before for aim in asked] == [0, 8]
    assert [aim.schedule.learning_rate for aim in asked] == [3e-3, 3e-3]
    replace(SMALL, training_steps=0).fit(statistics)
    assert [aim.name for aim in asked[2:]] == ["answering"]


def test_settings_out_of_range_are_all_named() -> None:
    with pytest.raises(ConfigurationError, match=r"heads.*gate.*answers.*nor all be zero"):
        DenseLatent(heads="one", gate=-1, answers=0, aware=0, unaware=0, pointwise=0)  # type: ignore[arg-type]
