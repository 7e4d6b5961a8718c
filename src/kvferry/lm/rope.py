"""Rotary positions: taken off keys before a map and put on again after it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvferry.lm.geometry import KVGeometry


def apply_rope(
    content: Float[Tensor, "batch heads tokens dim"],
    cos: Float[Tensor, "batch tokens rotary"],
    sin: Float[Tensor, "batch tokens rotary"],
) -> Float[Tensor, "batch heads tokens dim"]:
    """Rotate position-free keys in fp32; channels past ``rotary`` stay as they are."""
    return _turn(content, cos, sin)


def strip_rope(
    keys: Float[Tensor, "batch heads tokens dim"],
    cos: Float[Tensor, "batch tokens rotary"],
    sin: Float[Tensor, "batch tokens rotary"],
) -> Float[Tensor, "batch heads tokens dim"]:
    """Undo :func:`apply_rope`, exactly also where YaRN scales cos and sin.

    The inverse of a rotation scaled by m is its transpose over m^2 = cos^2 + sin^2.
    """
    square = cos * cos + sin * sin
    return _turn(keys, cos / square, -sin / square)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin): the pairs lie half a rotary width apart.

    Few passes over memory, since every mapped layer goes through here.
    """
    rotary, half = cos.shape[-1], cos.shape[-1] // 2
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    x = x.float()
    first, second = x[..., :half], x[..., half:rotary]
    turned = (
        torch.addcmul(first * c[..., :half], second, s[..., :half], value=-1),
        torch.addcmul(second * c[..., half:], first, s[..., half:]),
    )
    return torch.cat(turned if rotary == x.shape[-1] else (*turned, x[..., rotary:]), dim=-1)


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
