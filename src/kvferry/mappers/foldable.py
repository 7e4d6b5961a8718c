"""The network of a polish: affine in what the affine map reads and says, so it folds into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn import functional

from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.correction import group_outputs
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import ALL_HEADS, Component, FeatureBlock
from kvferry.mappers.refined import Refiner
from kvferry.mappers.sites import uniform


@dataclass(frozen=True)
class Outputs:
    """What one affine group writes of one target layer.

    Args:
        component, layer, head: where.
        width: features.
        code: which code of the group's inputs may change it.
    """

    component: Component
    layer: int
    head: int
    width: int
    code: int


class FoldableResidual(Refiner):
    """``y + (y - mean) M + scale * (b + (z A) B)`` for every layer, keys and values apart.

    y is what an affine group predicts of the layer and z a code of what that group reads; M mixes
    the layer's own features. M, b and B start at zero: training starts at the affine map, and
    :meth:`folded` ends at another.

    Args:
        source, target: geometries.
        outputs: see :class:`Outputs`.
        codes: blocks of each code, and how many directions it has.
        rank: of A B; 0 leaves M and b.
    """

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        *,
        outputs: Sequence[Sequence[Any]],
        codes: Sequence[tuple[Sequence[Sequence[Any]], int]],
        rank: int,
    ) -> None:
        settings = {
            "outputs": [list(o) for o in outputs],
            "codes": [[[list(block) for block in blocks], width] for blocks, width in codes],
            "rank": rank,
        }
        super().__init__(source, target, settings)
        self.outputs = tuple(Outputs(*o) for o in outputs)
        self.reads = tuple(tuple(FeatureBlock(*b) for b in blocks) for blocks, _ in codes)
        self.rank = rank
        for number, (blocks, (_, directions)) in enumerate(zip(self.reads, codes, strict=True)):
            features = sum(block.width for block in blocks)
            self.register_buffer(f"code_mean_{number}", torch.zeros(features))
            self.register_buffer(f"basis_{number}", torch.zeros(features, directions))
        self.mix = nn.ParameterList([torch.zeros(o.width, o.width) for o in self.outputs])
        self.bias = nn.ParameterList([torch.zeros(o.width) for o in self.outputs])
        widths = [codes[o.code][1] for o in self.outputs] if rank else []
        self.down = nn.ParameterList([uniform((width, rank), width) for width in widths])
        self.up = nn.ParameterList([torch.zeros(rank, o.width) for o in self.outputs if rank])
        for place, o in enumerate(self.outputs):
            self.register_buffer(f"mean_{place}", torch.zeros(o.width))
        self.register_buffer("scale", torch.ones(len(self.outputs)))

    @property
    def blocks(self) -> tuple[FeatureBlock, ...]:
        """What the codes are made of."""
        return tuple(dict.fromkeys(block for blocks in self.reads for block in blocks))

    def forward(
        self, inputs: MapperInputs, content: ContentKV, first_tokens: Sequence[int]
    ) -> ContentKV:
        """See :class:`Refiner`."""
        coded: dict[tuple[int, int], Tensor] = {}
        changes: dict[tuple[Component, int], dict[int, Tensor]] = {}
        for place, o in enumerate(self.outputs):
            base = getattr(content, o.component)[o.layer]
            if o.head != ALL_HEADS:
                base = base[:, o.head : o.head + 1]
            flat = base[0].transpose(0, 1).flatten(1)
            change = self.get_buffer("scale")[place] * self.bias[place]
            if self.rank:
                key = o.code, first_tokens[o.layer]
                if key not in coded:
                    coded[key] = self._code(inputs, *key)
                low = functional.linear(coded[key], self.down[place].T)
                high = functional.linear(low, self.up[place].T)
                change = change + self.get_buffer("scale")[place] * high
            mixed = functional.linear(flat - self.get_buffer(f"mean_{place}"), self._mix(place).T)
            shaped = (mixed + change).view(len(flat), base.shape[1], -1).transpose(0, 1)[None]
            changes.setdefault((o.component, o.layer), {})[o.head] = base + shaped.to(base.dtype)
        out = {"keys": dict(content.keys), "values": dict(content.values)}
        for (component, layer), by_head in changes.items():
            out[component][layer] = torch.cat([by_head[head] for head in sorted(by_head)], dim=1)
        return replace(content, keys=out["keys"], values=out["values"])

    def folded(self, affine: AffineMapper) -> AffineMapper:
        """The affine map that does what ``affine`` and this do, one after the other.

        Args:
            affine: the map whose groups this was made for.
        """
        places = {(o.component, o.layer, o.head): i for i, o in enumerate(self.outputs)}
        groups = []
        for group in affine.groups:
            weight, mean = group.weight.clone(), group.output_mean.clone()
            for layer, columns in group_outputs(affine, group):
                place = places[group.component, layer, group.head]
                before = weight[:, columns].double()
                after = before + before @ self._mix(place).detach().double()
                scale = float(self.get_buffer("scale")[place])
                if self.rank:
                    after += scale * self._low_rank(place)
                weight[:, columns] = after.to(weight.dtype)
                mean[columns] += scale * self.bias[place].detach()
            groups.append(replace(group, weight=weight, output_mean=mean))
        return replace(affine, groups=tuple(groups))

    def _mix(self, place: int) -> Float[Tensor, "features features"]:
        # As large as the other parts in effect, at one learning rate.
        mix: Tensor = self.mix[place]
        scaled: Tensor = mix * len(mix) ** -0.5
        return scaled

    def _low_rank(self, place: int) -> Float64[Tensor, "inputs features"]:
        basis = self.get_buffer(f"basis_{self.outputs[place].code}").double()
        product: Tensor = self.down[place].detach().double() @ self.up[place].detach().double()
        return basis @ product

    def _code(
        self, inputs: MapperInputs, number: int, first: int
    ) -> Float[Tensor, "tokens directions"]:
        mean, basis = (self.get_buffer(f"{name}_{number}") for name in ("code_mean", "basis"))
        return inputs.coded(self.reads[number], first, mean, basis)


def foldable_residual(
    affine: AffineMapper,
    scales: dict[tuple[Component, int], float],
    codes: dict[tuple[Component, tuple[FeatureBlock, ...]], Float[Tensor, "features directions"]],
    rank: int,
) -> FoldableResidual:
    """A residual that changes nothing yet.

    Args:
        affine: what it will be folded into.
        scales: spread of the native content by component and target layer.
        codes: directions of the inputs of each set of groups that read the same; none for rank 0.
        rank: see :class:`FoldableResidual`.
    """
    numbers = {key: number for number, key in enumerate(codes)}
    outputs, means = [], []
    for group in affine.groups:
        number = numbers.get((group.component, group.blocks), 0)
        for layer, columns in group_outputs(affine, group):
            width = columns.stop - columns.start
            outputs.append(Outputs(group.component, layer, group.head, width, number))
            means.append(group.output_mean[columns])
    refiner = FoldableResidual(
        affine.source,
        affine.target,
        outputs=[astuple(o) for o in outputs],
        codes=[([astuple(b) for b in blocks], x.shape[1]) for (_, blocks), x in codes.items()],
        rank=rank,
    )
    for place, (o, mean) in enumerate(zip(outputs, means, strict=True)):
        refiner.get_buffer(f"mean_{place}").copy_(mean)
        refiner.get_buffer("scale")[place] = scales[o.component, o.layer]
    inputs = {(group.component, group.blocks): group.input_mean for group in affine.groups}
    for number, (key, basis) in enumerate(codes.items()):
        refiner.get_buffer(f"code_mean_{number}").copy_(inputs[key])
        refiner.get_buffer(f"basis_{number}").copy_(basis)
    return refiner.to(affine.groups[0].weight.device)
