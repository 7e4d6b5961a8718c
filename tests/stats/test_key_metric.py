"""The metric is what queries read of keys, and ridge in it solves its own normal equations."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.lm.attention import QueryTrace
from kvferry.stats.key_metric import QueryMetric, metric_ridge
from kvferry.stats.moments import Moments
from kvferry.stats.ridge import ridge

TOKENS, DIM = 24, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trace(window: int | None = None) -> QueryTrace:
    angles = torch.arange(TOKENS)[:, None] / 10.0 ** (torch.arange(DIM // 2) / 2)
    both = torch.cat([angles, angles], dim=1)[None]
    return QueryTrace(normal(4, TOKENS, DIM), both.cos(), both.sin(), DIM**-0.5, None, window)


def test_drawn_pairs_give_the_metric_of_all_pairs() -> None:
    """Control: queries that are not un-rotated by the key's position give another metric."""
    asked, keys, values = trace(), normal(2, TOKENS, DIM, seed=1), normal(2, TOKENS, DIM, seed=2)
    rows, first = torch.tensor([9, 15, 23]), 2
    metric = (
        QueryMetric(2, DIM, pairs=4000)
        .update(asked, rows, keys, values, torch.arange(TOKENS) >= first)
        .metric
    )
    wanted, unturned = torch.zeros(2, DIM, DIM), torch.zeros(2, DIM, DIM)
    weights = asked.weights(rows, keys)
    for head in range(4):
        mine = values[head // 2]
        for place, row in enumerate(rows):
            output = weights[head, place] @ mine
            for token in range(first, int(row) + 1):
                at = torch.tensor([token])
                g = asked.content_queries(row[None], at)[head, 0]
                w = weights[head, place, token] ** 2 * (mine[token] - output).square().sum() / DIM
                wanted[head // 2] += w * torch.outer(g, g) / 6
                q = asked.queries[head, row]
                unturned[head // 2] += w * torch.outer(q, q) / 6
    scale = float(wanted.norm())
    assert float((metric - wanted).norm()) < 0.05 * scale
    assert float((metric - unturned).norm()) > 0.2 * scale


def test_keys_that_nobody_maps_weigh_nothing() -> None:
    keys, values = normal(2, TOKENS, DIM, seed=1), normal(2, TOKENS, DIM, seed=2)
    rows = torch.tensor([4])
    metric = (
        QueryMetric(2, DIM)
        .update(trace(), rows, keys, values, counted=torch.zeros(TOKENS, dtype=torch.bool))
        .metric
    )
    assert float(metric.abs().max()) == 0


def planted() -> tuple[Moments, Tensor, Tensor]:
    """Two layers of two heads each; metrics whose shares are powers of ten, in a turned basis."""
    x = normal(300, 10).double()
    y = x @ normal(10, 12, seed=3).double() + normal(300, 12, seed=4).double()
    moments = Moments(10, 12, y_blocks=[slice(0, 6), slice(6, 12)]).update(x, y)
    shares = torch.tensor([2.99, 0.01, 0.0], dtype=torch.float64).clamp(min=1e-9)
    turns = torch.linalg.qr(normal(4, 3, 3, seed=5).double()).Q
    metrics = turns @ torch.diag(shares) @ turns.transpose(1, 2)
    return moments, metrics, turns


def test_ridge_in_the_metric_solves_its_normal_equations() -> None:
    """C W M + penalty W = C_xy M, with shares rounded to half decades."""
    moments, _, turns = planted()
    shares = torch.tensor([0.1, 0.3, 2.6], dtype=torch.float64)
    metrics = turns @ torch.diag(shares) @ turns.transpose(1, 2)
    got = metric_ridge(moments, [metrics[:2], metrics[2:]], relative=0.5)
    penalty = 0.5 * float(moments.c_xx.diagonal().mean())
    rounded = 10 ** ((2 * shares.log10()).round() / 2)
    for head in range(4):
        here = slice(3 * head, 3 * head + 3)
        metric = turns[head] @ torch.diag(rounded) @ turns[head].T
        left = moments.c_xx @ got[:, here] @ metric + penalty * got[:, here]
        torch.testing.assert_close(left, moments.c_xy[:, here] @ metric, atol=1e-6, rtol=1e-6)


def test_what_queries_read_is_spared_the_penalty() -> None:
    """Under a heavy penalty the error that queries see falls below ridge's, at the cost of R²."""
    moments, metrics, _ = planted()
    metrics_by_layer = [metrics[:2], metrics[2:]]
    found = metric_ridge(moments, metrics_by_layer, relative=1.0)
    plain = ridge(moments.c_xx, moments.c_xy, relative=1.0)
    assert _seen(moments, found, metrics) < 0.8 * _seen(moments, plain, metrics)
    identity = torch.eye(3, dtype=torch.float64).expand(4, -1, -1)
    assert _seen(moments, found, identity) > _seen(moments, plain, identity)
    same = metric_ridge(moments, [identity[:2], identity[2:]], relative=1.0)
    torch.testing.assert_close(same, plain)


def _seen(moments: Moments, weight: Tensor, metrics: Tensor) -> float:
    total = 0.0
    for head, metric in enumerate(metrics):
        here = slice(3 * head, 3 * head + 3)
        w, block = weight[:, here], moments.c_yy[head // 2]
        c_yy = block[3 * (head % 2) :, 3 * (head % 2) :][:3, :3]
        cross = w.T @ moments.c_xy[:, here]
        error = c_yy - cross - cross.T + w.T @ moments.c_xx @ w
        total += float((error @ metric).trace())
    return total
