"""Gate 6: alpha* meets the floor of the effective sample exactly, and never more."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.stats.effective_sample import largest_alpha, squared_variation


def relevances(rows: int, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    r = (spread * torch.randn(3, rows, generator=generator, dtype=torch.float64)).exp()
    return r / r.mean(dim=1, keepdim=True)


@settings(deadline=None, max_examples=60)
@given(st.integers(20, 400), st.floats(0.1, 3.0), st.floats(1.0, 300.0), st.integers(0, 99))
def test_the_floor_is_met_exactly(rows: int, spread: float, floor: float, seed: int) -> None:
    r = relevances(rows, spread, seed)
    scaled = 7.0 * r  # the mean need not be known beforehand
    variation = squared_variation(scaled.sum(1), scaled.square().sum(1), rows)
    alpha = largest_alpha(variation, rows, floor)
    weights = 1 + alpha[:, None] * (r - 1)
    kish = weights.sum(1).square() / weights.square().sum(1)
    torch.testing.assert_close(kish, rows / (1 + alpha.square() * variation))
    wanted = min(floor, rows)
    for one, size in zip(alpha.tolist(), kish.tolist(), strict=True):
        assert one == 1.0 or size == pytest.approx(wanted)
        assert size >= wanted * (1 - 1e-9)


def test_without_spare_rows_nothing_is_weighted() -> None:
    r = relevances(50, 1.0, 0)
    variation = squared_variation(r.sum(1), r.square().sum(1), 50)
    assert largest_alpha(variation, 50, 50).tolist() == [0.0] * 3
    assert largest_alpha(variation, 50, 1e9).tolist() == [0.0] * 3
    assert largest_alpha(torch.zeros(3, dtype=torch.float64), 50, 10).tolist() == [1.0] * 3
