"""Ridge against its definition, planted maps and planted layers, and on singular Grams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.align.layers import top_layers_by_r2
from kvferry.errors import InputError
from kvferry.stats.errors import NumericalError
from kvferry.stats.moments import Moments
from kvferry.stats.ridge import (
    RidgeFactor,
    bias,
    held_out_r2,
    ridge,
    single_source_r2,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.T @ x / len(x), x.T @ y / len(x)


@pytest.mark.parametrize("penalty", [{"relative": 1e-3}, {"absolute": 0.7}, {"relative": 0.0}])
def test_ridge_meets_its_normal_equations(penalty: dict[str, float]) -> None:
    x = normal(400, 30) * torch.logspace(-3, 3, 30, dtype=torch.float64)
    c_xx, c_xy = covariance(x, normal(400, 4, seed=1))
    w = ridge(c_xx, c_xy, **penalty)
    scale = float(c_xx.diagonal().mean())
    value = penalty.get("absolute", penalty.get("relative", 0.0) * scale)
    residual = c_xx @ w + value * w - c_xy
    assert float((residual.abs() / c_xx.diagonal().sqrt()[:, None]).max()) < 1e-10


def test_one_factor_serves_many_right_hand_sides() -> None:
    c_xx, c_xy = covariance(normal(200, 10), normal(200, 6, seed=1))
    factor = RidgeFactor(c_xx, relative=1e-2)
    together = torch.cat([factor.solve(c_xy[:, :2]), factor.solve(c_xy[:, 2:])], dim=1)
    torch.testing.assert_close(together, ridge(c_xx, c_xy, relative=1e-2))


def test_a_singular_gram_still_predicts() -> None:
    basis = normal(500, 6)
    x = torch.cat([basis @ normal(6, 20, seed=1), torch.zeros(500, 2)], dim=1)
    y = basis @ normal(6, 3, seed=2)
    c_xx, c_xy = covariance(x, y)
    w = ridge(c_xx, c_xy, absolute=0.0)
    assert float((x @ w - y).abs().max()) < 1e-4
    assert bool((w[-2:] == 0).all())
    # Noise as large as the jitter's whole ladder: Cholesky fails, the eigenvectors serve.
    noise = normal(22, 22, seed=3) * 1e-4
    noise[20:] = noise[:, 20:] = 0
    noisy = ridge(c_xx + noise + noise.T, c_xy, absolute=0.0)
    assert float((x @ noisy - y).square().mean()) < 1e-3


def test_what_is_no_gram_is_refused() -> None:
    one = torch.ones(3, 1)
    with pytest.raises(NumericalError, match="negative eigenvalues"):
        ridge(torch.eye(3) - 0.9 * (1 - torch.eye(3)), one, absolute=0.0)
    with pytest.raises(NumericalError, match="no covariance"):
        ridge(torch.full((3, 3), float("nan")), one, relative=1e-3)
    for bad in ({}, {"relative": 1.0, "absolute": 1.0}, {"relative": -1.0}):
        with pytest.raises(InputError, match="penalty"):
            ridge(torch.eye(3), one, **bad)


def planted(n: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Five source layers of width 8; target t is layer [3, 1][t] times W* plus noise."""
    x = normal(n, 40, seed=seed) + 5.0
    y = torch.cat([x[:, 8 * j : 8 * j + 8] @ normal(8, 6, seed=90 + j) / 8**0.5 for j in (3, 1)], 1)
    share = (noise / (1 - noise)) ** 0.5
    spread = y.std(0, correction=0)
    return x, y + normal(n, 12, seed=seed + 1) * spread * share


SOURCES = [slice(8 * j, 8 * j + 8) for j in range(5)]
TARGETS = [slice(0, 6), slice(6, 12)]


def moments_of(x: Tensor, y: Tensor) -> Moments:
    return Moments(40, 12, y_blocks=TARGETS, panel=512).update(x, y)


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_planted_layer_is_found_and_r2_is_one_minus_the_noise(noise: float) -> None:
    fit, held = (moments_of(*planted(6000, noise, seed)) for seed in (10, 20))
    r2 = single_source_r2(fit, SOURCES)
    assert top_layers_by_r2(r2, 1).layers == ((3,), (1,))
    assert float((r2[[0, 1], [3, 1]] - (1 - noise)).abs().max()) < 0.02
    r2[[0, 1], [3, 1]] = 0
    assert float(r2.max()) < 0.02  # the other layers know nothing
    w = RidgeFactor.of(fit, relative=1e-4).solve(fit.c_xy)
    score = held_out_r2(w, bias(fit.mean_x, fit.mean_y, w), held)
    assert float((score - (1 - noise)).abs().max()) < 0.02
    assert bool((held_out_r2(w, torch.full((12,), 99.0), held) < 0).all())  # the constant matters


def test_held_out_r2_from_moments_is_r2_from_predictions() -> None:
    fit = moments_of(*planted(300, 0.3, 1))
    x, y = planted(500, 0.3, 7)
    x = x * 1.5  # not the distribution of the fit
    w = ridge(fit.c_xx, fit.c_xy, relative=1e-2).float()
    b = bias(fit.mean_x, fit.mean_y, w)
    error = (y - (x @ w.double() + b)).square()
    total = (y - y.mean(0)).square()
    expected = [1 - float(error[:, t].sum() / total[:, t].sum()) for t in TARGETS]
    got = held_out_r2(w, b, moments_of(x, y))
    torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=1e-4, atol=1e-4)


def test_supports_are_sub_blocks_of_one_gram() -> None:
    x, y = planted(500, 0.3, 1)
    moments, every = moments_of(x, y), torch.arange(40)
    for support, block in (((0, 3), TARGETS[0]), ((1,), TARGETS[1])):
        chosen = moments.select(torch.cat([every[SOURCES[s]] for s in support]), block)
        w = RidgeFactor.of(chosen, relative=1e-3).solve(chosen.c_xy)
        part = torch.cat([x[:, SOURCES[s]] for s in support], dim=1)
        part, target = part - part.mean(0), y[:, block] - y[:, block].mean(0)
        expected = ridge(*covariance(part, target), relative=1e-3)
        torch.testing.assert_close(w, expected, rtol=1e-4, atol=1e-5)
