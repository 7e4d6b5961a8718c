"""Ridge regression from moments alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InputError
from kvferry.stats.errors import NumericalError
from kvferry.stats.moments import Columns, Moments

_JITTERS = (0.0, 1e-7, 1e-6)  # of a unit diagonal; products in fp32 are noise below that


class RidgeFactor:
    """A factorised `C_xx + penalty I`, to be solved for any number of right-hand sides.

    Cholesky in fp64 on a Gram scaled to a unit diagonal. A numerically singular Gram is tried
    again with a jitter of 1e-7 and 1e-6 of that diagonal, then solved by its eigenvectors without
    those that are noise. Columns of x that never vary get the coefficient zero.
    """

    def __init__(
        self,
        c_xx: Float[Tensor, "p p"],
        *,
        relative: float | None = None,
        absolute: float | None = None,
        divide_by: float = 1.0,
    ) -> None:
        """Factorise.

        Args:
            c_xx: covariance of x, that is, divided by the number of rows.
            relative: penalty as a multiple of the mean variance of the columns of x.
            absolute: penalty as it is. One of the two must be given.
            divide_by: scale `c_xx` by one over this on the way (for `Moments.scatter_xx`).

        Raises:
            InputError: not exactly one penalty, or a negative one.
            NumericalError: `c_xx` is not finite, or no covariance.
        """
        given = [value for value in (relative, absolute) if value is not None]
        if len(given) != 1 or not given[0] >= 0:
            raise InputError(
                "Ridge needs one penalty, relative or absolute, of at least zero.",
                found=f"relative={relative}, absolute={absolute}",
                fix="Set, for instance, relative=1e-3.",
            )
        variances = c_xx.diagonal().double() / divide_by
        mean_variance = float(variances.mean())
        if not math.isfinite(mean_variance) or bool((variances < 0).any()):
            raise NumericalError(
                "The Gram of the source features is no covariance.",
                found=f"mean variance {mean_variance}, smallest {float(variances.min())}",
                fix="Check the calibration rows for NaN and infinity, and fit again.",
            )
        self.penalty = absolute if absolute is not None else given[0] * mean_variance
        diagonal = variances + self.penalty
        self._scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        gram = c_xx.to(torch.float64, copy=True)
        gram.mul_((self._scale / divide_by)[:, None]).mul_(self._scale)
        gram.diagonal().fill_(1.0)
        self._lower, self._inverse_root = _factorise(gram)

    @classmethod
    def of(
        cls, moments: Moments, *, relative: float | None = None, absolute: float | None = None
    ) -> RidgeFactor:
        """Factorise the whole Gram of moments without a copy of it beyond the factor."""
        return cls(
            moments.scatter_xx, relative=relative, absolute=absolute, divide_by=moments.weight
        )

    def solve(self, c_xy: Float[Tensor, "p q"]) -> Float[Tensor, "p q"]:
        """`(C_xx + penalty I)^-1 c_xy`, in fp64."""
        scaled = c_xy.double() * self._scale[:, None]
        if self._lower is not None:
            solved = torch.cholesky_solve(scaled, self._lower)
        else:
            assert self._inverse_root is not None
            solved = self._inverse_root @ (self._inverse_root.T @ scaled)
        return solved.mul_(self._scale[:, None])


def ridge(
    c_xx: Float[Tensor, "p p"],
    c_xy: Float[Tensor, "p q"],
    *,
    relative: float | None = None,
    absolute: float | None = None,
) -> Float[Tensor, "p q"]:
    """W that minimises E|y - xW|² + penalty |W|², for centred x and y. Errors as `RidgeFactor`."""
    return RidgeFactor(c_xx, relative=relative, absolute=absolute).solve(c_xy)


def bias(
    mean_x: Float[Tensor, " p"], mean_y: Float[Tensor, " q"], weights: Float[Tensor, "p q"]
) -> Float[Tensor, " q"]:
    """The constant that lets `x W + b` meet the mean of y."""
    return mean_y - mean_x.to(weights.dtype) @ weights


def held_out_r2(
    weights: Float[Tensor, "p q"], constant: Float[Tensor, " q"], moments: Moments
) -> Float[Tensor, " blocks"]:
    """R² of `x W + b` in each block of y, on the rows behind `moments`.

    1 - SSE / SST over all columns of a block together; SST is about the mean of these rows.
    A block of y without variance scores NaN.
    """
    w = weights.double()
    predicted = moments.scatter_xx @ w / moments.weight
    offset = moments.mean_y - moments.mean_x @ w - constant.double()
    error = (w * (predicted - 2 * moments.c_xy)).sum(0) + offset.square()
    return _r2_of_blocks(moments, moments.y_blocks, error)


def single_source_r2(
    moments: Moments,
    source_blocks: Sequence[Columns],
    target_blocks: Sequence[slice] | None = None,
    *,
    relative: float = 1e-4,
) -> Float[Tensor, "targets sources"]:
    """R² on the calibration rows of each block of y from each block of x alone.

    Args:
        moments: of all blocks.
        source_blocks: columns of x of each source layer, or head.
        target_blocks: columns of y of each target layer, or head; by default the blocks of
            `moments`.
        relative: ridge penalty, see `RidgeFactor`.
    """
    columns = []
    for source in source_blocks:
        gram = moments.scatter_xx[source][:, source] / moments.weight
        c_xy = moments.scatter_xy[source] / moments.weight
        factor = RidgeFactor(gram, relative=relative)
        w = factor.solve(c_xy)
        # W' C_xx W = W'(c_xy - penalty W), which saves the product.
        error = -(w * c_xy).sum(0) - factor.penalty * w.square().sum(0)
        columns.append(_r2_of_blocks(moments, target_blocks or moments.y_blocks, error))
    return torch.stack(columns, dim=1)


def _r2_of_blocks(
    moments: Moments, blocks: Sequence[slice], error_minus_variance: Float[Tensor, " q"]
) -> Float[Tensor, " blocks"]:
    variance = torch.cat([block.diagonal() for block in moments.c_yy])
    sums = [(error_minus_variance[block].sum(), variance[block].sum()) for block in blocks]
    return torch.stack([-error / total for error, total in sums])


def _factorise(
    gram: Float[Tensor, "p p"],
) -> tuple[Float[Tensor, "p p"] | None, Float[Tensor, "p r"] | None]:
    """A Cholesky factor of a Gram with unit diagonal, or else a root of its pseudo-inverse."""
    noise = len(gram) * torch.finfo(gram.dtype).eps
    for jitter in _JITTERS:
        gram.diagonal().fill_(1.0 + jitter)
        lower, failed = torch.linalg.cholesky_ex(gram)
        # A pivot that is all rounding means that the factor is too.
        if not int(failed) and float(lower.diagonal().min()) ** 2 > noise:
            return lower, None
        del lower
    gram.diagonal().fill_(1.0)
    values, vectors = torch.linalg.eigh(gram)
    noise = max(noise * float(values[-1]), -float(values[0]))
    if noise > 1e-3 * float(values[-1]):
        raise NumericalError(
            "The Gram of the source features is no covariance: it has negative eigenvalues.",
            found=f"from {float(values[0]):.3g} to {float(values[-1]):.3g} at a unit diagonal",
            fix="Raise the ridge penalty, for instance relative=1e-2, or fit the moments again.",
        )
    kept = values > noise
    return None, vectors[:, kept] * values[kept].rsqrt()
