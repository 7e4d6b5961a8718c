"""Rotary positions: taken off keys before a map and put on again after it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.lm.geometry import KVGeometry


def rotate_half(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """(x1, x2) -> (-x2, x1) on the two halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rope(
    content: Float[Tensor, "batch heads tokens dim"],
    cos: Float[Tensor, "batch tokens rotary"],
    sin: Float[Tensor, "batch tokens rotary"],
) -> Float[Tensor, "batch heads tokens dim"]:
    """Rotate position-free keys in fp32; channels past ``rotary`` stay as they are."""
    turned, rest = _split(content, cos)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return _join(turned * c + rotate_half(turned) * s, rest)


def strip_rope(
    keys: Float[Tensor, "batch heads tokens dim"],
    cos: Float[Tensor, "batch tokens rotary"],
    sin: Float[Tensor, "batch tokens rotary"],
) -> Float[Tensor, "batch heads tokens dim"]:
    """Undo :func:`apply_rope`, exactly also where YaRN scales cos and sin.

    The inverse of a rotation scaled by m is its transpose over m^2 = cos^2 + sin^2.
    """
    turned, rest = _split(keys, cos)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return _join((turned * c - rotate_half(turned) * s) / (c * c + s * s), rest)


def _split(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    rotary = cos.shape[-1]
    return x[..., :rotary].float(), x[..., rotary:].float()


def _join(turned: Tensor, rest: Tensor) -> Tensor:
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class RotaryTables:
    """Cos and sin from the model's own rotary module, one table for each layer type."""

    def __init__(self, rotary: Any, geometry: KVGeometry) -> None:
        self._rotary = rotary
        self._geometry = geometry

    def at(
        self, positions: Int[Tensor, "batch tokens"]
    ) -> list[tuple[Float[Tensor, "batch tokens rotary"], Float[Tensor, "batch tokens rotary"]]]:
        """(cos, sin) of every layer at ``positions``, fp32; layers of one type share tensors.

        Dynamic and long-rope scaling depend on the largest position of a call, so ask for all
        positions of one sequence at once, as the model did when it wrote the cache.
        """
        probe = torch.empty(0, device=positions.device, dtype=torch.float32)
        by_type: dict[str | None, tuple[Tensor, Tensor]] = {}
        for layer in self._geometry.layers:
            if layer.rope not in by_type:
                extra = () if layer.rope is None else (layer.rope,)
                cos, sin = self._rotary(probe, positions, *extra)
                by_type[layer.rope] = (cos.float(), sin.float())
        return [by_type[layer.rope] for layer in self._geometry.layers]
