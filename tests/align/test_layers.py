"""Layer supports against planted R² and against the definition of relative depth."""

from __future__ import annotations

import pytest
import torch

from kvferry.align.layers import LayerSupport, all_layers, relative_depth, top_layers_by_r2
from kvferry.errors import InputError


def test_relative_depth_runs_from_the_first_layer_to_the_last() -> None:
    assert relative_depth(30, 18, 1).layers[0] == (0,)
    assert relative_depth(30, 18, 1).layers[-1] == (29,)
    assert relative_depth(5, 3, 3).layers == ((0, 1, 2), (1, 2, 3), (2, 3, 4))
    assert relative_depth(2, 3, 1).layers == ((0,), (1,), (1,))  # half is rounded up
    assert relative_depth(7, 1, 3).layers == ((2, 3, 4),)


@pytest.mark.parametrize("source", [1, 2, 5, 30])
@pytest.mark.parametrize("target", [1, 2, 18, 41])
@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_windows_hold_distinct_layers_and_keep_order(source: int, target: int, window: int) -> None:
    support = relative_depth(source, target, window)
    support.validate(source)
    assert len(support.layers) == target
    assert {len(layers) for layers in support.layers} == {min(window, source)}
    firsts = [layers[0] for layers in support.layers]
    assert firsts == sorted(firsts)


def test_top_layers_finds_the_planted_ones() -> None:
    r2 = torch.tensor([[0.1, 0.9, 0.3, 0.8], [0.5, float("nan"), 0.5, 0.4]])
    assert top_layers_by_r2(r2, 2).layers == ((1, 3), (0, 2))
    assert top_layers_by_r2(r2, 9).layers == ((0, 1, 2, 3),) * 2


def test_read_layers_is_the_sorted_union() -> None:
    assert LayerSupport(((3, 5), (0, 3))).read_layers() == (0, 3, 5)
    assert all_layers(3, 2).layers == ((0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize("bad", [(), (3,), (-1,), (1, 1), (2, 1)])
def test_unusable_supports_are_named(bad: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="target layer 1"):
        LayerSupport(((0,), bad)).validate(3)
    with pytest.raises(InputError, match="window"):
        relative_depth(3, 3, 0)
