"""Ridge for many heads at once from their weighted sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor

from kvferry.stats.ridge import RidgeFactor


@dataclass(frozen=True)
class HeadMoments:
    """Moments of several heads about an origin, the constant one as the last feature of x.

    With that constant, first moments and the total weight are entries of the products, and
    measures add like numbers: `(1 - a) P + a Q` is that of the moments themselves.

    Args:
        xx: `sum w [x 1]'[x 1]`.
        xy: `sum w [x 1]' y`.
    """

    xx: Float64[Tensor, "heads p+1 p+1"]
    xy: Float64[Tensor, "heads p+1 q"]

    @property
    def weight(self) -> Float64[Tensor, " heads"]:
        """Total weight of each head."""
        return self.xx[:, -1, -1]

    def mixed(self, other: HeadMoments, alpha: Float64[Tensor, " heads"]) -> HeadMoments:
        """Weights `1 - alpha` here and `alpha` there, the other total made equal to this one.

        That is weighting each row by `1 + alpha (r - 1)` where the others hold rows weighted by r,
        scaled to a mean of one: exactly, though r's mean is known only after the last row.
        """
        there = (alpha * self.weight / other.weight.clamp_min(1e-300))[:, None, None]
        here = (1 - alpha)[:, None, None]
        return HeadMoments(
            (here * self.xx).addcmul_(there, other.xx),
            (here * self.xy).addcmul_(there, other.xy),
        )

    @property
    def mean_x(self) -> Float64[Tensor, "heads p"]:
        """Weighted mean of x, from the origin."""
        return self.xx[:, :-1, -1] / self.weight[:, None]

    @property
    def mean_y(self) -> Float64[Tensor, "heads q"]:
        """Weighted mean of y, from the origin."""
        return self.xy[:, -1] / self.weight[:, None]

    @property
    def c_xx(self) -> Float64[Tensor, "heads p p"]:
        """Covariance of x about its weighted mean."""
        mean = self.mean_x
        scaled = self.xx[:, :-1, :-1] / self.weight[:, None, None]
        return scaled.baddbmm_(mean[:, :, None], mean[:, None, :], alpha=-1)

    @property
    def c_xy(self) -> Float64[Tensor, "heads p q"]:
        """Cross-covariance about the weighted means."""
        scaled = self.xy[:, :-1] / self.weight[:, None, None]
        return scaled.baddbmm_(self.mean_x[:, :, None], self.mean_y[:, None, :], alpha=-1)


def ridge_heads(
    c_xx: Float64[Tensor, "heads p p"],
    c_xy: Float64[Tensor, "heads p q"],
    *,
    relative: float | None = None,
    absolute: float | None = None,
) -> Float64[Tensor, "heads p q"]:
    """Ridge of each head, as :func:`kvferry.stats.ridge.ridge` gives it, by batched Cholesky.

    A head whose Gram does not factorise is solved alone, with all that `RidgeFactor` knows.

    Args:
        relative, absolute: the penalty, see :class:`RidgeFactor`; relative to each head's variance.

    Raises:
        InputError, NumericalError: as `RidgeFactor`.
    """
    variances = c_xx.diagonal(dim1=1, dim2=2)
    if absolute is not None:
        penalty = torch.full_like(variances[:, 0], absolute)
    else:
        penalty = (relative or 0.0) * variances.mean(dim=1)
    diagonal = variances + penalty[:, None]
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    gram = c_xx * scale[:, :, None] * scale[:, None, :]
    gram.diagonal(dim1=1, dim2=2).fill_(1.0)
    lower, failed = torch.linalg.cholesky_ex(gram)
    noise = gram.shape[1] * torch.finfo(gram.dtype).eps
    sound = (failed == 0) & (lower.diagonal(dim1=1, dim2=2).amin(dim=1).square() > noise)
    solved = torch.cholesky_solve(c_xy * scale[:, :, None], lower) * scale[:, :, None]
    for head in (~sound).nonzero().flatten().tolist():
        alone = RidgeFactor(c_xx[head], relative=relative, absolute=absolute)
        solved[head] = alone.solve(c_xy[head])
    return solved
