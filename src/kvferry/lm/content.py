"""Keys without position, and values: what a mapper reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LayerTensor = Float[Tensor, "batch kv_heads tokens head_dim"]


@dataclass(frozen=True)
class ContentKV:
    """Position-free keys and values of the layers that a mapper reads.

    Args:
        keys, values: by layer index, ``[batch, kv_heads, tokens, head_dim]``. Layers that nobody
            reads may be absent.
        positions: rope position of each token.
        mask: True for a real token, False for padding.
    """

    keys: dict[int, LayerTensor]
    values: dict[int, LayerTensor]
    positions: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]

    @property
    def tokens(self) -> int:
        """Tokens a row, padding included."""
        return int(self.positions.shape[1])

    def map_layers(self, change: Callable[[LayerTensor], LayerTensor]) -> ContentKV:
        """The same content with ``change`` applied to each layer's keys and values."""
        return replace(
            self,
            keys={layer: change(x) for layer, x in self.keys.items()},
            values={layer: change(x) for layer, x in self.values.items()},
        )

    def to(self, device: torch.device) -> ContentKV:
        """The same content on another device."""
        moved = self.map_layers(lambda x: x.to(device))
        return replace(moved, positions=self.positions.to(device), mask=self.mask.to(device))

    def slice_tokens(self, start: int, stop: int) -> ContentKV:
        """Tokens ``start`` to ``stop`` of every layer (a view)."""
        cut = self.map_layers(lambda x: x[:, :, start:stop])
        return replace(cut, positions=self.positions[:, start:stop], mask=self.mask[:, start:stop])

    def select_row(self, row: int) -> ContentKV:
        """One row of the batch, as a batch of one."""
        cut = self.map_layers(lambda x: x[row : row + 1])
        return replace(cut, positions=self.positions[row : row + 1], mask=self.mask[row : row + 1])
