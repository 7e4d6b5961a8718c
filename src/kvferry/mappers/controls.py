"""Caches that must do badly, and the one that must do well: what every number is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.errors import InputError
from kvferry.lm.content import ContentKV
from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.base import MapperMethod, Statistics, output_columns
from kvferry.mappers.layout import COMPONENTS, FeatureBlock


@dataclass(frozen=True)
class Identity(MapperMethod):
    """Every layer as it is: retention must be 1 where source and target are one model."""

    pretty_name: ClassVar[str] = "Identity"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"
    needs_moments: ClassVar[bool] = False

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Unit matrices.

        Raises:
            InputError: the two caches have different shapes.
        """
        if statistics.source.widths != statistics.target.widths:
            raise InputError(
                "The identity carries a cache over only between equal shapes.",
                found=f"{len(statistics.source.layers)} and {len(statistics.target.layers)} layers",
                fix="use pair=smollm2_smollm2 or pair=gemma3_gemma3, or another mapper",
            )
        groups = []
        for component in COMPONENTS:
            for layer, width in enumerate(statistics.target.widths):
                block = FeatureBlock("source", component, layer, width)
                means = torch.zeros(width), torch.zeros(width)
                groups.append(AffineGroup(component, (layer,), (block,), torch.eye(width), *means))
        return AffineMapper(statistics.source, statistics.target, tuple(groups))


@dataclass(frozen=True)
class Random(MapperMethod):
    """Random coefficients of the size that keeps the input's variance: must ruin every score.

    Args:
        seed: of the coefficients.
    """

    seed: int = 0

    pretty_name: ClassVar[str] = "Random"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"
    needs_moments: ClassVar[bool] = False

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Gaussian coefficients over all source layers."""
        generator = torch.Generator().manual_seed(self.seed)
        groups = []
        for component in COMPONENTS:
            blocks = statistics.layouts[component].of_kind("source")
            inputs = sum(block.width for block in blocks)
            layers = tuple(range(len(statistics.target.layers)))
            for window in dict.fromkeys(layer.window for layer in statistics.target.layers):
                same = tuple(i for i in layers if statistics.target.layers[i].window == window)
                outputs = len(output_columns(statistics.target, same))
                weight = torch.randn(inputs, outputs, generator=generator) / inputs**0.5
                means = torch.zeros(inputs), torch.zeros(outputs)
                groups.append(AffineGroup(component, same, blocks, weight, *means))
        return AffineMapper(statistics.source, statistics.target, tuple(groups))


def random_content(like: ContentKV, seed: int) -> ContentKV:
    """Gaussian keys and values with the mean and spread of each feature of ``like``."""
    generator = torch.Generator(device=like.mask.device).manual_seed(seed)

    def draw(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        mean = x.mean(dim=2, keepdim=True)
        return mean + noise * x.std(dim=2, keepdim=True, unbiased=False)

    return like.map_layers(draw)


def shuffled_content(content: ContentKV, seed: int) -> ContentKV:
    """The right keys and values at the wrong tokens: one permutation for all layers."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(content.tokens, generator=generator).to(content.mask.device)

    def permute(x: Tensor) -> Tensor:
        # A windowed layer holds the last tokens only; it keeps their part of the permutation.
        first = content.tokens - x.shape[2]
        return x[:, :, order[order >= first] - first]

    return content.map_layers(permute)


def identity_content(source: ContentKV, first_tokens: list[int]) -> ContentKV:
    """The source's own content as the target's: right only where both are the same model."""

    def cut(by_layer: dict[int, Tensor]) -> dict[int, Tensor]:
        return {layer: x[:, :, first_tokens[layer] :].clone() for layer, x in by_layer.items()}

    return replace(source, keys=cut(source.keys), values=cut(source.values))
