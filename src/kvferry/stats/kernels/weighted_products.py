"""Triton: gather a head's features, weigh them and multiply, with no copy of the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int64
from torch import Tensor

_TILE = 64
_ROWS = 32


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    left,
    left_source,
    left_columns,
    right,
    right_source,
    right_columns,
    weights,
    out,
    rows,
    p,
    q,
    left_width,
    right_width,
    panel,
    WEIGHTED: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One tile of `sum_n w left' right` of one head; fp32 within a panel, fp64 between panels."""
    i0 = tl.program_id(0) * TILE
    j0 = tl.program_id(1) * TILE
    head = tl.program_id(2)
    # Below the diagonal the host mirrors.
    if not SYMMETRIC or j0 >= i0:
        i = i0 + tl.arange(0, TILE)
        j = j0 + tl.arange(0, TILE)
        in_p = i < p
        in_q = j < q
        ci = tl.load(left_columns + i, mask=in_p, other=0)
        cj = tl.load(right_columns + j, mask=in_q, other=0)
        left_head = left + tl.load(left_source + head) * rows * left_width
        right_head = right + tl.load(right_source + head) * rows * right_width
        place = out + head.to(tl.int64) * p * q + i[:, None].to(tl.int64) * q + j[None, :]
        inside = in_p[:, None] & in_q[None, :]
        total = tl.load(place, mask=inside, other=0.0)
        for low in range(0, rows, panel):
            part = tl.zeros((TILE, TILE), dtype=tl.float32)
            stop = tl.minimum(low + panel, rows)
            for first in range(low, stop, ROWS):
                n = first + tl.arange(0, ROWS)
                in_rows = n < stop
                at = n.to(tl.int64)
                a = tl.load(
                    left_head + at[None, :] * left_width + ci[:, None],
                    mask=in_p[:, None] & in_rows[None, :],
                    other=0.0,
                )
                b = tl.load(
                    right_head + at[:, None] * right_width + cj[None, :],
                    mask=in_rows[:, None] & in_q[None, :],
                    other=0.0,
                )
                if WEIGHTED:
                    w = tl.load(weights + head.to(tl.int64) * rows + at, mask=in_rows, other=0.0)
                    root = tl.sqrt(w)
                    a *= root[None, :]
                    b *= root[:, None]
                part += tl.dot(a, b, input_precision="ieee")
            total += part.to(tl.float64)
        tl.store(place, total, mask=inside)


def add_products(
    sums: Float64[Tensor, "heads p q"],
    x: Float[Tensor, "sources rows features"],
    sources: Int64[Tensor, " heads"],
    columns: Int64[Tensor, " p"],
    weights: Float[Tensor, "heads rows"] | None = None,
    y: Float[Tensor, "heads rows q"] | None = None,
    *,
    panel: int = 1024,
) -> None:
    """Add `sum_n w x y'` of each head to ``sums``; without ``y`` the upper tiles of `w x x'`.

    Each tile has one owner, so that the order of additions, and with it every bit, is fixed.

    Args:
        sums: contiguous, in fp64.
        x: centred features of every source.
        sources, columns: what each head reads of them.
        panel: rows summed in fp32 before they are added in fp64.
    """
    heads, p, q = sums.shape
    x = x.float().contiguous()
    symmetric = y is None
    if y is None:
        right, right_sources, right_columns = x, sources, columns
    else:
        right = y.float().contiguous()
        right_sources = torch.arange(heads, device=x.device)
        right_columns = torch.arange(q, device=x.device)
    grid = (triton.cdiv(p, _TILE), triton.cdiv(q, _TILE), heads)
    _kernel[grid](
        x,
        sources,
        columns,
        right,
        right_sources,
        right_columns,
        x if weights is None else weights.float().contiguous(),
        sums,
        x.shape[1],
        p,
        q,
        x.shape[2],
        right.shape[2],
        panel,
        WEIGHTED=weights is not None,
        SYMMETRIC=symmetric,
        TILE=_TILE,
        ROWS=_ROWS,
    )
