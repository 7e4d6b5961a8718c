"""Values by what attention makes of them: regress attention outputs, not cached values."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


class AttendedMoments:
    """Normal equations of attention outputs on attended inputs, one set for each KV head.

    A value map v = z D gives a query with attention a the output (a Z) D, so D is found by
    regressing outputs on attended inputs a Z. Products in fp32, sums in fp64; memory is
    `heads x width x (width + dim)`, however many rows are seen.
    """

    def __init__(self, heads: int, width: int, dim: int) -> None:
        self.rows = 0
        self._gram = torch.zeros(heads, width, width, dtype=torch.float64)
        self._cross = torch.zeros(heads, width, dim, dtype=torch.float64)
        self._energy = torch.zeros(heads, dtype=torch.float64)

    def update(
        self,
        attended: Float[Tensor, "query_heads rows width"],
        outputs: Float[Tensor, "query_heads rows dim"],
    ) -> AttendedMoments:
        """Add rows; neighbouring query heads share a KV head."""
        heads = len(self._gram)
        z = attended.float().reshape(heads, -1, attended.shape[-1])
        o = outputs.float().reshape(heads, -1, outputs.shape[-1])
        self._gram = self._gram.to(z.device).add_(z.transpose(1, 2) @ z)
        self._cross = self._cross.to(z.device).add_(z.transpose(1, 2) @ o)
        self._energy = self._energy.to(z.device).add_(o.square().sum((1, 2)))
        self.rows += z.shape[1]
        return self

    @property
    def gram(self) -> Float[Tensor, "heads width width"]:
        """Mean product of attended inputs."""
        return self._gram / max(self.rows, 1)

    @property
    def cross(self) -> Float[Tensor, "heads width dim"]:
        """Mean product of attended inputs and outputs."""
        return self._cross / max(self.rows, 1)

    def error(self, solution: Float[Tensor, "heads width dim"]) -> Float[Tensor, " heads"]:
        """Mean |o - z D|² of these rows."""
        fitted = solution * (self.gram @ solution - 2 * self.cross)
        return self._energy / max(self.rows, 1) + fitted.sum((1, 2))


def functional_values(
    attended: AttendedMoments,
    c_zz: Float[Tensor, "width width"],
    c_zv: Float[Tensor, "heads width dim"],
    *,
    pointwise: float,
    penalty: Float[Tensor, "width width"],
    start: Float[Tensor, "heads width dim"],
) -> Float[Tensor, "heads width dim"]:
    """D that minimises, for each KV head and with means over rows and tokens,

        |o - a Z D|²  +  pointwise |v - z D|²  +  (1 + pointwise) (D' penalty D + 2 D' start)

    Attended inputs vary in far fewer directions than inputs do; the pointwise term holds the rest.
    Where every query attends to one token the two terms agree, and D is the ridge map whatever
    `pointwise` is.

    Args:
        attended: of the attention rows, o being what is left for D to explain.
        c_zz, c_zv: mean products of inputs with themselves and with what is left of the values.
        pointwise: weight of the pointwise term (mu).
        penalty: ridge penalty as a quadratic form in D.
        start: its gradient at D = 0, where D corrects a map that is penalised too.
    """
    both = 1 + pointwise
    left = attended.gram + pointwise * c_zz + both * penalty
    right = attended.cross + pointwise * c_zv - both * start
    # Without a pointwise term a direction that no query attends to has nothing to hold it.
    jitter = 1e-9 * left.diagonal(dim1=1, dim2=2).mean(dim=1)
    left.diagonal(dim1=1, dim2=2).add_(jitter[:, None])
    return torch.cholesky_solve(right, torch.linalg.cholesky(left))
