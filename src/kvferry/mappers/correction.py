"""Low-rank corrections of a fitted mapper, in a short code of its inputs, folded back into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.base import Statistics, output_columns
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import ALL_HEADS, Component, FeatureBlock
from kvferry.stats.directions import whitened_directions

Blocks = tuple[FeatureBlock, ...]


@dataclass(frozen=True)
class InputCode:
    """Leading directions of some input features, of unit variance, and a constant.

    Args:
        blocks: the input features.
        mean: of the features.
        basis: ``[features, directions]``.
        mean_variance: of the features; what a relative ridge penalty is a share of.
    """

    blocks: Blocks
    mean: Float[Tensor, " features"]
    basis: Float64[Tensor, "features directions"]
    mean_variance: float

    @property
    def width(self) -> int:
        """Coordinates, the constant among them."""
        return self.basis.shape[1] + 1

    def rows(self, inputs: MapperInputs, prefix: int) -> Float[Tensor, "tokens width"]:
        """Coordinates of every token; zero for the prefix, which no map reaches."""
        coded = inputs.coded(self.blocks, 0, self.mean, self.basis.float())
        out = torch.cat([coded, coded.new_ones(inputs.tokens, 1)], dim=1)
        out[:prefix] = 0
        return out


@dataclass(frozen=True)
class CodedMoments:
    """Moments of one layer in code coordinates, about a mapper's present predictions.

    Args:
        c_zz: mean products of coordinates, the constant last.
        c_ze: mean products of coordinates and what the mapper leaves of the target.
        penalty: P'P, so that it measures a correction as the ridge penalty measures weights.
        start: P'W, half the gradient of that penalty.
    """

    c_zz: Float64[Tensor, "width width"]
    c_ze: Float64[Tensor, "width outputs"]
    penalty: Float64[Tensor, "width width"]
    start: Float64[Tensor, "width outputs"]


def group_of(mapper: AffineMapper, component: Component, layer: int) -> AffineGroup:
    """The group that writes ``component`` of target layer ``layer``."""
    return next(g for g in mapper.groups if g.component == component and layer in g.target_layers)


def group_outputs(mapper: AffineMapper, group: AffineGroup) -> Iterator[tuple[int, slice]]:
    """Each target layer of a group, and its columns among the group's outputs."""
    start = 0
    for layer in group.target_layers:
        shape = mapper.target.layers[layer]
        stop = start + (shape.width if group.head == ALL_HEADS else shape.head_dim)
        yield layer, slice(start, stop)
        start = stop


def columns_of(mapper: AffineMapper, group: AffineGroup, layer: int) -> slice:
    """Where ``layer`` lies among the outputs of ``group``."""
    return dict(group_outputs(mapper, group))[layer]


def input_codes(
    statistics: Statistics, mapper: AffineMapper, component: Component, rank: int, seed: int
) -> dict[Blocks, InputCode]:
    """The code of each set of features that maps of ``component`` read."""
    layout, moments = statistics.layouts[component], statistics.moments[component]
    codes = {}
    for blocks in dict.fromkeys(g.blocks for g in mapper.groups if g.component == component):
        part = moments.select(layout.columns(blocks), slice(0, 1))
        variance = float(part.scatter_xx.diagonal().mean()) / part.weight
        basis = whitened_directions(part.scatter_xx, part.weight, rank, seed)
        codes[blocks] = InputCode(blocks, part.mean_x.float(), basis, variance)
    return codes


def coded_moments(
    statistics: Statistics, mapper: AffineMapper, component: Component, code: InputCode
) -> dict[int, CodedMoments]:
    """By target layer that reads through ``code``; one product with its Gram for all of them."""
    layout, moments = statistics.layouts[component], statistics.moments[component]
    groups = [g for g in mapper.groups if (g.component, g.blocks) == (component, code.blocks)]
    layers = sorted(layer for group in groups for layer in group.target_layers)
    part = moments.select(layout.columns(code.blocks), output_columns(statistics.target, layers))
    seen = part.scatter_xx @ code.basis / part.weight
    c_zz = _bordered(code.basis.T @ seen, corner=1.0)
    penalty = _bordered(code.basis.T @ code.basis, corner=0.0)
    out = {}
    for layer, block in zip(layers, part.y_blocks, strict=True):
        group = group_of(mapper, component, layer)
        columns = columns_of(mapper, group, layer)
        weight = group.weight[:, columns].double()
        left = code.basis.T @ (part.scatter_xy[:, block] / part.weight) - seen.T @ weight
        offset = part.mean_y[block] - group.output_mean[columns].double()
        out[layer] = CodedMoments(
            c_zz=c_zz,
            c_ze=torch.cat([left, offset[None]]),
            penalty=penalty,
            start=torch.cat([code.basis.T @ weight, torch.zeros_like(offset)[None]]),
        )
    return out


def corrected(
    mapper: AffineMapper,
    component: Component,
    codes: Mapping[Blocks, InputCode],
    corrections: Mapping[int, Float[Tensor, "width outputs"]],
) -> AffineMapper:
    """The mapper with ``y + z D`` folded into its weights and means.

    Args:
        corrections: D by target layer; other layers stay as they are.
    """
    groups = []
    for group in mapper.groups:
        if group.component == component:
            weight, mean = group.weight.clone(), group.output_mean.clone()
            for layer in set(group.target_layers) & set(corrections):
                columns, change = columns_of(mapper, group, layer), corrections[layer].double()
                weight[:, columns] += (codes[group.blocks].basis @ change[:-1]).to(weight.dtype)
                mean[columns] += change[-1].to(mean.dtype)
            group = replace(group, weight=weight, output_mean=mean)
        groups.append(group)
    return replace(mapper, groups=tuple(groups))


def with_key_gain(mapper: AffineMapper, gain: float) -> AffineMapper:
    """The mapper with its keys ``gain`` times as far from their mean."""
    groups = (
        replace(group, weight=gain * group.weight) if group.component == "keys" else group
        for group in mapper.groups
    )
    return replace(mapper, groups=tuple(groups))


def with_weights(
    mapper: AffineMapper,
    component: Component,
    weights: Mapping[int, Float[Tensor, "inputs outputs"]],
) -> AffineMapper:
    """The mapper with the weights of some target layers replaced."""
    groups = []
    for group in mapper.groups:
        if group.component == component:
            weight = group.weight.clone()
            for layer in set(group.target_layers) & set(weights):
                weight[:, columns_of(mapper, group, layer)] = weights[layer].to(weight.dtype)
            group = replace(group, weight=weight)
        groups.append(group)
    return replace(mapper, groups=tuple(groups))


def _bordered(inner: Float64[Tensor, "r r"], corner: float) -> Float64[Tensor, "width width"]:
    out = inner.new_zeros(len(inner) + 1, len(inner) + 1)
    out[:-1, :-1], out[-1, -1] = inner, corner
    return out
