"""A gated MLP and a skip for every KV head, keys and values apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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


class GatedNetwork(SiteNetwork):
    """``g_a (A x) + g_m (W2 silu(W1 x + b1)) + b2`` of every KV head, for all sites at once.

    A x is the affine map's own prediction, plus what the skip has learned to add to it: zero at
    first, like b2, while g_a is one and g_m is ``gate``.

    Args:
        shape: of the sites.
        expansion: hidden width, in head dims of the target.
        gate: g_m at the start.
    """

    def __init__(self, shape: StackShape, expansion: int, gate: float) -> None:
        super().__init__()
        first, inputs, dim = (shape.sites, shape.heads), shape.inputs, shape.dim
        hidden = expansion * dim
        self.enter = uniform((*first, inputs, hidden), inputs)
        self.enter_bias = uniform((*first, 1, hidden), inputs)
        self.leave = uniform((*first, hidden, dim), hidden)
        self.leave_bias = nn.Parameter(torch.zeros(*first, 1, dim))
        self.skip = nn.Parameter(torch.zeros(*first, inputs, dim))
        self.skip_gate = nn.Parameter(torch.ones(*first, 1, dim))
        self.gate = nn.Parameter(torch.full((*first, 1, dim), gate))

    def forward(
        self,
        x: Float[Tensor, "sites readers tokens inputs"],
        base: Float[Tensor, "sites heads tokens dim"],
        scale: Float[Tensor, "sites heads 1 1"],
    ) -> Float[Tensor, "sites heads tokens dim"]:
        """See :class:`SiteNetwork`."""
        none = torch.zeros_like(self.leave_bias)
        hidden = functional.silu(layer_products(x, self.enter, self.enter_bias))
        said = self.gate * layer_products(hidden, self.leave, none).float() + self.leave_bias
        linear = torch.addcmul(base, scale, layer_products(x, self.skip, none).float())
        return torch.addcmul(self.skip_gate * linear, scale, said)


class DenseRefiner(SiteRefiner):
    """A gated MLP for each KV head of each target layer.

    Args:
        source, target: geometries.
        sites: see :meth:`Site.record`.
        expansion, gate: see :class:`GatedNetwork`.
    """

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        *,
        sites: Sequence[Sequence[Any]],
        expansion: int,
        gate: float,
    ) -> None:
        settings = {"sites": [list(site) for site in sites], "expansion": expansion, "gate": gate}
        network = partial(GatedNetwork, expansion=expansion, gate=gate)
        super().__init__(source, target, settings, [Site.of(site) for site in sites], network)
