"""How long a step takes as a function of the context's length, fitted to a few timings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from kvferry.errors import InputError

LEAST_LENGTHS = 3


@dataclass(frozen=True)
class CostModel:
    """Milliseconds over N tokens: ``constant + linear N + quadratic N^2``, none of them negative.

    Attention makes prefill quadratic; everything else is linear, or costs the same at any length.
    """

    constant: float = 0.0
    linear: float = 0.0
    quadratic: float = 0.0

    @classmethod
    def fit(cls, tokens: Sequence[int], milliseconds: Sequence[float]) -> CostModel:
        """Least squares of relative errors under non-negative coefficients, solved exactly.

        Relative, so that the short lengths, where carrying begins to pay, count as the long ones.

        Args:
            tokens, milliseconds: one timing a length.

        Raises:
            InputError: fewer than three different lengths, or times that are not positive numbers.
        """
        usable = all(math.isfinite(t) and t > 0 for t in milliseconds)
        if len(set(tokens)) < LEAST_LENGTHS or len(tokens) != len(milliseconds) or not usable:
            raise InputError(
                "These timings do not show how time grows with length.",
                found=f"{list(milliseconds)} ms at {list(tokens)} tokens",
                expected=f"a positive time at {LEAST_LENGTHS} lengths or more",
                fix="name more lengths in eval.latency_tokens",
            )
        lengths = torch.tensor(tokens, dtype=torch.float64)
        times = torch.tensor(milliseconds, dtype=torch.float64)
        scale = float(lengths.max())
        terms = torch.stack([(lengths / scale) ** power for power in range(3)], dim=1)
        found = _non_negative(terms / times[:, None], torch.ones_like(times))
        return cls(*(value / scale**power for power, value in enumerate(found)))

    def __call__(self, tokens: int) -> float:
        """Milliseconds over ``tokens``."""
        return self.constant + self.linear * tokens + self.quadratic * tokens**2

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Constant, linear, quadratic."""
        return self.constant, self.linear, self.quadratic


def _non_negative(terms: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Non-negative least squares of a few columns: the best of all sets of them that are positive.

    The solution is the unconstrained one on its own support (Lawson and Hanson 1974), and three
    columns have seven supports.
    """
    columns = range(terms.shape[1])
    best, least = [0.0] * len(columns), math.inf
    for size in range(1, len(columns) + 1):
        for support in combinations(columns, size):
            chosen = terms[:, list(support)]
            values = torch.linalg.lstsq(chosen, wanted[:, None]).solution[:, 0]
            error = float((chosen @ values - wanted).square().sum())
            if bool((values >= 0).all()) and error < least:
                best, least = [0.0] * len(columns), error
                for place, value in zip(support, values.tolist(), strict=True):
                    best[place] = value
    return best
