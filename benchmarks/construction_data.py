"""Made-up caches of one shape, as both ways of construction find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from kvferry.align.tokens import TokenAlignment
from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry, LayerGeometry
from kvferry.mappers.base import Statistics
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import FeatureBlock, component_layout
from kvferry.mappers.observation import Observation

TEXT_TOKENS = 1024


@dataclass(frozen=True)
class Shape:
    """One component of a pair: source layers, all of them read, heads of both, target layers."""

    source_layers: int = 12
    source_heads: int = 3
    target_layers: int = 6
    target_heads: int = 3
    dim: int = 64
    device: str = "cpu"

    @property
    def inputs(self) -> int:
        """Features of one head's map."""
        return self.source_layers * self.dim

    @property
    def sources(self) -> list[int]:
        """Source head of each target head."""
        count = self.target_heads
        return [head * self.source_heads // count for head in range(count)]


@dataclass(frozen=True)
class Text:
    """One text: its caches, and by target layer how relevant its tokens are to each head."""

    seen: Observation
    relevance: dict[int, torch.Tensor]


@dataclass(frozen=True)
class Means:
    """All that the sums ask of calibration moments."""

    mean_x: torch.Tensor
    mean_y: torch.Tensor


def statistics_of(shape: Shape) -> Statistics:
    """Geometries, and means of zero."""

    def model(layers: int, heads: int) -> KVGeometry:
        geometry = (LayerGeometry(heads, shape.dim),) * layers
        return KVGeometry("made_up", geometry, heads, TEXT_TOKENS, 8, 8, "{}")

    source = model(shape.source_layers, shape.source_heads)
    target = model(shape.target_layers, shape.target_heads)
    layout = component_layout(
        "values", source, target, code_width=0, anchor_context=-1, native_layers=0
    )
    sizes = sum(source.widths), sum(target.widths)
    x, y = (torch.zeros(size, dtype=torch.float64, device=shape.device) for size in sizes)
    return Statistics(source, target, {"values": layout}, {"values": cast(Any, Means(x, y))}, None)


def reads_of(shape: Shape, statistics: Statistics) -> dict[int, list[tuple[FeatureBlock, ...]]]:
    """Every target layer's heads read their source head in all layers."""
    blocks = statistics.layouts["values"].of_kind("source")
    heads = [
        tuple(block.of_head(head, shape.source_heads) for block in blocks) for head in shape.sources
    ]
    return dict.fromkeys(range(shape.target_layers), heads)


def texts(shape: Shape, count: int) -> Iterator[Text]:
    """Independent normal rows, aligned one to one; relevances between .01 and 1.01."""
    here: Any = {
        "generator": torch.Generator(shape.device).manual_seed(0),
        "device": shape.device,
    }
    mask = torch.ones(1, TEXT_TOKENS, dtype=torch.bool, device=shape.device)
    index = torch.arange(TEXT_TOKENS, device=shape.device)
    alignment = TokenAlignment(index[:, None], torch.ones_like(index)[:, None].float(), mask[0])

    def cache(layers: int, heads: int) -> ContentKV:
        values = {i: torch.randn(1, heads, TEXT_TOKENS, shape.dim, **here) for i in range(layers)}
        return ContentKV(values, values, index[None], mask)

    for _ in range(count):
        source = cache(shape.source_layers, shape.source_heads)
        target = cache(shape.target_layers, shape.target_heads)
        relevance = {
            layer: torch.rand(shape.target_heads, TEXT_TOKENS, **here).square() + 0.01
            for layer in range(shape.target_layers)
        }
        seen = Observation(MapperInputs(source, alignment, target), target, (), prefix=0)
        yield Text(seen, relevance)
