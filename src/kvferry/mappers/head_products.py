"""Products of maps that read and write single heads, batched over the heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.head_panel import fill_head_panel
from kvferry.mappers.inputs import MapperInputs, longest_panel, token_panels
from kvferry.mappers.layout import ALL_HEADS, Component, FeatureBlock

if TYPE_CHECKING:
    from kvferry.mappers.affine import AffineGroup


@dataclass(frozen=True)
class HeadBatch:
    """Maps of one component whose blocks are the same but for the source head.

    Args:
        groups: by source head, ascending, those that read it.
        start: first target token that they are mapped for.
    """

    groups: tuple[tuple[AffineGroup, ...], ...]
    start: int

    def add_to(
        self,
        out: dict[Component, dict[int, Tensor]],
        inputs: MapperInputs,
        target: KVGeometry,
        dtype: torch.dtype,
    ) -> None:
        """Write the heads of these groups into ``out``, whose layers are made where missing."""
        rows = inputs.tokens - self.start
        first = self.groups[0][0]
        layers = {layer for same in self.groups for group in same for layer in group.target_layers}
        place, device = out[first.component], first.weight.device
        for layer in layers - place.keys():
            shape = target.layers[layer]
            place[layer] = torch.empty(1, shape.kv_heads, rows, shape.head_dim, device=device)
        mean = torch.stack([same[0].input_mean for same in self.groups])
        # Joined for each call: a copy of the weights costs little beside hundreds of rows.
        weights = [torch.cat([group.weight for group in same], dim=1) for same in self.groups]
        even = len({weight.shape[1] for weight in weights}) == 1
        stacked = torch.stack(weights) if even else None
        reads = [same[0].blocks for same in self.groups]
        panels = token_panels(0, rows)
        buffer = torch.empty(
            len(reads), longest_panel(panels), mean.shape[1], dtype=dtype, device=device
        )
        for low, high in panels:
            panel = buffer[:, : high - low]
            fill_head_panel(inputs, reads, self.start + low, self.start + high, mean, panel)
            products: Sequence[Tensor] = (
                torch.bmm(panel, stacked).unbind()
                if stacked is not None
                else [part @ weight for part, weight in zip(panel, weights, strict=True)]
            )
            for same, product in zip(self.groups, products, strict=True):
                done = 0
                for group in same:
                    here = slice(done, done + len(group.output_mean))
                    flat = product[:, here].float() + group.output_mean
                    for layer, part in head_rows(group, flat).items():
                        place[layer][0, group.head, low:high] = part
                    done = here.stop


def head_batches(groups: Sequence[AffineGroup], first_tokens: Sequence[int]) -> Iterator[HeadBatch]:
    """Batches of the groups that are for one target head; the others are left out."""
    found: dict[object, dict[tuple[FeatureBlock, ...], list[AffineGroup]]] = {}
    for group in groups:
        if group.head == ALL_HEADS:
            continue
        start = min(first_tokens[layer] for layer in group.target_layers)
        layers = tuple(replace(block, head=ALL_HEADS) for block in group.blocks)
        key = (group.component, layers, start)
        found.setdefault(key, {}).setdefault(group.blocks, []).append(group)
    for by_blocks in found.values():
        ordered = tuple(tuple(by_blocks[blocks]) for blocks in sorted(by_blocks))
        yield HeadBatch(ordered, min(first_tokens[layer] for layer in ordered[0][0].target_layers))


def head_rows(
    group: AffineGroup, flat: Float[Tensor, "tokens outputs"]
) -> dict[int, Float[Tensor, "tokens head_dim"]]:
    """Outputs of a group for one head, by target layer."""
    parts = flat.chunk(len(group.target_layers), dim=1)
    return dict(zip(group.target_layers, parts, strict=True))
