"""Recolouring: the covariance is met, the raw metric is the best that meets it, rank may lack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.errors import InputError
from kvferry.stats.errors import NumericalError
from kvferry.stats.recolour import recolour
from kvferry.stats.ridge import ridge

METRICS = pytest.mark.parametrize("metric", ["raw", "whitened"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(n: int = 4000, p: int = 20, d: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, y of very unequal variances, and their ridge fit with its Gram."""
    x = normal(n, p) @ normal(p, p, seed=1)
    y = (x @ normal(p, d, seed=2) / p + normal(n, d, seed=3)) * torch.logspace(-1, 1, d)
    x, y = x - x.mean(0), y - y.mean(0)
    c_xx = x.T @ x / n
    return x, y, c_xx, ridge(c_xx, x.T @ y / n, relative=1e-3)


def parts(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x @ w
    return h.T @ h / len(h), h.T @ y / len(h), y.T @ y / len(y)


def error(x: Tensor, y: Tensor, m: Tensor) -> float:
    return float((y - x @ m).square().mean())


@METRICS
def test_full_strength_meets_the_covariance_that_ridge_shrinks(metric: str) -> None:
    x, y, c_xx, w = problem()
    c_hh, c_hy, c_yy = parts(x, y, w)
    m = w @ recolour(c_hh, c_hy, c_yy, metric=metric)
    scale = float(c_yy.abs().max())
    assert float((m.T @ c_xx @ m - c_yy).abs().max()) < 1e-4 * scale
    assert float((w.T @ c_xx @ w - c_yy).abs().max()) > 1e-1 * scale
    assert error(x, y, m) > error(x, y, w)  # what it costs


def test_each_metric_is_best_in_its_own_units_among_all_rotations() -> None:
    x, y, _, w = problem()
    c_hh, c_hy, c_yy = parts(x, y, w)
    whiten = torch.linalg.inv(torch.linalg.cholesky(c_yy)).T
    best = {k: w @ recolour(c_hh, c_hy, c_yy, metric=k) for k in ("raw", "whitened")}
    raw = {name: error(x, y, m) for name, m in best.items()}
    white = {name: error(x, y @ whiten, m @ whiten) for name, m in best.items()}
    assert raw["raw"] < raw["whitened"] and white["whitened"] < white["raw"]
    root = torch.linalg.cholesky(c_yy).T  # m @ inverse(root) @ rotation @ root keeps the covariance
    for seed in range(60):
        size = 10.0 ** (-seed % 4)
        skew = normal(8, 8, seed=seed) * size
        rotation = torch.linalg.matrix_exp(skew - skew.T)
        turn = torch.linalg.inv(root) @ rotation @ root
        assert error(x, y, best["raw"] @ turn) >= raw["raw"] - 1e-12
        turned = best["whitened"] @ turn @ whiten
        assert error(x, y @ whiten, turned) >= white["whitened"] - 1e-12


def test_strength_interpolates() -> None:
    c_hh, c_hy, c_yy = parts(*problem()[:2], problem()[3])
    full = recolour(c_hh, c_hy, c_yy)
    assert torch.equal(recolour(c_hh, c_hy, c_yy, strength=0.0), torch.eye(8).double())
    half = recolour(c_hh, c_hy, c_yy, strength=0.5)
    torch.testing.assert_close(half, (torch.eye(8) + full) / 2)


def test_perfect_predictions_are_left_alone() -> None:
    _, y, _, _ = problem()
    c_yy = y.T @ y / len(y)
    torch.testing.assert_close(recolour(c_yy, c_yy, c_yy), torch.eye(8).double())


@METRICS
def test_missing_directions(metric: str) -> None:
    x, y, _, w = problem()
    # y varies in fewer directions than h: still met exactly.
    flat = y.clone()
    flat[:, 3] = flat[:, 5]
    flat[:, 0] = 0
    c_hh, c_hy, c_yy = parts(x, flat, w)
    r = recolour(c_hh, c_hy, c_yy, metric=metric)
    torch.testing.assert_close(r.T @ c_hh @ r, c_yy, rtol=0, atol=1e-4 * float(c_yy.max()))
    # h varies in fewer directions than y: finite, and met in as many as h has.
    narrow = w.clone()
    narrow[:, 4:] = 0
    c_hh, c_hy, c_yy = parts(x, y, narrow)
    r = recolour(c_hh, c_hy, c_yy, metric=metric)
    values, vectors = torch.linalg.eigh(c_yy)
    root = vectors * values.rsqrt()
    met = torch.linalg.eigvalsh(root.T @ r.T @ c_hh @ r @ root)
    expected = torch.tensor([0.0] * 4 + [1.0] * 4).double()
    torch.testing.assert_close(met, expected, rtol=0, atol=1e-4)


def test_no_variance_at_all_gives_a_constant() -> None:
    zero = torch.zeros(3, 3)
    assert torch.equal(recolour(zero, zero, torch.eye(3)), zero.double())


def test_mistakes_are_typed() -> None:
    eye = torch.eye(3)
    with pytest.raises(InputError, match="metric"):
        recolour(eye, eye, eye, metric="cosine")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="strength"):
        recolour(eye, eye, eye, strength=1.5)
    with pytest.raises(NumericalError, match="not finite"):
        recolour(eye, eye, eye * float("nan"))
