"""Keys by where attention goes: a remix of mapped keys that brings it back to the native one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvferry.lm.attention import RowQueries

CHECKS = 10
"""How often a fit looks at the held-out texts."""


@dataclass(frozen=True)
class AttentionSample:
    """One layer's queries of one text, over native keys and over mapped ones that may change.

    Args:
        ask: the queries.
        native: the target's own position-free keys, ``[kv_heads, tokens, dim]``.
        mapped: what a mapper gives in their place.
        mean: of the mapped keys, heads side by side; it stays where it is.
        fixed: tokens whose keys are native and stay so.
        left_out: tokens that attention is compared without, each query in proportion to what it
            has for the others.
        recalled: by query, the token that it must find for the text to be repeated; -1: none.

    Half precision is enough to keep; products are in fp32.
    """

    ask: RowQueries
    native: Float[Tensor, "kv_heads tokens dim"]
    mapped: Float[Tensor, "kv_heads tokens dim"]
    mean: Float[Tensor, " features"]
    fixed: Bool[Tensor, " tokens"]
    left_out: Bool[Tensor, " tokens"]
    recalled: Int64[Tensor, " rows"]

    def attention(self) -> Float[Tensor, "query_heads rows tokens"]:
        """Native attention to the tokens that count: what to come near to."""
        return self.ask.scores(self.native.float()).softmax(dim=-1).masked_fill(self.left_out, 0)

    def wanted(self, recall: float) -> Float[Tensor, "query_heads rows tokens"]:
        """Native attention, in which what is recalled counts ``1 + recall`` times.

        Uncertain keys spread attention, and what a head had for one token goes to many. Only heads
        that copy have anything there to be counted again.
        """
        attention = self.attention()
        rows = (self.recalled >= 0).nonzero()[:, 0]
        attention[:, rows, self.recalled[rows]] *= 1 + recall
        return attention

    def translated(
        self, remix: Float[Tensor, "features features"] | None
    ) -> Float[Tensor, "query_heads rows tokens"]:
        """Attention over remixed keys to the tokens that count, as much in all as natively."""
        mass = self.attention().sum(dim=-1, keepdim=True)
        scores = self.ask.scores(self.remixed(remix)).masked_fill(self.left_out, -torch.inf)
        return mass * scores.softmax(dim=-1)

    def remixed(
        self, remix: Float[Tensor, "features features"] | None
    ) -> Float[Tensor, "kv_heads tokens dim"]:
        """Mapped keys plus their deviation from the mean times ``remix``."""
        keys = self.mapped.float()
        if remix is None:
            return keys
        heads, tokens, dim = keys.shape
        deviation = keys.transpose(0, 1).flatten(1) - self.mean
        change = deviation.masked_fill(self.fixed[:, None], 0) @ remix
        return keys + change.view(tokens, heads, dim).transpose(0, 1)

    def divergence(
        self,
        wanted: Float[Tensor, "query_heads rows tokens"],
        remix: Float[Tensor, "features features"] | None = None,
    ) -> Float[Tensor, ""]:
        """KL(wanted || attention over remixed keys), both of the tokens that count, in nats.

        A mean over queries, each weighed by its native attention to these tokens.
        """
        mass = wanted.sum(dim=-1)
        entropy: Tensor = torch.special.entr(wanted).sum() - torch.special.entr(mass).sum()
        return self.cross_entropy(wanted, remix) - entropy / mass.numel()

    def cross_entropy(
        self,
        wanted: Float[Tensor, "query_heads rows tokens"],
        remix: Float[Tensor, "features features"] | None = None,
    ) -> Float[Tensor, ""]:
        """The divergence and the entropy of ``wanted``, which no remix changes."""
        scores = self.ask.scores(self.remixed(remix)).masked_fill(self.left_out, -torch.inf)
        got = scores.log_softmax(dim=-1)
        # Hidden keys have no weight, and an infinite logarithm.
        got = got.masked_fill(wanted == 0, 0.0)
        gained: Tensor = torch.dot(wanted.flatten(), got.flatten()) / wanted[..., 0].numel()
        return -gained


def fit_attention(
    samples: Sequence[AttentionSample],
    held_out: Sequence[AttentionSample],
    *,
    steps: int,
    learning_rate: float,
    recall: float = 0.0,
    seed: int = 0,
) -> tuple[Float[Tensor, "features features"], float, float]:
    """The remix of one layer's mapped keys, all heads with all, that attends most natively.

    AdamW with a cosine to zero, one text a step, from no change at all; what does best on the
    held-out texts is kept, and that is no change where none does better. Queries are native, so
    layers are independent, and no gradient passes through a language model. It has only
    (KV heads x head dim)² numbers to learn: corrections that read more inputs learn the texts by
    heart before they help.

    Args:
        learning_rate: of the remix, which has no unit.
        recall: see :meth:`AttentionSample.wanted`.

    Returns:
        R for keys y + (y - mean) R, and the held-out divergence from what is wanted before and
        after, in nats a query.
    """
    wanted = [sample.wanted(recall) for sample in samples]
    judged = [sample.wanted(recall) for sample in held_out]
    generator = torch.Generator().manual_seed(seed)
    features = len(samples[0].mean)
    remix = torch.zeros(features, features, device=samples[0].mean.device, requires_grad=True)
    optimiser = torch.optim.AdamW([remix], lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))

    @torch.no_grad()
    def judge() -> float:
        pairs = zip(held_out, judged, strict=True)
        return float(torch.stack([s.divergence(w, remix) for s, w in pairs]).mean())

    best, first = remix.detach().clone(), judge()
    least = first
    for step in range(steps):
        if step % len(samples) == 0:
            order = torch.randperm(len(samples), generator=generator).tolist()
        at = order[step % len(samples)]
        loss = samples[at].cross_entropy(wanted[at], remix)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if ((step + 1) % max(steps // CHECKS, 1) == 0 or step == steps - 1) and (
            now := judge()
        ) < least:
            best, least = remix.detach().clone(), now
    return best, first, least
