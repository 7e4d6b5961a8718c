"""Weighted products of rows, head by head, in panels of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from kvferry.stats.kernels import require_fused

PANEL_ROWS = 4096
"""Long enough that adding a product up in fp64 costs little beside the product."""
_BLOCK = 128  # columns of a product at once: what lies below the diagonal is left out
_ALIGNED = 16  # numbers in a cache line: rows that begin elsewhere multiply a seventh slower


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
    fused: bool = False,
) -> None:
    """Add `sum_n w x x'` to the upper triangle of ``gram``, and `sum_n w x y'` to ``cross``.

    Products in fp32, sums in fp64. Never more than ``panel`` rows of one head are copied, however
    many there are; both operands carry the root of the weight, so that one copy serves both, and
    adjacent features without weights are not copied at all.

    Args:
        fused: by the Triton kernel, which copies nothing: least memory, not least time.

    Raises:
        ConfigurationError: the fused kernel is asked for and cannot run here.
    """
    if fused:
        _add_fused(rows, gram, cross, y, panel)
        return
    count, p = rows.x.shape[1], len(rows.columns)
    q = 0 if y is None else y.shape[2]
    runs = _runs(rows.columns)
    copied = rows.weights is not None or len(runs) > 1 or (gram is not None and y is not None)
    buffer = aligned_rows(min(panel, count) if copied else 0, p + q, like=rows.x)
    # One large product suits a GPU better than half of it in strips.
    places = [(0, p)] if rows.x.is_cuda else strips(p)
    scratch = rows.x.new_empty(max(last - first for first, last in places) * (p + q))
    for head, source in enumerate(rows.sources.tolist()):
        sums = (
            None if gram is None else gram[head],
            None if cross is None else cross[head],
        )
        for low in range(0, count, panel):
            here = slice(low, min(low + panel, count))
            x, outputs = rows.x[source, here], None if y is None else y[head, here]
            if copied:
                root = None if rows.weights is None else rows.weights[head, here, None].sqrt()
                both = _joined(x, runs, outputs, root, buffer[: here.stop - low])
                left, right = both[:, :p], both[:, p:] if gram is None else both
            else:
                left = x[:, runs[0]]
                right = left if outputs is None else outputs
            _accumulate(left, right, *sums, places, scratch)


def strips(p: int) -> list[tuple[int, int]]:
    """Ranges of columns that are multiplied at once, none of them short.

    A strip of one column would be summed one row after the other in fp32, at five times the error.
    """
    starts = list(range(0, p, _BLOCK))
    if len(starts) > 1 and p - starts[-1] < _BLOCK // 2:
        starts.pop()
    return list(pairwise([*starts, p]))


def mirror(sums: Float64[Tensor, "heads p p"]) -> None:
    """Copy the upper triangles into the lower ones."""
    p = sums.shape[1]
    for first in range(0, p, _BLOCK):
        last = min(first + _BLOCK, p)
        sums[:, last:, first:last] = sums[:, first:last, last:].transpose(1, 2)
        corner = sums[:, first:last, first:last]
        corner.copy_(corner.triu() + corner.triu(1).transpose(1, 2))


def aligned_rows(*shape: int, like: Tensor) -> Tensor:
    """An empty tensor of this shape, whose rows each begin at a cache line."""
    *outer, width = shape
    return like.new_empty(*outer, -(-width // _ALIGNED) * _ALIGNED)[..., :width]


def _add_fused(
    rows: HeadRows, gram: Tensor | None, cross: Tensor | None, y: Tensor | None, panel: int
) -> None:
    kernel = require_fused(rows.x.device)
    read = rows.x, rows.sources, rows.columns, rows.weights
    if gram is not None:
        kernel.add_products(gram, *read, panel=panel)
    if cross is not None:
        kernel.add_products(cross, *read, y, panel=panel)


def _joined(
    x: Float[Tensor, "rows features"],
    runs: list[slice],
    y: Float[Tensor, "rows q"] | None,
    root: Float[Tensor, "rows 1"] | None,
    out: Float[Tensor, "rows p+q"],
) -> Float[Tensor, "rows p+q"]:
    """The features of all runs and y side by side, each row times its ``root``."""
    parts = [x[:, run] for run in runs] + ([] if y is None else [y])
    places = torch.split(out, [part.shape[1] for part in parts], dim=1)
    for part, place in zip(parts, places, strict=True):
        if root is None:
            place.copy_(part)
        else:
            torch.mul(part, root, out=place)
    return out


def _accumulate(
    x: Float[Tensor, "rows p"],
    right: Float[Tensor, "rows columns"],
    gram: Float64[Tensor, "p p"] | None,
    cross: Float64[Tensor, "p q"] | None,
    places: Sequence[tuple[int, int]],
    scratch: Tensor,
) -> None:
    """Multiply x, strip by strip of its columns, with [x y], or with one of them.

    With x it is multiplied from the strip on: what lies below the diagonal is above it too.
    """
    p, columns = x.shape[1], right.shape[1]
    for first, last in places:
        start = 0 if gram is None else first
        product = scratch[: (last - first) * (columns - start)].view(last - first, columns - start)
        torch.mm(x[:, first:last].T, right[:, start:], out=product)
        if gram is not None:
            gram[first:last, first:].add_(product[:, : p - first])
        if cross is not None:
            cross[first:last].add_(product[:, -cross.shape[1] :])


def _runs(columns: Int64[Tensor, " p"]) -> list[slice]:
    """Slices of adjacent columns: whole layers are copied, not single features."""
    breaks = (columns.diff() != 1).nonzero().flatten().tolist()
    edges = [0, *(place + 1 for place in breaks), len(columns)]
    values = columns.tolist()
    return [slice(values[a], values[b - 1] + 1) for a, b in pairwise(edges)]
