"""The network of context mobility: a gated low-rank residual that may look at tokens before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock
from kvferry.mappers.refined import Refiner


class CausalMixer(nn.Module):
    """Each token looks at itself and the tokens before it, channel by channel, through a gate.

    Args:
        width: features of a token.
        kernel: tokens that are seen, the token itself among them.
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.taps = nn.Parameter(torch.zeros(width, kernel))
        with torch.no_grad():
            self.taps[:, -1] = 1.0
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """Features of the same tokens, changed."""
        # PyTorch has no fast norm of bf16 by fp32 weights.
        before = functional.pad(self.norm(x.float()), (0, 0, self.taps.shape[1] - 1, 0))
        mixed = (before.unfold(0, self.taps.shape[1], 1) * self.taps).sum(dim=-1)
        out: Tensor = x + self.out(functional.silu(self.gate(mixed)) * self.value(mixed))
        return out


class GatedResidual(Refiner):
    """``y + (y - mean) M + gate(z) * scale * (z A) B`` for every layer, keys and values apart.

    y is what the affine map predicts; z is a code of its inputs, keys and values together, and what
    causal mixers make of it; A B has a low rank. B and M start at zero: training starts at the
    affine map.

    Args:
        source, target: geometries.
        blocks: by component, what the code is made of: kind, component, index, width, head.
        directions: code features of one component.
        rank: of A B.
        width: of the mixers; their output stands beside the code.
        mixers: how many; 0 leaves each token to itself.
        kernel: tokens that one mixer sees.
        native_layers: first target layers, which stay as they are.
    """

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        *,
        blocks: Mapping[Component, Sequence[Sequence[Any]]],
        directions: Mapping[Component, int],
        rank: int,
        width: int,
        mixers: int,
        kernel: int,
        native_layers: int,
    ) -> None:
        settings = {
            "blocks": {c: [list(block) for block in blocks[c]] for c in COMPONENTS},
            "directions": dict(directions),
            "rank": rank,
            "width": width,
            "mixers": mixers,
            "kernel": kernel,
            "native_layers": native_layers,
        }
        super().__init__(source, target, settings)
        self.reads = {c: tuple(FeatureBlock(*block) for block in blocks[c]) for c in COMPONENTS}
        for component in COMPONENTS:
            features = sum(block.width for block in self.reads[component])
            self.register_buffer(f"{component}_mean", torch.zeros(features))
            self.register_buffer(f"{component}_basis", torch.zeros(features, directions[component]))
        code = sum(directions.values())
        self.enter = nn.Linear(code, width) if mixers else None
        self.mixers = nn.ModuleList([CausalMixer(width, kernel) for _ in range(mixers)])
        seen = code + (width if mixers else 0)
        layers = range(native_layers, len(target.layers))
        self.sites: list[tuple[Component, int]] = [(c, i) for c in COMPONENTS for i in layers]
        self.down = nn.Linear(seen, rank * len(self.sites), bias=False)
        self.gate = nn.Linear(seen, len(self.sites))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        widths = [target.layers[layer].width for _, layer in self.sites]
        self.up = nn.ParameterList([torch.zeros(rank + 1, w) for w in widths])
        self.mix = nn.ParameterList([torch.zeros(w, w) for w in widths])
        for place, width_of_layer in enumerate(widths):
            self.register_buffer(f"mean_{place}", torch.zeros(width_of_layer))
        self.register_buffer("scale", torch.ones(len(self.sites)))

    @property
    def blocks(self) -> tuple[FeatureBlock, ...]:
        """What the code is made of."""
        return tuple(dict.fromkeys((*self.reads["keys"], *self.reads["values"])))

    def set_code(
        self,
        component: Component,
        mean: Float[Tensor, " features"],
        basis: Float[Tensor, "features directions"],
    ) -> None:
        """Where the code of ``component`` comes from; it is not trained."""
        self.get_buffer(f"{component}_mean").copy_(mean)
        self.get_buffer(f"{component}_basis").copy_(basis)

    def forward(
        self, inputs: MapperInputs, content: ContentKV, first_tokens: Sequence[int]
    ) -> ContentKV:
        """See :class:`Refiner`."""
        seen = self._seen(inputs)
        rank = self.down.out_features // len(self.sites)
        out: dict[Component, dict[int, Tensor]] = {
            "keys": dict(content.keys), "values": dict(content.values)
        }  # fmt: skip
        for first in sorted(set(first_tokens)):
            places = [i for i, (_, layer) in enumerate(self.sites) if first_tokens[layer] == first]
            if not places:
                continue
            rows = seen[first:]
            weight = self.down.weight.view(len(self.sites), rank, -1)[places]
            low = functional.linear(rows, weight.flatten(0, 1)).view(len(rows), len(places), rank)
            gate = functional.linear(rows, self.gate.weight[places], self.gate.bias[places])
            strength = 2 * gate.sigmoid() * self.get_buffer("scale")[places]
            for column, place in enumerate(places):
                component, layer = self.sites[place]
                up = self.up[place]
                change = functional.linear(low[:, column], up[:-1].T) + up[-1]
                base = out[component][layer]
                heads = base.shape[1]
                flat = base[0].transpose(0, 1).flatten(1) - self.get_buffer(f"mean_{place}")
                mix = self.mix[place] * len(self.mix[place]) ** -0.5
                change = strength[:, column, None] * change + functional.linear(flat, mix.T)
                shaped = change.view(len(rows), heads, -1).transpose(0, 1)[None]
                out[component][layer] = base + shaped.to(base.dtype)
        return replace(content, keys=out["keys"], values=out["values"])

    def _seen(self, inputs: MapperInputs) -> Float[Tensor, "tokens seen"]:
        """The code, and what the mixers make of it."""
        codes = []
        for component in COMPONENTS:
            mean = self.get_buffer(f"{component}_mean")
            basis = self.get_buffer(f"{component}_basis")
            codes.append(inputs.coded(self.reads[component], 0, mean, basis))
        code = torch.cat(codes, dim=1)
        if self.enter is None:
            return code
        x = self.enter(code)
        for mixer in self.mixers:
            x = mixer(x)
        return torch.cat([code, x.float()], dim=1)
