"""Which source layers each target layer reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InputError


@dataclass(frozen=True)
class LayerSupport:
    """For each target layer the source layers it reads, in ascending order."""

    layers: tuple[tuple[int, ...], ...]

    def validate(self, source_layers: int) -> None:
        """Check that every target layer reads distinct layers of a source this deep.

        Raises:
            InputError: names the first target layer whose support is not usable.
        """
        for target, support in enumerate(self.layers):
            ascending = all(a < b for a, b in pairwise(support))
            inside = all(0 <= layer < source_layers for layer in support)
            if not (support and ascending and inside):
                raise InputError(
                    f"The support of target layer {target} is not usable.",
                    found=support,
                    expected=f"one or more ascending layers from 0 to {source_layers - 1}",
                    fix="Choose the support again for these two models.",
                )

    def read_layers(self) -> tuple[int, ...]:
        """Every source layer that some target layer reads, ascending."""
        return tuple(sorted({layer for support in self.layers for layer in support}))


def relative_depth(source_layers: int, target_layers: int, window: int) -> LayerSupport:
    """Neighbouring source layers around the same relative depth.

    The centre of target layer l is `round(l (source_layers - 1) / (target_layers - 1))`, halves
    rounded up; a lone target layer looks at the middle. At both ends the window is shifted inwards,
    so that it holds `window` distinct layers wherever the source has as many.
    """
    _positive(source_layers=source_layers, target_layers=target_layers, window=window)
    steps, top = target_layers - 1, source_layers - 1
    centres = [
        (2 * target * top + steps) // (2 * steps) if steps else top // 2
        for target in range(target_layers)
    ]
    return windows_around(centres, source_layers, window)


def windows_around(centres: Sequence[int], source_layers: int, window: int) -> LayerSupport:
    """Neighbouring source layers around one of each target layer, shifted inwards at both ends."""
    _positive(source_layers=source_layers, window=window)
    width = min(window, source_layers)
    supports = []
    for centre in centres:
        first = min(max(centre - (width - 1) // 2, 0), source_layers - width)
        supports.append(tuple(range(first, first + width)))
    return LayerSupport(tuple(supports))


def all_layers(source_layers: int, target_layers: int) -> LayerSupport:
    """Every target layer reads every source layer."""
    _positive(source_layers=source_layers, target_layers=target_layers)
    return LayerSupport((tuple(range(source_layers)),) * target_layers)


def top_layers_by_r2(r2: Float[Tensor, "target source"], k: int) -> LayerSupport:
    """The k source layers that alone explain each target layer best (all, if there are fewer).

    Ties go to the shallower layer; NaN counts as worst.
    """
    _positive(k=k)
    ranked = torch.nan_to_num(r2, nan=-torch.inf).argsort(dim=1, descending=True, stable=True)
    return LayerSupport(tuple(tuple(sorted(row)) for row in ranked[:, :k].tolist()))


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise InputError(f"{name} must be at least 1.", found=value, fix=f"Set {name} to 1+.")
