"""Input features of several source heads at once: the same blocks, one head each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.align.tokens import gather_aligned
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import FeatureBlock

HeadReads = Sequence[tuple[FeatureBlock, ...]]
"""Blocks of each head: alike but for the head of source blocks."""


def fill_head_panel(
    inputs: MapperInputs,
    reads: HeadReads,
    start: int,
    stop: int,
    mean: Float[Tensor, "heads features"],
    out: Float[Tensor, "heads rows features"],
) -> Float[Tensor, "heads rows features"]:
    """Features of target tokens ``start`` to ``stop`` without their ``mean``, in ``out``.

    One gather a source layer for all heads; source heads that ``reads`` does not name are not
    touched. ``mean`` is taken off in fp32, before anything is rounded to the format of ``out``.
    """
    column = 0
    for same in zip(*reads, strict=True):
        here = slice(column, column + same[0].width)
        if same[0].kind == "source":
            features = _source(inputs, same, start, stop)
        else:
            features = inputs.rows(same[:1], start, stop)[None]
        torch.sub(features.float(), mean[:, None, here], out=out[:, :, here])
        column = here.stop
    return out


def _source(
    inputs: MapperInputs, same: Sequence[FeatureBlock], start: int, stop: int
) -> Float[Tensor, "heads rows features"]:
    layers: dict[int, Tensor] = getattr(inputs.source, same[0].component)
    heads = [block.head for block in same]
    content = layers[same[0].index]
    return gather_aligned(_heads(content, heads), inputs.alignment.narrow(start, stop))[0]


def _heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of ``[1, heads, tokens, dim]``: a view where they are evenly spaced."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if step > 0 and list(heads) == list(range(heads[0], heads[-1] + 1, step)):
        return x[:, heads[0] : heads[-1] + 1 : step]
    return x[:, list(heads)]
