"""Networks of many target layers at once: what each one reads, and how they are batched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.base import Statistics
from kvferry.mappers.head_panel import fill_head_panel
from kvferry.mappers.inputs import MapperInputs, token_panels
from kvferry.mappers.layout import Component, FeatureBlock
from kvferry.mappers.refined import Refiner

LEAST_SPREAD = 1e-3
"""Of an input feature, as a share of the largest among its neighbours: none is blown up more."""


@dataclass(frozen=True)
class Site:
    """Keys or values of one target layer.

    Args:
        component, layer: what is changed.
        reads: input blocks: once for all heads, or one entry a head.
    """

    component: Component
    layer: int
    reads: tuple[tuple[FeatureBlock, ...], ...]

    @property
    def inputs(self) -> int:
        """Features of one reader."""
        return sum(block.width for block in self.reads[0])

    def record(self) -> list[Any]:
        """As JSON holds it."""
        reads = [[list(astuple(block)) for block in blocks] for blocks in self.reads]
        return [self.component, self.layer, reads]

    @classmethod
    def of(cls, record: Sequence[Any]) -> Site:
        """From :meth:`record`."""
        component, layer, reads = record
        blocks = tuple(tuple(FeatureBlock(*block) for block in blocks) for blocks in reads)
        return cls(component, layer, blocks)


@dataclass(frozen=True)
class StackShape:
    """Sites of one shape.

    Args:
        sites: how many.
        readers: 1 where all heads of a site read the same, else its heads.
        inputs: features of one reader.
        heads, dim: of the target layers.
    """

    sites: int
    readers: int
    inputs: int
    heads: int
    dim: int


class SiteNetwork(nn.Module):
    """The network of all sites of one shape; every parameter has the sites on its first axis."""

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "sites readers tokens inputs"],
        base: Float[Tensor, "sites heads tokens dim"],
        scale: Float[Tensor, "sites heads 1 1"],
    ) -> Float[Tensor, "sites heads tokens dim"]:
        """Content from the affine map's ``base``.

        Args:
            x: inputs about their means, in units of their spread.
            scale: spread of native content; what the network says is in units of it.
        """


class Stack(nn.Module):
    """Sites of one shape and one window, and what their inputs look like.

    Args:
        sites: which.
        network: of them all.
        shape: of them.
    """

    def __init__(self, sites: Sequence[Site], network: SiteNetwork, shape: StackShape) -> None:
        super().__init__()
        self.sites, self.network = tuple(sites), network
        features = (shape.sites, shape.readers, shape.inputs)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("spread", torch.ones(features))
        self.register_buffer("scale", torch.ones(shape.sites, shape.heads))

    def forward(
        self, inputs: MapperInputs, base: Float[Tensor, "sites heads tokens dim"], first: int
    ) -> Float[Tensor, "sites heads tokens dim"]:
        """Content of target tokens ``first`` on, a panel of them at a time."""
        scale = self.get_buffer("scale")[:, :, None, None]
        parts = [
            self.network(
                self._read(inputs, low, high), base[:, :, low - first : high - first], scale
            )
            for low, high in token_panels(first, first + base.shape[2])
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _read(
        self, inputs: MapperInputs, low: int, high: int
    ) -> Float[Tensor, "sites readers tokens inputs"]:
        mean, spread = self.get_buffer("mean"), self.get_buffer("spread")
        x = mean.new_empty(*mean.shape[:2], high - low, mean.shape[2])
        for place, site in enumerate(self.sites):
            if len(site.reads) == 1:
                blocks = site.reads[0]
                inputs.rows(blocks, low, high, mean=mean[place, 0], out=x[place, 0])
            else:
                fill_head_panel(inputs, site.reads, low, high, mean[place], x[place])
        return x.div_(spread[:, :, None])


class SiteRefiner(Refiner):
    """Changes layers by networks that see one token at a time, many layers in one product.

    Args:
        source, target: geometries.
        settings: keyword arguments of the subclass.
        sites: what is changed; each target layer at most once a component.
        network: makes that of all sites of one shape.
    """

    def __init__(
        self,
        source: KVGeometry,
        target: KVGeometry,
        settings: Mapping[str, Any],
        sites: Sequence[Site],
        network: Callable[[StackShape], SiteNetwork],
    ) -> None:
        super().__init__(source, target, settings)
        alike: dict[tuple[StackShape, int | None], list[Site]] = {}
        for site in sites:
            layer = target.layers[site.layer]
            shape = StackShape(1, len(site.reads), site.inputs, layer.kv_heads, layer.head_dim)
            alike.setdefault((shape, layer.window), []).append(site)
        stacks = []
        for (shape, _), same in alike.items():
            shape = replace(shape, sites=len(same))
            stacks.append(Stack(same, network(shape), shape))
        self.stacks: Sequence[Stack] = nn.ModuleList(stacks)  # type: ignore[assignment]

    @property
    def blocks(self) -> tuple[FeatureBlock, ...]:
        """What any site reads."""
        sites = chain.from_iterable(stack.sites for stack in self.stacks)
        reads = chain.from_iterable(site.reads for site in sites)
        return tuple(dict.fromkeys(chain.from_iterable(reads)))

    def weights_of(self, layer: int) -> dict[str, Tensor]:
        """See :class:`Refiner`."""
        return {
            f"{number}.{name}.{place}": parameter.data[place]
            for number, stack in enumerate(self.stacks)
            for place, site in enumerate(stack.sites)
            if site.layer == layer
            for name, parameter in stack.named_parameters()
        }

    def forward(
        self, inputs: MapperInputs, content: ContentKV, first_tokens: Sequence[int]
    ) -> ContentKV:
        """See :class:`Refiner`; layers of one window begin at one token."""
        out: dict[Component, dict[int, Tensor]] = {
            "keys": dict(content.keys), "values": dict(content.values)
        }  # fmt: skip
        for stack in self.stacks:
            first = first_tokens[stack.sites[0].layer]
            base = torch.cat([out[site.component][site.layer] for site in stack.sites])
            refined = stack(inputs, base, first)
            for site, x in zip(stack.sites, refined.unbind(), strict=True):
                out[site.component][site.layer] = x[None]
        return replace(content, keys=out["keys"], values=out["values"])

    def measure(self, statistics: Statistics) -> None:
        """Take means and spreads of inputs and outputs from the calibration."""
        for stack in self.stacks:
            for place, site in enumerate(stack.sites):
                moments = statistics.moments[site.component]
                layout = statistics.layouts[site.component]
                variance = moments.scatter_xx.diagonal() / moments.weight
                for reader, blocks in enumerate(site.reads):
                    columns = layout.columns(blocks)
                    spread = variance[columns].sqrt()
                    spread = spread.clamp(min=LEAST_SPREAD * float(spread.max()))
                    stack.get_buffer("mean")[place, reader] = moments.mean_x[columns]
                    stack.get_buffer("spread")[place, reader] = spread
                by_head = statistics.head_variance(site.component, site.layer)
                stack.get_buffer("scale")[place] = by_head.sqrt()


def uniform(shape: Sequence[int], fan_in: int) -> nn.Parameter:
    """Weights or biases as PyTorch draws those of a linear layer with so many inputs."""
    return nn.Parameter(torch.empty(*shape).uniform_(-1, 1) * fan_in**-0.5)


def layer_products(
    x: Float[Tensor, "sites readers tokens inputs"],
    weight: Float[Tensor, "sites groups inputs outputs"],
    bias: Float[Tensor, "sites groups 1 outputs"],
) -> Float[Tensor, "sites groups tokens outputs"]:
    """A linear layer of every site and group; one reader serves all groups."""
    groups = weight.shape[1]
    flat = x.expand(-1, groups, -1, -1).flatten(0, 1)
    out = torch.baddbmm(bias.flatten(0, 1), flat, weight.flatten(0, 1))
    return out.view(len(x), groups, *out.shape[1:])
