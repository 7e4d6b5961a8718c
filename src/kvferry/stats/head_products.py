"""Weighted products of rows, batched over heads, in panels of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from kvferry.stats.kernels import fused_products

PANEL_ROWS = 1024
_BLOCK = 512  # columns of a symmetric product computed at once


@dataclass(frozen=True)
class HeadRows:
    """Rows of several heads, each of which reads some features of one source.

    Args:
        x: centred features of every source, ``[sources, rows, features]``.
        sources: which source each head reads.
        columns: which of its features, the same in every head.
    """

    x: Float[Tensor, "sources rows features"]
    sources: Int64[Tensor, " heads"]
    columns: Int64[Tensor, " p"]


def add_gram(
    sums: Float64[Tensor, "heads p p"],
    rows: HeadRows,
    weights: Float[Tensor, "heads rows"] | None = None,
    *,
    panel: int = PANEL_ROWS,
) -> None:
    """Add `sum_n w x x'` of each head to the upper triangle of ``sums``.

    Products in fp32, sums in fp64. Never more than ``panel`` rows of x are copied, however many
    there are. On CUDA a fused Triton kernel does the same without any copy.
    """
    kernel = fused_products() if rows.x.is_cuda else None
    if kernel is not None:
        kernel.add_products(sums, rows.x, rows.sources, rows.columns, weights, panel=panel)
        return
    p = len(rows.columns)
    for left, _ in _panels(rows, weights, panel):
        for first in range(0, p, _BLOCK):
            here = left[:, :, first : first + _BLOCK]
            product = torch.bmm(here.transpose(1, 2), left[:, :, first:])
            sums[:, first : first + _BLOCK, first:].add_(product)


def add_cross(
    sums: Float64[Tensor, "heads p q"],
    rows: HeadRows,
    y: Float[Tensor, "heads rows q"],
    weights: Float[Tensor, "heads rows"] | None = None,
    *,
    panel: int = PANEL_ROWS,
) -> None:
    """Add `sum_n w x y'` of each head to ``sums``, as :func:`add_gram` does."""
    kernel = fused_products() if rows.x.is_cuda else None
    if kernel is not None:
        kernel.add_products(sums, rows.x, rows.sources, rows.columns, weights, y, panel=panel)
        return
    for left, here in _panels(rows, weights, panel):
        right = y[:, here]
        if weights is not None:
            right = right * weights[:, here, None].sqrt()
        sums.add_(torch.bmm(left.transpose(1, 2), right))


def mirror(sums: Float64[Tensor, "heads p p"]) -> None:
    """Copy the upper triangles into the lower ones."""
    for gram in sums:
        gram.copy_(gram.triu() + gram.triu(1).T)


def _panels(
    rows: HeadRows, weights: Tensor | None, panel: int
) -> Iterator[tuple[Float[Tensor, "heads panel p"], slice]]:
    """Features of each head times the root of their weight, and which rows these are."""
    count = rows.x.shape[1]
    buffer = rows.x.new_empty(len(rows.sources), min(panel, count), len(rows.columns))
    runs, sources = _runs(rows.columns), rows.sources.tolist()
    for low in range(0, count, panel):
        here = slice(low, min(low + panel, count))
        left = buffer[:, : here.stop - low]
        done = 0
        for run in runs:
            place = slice(done, done + run.stop - run.start)
            for head, source in enumerate(sources):
                features = rows.x[source, here, run]
                if weights is None:
                    left[head, :, place] = features
                else:
                    root = weights[head, here, None].sqrt()
                    torch.mul(features, root, out=left[head, :, place])
            done = place.stop
        yield left, here


def _runs(columns: Int64[Tensor, " p"]) -> list[slice]:
    """Slices of adjacent columns: whole layers are copied, not single features."""
    breaks = (columns.diff() != 1).nonzero().flatten().tolist()
    edges = [0, *(place + 1 for place in breaks), len(columns)]
    values = columns.tolist()
    return [slice(values[a], values[b - 1] + 1) for a, b in pairwise(edges)]
