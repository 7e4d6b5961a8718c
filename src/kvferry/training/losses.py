"""What a learned mapper is judged by while it learns: pure functions of logits and content."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.layout import COMPONENTS, Component


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
    mapped: ContentKV, native: ContentKV, variance: Mapping[Component, Mapping[int, float]]
) -> Float[Tensor, ""]:
    """Squared error of mapped content as a share of its variance, mean of layers and components.

    Args:
        mapped, native: the same tokens of the same layers.
        variance: by component and layer, of one feature; layers that are missing do not count.
    """
    shares = [
        (getattr(mapped, component)[layer] - getattr(native, component)[layer]).square().mean()
        / variance[component][layer]
        for component in COMPONENTS
        for layer in variance[component]
    ]
    return torch.stack(shares).mean()
