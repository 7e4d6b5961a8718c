"""Weighted products of rows, head by head, in panels of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from kvferry.stats.kernels import fused_products

PANEL_ROWS = 1024
_BLOCK = 128  # columns of a product at once: what lies below the diagonal is left out


@dataclass(frozen=True)
class HeadRows:
    """Rows of several heads, each of which reads some features of one source.

    Args:
        x: centred features of every source, ``[sources, rows, features]``.
        sources: which source each head reads.
        columns: which of its features, the same in every head.
        weights: of each row, by head; one by default.
    """

    x: Float[Tensor, "sources rows features"]
    sources: Int64[Tensor, " heads"]
    columns: Int64[Tensor, " p"]
    weights: Float[Tensor, "heads rows"] | None = None


def add_products(
    rows: HeadRows,
    *,
    gram: Float64[Tensor, "heads p p"] | None = None,
    cross: Float64[Tensor, "heads p q"] | None = None,
    y: Float[Tensor, "heads rows q"] | None = None,
    panel: int = PANEL_ROWS,
) -> None:
    """Add `sum_n w x x'` to the upper triangle of ``gram``, and `sum_n w x y'` to ``cross``.

    Products in fp32, sums in fp64. Never more than ``panel`` rows of one head are copied, however
    many there are; both operands carry the root of the weight, so that one copy serves both. On
    CUDA a fused Triton kernel does the same without any copy.
    """
    kernel = fused_products() if rows.x.is_cuda else None
    if kernel is not None:
        read = rows.x, rows.sources, rows.columns, rows.weights
        if gram is not None:
            kernel.add_products(gram, *read, panel=panel)
        if cross is not None:
            kernel.add_products(cross, *read, y, panel=panel)
        return
    count, p = rows.x.shape[1], len(rows.columns)
    q = 0 if y is None else y.shape[2]
    buffer = rows.x.new_empty(min(panel, count), p + q)
    scratch = rows.x.new_empty(_BLOCK * (p + q))
    runs = _runs(rows.columns)
    for head, source in enumerate(rows.sources.tolist()):
        for low in range(0, count, panel):
            here = slice(low, min(low + panel, count))
            both = buffer[: here.stop - low]
            root = None if rows.weights is None else rows.weights[head, here, None].sqrt()
            done = 0
            for run in runs:
                _put(rows.x[source, here, run], root, both[:, done : done + run.stop - run.start])
                done += run.stop - run.start
            if y is not None:
                _put(y[head, here], root, both[:, p:])
            _accumulate(
                both,
                p,
                None if gram is None else gram[head],
                None if cross is None else cross[head],
                scratch,
            )


def mirror(sums: Float64[Tensor, "heads p p"]) -> None:
    """Copy the upper triangles into the lower ones."""
    for gram in sums:
        gram.copy_(gram.triu() + gram.triu(1).T)


def _put(x: Tensor, root: Tensor | None, out: Tensor) -> None:
    if root is None:
        out.copy_(x)
    else:
        torch.mul(x, root, out=out)


def _accumulate(
    both: Float[Tensor, "rows p+q"],
    p: int,
    gram: Float64[Tensor, "p p"] | None,
    cross: Float64[Tensor, "p q"] | None,
    scratch: Tensor,
) -> None:
    """Multiply x, block by block, with itself from there on and with y behind it."""
    end = both.shape[1] if cross is not None else p
    for first in range(0, p, _BLOCK):
        last = min(first + _BLOCK, p)
        start = first if gram is not None else p
        product = scratch[: (last - first) * (end - start)].view(last - first, end - start)
        torch.mm(both[:, first:last].T, both[:, start:end], out=product)
        if gram is not None:
            gram[first:last, first:].add_(product[:, : p - first])
        if cross is not None:
            cross[first:last].add_(product[:, p - start :])


def _runs(columns: Int64[Tensor, " p"]) -> list[slice]:
    """Slices of adjacent columns: whole layers are copied, not single features."""
    breaks = (columns.diff() != 1).nonzero().flatten().tolist()
    edges = [0, *(place + 1 for place in breaks), len(columns)]
    values = columns.tolist()
    return [slice(values[a], values[b - 1] + 1) for a, b in pairwise(edges)]
