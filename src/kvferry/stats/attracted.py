"""Which tokens attention goes to beyond their share: sinks, found from attention weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def received_mass(
    weights: Float[Tensor, "heads rows tokens"],
) -> Float[Tensor, " tokens"]:
    """Attention that each key token receives, mean of heads and query rows; sums to one."""
    return weights.mean(dim=(0, 1))


def fair_mass(visible: Bool[Tensor, "rows tokens"]) -> Float[Tensor, " tokens"]:
    """What each key token would receive if every query attended evenly to all that it sees."""
    seen = visible.float()
    return (seen / seen.sum(dim=1, keepdim=True)).mean(dim=0)


@dataclass(frozen=True)
class TokenShare:
    """What the occurrences of one token id received together.

    Args:
        count: occurrences.
        received, fair: attention mass, and what an even attention would give; in texts.
    """

    count: int = 0
    received: float = 0.0
    fair: float = 0.0

    @property
    def excess(self) -> float:
        """Mass beyond the fair share."""
        return self.received - self.fair

    def __add__(self, other: TokenShare) -> TokenShare:
        return TokenShare(
            self.count + other.count, self.received + other.received, self.fair + other.fair
        )


def share_by_token(
    ids: Int64[Tensor, " tokens"],
    received: Float[Tensor, " tokens"],
    fair: Float[Tensor, " tokens"],
) -> dict[int, TokenShare]:
    """Sum the masses of one text over the occurrences of each token id."""
    unique, place = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(3, len(unique), dtype=torch.float64, device=ids.device)
    rows = torch.stack([torch.ones_like(received), received, fair]).double()
    sums.index_add_(1, place, rows)
    return {
        int(token): TokenShare(int(count), mass, even)
        for token, (count, mass, even) in zip(unique.tolist(), sums.T.tolist(), strict=True)
    }


def merge_shares(parts: Iterable[Mapping[int, TokenShare]]) -> dict[int, TokenShare]:
    """Sum the shares of several texts or layers."""
    out: dict[int, TokenShare] = {}
    for part in parts:
        for token, share in part.items():
            out[token] = out.get(token, TokenShare()) + share
    return out


def most_attracting(
    shares: Mapping[int, TokenShare], count: int, least_seen: int = 1
) -> tuple[int, ...]:
    """Up to ``count`` token ids with the most mass beyond their share, the most first.

    Args:
        least_seen: ids that occur less often say nothing about the next text.
    """
    seen = {token: s for token, s in shares.items() if s.count >= least_seen and s.excess > 0}
    return tuple(sorted(seen, key=lambda token: (-seen[token].excess, token))[:count])
