"""Which source layers and which one head of them each target head reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.align.heads import HeadSupport, assign_heads, same_relative_head
from kvferry.align.layers import LayerSupport, all_layers, top_layers_by_r2
from kvferry.errors import InputError
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.anchors import AnchorReads
from kvferry.mappers.base import Statistics, output_columns
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock
from kvferry.stats.ridge import single_source_r2

HeadRule = Literal["index", "hungarian"]


@dataclass(frozen=True)
class HeadLocalSupport:
    """Source layers by target layer, and one source head by target head."""

    layers: LayerSupport
    heads: HeadSupport

    def reads(
        self, statistics: Statistics, component: Component, anchors: AnchorReads
    ) -> list[list[tuple[FeatureBlock, ...]]]:
        """By target layer and head: its source head in the layers read, and whole anchors."""
        layout = statistics.layouts[component]
        blocks, count = layout.of_kind("source"), kv_heads(statistics.source)
        extra = [
            anchors.blocks(layout, statistics.target, layer)
            for layer in range(len(self.layers.layers))
        ]
        return [
            [
                (*(blocks[layer].of_head(source, count) for layer in layers), *whole)
                for source in self.heads.sources
            ]
            for layers, whole in zip(self.layers.layers, extra, strict=True)
        ]


def select_heads_and_layers(
    statistics: Statistics, count: int | Literal["all"], rule: HeadRule
) -> HeadLocalSupport:
    """Heads by ``rule``, then the ``count`` source layers with the highest single-source R².

    R² is that of a target head from its own source head alone, about the means, averaged over
    heads, keys and values.

    Raises:
        InputError: a model whose layers differ in their number of heads.
    """
    sources, targets = kv_heads(statistics.source), kv_heads(statistics.target)
    depth, target_depth = len(statistics.source.layers), len(statistics.target.layers)
    every = count == "all" or count >= depth
    if every and rule == "index":
        return HeadLocalSupport(
            all_layers(depth, target_depth), same_relative_head(sources, targets)
        )
    r2 = single_head_r2(statistics)
    heads = (
        same_relative_head(sources, targets)
        if rule == "index"
        else assign_heads(r2.nanmean(dim=(0, 2)))
    )
    if count == "all" or every:
        return HeadLocalSupport(all_layers(depth, target_depth), heads)
    matched = r2[:, torch.arange(targets), :, torch.tensor(heads.sources)]
    return HeadLocalSupport(top_layers_by_r2(matched.nanmean(dim=0), count), heads)


def matched_heads(statistics: Statistics, rule: HeadRule) -> HeadSupport:
    """Heads by ``rule`` over all source layers.

    Raises:
        InputError: a model whose layers differ in their number of heads.
    """
    if rule == "index":
        return same_relative_head(kv_heads(statistics.source), kv_heads(statistics.target))
    return assign_heads(single_head_r2(statistics).nanmean(dim=(0, 2)))


def single_head_r2(
    statistics: Statistics,
) -> Float[Tensor, "target_layers target_heads source_layers source_heads"]:
    """R² of every target head from every single source head, averaged over keys and values."""
    sources, targets = kv_heads(statistics.source), kv_heads(statistics.target)
    depth, target_depth = len(statistics.source.layers), len(statistics.target.layers)
    found: list[Tensor] = []
    for component in COMPONENTS:
        layout = statistics.layouts[component]
        blocks = layout.of_kind("source")
        columns = [
            layout.columns([blocks[layer].of_head(head, sources)])
            for layer, head in product(range(depth), range(sources))
        ]
        heads = [
            head_columns(statistics.target, layer, head)
            for layer, head in product(range(target_depth), range(targets))
        ]
        r2 = single_source_r2(statistics.moments[component], columns, heads)
        found.append(r2.view(target_depth, targets, depth, sources))
    return torch.stack(found).nanmean(dim=0)


def head_columns(target: KVGeometry, layer: int, head: int) -> slice:
    """Columns of one target head among all layers side by side."""
    start = int(output_columns(target, [layer])[0]) + head * target.layers[layer].head_dim
    return slice(start, start + target.layers[layer].head_dim)


def kv_heads(geometry: KVGeometry) -> int:
    """KV heads of every layer.

    Raises:
        InputError: layers differ, so that one head cannot be followed through them.
    """
    counts = sorted({layer.kv_heads for layer in geometry.layers})
    if len(counts) > 1:
        raise InputError(
            "Heads can only be matched through layers that all have as many.",
            found=f"{geometry.architecture} with {counts} KV heads",
            fix="choose a full-head mapper, for instance mapper=full_head_ridge",
        )
    return counts[0]
