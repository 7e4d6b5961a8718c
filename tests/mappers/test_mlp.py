"""MLP mapping: it finds what no linear map can, and never ends below its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kvferry.errors import ConfigurationError
from kvferry.mappers.base import Statistics
from kvferry.mappers.behaviour import attention_error
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.mlp import MLP, means_alone
from kvferry.mappers.mlp_refiner import MLPRefiner
from kvferry.mappers.mobility import Mobility
from tests.mappers.planted import Planted, folded, folded_even_layers, straight
from tests.matrix import fitted
from tests.pairs import learnable, statistics_of, traces_of

RIDGE = FullHeadRidge(ridge=1e-5)
SMALL = MLP(
    start=RIDGE,
    source_layers=1,
    selector="relative_depth",
    hidden=48,
    tokens=0,
    rows=16,
    training_steps=160,
    learning_rate=5e-3,
    passages=12,
    held_out=3,
    validate_every=40,
)


def unexplained(mapper: Mapper, planted: Planted, names: Sequence[str]) -> dict[int, float]:
    """By target layer: error of keys and values on unseen texts, as a share of their variance."""
    traces = [planted.trace(t) for t in traces_of(names[0], names[1], 3, seed=11)]
    found = {}
    for layer in range(len(mapper.target.layers)):
        error = total = 0.0
        for trace in traces:
            with torch.no_grad():
                out = mapper.map(trace.inputs(None), [0] * len(mapper.target.layers))
            for component in COMPONENTS:
                got, true = (getattr(x, component)[layer][0] for x in (out, trace.target))
                error += float((got - true).square().sum())
                total += float((true - true.mean(dim=1, keepdim=True)).square().sum())
        found[layer] = error / total
    return found


@pytest.mark.parametrize(("form", "left"), [("plain", 0.4), ("residual", 0.7)])
def test_a_planted_fold_is_found_by_the_mlp_and_not_by_ridge(
    form: str, left: float, tmp_path: Path
) -> None:
    """The residual form sees directions alone, its inputs being normalised: it finds less of it."""
    names = ("gemma3", "llama")
    planted = Planted(*names, folded)
    statistics = planted.calibrated(tmp_path)
    linear = unexplained(RIDGE.fit(statistics), planted, names)
    learned = unexplained(replace(SMALL, form=form).fit(statistics), planted, names)  # type: ignore[arg-type]
    assert min(linear.values()) > 0.6, "control: no linear map explains a fold"
    assert max(learned.values()) < left * min(linear.values())


def test_each_layer_keeps_its_own_best_state(tmp_path: Path) -> None:
    """Ridge explains every other layer: there the MLP has nothing to add, and its start stays."""
    names = ("gemma3", "llama")
    planted = Planted(*names, folded_even_layers)
    statistics = planted.calibrated(tmp_path)
    mapper = SMALL.fit(statistics)
    unseen = list(statistics.observe(3, "selection"))
    with torch.inference_mode():
        start = attention_error(mapper.affine, unseen, SMALL.rows)
        end = attention_error(mapper, unseen, SMALL.rows)
    assert bool((end <= start + 1e-6).all()), "no layer below its start"
    assert bool((end[::2] < 0.75 * start[::2]).all())
    same = (end == start).nonzero()[:, 0].tolist()
    assert same and set(same) <= {1, 3}, "but for rounding nothing was left to gain there"
    kept = {name for name in mapper.report if "kept_at_start" in name}
    assert kept == {f"reconstruction_kept_at_start_layer_{layer}" for layer in same}
    assert mapper.report["reconstruction_layers_improved"] == 5 - len(same)


def test_too_large_steps_ruin_the_plain_form_alone(tmp_path: Path) -> None:
    method = replace(SMALL, learning_rate=30.0, training_steps=20, validate_every=10, warmup=0)
    planted = Planted("gemma3", "llama", straight)
    statistics = planted.calibrated(tmp_path / "residual")
    residual = method.fit(statistics)
    plain = replace(method, form="plain").fit(planted.calibrated(tmp_path / "plain"))
    unseen = list(statistics.observe(3, "selection"))
    with torch.inference_mode():
        start = attention_error(residual.affine, unseen)
        assert bool((attention_error(plain, unseen) > start + 0.1).all()), "control"
        assert torch.equal(attention_error(residual, unseen), start)
    assert residual.report["reconstruction_layers_improved"] == 0
    kept = {name for name in residual.report if "kept_at_start" in name}
    assert kept == {f"reconstruction_kept_at_start_layer_{layer}" for layer in range(5)}


@pytest.mark.parametrize("method", ["mlp", "mlp_anchored", "mlp_plain"])
def test_batched_layers_and_heads_equal_one_at_a_time(method: str) -> None:
    """Against two linear layers a site, written out."""
    mapper, trace = fitted(method, "qwen3", "mistral"), traces_of("qwen3", "mistral", 1)[0]
    refiner = mapper.refiner
    assert isinstance(refiner, MLPRefiner)
    with torch.no_grad():
        for parameter in refiner.parameters():
            parameter.normal_(std=0.1)
        inputs = trace.inputs(statistics_of("qwen3", "mistral").code)
        first = [0] * len(mapper.target.layers)
        out, base = mapper.map(inputs, first), mapper.affine.map(inputs, first)
        for stack in refiner.stacks:
            for place, site in enumerate(stack.sites):
                mean, spread = stack.mean[place, 0], stack.spread[place, 0]  # type: ignore[index]
                x = (inputs.rows(site.reads[0], 0, inputs.tokens) - mean) / spread
                if refiner.settings["residual"]:
                    x = functional.layer_norm(x, x.shape[-1:])
                parts = []
                network = stack.network
                for group in range(network.weights[0].shape[1]):  # type: ignore[union-attr, index]
                    h = x
                    for depth, (w, b) in enumerate(zip(network.weights, network.biases)):  # type: ignore[arg-type] # noqa: B905
                        h = h @ w[place, group] + b[place, group]
                        h = h.relu() if depth < 2 else h
                    parts.append(h)
                change = torch.cat(parts, dim=1).unflatten(
                    1, (mapper.target.layers[0].kv_heads, -1)
                )
                scale = stack.scale[place][None, :, None]  # type: ignore[index]
                wanted = getattr(base, site.component)[site.layer][0].transpose(0, 1)
                wanted = wanted + scale * change
                got = getattr(out, site.component)[site.layer][0].transpose(0, 1)
                assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-4)
                assert float((scale * change).abs().max()) > 1e-2, "control: it changes something"


def test_an_affine_map_that_reads_nothing_gives_the_means() -> None:
    statistics, trace = statistics_of("llama", "gemma3"), traces_of("llama", "gemma3", 1)[0]
    out = means_alone(statistics).map(trace.inputs(None), [0] * 6)
    for component in COMPONENTS:
        rows = torch.cat(
            [x[0].transpose(0, 1).flatten(1) for x in getattr(out, component).values()], 1
        )
        mean = statistics.moments[component].mean_y.float()
        assert torch.allclose(rows, mean.expand_as(rows))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"source_layers.*form.*hidden"):
        MLP(form="other", hidden=0, source_layers=0)  # type: ignore[arg-type]
    statistics: Statistics = learnable("llama", "gemma3", tmp_path)
    statistics = replace(statistics, learn=lambda mapper, aim: mapper)
    with pytest.raises(ConfigurationError, match="starts from an affine map"):
        replace(SMALL, start=Mobility(directions=8, rank=2)).fit(statistics)
