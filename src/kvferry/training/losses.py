"""What a learned mapper is judged by while it learns: pure functions of logits and content."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.layout import Component


def kl_from_native(
    native: Float[Tensor, "tokens vocab"], mapped: Float[Tensor, "tokens vocab"]
) -> Float[Tensor, " tokens"]:
    """KL(native || mapped) of next-token distributions, in nats, by position."""
    wanted = native.float().log_softmax(dim=-1)
    got = mapped.float()
    expected: Tensor = torch.linalg.vecdot(wanted.exp(), wanted - got)
    return expected + got.logsumexp(dim=-1)


def text_nll(
    logits: Float[Tensor, "tokens vocab"], ids: Int64[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """NLL of the text's own next tokens, in nats."""
    logits = logits.float()
    return logits.logsumexp(dim=-1) - logits.gather(1, ids[:, None])[:, 0]


def pointwise_error(
    mapped: ContentKV,
    native: ContentKV,
    variance: Mapping[Component, Mapping[int, Float[Tensor, " heads"]]],
    counted: Bool[Tensor, " tokens"] | None = None,
) -> Float[Tensor, ""]:
    """Squared error of mapped content as a share of its variance: a mean over layers, components
    and KV heads, so that none of them dominates.

    Args:
        mapped, native: the same tokens of the same layers.
        variance: by component, layer and KV head, of one feature; layers that are missing do not
            count.
        counted: the tokens that do; all by default.
    """
    shares = []
    for component, by_layer in variance.items():
        made, wanted = getattr(mapped, component), getattr(native, component)
        for layer, spread in by_layer.items():
            error = (made[layer] - wanted[layer]).square().mean(dim=(0, 3))
            if counted is not None:
                weights = counted[-error.shape[1] :].to(error)
                error = error * weights * (len(weights) / weights.sum().clamp(min=1))
            shares.append((error.mean(dim=1) / spread).mean())
    return torch.stack(shares).mean()
