"""Scores of one context under one condition: pure functions of log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What one cache is worth on one context.

    Args:
        nll: nats a token of the continuation, its first token given.
        kl: KL(native || this) of the next-token distribution, nats, mean over the continuation.
        top1_agreement: share of positions where both would choose the same token.
        recall_nll: nats a token of the repeated early span, its prompt given.
    """

    nll: float
    kl: float
    top1_agreement: float
    recall_nll: float


def token_nll(
    log_probabilities: Float[Tensor, "tokens vocab"], ids: Int64[Tensor, " tokens"], given: int
) -> float:
    """Mean NLL of ``ids[given:]``; position i predicts token i + 1."""
    scored = log_probabilities[given - 1 : -1].gather(1, ids[given:, None])
    return -float(scored.double().mean())


def mean_kl(native: Float[Tensor, "tokens vocab"], other: Float[Tensor, "tokens vocab"]) -> float:
    """KL(native || other) in nats, averaged over positions."""
    return float((native.exp() * (native - other)).sum(dim=-1).double().mean())


def top1_agreement(
    native: Float[Tensor, "tokens vocab"], other: Float[Tensor, "tokens vocab"]
) -> float:
    """Share of positions with the same most probable token."""
    return float((native.argmax(dim=-1) == other.argmax(dim=-1)).double().mean())


def r2_about_mean(
    predicted: Float[Tensor, "tokens features"], wanted: Float[Tensor, "tokens features"]
) -> float:
    """1 - SSE / SST over all features together, SST about this context's own mean."""
    wanted = wanted.double()
    error = (predicted.double() - wanted).square().sum()
    total = (wanted - wanted.mean(dim=0)).square().sum()
    return float(1 - error / total)


def mean_cosine(a: Float[Tensor, "*batch dim"], b: Float[Tensor, "*batch dim"]) -> float:
    """Cosine along the last axis, averaged over everything else."""
    return float(torch.nn.functional.cosine_similarity(a.float(), b.float(), dim=-1).mean())
