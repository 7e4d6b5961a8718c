"""Frozen linear layers kept in autocast's number format, which would cast them anew each pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class CoarseLinears:
    """Copies of a frozen model's linear weights, in their place while autocast is on.

    Products are the same to the bit. Autocast keeps what it has cast only for weights that take a
    gradient, so a pass through a frozen model casts all of it: a seventh of a training step here.

    Args:
        model: whose weights stay as they are; those that are sharded or learn are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made_of: list[tuple[int, int]] = []
        self._copies: list[tuple[nn.Linear, nn.Parameter]] = []

    @contextmanager
    def under_autocast(self, device: str) -> Iterator[None]:
        """For the block's length, where autocast is on for this type of device; else nothing
        happens: each decoded token comes by here."""
        if not torch.is_autocast_enabled(device):
            yield
            return
        self._update(_frozen_linears(self._model), torch.get_autocast_dtype(device))
        fine = [layer.weight for layer, _ in self._copies]
        try:
            for layer, coarse in self._copies:
                layer.weight = coarse
            yield
        finally:
            for (layer, _), weight in zip(self._copies, fine, strict=True):
                layer.weight = weight

    def _update(self, layers: list[nn.Linear], dtype: torch.dtype) -> None:
        """Make copies, or make them again where a weight has changed since."""
        made_of = [(id(layer.weight), layer.weight._version) for layer in layers]
        if made_of != self._made_of or any(copy.dtype != dtype for _, copy in self._copies):
            tied: dict[int, nn.Parameter] = {}
            for layer in layers:
                if id(layer.weight) not in tied:
                    tied[id(layer.weight)] = _frozen_copy(layer.weight, dtype)
            self._copies = [(layer, tied[id(layer.weight)]) for layer in layers]
            self._made_of = made_of


def _frozen_linears(model: nn.Module) -> list[nn.Linear]:
    # Sharded weights are empty, or of a class of their own.
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and layer.weight.numel() > 0
        and not layer.weight.requires_grad
    ]


def _frozen_copy(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    # The first pass may be one that nothing is learned in; a later one must meet gradients.
    with torch.inference_mode(False), torch.no_grad():
        return nn.Parameter(weight.detach().to(dtype), requires_grad=False)
