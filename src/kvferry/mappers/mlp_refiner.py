"""Two hidden layers for the keys or values of every target layer, one head or all at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.sites import (
    Site,
    SiteNetwork,
    SiteRefiner,
    StackShape,
    layer_products,
    uniform,
)


class MLPNetwork(SiteNetwork):
    """``base + scale * W3 relu(W2 relu(W1 x + b1) + b2) + b3``, for all sites at once.

    Args:
        shape: of the sites.
        hidden: width of both hidden layers.
        per_head: own hidden layers for each head; else the heads of a site share them.
        residual: normalise x by token and start W3 and b3 at zero.
    """

    def __init__(self, shape: StackShape, hidden: int, per_head: bool, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        groups = shape.heads if per_head else 1
        outputs = shape.heads * shape.dim // groups
        widths = [shape.inputs, hidden, hidden, outputs]
        pairs = list(pairwise(widths))
        first = (shape.sites, groups)
        self.weights = nn.ParameterList([uniform((*first, a, b), a) for a, b in pairs])
        self.biases = nn.ParameterList([uniform((*first, 1, b), a) for a, b in pairs])
        if residual:
            nn.init.zeros_(self.weights[-1])
            nn.init.zeros_(self.biases[-1])

    def forward(
        self,
        x: Float[Tensor, "sites readers tokens inputs"],
        base: Float[Tensor, "sites heads tokens dim"],
        scale: Float[Tensor, "sites heads 1 1"],
    ) -> Float[Tensor, "sites heads tokens dim"]:
        """See :class:`SiteNetwork`."""
        if self.residual:
            x = functional.layer_norm(x, x.shape[-1:])
        *hidden, last = zip(self.weights, self.biases, strict=True)
        for weight, bias in hidden:
            x = torch.relu_(layer_products(x, weight, bias))
        out = layer_products(x, *last)
        if out.shape[1] != base.shape[1]:
            by_head = (*out.shape[::2], base.shape[1], base.shape[3])
            out = out.view(by_head).transpose(1, 2)
        return torch.addcmul(base, scale, out.float())


class MLPRefiner(SiteRefiner):
    """An MLP behind the affine map of each target layer, keys and values apart.

    Args:
        source, target: geometries.
        sites: see :meth:`Site.record`.
        hidden, per_head, residual: see :class:`MLPNetwork`.
    """

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        *,
        sites: Sequence[Sequence[Any]],
        hidden: int,
        per_head: bool,
        residual: bool,
    ) -> None:
        settings = {
            "sites": [list(site) for site in sites],
            "hidden": hidden,
            "per_head": per_head,
            "residual": residual,
        }
        network = partial(MLPNetwork, hidden=hidden, per_head=per_head, residual=residual)
        super().__init__(source, target, settings, [Site.of(site) for site in sites], network)
