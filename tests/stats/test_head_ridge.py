"""Mixed sums are those of weighted rows; batched ridge is ridge."""

from __future__ import annotations

import pytest
import torch

from kvferry.stats.head_ridge import HeadMoments, ridge_heads
from kvferry.stats.moments import Moments
from kvferry.stats.ridge import ridge


def sums_of(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> HeadMoments:
    one = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
    left = (one * weights[..., None]).transpose(1, 2)
    return HeadMoments(left @ one, left @ y)


def test_mixing_two_sums_weighs_each_row() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 80, 5, dtype=torch.float64) + 0.5
    y = torch.randn(2, 80, 3, dtype=torch.float64) - 1.0
    relevance = torch.rand(2, 80, dtype=torch.float64) * 9.0
    alpha = torch.tensor([0.3, 1.0], dtype=torch.float64)
    mixed = sums_of(x, y, torch.ones(2, 80)).mixed(sums_of(x, y, relevance), alpha)
    for head in range(2):
        scaled = relevance[head] / relevance[head].mean()
        weights = 1 + alpha[head] * (scaled - 1)
        wanted = Moments(5, 3).update(x[head], y[head], weights)
        for name in ("mean_x", "mean_y", "c_xx", "c_xy"):
            found = getattr(mixed, name)[head]
            torch.testing.assert_close(found, getattr(wanted, name), rtol=1e-5, atol=1e-6)
    unmixed = sums_of(x, y, torch.ones(2, 80)).mixed(sums_of(x, y, relevance), 0 * alpha)
    torch.testing.assert_close(unmixed.c_xx[0], torch.cov(x[0].T, correction=0))


@pytest.mark.parametrize("penalty", [{"relative": 1e-3}, {"absolute": 0.01}])
def test_the_batch_equals_each_head_alone(penalty: dict[str, float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 60, 8, dtype=torch.float64)
    x[1] *= torch.logspace(-3, 3, 8)
    x[2, :, 3] = 0.0  # never varies
    x[2, :, 5] = x[2, :, 4]  # singular without a penalty
    gram, cross = x.transpose(1, 2) @ x / 60, x.transpose(1, 2) @ torch.randn(3, 60, 2).double()
    for settings in (penalty, {"relative": 0.0}):
        found = ridge_heads(gram, cross, **settings)
        for head in range(3):
            torch.testing.assert_close(found[head], ridge(gram[head], cross[head], **settings))
