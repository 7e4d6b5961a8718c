"""Windowed layers get the target's own prefix back once it has left the window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.handoff.handoff import Handoff
from kvferry.lm.content import ContentKV
from kvferry.mappers.affine import sink_places
from kvferry.mappers.observation import surrogate_sinks
from tests.matrix import METHODS
from tests.pairs import reader_of, statistics_of, traces_of

PAIR = ("llama", "gemma3")


def carried(planted: int) -> tuple[Handoff, ContentKV]:
    """A context longer than the target's windows, mapped."""
    mapper = METHODS["full_head_ridge"].fit(statistics_of(*PAIR))
    handoff = Handoff(reader_of(*PAIR), replace(mapper, planted_sinks=planted))
    trace = traces_of(*PAIR, 1)[0]
    return handoff, handoff.map_content(trace.source, trace.tokens)


def test_the_prefix_stands_in_windowed_layers_and_nothing_else_changes() -> None:
    handoff, made = carried(2)
    _, plain = carried(0)
    windowed = 0
    for layer, shape in enumerate(handoff.reader.target.geometry.layers):
        held = made.keys[layer].shape[2]
        left = shape.window is not None and held < made.tokens
        places = sink_places(2, held) if left else []
        windowed += left
        kept = [i for i in range(held) if i not in places]
        for component in ("keys", "values"):
            content = getattr(made, component)[layer]
            own = getattr(handoff.prefix, component)[layer]
            for place in places:
                assert content[:, :, place].equal(own[:, :, 0])
            before = getattr(plain, component)[layer]
            assert content[:, :, kept].equal(before[:, :, kept])
            assert not places or not content[:, :, places].equal(before[:, :, places])
    assert windowed, "the miniature's window is shorter than its context"


def test_places_are_evenly_apart() -> None:
    assert sink_places(0, 511) == []
    assert sink_places(1, 511) == [255]
    assert sink_places(3, 400) == [100, 200, 300]


def test_a_native_windowed_layer_is_left_alone() -> None:
    """What the target has read itself has its own sinks."""
    mapper = METHODS["anchored_native"].fit(statistics_of(*PAIR))
    handoff = Handoff(reader_of(*PAIR), replace(mapper, planted_sinks=1))
    trace = traces_of(*PAIR, 1)[0]
    made = handoff.map_content(trace.source, trace.tokens)
    layer = 0
    held = made.keys[layer].shape[2]
    native = trace.target.keys[layer][:, :, -held:]
    torch.testing.assert_close(made.keys[layer], native, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_sinks_are_found_by_values_like_those_of_the_first_token(share: float) -> None:
    """Made-up content in which three tokens take the first one's part; or only half its layers."""
    generator = torch.Generator().manual_seed(0)
    layers = {i: torch.randn(1, 2, 50, 8, generator=generator) for i in range(6)}
    for index, values in layers.items():
        if index >= 3 or share == 1.0:
            noise = 0.1 * torch.randn(1, 2, 3, 8, generator=generator)
            values[:, :, [7, 20, 41]] = values[:, :, :1] + noise
    positions = torch.arange(50)[None]
    content = ContentKV(layers, layers, positions, torch.ones_like(positions).bool())
    assert surrogate_sinks(content).nonzero()[:, 0].tolist() == [0, 7, 20, 41]
    shallow = replace(
        content,
        values={i: layers[i] for i in range(3)}
        | {i: torch.randn(1, 2, 50, 8, generator=generator) for i in range(3, 6)},
    )
    assert surrogate_sinks(shallow).nonzero()[:, 0].tolist() == [0], "control: deep layers tell"
