"""Leading principal directions of many features: a low-rank code that corrections are cheap in."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_EXACT_WIDTH = 1024
_OVERSAMPLED = 16
_ROUNDS = 4


def whitened_directions(
    scatter_xx: Float[Tensor, "p p"], weight: float, rank: int, seed: int = 0
) -> Float[Tensor, "p r"]:
    """P such that the coordinates x P of centred rows are uncorrelated and of unit variance.

    Up to 1,024 features by an exact decomposition, above by subspace iteration (Halko et al.), a
    few products with the Gram. Directions that do not vary are left out, so r may be below `rank`.

    Args:
        scatter_xx: sum of centred products, see `Moments.scatter_xx`; neither copied nor changed.
        weight: what to divide it by.
        rank: directions wanted; no more than p are found.
        seed: of the subspace iteration.

    Returns:
        Directions by falling variance, in fp64.
    """
    width = len(scatter_xx)
    rank = min(rank, width)
    if width <= max(_EXACT_WIDTH, 2 * rank):
        values, vectors = torch.linalg.eigh(scatter_xx / weight)
    else:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(width, rank + _OVERSAMPLED, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(start.to(scatter_xx.device)).Q
        for _ in range(_ROUNDS):
            basis = torch.linalg.qr(scatter_xx @ basis).Q
        values, inner = torch.linalg.eigh(basis.T @ (scatter_xx @ basis) / weight)
        vectors = basis @ inner
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = values > max(float(values[0]), 0.0) * 1e-7
    out: Tensor = vectors[:, kept] * values[kept].rsqrt()
    return out
