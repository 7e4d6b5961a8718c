"""Leading principal directions of many features: a low-rank code that corrections are cheap in."""

from __future__ import annotations

from collections.abc import Callable

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
    values, vectors = _leading(
        lambda x: scatter_xx @ x / weight, len(scatter_xx), rank, seed, scatter_xx.device
    )
    out: Tensor = vectors * values.rsqrt()
    return out


def predictive_directions(
    scatter_xx: Float[Tensor, "p p"],
    weight: float,
    maps: Float[Tensor, "p q"],
    rank: int,
    seed: int = 0,
) -> Float[Tensor, "p r"]:
    """P such that the coordinates x P carry most of what ``maps`` predict, and are whitened.

    The principal directions of the predictions x ``maps``, and not of x: features that vary much
    and tell little are left out. Coordinates are uncorrelated and of unit variance.

    Args:
        scatter_xx, weight, rank, seed: as :func:`whitened_directions`.
        maps: linear maps side by side, their outputs scaled to be worth the same.

    Returns:
        Directions by falling variance of what they predict, in fp64.
    """
    maps = maps.double()

    def predicted(x: Tensor) -> Tensor:
        return maps.T @ (scatter_xx @ (maps @ x)) / weight

    values, vectors = _leading(predicted, maps.shape[1], rank, seed, scatter_xx.device)
    out: Tensor = maps @ (vectors * values.rsqrt())
    return out


def _leading(
    product: Callable[[Float[Tensor, "n k"]], Float[Tensor, "n k"]],
    size: int,
    rank: int,
    seed: int,
    device: torch.device,
) -> tuple[Float[Tensor, " r"], Float[Tensor, "n r"]]:
    """Largest eigenvalues, falling, and eigenvectors of a symmetric ``product``."""
    rank = min(rank, size)
    if size <= max(_EXACT_WIDTH, 2 * rank):
        whole = product(torch.eye(size, dtype=torch.float64, device=device))
        values, vectors = torch.linalg.eigh((whole + whole.T) / 2)
    else:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(size, rank + _OVERSAMPLED, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(start.to(device)).Q
        for _ in range(_ROUNDS):
            basis = torch.linalg.qr(product(basis)).Q
        values, inner = torch.linalg.eigh(basis.T @ product(basis))
        vectors = basis @ inner
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = values > max(float(values[0]), 0.0) * 1e-7
    return values[kept], vectors[:, kept]
