"""How much an error in one token's key or value would change what later queries read."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def log_boundaries(
    tokens: int, count: int = 32, first: int = 12, last: int | None = None
) -> Int64[Tensor, " boundaries"]:
    """Last context tokens, log-spaced from ``first`` to the last one that has a query after it.

    Args:
        tokens: of the text; short texts give fewer boundaries, those of one token none.
        last: the last boundary, where it shall come earlier.
    """
    stop = tokens - 2 if last is None else min(last, tokens - 2)
    if stop < 0:
        return torch.empty(0, dtype=torch.long)
    start = min(first, stop)
    exponents = torch.linspace(0, 1, count, dtype=torch.float64)
    places = (start + 1) * ((stop + 1) / (start + 1)) ** exponents - 1
    distinct: Tensor = torch.unique(places.round().long())
    return distinct


def attention_sensitivity(
    attention: Float[Tensor, "query_heads boundaries tokens"],
    values: Float[Tensor, "kv_heads tokens dim"],
    queries: Float[Tensor, "query_heads boundaries query_dim"],
    boundaries: Int64[Tensor, " boundaries"],
    scale: float,
    slopes: Float[Tensor, "query_heads boundaries tokens"] | None = None,
) -> tuple[
    Float[Tensor, "kv_heads boundaries tokens"], Float[Tensor, "kv_heads boundaries tokens"]
]:
    """Squared sensitivity of attention outputs to each token's key and value.

        r^V_i = sum_u a_ui²,    r^K_i = sum_u a_ui² |v_i - o_u|² |q_u|² scale²

    over the queries u of one KV head's group. To first order an error in a key moves the output by
    `a (v - o) q·dk scale`, one in a value by `a dv`. Source: arXiv 2609.00891, where scale² = 1/d.

    Args:
        attention: weights a of the first query after each boundary, its own token included.
        values: what is attended to.
        queries: those queries, rotated or not.
        boundaries: last context token of each; tokens behind it get zero.
        scale: what products of queries and keys are multiplied with.
        slopes: derivative of capped scores by uncapped ones.

    Returns:
        of keys, and of values.
    """
    heads, tokens, _ = values.shape
    v = values.float()
    a = attention.float().view(heads, -1, len(boundaries), tokens)
    output = torch.einsum("hgbt,htd->hgbd", a, v)
    distance = (
        v.square().sum(-1)[:, None, None]
        + output.square().sum(-1, keepdim=True)
        - 2 * torch.einsum("hgbd,htd->hgbt", output, v)
    ).clamp_min_(0)
    squared = a.square()
    length = queries.float().square().sum(-1).view(heads, -1, len(boundaries), 1) * scale**2
    of_keys = squared * distance * length
    if slopes is not None:
        of_keys = of_keys * slopes.view_as(a).square()
    context = torch.arange(tokens, device=a.device) <= boundaries[:, None].to(a.device)
    return of_keys.sum(1) * context, squared.sum(1) * context


def relevance(
    sensitivity: Float[Tensor, "heads boundaries tokens"], counted: Bool[Tensor, " tokens"]
) -> Float[Tensor, "heads tokens"]:
    """Sensitivity of the counted tokens at unit mass a boundary, boundaries added up."""
    mass = sensitivity * counted
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total.clamp_min(1e-30), 0.0).sum(1)
