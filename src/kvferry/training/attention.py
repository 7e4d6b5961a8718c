"""Whether mapped keys are found: what repeated stretches attend to, mapped against native."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvferry.lm.attention import AttentionCall, softcapped

HIDDEN = -1e9
"""Score of a key that is not seen: finite, so that what it adds to a divergence is zero."""


def copying_attention_kl(
    calls: Sequence[AttentionCall],
    keys: Mapping[int, Float[Tensor, "1 kv_heads context dim"]],
    starts: Sequence[int],
    scored: Bool[Tensor, "rows tokens"],
) -> Float[Tensor, ""]:
    """KL(native || mapped) of attention, in nats: a mean over query heads by how much they copy.

    A query of a repeated stretch copies where it attends to the token that followed its own the
    first time. Native mass on that token, which few heads have, is a head's weight: retrieval heads
    decide whether a mapped cache recalls, and their queries meet keys that tell what stood before.

    Args:
        calls: of the native pass, whose last rows are the repeated stretches.
        keys: mapped, rotated, by layer; layers that are left out do not count.
        starts: context token at which each stretch stood.
        scored: queries of each stretch that count.
    """
    rows, at = scored.nonzero(as_tuple=True)
    places = torch.tensor(starts, device=rows.device)[rows] + at + 1
    masses, divergences = [], []
    for call in calls:
        if call.layer not in keys:
            continue
        mapped = keys[call.layer][0].float()
        context = mapped.shape[1]
        first = len(call.queries) - len(starts)
        queries = _grouped(call.queries[first:][rows, :, at].float(), len(mapped))
        own = _own_scores(call, queries, call.keys[first:, :, context:].float()[rows], at)
        native = _attention(call, queries, call.keys[first, :, :context].float(), own)
        made = _attention(call, queries, mapped, own)
        found = native.gather(3, places.view(-1, 1, 1, 1).expand(*native.shape[:3], 1)).exp()
        masses.append(found.mean(dim=0).flatten())
        divergences.append((native.exp() * (native - made)).sum(dim=3).mean(dim=0).flatten())
    if not masses:
        return torch.zeros((), device=rows.device)
    weights = torch.cat(masses)
    return weights @ torch.cat(divergences) / weights.sum().clamp(min=torch.finfo().tiny)


def _grouped(
    queries: Float[Tensor, "asked query_heads dim"], kv_heads: int
) -> Float[Tensor, "asked kv_heads group dim"]:
    return queries.view(len(queries), kv_heads, -1, queries.shape[-1])


def _own_scores(
    call: AttentionCall,
    queries: Float[Tensor, "asked kv_heads group dim"],
    keys: Float[Tensor, "asked kv_heads tokens dim"],
    at: Int64[Tensor, " asked"],
) -> Float[Tensor, "asked kv_heads group tokens"]:
    """Of the tokens that are run on top of the context."""
    scores = torch.einsum("nkgd,nktd->nkgt", queries, keys) * call.scale
    later = torch.arange(keys.shape[2], device=at.device) > at[:, None]
    return softcapped(scores, call.softcap).masked_fill(later[:, None, None], HIDDEN)


def _attention(
    call: AttentionCall,
    queries: Float[Tensor, "asked kv_heads group dim"],
    keys: Float[Tensor, "kv_heads context dim"],
    own: Float[Tensor, "asked kv_heads group tokens"],
) -> Float[Tensor, "asked kv_heads group places"]:
    """Logarithms of attention over the context and what was run on top of it."""
    scores = torch.einsum("nkgd,ktd->nkgt", queries, keys) * call.scale
    return torch.cat((softcapped(scores, call.softcap), own), dim=3).log_softmax(dim=3)
