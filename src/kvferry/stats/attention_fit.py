"""Keys by where attention goes: a low-rank change of them that brings it back to the native one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
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
        code: the inputs that a change may read, ``[tokens, width]``, zero where keys are native.

    Half precision is enough to keep; products are in fp32.
    """

    ask: RowQueries
    native: Float[Tensor, "kv_heads tokens dim"]
    mapped: Float[Tensor, "kv_heads tokens dim"]
    code: Float[Tensor, "tokens width"]

    def attention(self) -> Float[Tensor, "query_heads rows tokens"]:
        """Native attention: what to come near to."""
        return self.ask.scores(self.native.float()).softmax(dim=-1)

    def changed(
        self, change: Float[Tensor, "width features"] | None
    ) -> Float[Tensor, "kv_heads tokens dim"]:
        """Mapped keys plus code @ change."""
        keys = self.mapped.float()
        if change is None:
            return keys
        heads, _, dim = keys.shape
        return keys + (self.code.float() @ change).view(-1, heads, dim).transpose(0, 1)

    def divergence(
        self,
        wanted: Float[Tensor, "query_heads rows tokens"],
        change: Float[Tensor, "width features"] | None = None,
    ) -> Float[Tensor, ""]:
        """Mean KL(wanted || attention over mapped keys plus code @ change), in nats a query."""
        # Hidden keys have no weight, and an infinite logarithm.
        got = (
            self.ask.scores(self.changed(change)).log_softmax(dim=-1).masked_fill(wanted == 0, 0.0)
        )
        loss = wanted * (wanted.clamp(min=1e-30).log() - got)
        return loss.sum(dim=-1).mean()


def fit_attention(
    samples: Sequence[AttentionSample],
    held_out: Sequence[AttentionSample],
    *,
    rank: int,
    steps: int,
    learning_rate: float,
    seed: int = 0,
) -> tuple[Float[Tensor, "width features"], float, float]:
    """The low-rank change A B of one layer's key map that attends as natively as it can.

    AdamW with a cosine to zero, one text a step, from B = 0; what does best on the held-out texts
    is kept, and that is no change at all where none does better. Queries are native, so layers are
    independent, and no gradient passes through a language model.

    Args:
        rank: columns of A.
        learning_rate: of A and of B in units of the native keys' root mean square.

    Returns:
        A B, and the held-out divergence before and after, in nats a query.
    """
    wanted = [sample.attention() for sample in samples]
    judged = [sample.attention() for sample in held_out]
    generator = torch.Generator().manual_seed(seed)
    scale = float(torch.stack([s.native.float().square().mean() for s in samples]).mean().sqrt())
    heads, _, dim = samples[0].native.shape
    code = samples[0].code
    start = torch.randn(code.shape[1], rank, generator=generator) / math.sqrt(rank)
    down = start.to(code.device).requires_grad_()
    up = torch.zeros(rank, heads * dim, device=code.device, requires_grad=True)
    optimiser = torch.optim.AdamW([down, up], lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))

    def judge(change: Tensor | None) -> float:
        with torch.no_grad():
            pairs = zip(held_out, judged, strict=True)
            return float(torch.stack([s.divergence(w, change) for s, w in pairs]).mean())

    best, first = torch.zeros(code.shape[1], heads * dim, device=code.device), judge(None)
    least = first
    for step in range(steps):
        if step % len(samples) == 0:
            order = torch.randperm(len(samples), generator=generator).tolist()
        at = order[step % len(samples)]
        loss = samples[at].divergence(wanted[at], down @ up * scale)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if (step + 1) % max(steps // CHECKS, 1) == 0 or step == steps - 1:
            change = (down @ up * scale).detach()
            if (now := judge(change)) < least:
                best, least = change, now
    return best, first, least
