"""Functional values: with identity attention they are ridge; else they go where attention looks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvferry.stats.directions import whitened_directions
from kvferry.stats.functional import AttendedMoments, functional_values
from kvferry.stats.ridge import ridge

HEADS, WIDTH, DIM = 2, 6, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def solve(
    attention: Tensor, x: Tensor, v: Tensor, pointwise: float, penalty: float = 0.01
) -> Tensor:
    """Functional values of [heads, tokens, dim] under attention [query_heads, rows, tokens]."""
    group = len(attention) // HEADS
    outputs = attention @ v.repeat_interleave(group, dim=0)
    attended = AttendedMoments(HEADS, WIDTH, DIM).update(attention @ x, outputs)
    return functional_values(
        attended,
        x.T @ x / len(x),
        x.T @ v / len(x),
        pointwise=pointwise,
        penalty=penalty * torch.eye(WIDTH, dtype=torch.float64),
        start=torch.zeros(HEADS, WIDTH, DIM, dtype=torch.float64),
    )


@pytest.mark.parametrize("pointwise", [0.0, 0.1, 3.0])
def test_identity_attention_gives_ridge(pointwise: float) -> None:
    """Gate 7. Control: attention that averages gives something else."""
    x, v = normal(200, WIDTH), normal(HEADS, 200, DIM, seed=1)
    identity = torch.eye(200, dtype=torch.float64).expand(2 * HEADS, -1, -1)
    got = solve(identity, x, v, pointwise)
    for head in range(HEADS):
        wanted = ridge(x.T @ x / 200, x.T @ v[head] / 200, absolute=0.01)
        torch.testing.assert_close(got[head], wanted, atol=1e-5, rtol=1e-5)
    averaging = normal(2 * HEADS, 200, 200, seed=2).softmax(dim=-1)
    assert not torch.allclose(solve(averaging, x, v, pointwise), got, atol=1e-3)


def test_attention_decides_which_tokens_count() -> None:
    """Planted: a tenth of the tokens follow a law of their own, and all attention goes there."""
    x = normal(400, WIDTH)
    laws = normal(2, WIDTH, DIM, seed=3)
    special = torch.arange(400) % 10 == 0
    v = torch.where(special[:, None], x @ laws[1], x @ laws[0]).expand(HEADS, -1, -1)
    scores = normal(HEADS, 300, 400, seed=4) * 3
    attention = scores.masked_fill(~special, -torch.inf).softmax(dim=-1)
    found = solve(attention, x, v, 1e-3, penalty=0.0)
    plain = ridge(x.T @ x / 400, x.T @ v[0] / 400, absolute=0.0)
    assert float((found[0] - laws[1]).norm() / laws[1].norm()) < 0.05
    assert float((plain - laws[1]).norm() / laws[1].norm()) > 0.5
    error = AttendedMoments(HEADS, WIDTH, DIM).update(attention @ x, attention @ v)
    assert bool((error.error(found) < 0.05 * error.error(plain.expand(HEADS, -1, -1))).all())
    values = (v - x @ found).square().mean(), (v - x @ plain).square().mean()
    assert values[0] > values[1], "it pays with R²"


def test_error_is_the_mean_square_and_rows_add_up() -> None:
    z, o = normal(4, 9, WIDTH), normal(4, 9, DIM, seed=1)
    solution = normal(HEADS, WIDTH, DIM, seed=2)
    whole = AttendedMoments(HEADS, WIDTH, DIM).update(z, o)
    parts = AttendedMoments(HEADS, WIDTH, DIM).update(z[:, :4], o[:, :4]).update(z[:, 4:], o[:, 4:])
    left = o.view(HEADS, 18, DIM) - z.view(HEADS, 18, WIDTH) @ solution
    wanted = left.square().sum(-1).mean(-1)
    torch.testing.assert_close(whole.error(solution), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts.error(solution), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [40, 1100])
def test_directions_are_whitened_and_lead(width: int) -> None:
    scales = torch.logspace(1, -2, width, dtype=torch.float64)
    x = normal(3000, width) * scales
    x = x - x.mean(0)
    basis = whitened_directions(x.T @ x, len(x), rank=8)
    z = x @ basis
    torch.testing.assert_close(z.T @ z / len(x), torch.eye(8).double(), atol=1e-6, rtol=0)
    kept = torch.linalg.qr(basis).Q
    share = (x @ kept).square().sum() / x.square().sum()
    best = torch.linalg.eigvalsh(x.T @ x)[-8:].sum() / x.square().sum()
    assert float(share) > 0.97 * float(best)


def test_directions_that_do_not_vary_are_left_out() -> None:
    x = torch.cat([normal(50, 3), torch.zeros(50, 4).double()], dim=1)
    assert whitened_directions(x.T @ x, 50, rank=7).shape == (7, 3)
