"""Keys by what queries read of them: least squares in the metric of the queries themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from kvferry.lm.attention import QueryTrace
from kvferry.stats.moments import Moments
from kvferry.stats.ridge import RidgeFactor

PENALTIES_PER_DECADE = 2
"""Coordinates of similar penalty share a factorisation; ridge is flat over decades."""


class QueryMetric:
    """M = E[w g g'] of the queries that meet a key, one for each KV head, streamed.

    A query q_c at token c meets the position-free key of token i as g = R_i^-1 q_c. An error d of
    that key moves the score by g'd and the attention output by about a (v_i - o_c) g'd, so pairs
    weigh w = a² |v_i - o_c|² / dim. Pairs are drawn in proportion to their weight, not all formed:
    memory is that of the metrics and of one draw.
    """

    def __init__(self, heads: int, dim: int, pairs: int = 8, seed: int = 0) -> None:
        """Empty metrics.

        Args:
            pairs: keys drawn for each query.
            seed: of the draw.
        """
        self.pairs = pairs
        self._generator = torch.Generator().manual_seed(seed)
        self._sum = torch.zeros(heads, dim, dim, dtype=torch.float64)
        self._queries = 0

    def update(
        self,
        trace: QueryTrace,
        rows: Int64[Tensor, " rows"],
        keys: Float[Tensor, "kv_heads tokens dim"],
        values: Float[Tensor, "kv_heads tokens dim"],
        counted: Bool[Tensor, " tokens"] | None = None,
    ) -> QueryMetric:
        """Add the queries at ``rows`` of one text over its position-free keys and its values.

        Args:
            counted: tokens whose keys are mapped; the others weigh nothing.
        """
        weights = trace.weights(rows, keys)
        groups = len(weights) // len(keys)
        for head in range(len(weights)):
            mine = values[head // groups].float()
            apart = torch.cdist(weights[head] @ mine, mine).square()
            pair = weights[head].square() * apart / mine.shape[1]
            if counted is not None:
                pair[:, ~counted] = 0
            total = pair.sum(dim=1)
            # A query that reads native keys alone has nothing to draw; its weight is zero.
            drawn = torch.multinomial(
                (pair + 1e-30).cpu(), self.pairs, replacement=True, generator=self._generator
            ).to(rows.device)
            alone = replace(trace, queries=trace.queries[head : head + 1])
            turned = alone.content_queries(rows.repeat_interleave(self.pairs), drawn.flatten())[0]
            weighed = turned * (total / self.pairs).repeat_interleave(self.pairs)[:, None]
            self._sum = self._sum.to(rows.device)
            self._sum[head // groups] += turned.T @ weighed
        self._queries += len(rows) * groups
        return self

    @property
    def metric(self) -> Float64[Tensor, "heads dim dim"]:
        """Mean over queries."""
        return self._sum / max(self._queries, 1)


def metric_ridge(
    moments: Moments,
    metrics: Sequence[Float[Tensor, "heads dim dim"]],
    *,
    relative: float,
    floor: float = 1e-3,
) -> Float64[Tensor, "p q"]:
    """W that minimises E[(y - x W) M (y - x W)'] + penalty mean(L) |W|², for each head's own M.

    With M = U L U' the coordinates y U part, and each is a ridge of its own with the penalty
    divided by its share of the metric, L_j / mean(L): what queries hardly read is left at its mean.
    Penalties are rounded to half decades, so that few factorisations serve all coordinates.

    Args:
        moments: of all inputs; each block of y is one layer, its heads side by side.
        metrics: by block of y.
        relative: the penalty as a share of the inputs' mean variance.
        floor: least share of the metric that a coordinate is taken to have.
    """
    wanted, turns, decades = moments.c_xy, [], []
    for metric in metrics:
        for one in metric.double():
            shares, vectors = torch.linalg.eigh((one + one.T) / 2)
            # Without a query that reads the head, its coordinates count alike.
            shares = shares / shares.mean() if float(shares.mean()) > 0 else torch.ones_like(shares)
            turns.append(vectors)
            decades.append(-shares.clamp(min=floor).log10())
    dims = [len(turn) for turn in turns]
    decade = (torch.cat(decades) * PENALTIES_PER_DECADE).round() / PENALTIES_PER_DECADE
    turned = _by_head(wanted, dims, turns)
    solved = torch.empty_like(turned)
    for exponent in sorted(set(decade.tolist())):
        same = decade == exponent
        factor = RidgeFactor.of(moments, relative=relative * 10**exponent)
        solved[:, same] = factor.solve(turned[:, same])
        del factor
    return _by_head(solved, dims, [turn.T for turn in turns])


def _by_head(
    flat: Float64[Tensor, "p q"], dims: Sequence[int], turns: Sequence[Float64[Tensor, "dim dim"]]
) -> Float64[Tensor, "p q"]:
    parts = torch.split(flat, list(dims), dim=1)
    return torch.cat([part @ turn for part, turn in zip(parts, turns, strict=True)], dim=1)
