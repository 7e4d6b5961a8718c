"""Every selector finds a planted layer, for every method that chooses layers: gate 4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvferry.app.mapper import build_mapper
from kvferry.app.schema import MapperConfig
from kvferry.errors import ConfigurationError
from kvferry.lm.geometry import KVGeometry, LayerGeometry
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.heterofold import HeteroFold
from kvferry.mappers.layout import COMPONENTS, component_layout
from kvferry.mappers.selection import LayerSelector, Selector, layer_scores
from kvferry.stats import Moments, single_source_r2

SOURCE = tuple(LayerGeometry(3, 4) for _ in range(9))
TARGET = tuple(LayerGeometry(2, 5) for _ in range(5))
RELATIVE = (0, 2, 4, 6, 8)
MONOTONE = (1, 2, 2, 5, 7)
PERMUTED = (7, 1, 5, 2, 4)


def geometry(layers: tuple[LayerGeometry, ...]) -> KVGeometry:
    return KVGeometry("planted", layers, 6, 24, 100, 512, "{}")


def planted(layers: tuple[int, ...], noise: float = 0.5) -> Statistics:
    """Target layer l is source layer ``layers[l]`` turned by a random matrix, and noise."""
    source, target = geometry(SOURCE), geometry(TARGET)
    layouts = {
        c: component_layout(c, source, target, code_width=0, anchor_context=-1, native_layers=0)
        for c in COMPONENTS
    }
    edges = [0, *torch.tensor(target.widths).cumsum(0).tolist()]
    blocks = [slice(a, b) for a, b in pairwise(edges)]
    moments = {}
    for seed, component in enumerate(COMPONENTS):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3000, sum(source.widths), generator=generator)
        y = torch.cat(
            [
                x[:, 12 * j : 12 * j + 12] @ torch.randn(12, 10, generator=generator) / 12**0.5
                for j in layers
            ],
            dim=1,
        )
        y += noise * torch.randn(y.shape, generator=generator)
        moments[component] = Moments(x.shape[1], y.shape[1], y_blocks=blocks).update(x, y)
    return Statistics(source, target, layouts, moments, None)


METHODS: dict[str, Callable[[Selector], MapperMethod]] = {
    "full_head_ridge": lambda s: FullHeadRidge(source_layers=1, selector=s),
    "heterofold": lambda s: HeteroFold(
        window=1, selector=s, behavioural_keys=False, behavioural_values=False
    ),
    "anchored": lambda s: Anchored(
        source_layers=1,
        selector=s,
        anchor_context=-1,
        neighbours=False,
        native_layers=0,
        behavioural_keys=False,
    ),
}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        ("relative_depth", RELATIVE),
        ("r2", PERMUTED),
        ("cka", MONOTONE),
        ("sinkhorn", PERMUTED),
    ],
)
def test_every_selector_finds_the_planted_layer(
    method: Callable[[Selector], MapperMethod], selector: Selector, layers: tuple[int, ...]
) -> None:
    mapper = method(selector).fit(planted(layers))
    read = {
        target: [block.index for block in group.blocks]
        for group in mapper.groups
        for target in group.target_layers
    }
    assert [read[target] for target in range(5)] == [[layer] for layer in layers]


def test_what_a_selector_assumes_is_what_it_finds() -> None:
    """Control: order and depth are no help where the layers are shuffled."""
    shuffled = planted(PERMUTED)
    wanted = tuple((layer,) for layer in PERMUTED)
    for selector in ("cka", "relative_depth"):
        assert LayerSelector(selector, 1).support(shuffled).layers != wanted
    scores = layer_scores(shuffled, single_source_r2)
    assert torch.allclose(scores.max(dim=1).values, torch.tensor(0.8).double(), atol=0.06)


@pytest.mark.parametrize("selector", ["r2", "relative_depth", "cka", "sinkhorn"])
def test_more_layers_hold_the_planted_one_and_all_is_all(selector: Selector) -> None:
    layers = RELATIVE if selector == "relative_depth" else MONOTONE
    if selector == "sinkhorn":
        layers = PERMUTED
    statistics = planted(layers)
    support = LayerSelector(selector, 3).support(statistics)
    support.validate(9)
    assert all(layer in three for layer, three in zip(layers, support.layers, strict=True))
    assert {len(three) for three in support.layers} == {3}
    for count in ("all", 9, 40):
        whole = LayerSelector(selector, count).support(replace(statistics, moments={}))
        assert whole.layers == (tuple(range(9)),) * 5


def test_an_unknown_selector_is_a_setting_that_is_named() -> None:
    config = MapperConfig("anchored", "kvferry.mappers.anchored.Anchored", {"selector": "sinkhron"})
    with pytest.raises(ConfigurationError, match="Did you mean `sinkhorn`"):
        build_mapper(config)
    with pytest.raises(ConfigurationError, match="selector must be one of r2, relative_depth"):
        HeteroFold(selector="depth")  # type: ignore[arg-type]
