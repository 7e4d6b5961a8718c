"""How far rows may be weighted before too few of them count."""

from __future__ import annotations

from jaxtyping import Float64
from torch import Tensor


def squared_variation(
    total: Float64[Tensor, " heads"], total_of_squares: Float64[Tensor, " heads"], rows: int
) -> Float64[Tensor, " heads"]:
    """CV² of relevances from their sum and their sum of squares over ``rows`` rows."""
    return (rows * total_of_squares / total.square() - 1).clamp_min(0)


def largest_alpha(
    variation: Float64[Tensor, " heads"], rows: int, floor: float
) -> Float64[Tensor, " heads"]:
    """The most weighting, at most 1, that leaves an effective sample of ``floor`` rows.

    `alpha* = min(1, sqrt((n / tau - 1) / CV²))` with `tau = min(n, floor)`; 0 where there are no
    more rows than the floor. Kish's `(sum w)² / sum w²` of `w = 1 + alpha (r - 1)`, with mean r of
    one, is `n / (1 + alpha² CV²)`. Source: arXiv 2609.00891.

    Args:
        variation: CV² of the relevances of each head.
        rows: n.
        floor: effective rows wanted (the paper: twice the inputs of a map).
    """
    spare = rows / min(float(rows), floor) - 1
    return (spare / variation.clamp_min(1e-300)).sqrt().clamp(max=1.0)
