"""An affine map and a network on top of it: what every learned mapper is to a hand-off."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import Component, FeatureBlock, source_layers_read


class Refiner(nn.Module):
    """Changes the content that an affine map predicts, layer by layer.

    A subclass takes the two geometries and keyword settings that JSON can hold, and leaves them in
    ``settings``: an artefact stores them with its weights and calls the class again.

    Args:
        source, target: geometries of the two models.
        settings: keyword arguments of the subclass.
    """

    def __init__(self, source: KVGeometry, target: KVGeometry, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.source, self.target = source, target
        self.settings = dict(settings)

    @property
    @abstractmethod
    def blocks(self) -> tuple[FeatureBlock, ...]:
        """Every input block that it reads beside the affine map."""

    @abstractmethod
    def forward(
        self, inputs: MapperInputs, content: ContentKV, first_tokens: Sequence[int]
    ) -> ContentKV:
        """The content changed; layers hold tokens ``first_tokens[layer]`` on, as in ``content``.

        Gradients reach its own parameters; ``content`` is neither changed nor differentiated.
        """

    def weights_of(self, layer: int) -> dict[str, Tensor]:
        """Views of the weights that change target ``layer`` and no other; empty where it shares
        all of them."""
        return {}


@dataclass(frozen=True, eq=False)
class RefinedMapper:
    """An affine mapper with a network behind it.

    Args:
        affine: maps first; windows, native layers and planted sinks are its own.
        refiner: changes what it predicts.
        report: what the fit chose and measured, by name.
    """

    affine: AffineMapper
    refiner: Refiner
    report: Mapping[str, float] = field(default_factory=dict)

    @property
    def source(self) -> KVGeometry:
        """Geometry of the model that has read."""
        return self.affine.source

    @property
    def target(self) -> KVGeometry:
        """Geometry of the model that goes on."""
        return self.affine.target

    @property
    def native_layers(self) -> int:
        """Target layers that are the target's own."""
        return self.affine.native_layers

    @property
    def product_dtype(self) -> torch.dtype:
        """Number format of the matrix products."""
        return self.affine.product_dtype

    @property
    def source_layers(self) -> dict[Component, list[int]]:
        """Source layers that either part reads."""
        blocks = (*self.affine.blocks, *self.refiner.blocks)
        return source_layers_read(blocks, len(self.source.layers))

    @property
    def parameters(self) -> int:
        """Coefficients of both parts."""
        own: Iterable[Tensor] = self.refiner.state_dict().values()
        return self.affine.parameters + sum(t.numel() for t in own)

    @property
    def storage_bytes(self) -> int:
        """Bytes of both parts in their present number formats."""
        own: Iterable[Tensor] = self.refiner.state_dict().values()
        return self.affine.storage_bytes + sum(t.numel() * t.element_size() for t in own)

    def with_precision(self, dtype: torch.dtype) -> RefinedMapper:
        """The same mapper with matrix products in ``dtype``; the network's weights stay fp32."""
        return replace(self, affine=self.affine.with_precision(dtype))

    def first_tokens(self, tokens: int) -> list[int]:
        """By target layer, the first of ``tokens`` that it still attends to."""
        return self.affine.first_tokens(tokens)

    def native_tokens(self, tokens: int) -> int:
        """How many of the last of ``tokens`` the target runs for its native prefix."""
        return self.affine.native_tokens(tokens)

    def planted_places(self, layer: int, tokens: int) -> list[int]:
        """Among the tokens that a mapped layer holds, those that give way to the prefix."""
        return self.affine.planted_places(layer, tokens)

    def mean_content(self, like: ContentKV) -> ContentKV:
        """One mean at every token of ``like``."""
        return self.affine.mean_content(like)

    def map(self, inputs: MapperInputs, first_tokens: Sequence[int]) -> ContentKV:
        """The affine prediction, refined; native layers stay as they are.

        With gradients on, they flow to the refiner's parameters.
        """
        device, dtype = inputs.anchors.mask.device.type, self.product_dtype
        inputs = self.affine.reading(inputs)
        with torch.no_grad(), torch.autocast(device, enabled=False):
            content = self.affine.map(inputs, first_tokens)
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            refined: ContentKV = self.refiner(inputs, content, first_tokens)
        return refined
