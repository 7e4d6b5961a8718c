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


@dataclass(frozen=True)
class NativeReference:
    """The native next-token distributions that every condition is compared with.

    Args:
        probabilities: ``[tokens, vocab]``.
        negative_entropy: nats, by position.
        choice: the most probable token, by position.
    """

    probabilities: Float[Tensor, "tokens vocab"]
    negative_entropy: Float[Tensor, " tokens"]
    choice: Int64[Tensor, " tokens"]

    @classmethod
    def of(cls, logits: Float[Tensor, "tokens vocab"]) -> NativeReference:
        """From native logits."""
        log_probabilities = logits.float().log_softmax(dim=-1)
        probabilities = log_probabilities.exp()
        negative_entropy = torch.linalg.vecdot(probabilities, log_probabilities)
        return cls(probabilities, negative_entropy, logits.argmax(dim=-1))


def token_nll(
    logits: Float[Tensor, "tokens vocab"], ids: Int64[Tensor, " tokens"], given: int
) -> float:
    """Mean NLL of ``ids[given:]`` in nats; position i predicts token i + 1."""
    scored = logits[given - 1 : -1].float()
    chosen = scored.gather(1, ids[given:, None])[:, 0]
    return float((scored.logsumexp(dim=-1) - chosen).double().mean())


def mean_kl(native: NativeReference, logits: Float[Tensor, "tokens vocab"]) -> float:
    """KL(native || this) in nats, averaged over positions; no second log-softmax is formed."""
    logits = logits.float()
    expected = torch.linalg.vecdot(native.probabilities, logits)
    kl = native.negative_entropy - expected + logits.logsumexp(dim=-1)
    return float(kl.clamp(min=0).double().mean())


def top1_agreement(native: NativeReference, logits: Float[Tensor, "tokens vocab"]) -> float:
    """Share of positions with the same most probable token."""
    return float((native.choice == logits.argmax(dim=-1)).double().mean())


def scores_of(
    native: NativeReference,
    continuation: tuple[Float[Tensor, "tokens vocab"], Int64[Tensor, " tokens"]],
    recall: tuple[Float[Tensor, "span vocab"], Int64[Tensor, " span"]],
    prompt: int,
) -> Scores:
    """What one cache is worth.

    Args:
        continuation, recall: logits, and the ids that were run.
        prompt: first tokens of the recalled span that are given, at least one.
    """
    return Scores(
        nll=token_nll(*continuation, 1),
        kl=mean_kl(native, continuation[0]),
        top1_agreement=top1_agreement(native, continuation[0]),
        recall_nll=token_nll(*recall, max(prompt, 1)),
    )


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
