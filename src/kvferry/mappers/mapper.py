"""What a hand-off needs of a fitted mapper, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

import torch

from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.inputs import MapperInputs
from kvferry.mappers.layout import Component

if TYPE_CHECKING:
    from kvferry.mappers.affine import AffineMapper
    from kvferry.mappers.refined import Refiner


class Mapper(Protocol):
    """Source content and anchors to target content: pure tensors, no tokenizer, no position."""

    @property
    def source(self) -> KVGeometry:
        """Geometry of the model that has read."""

    @property
    def target(self) -> KVGeometry:
        """Geometry of the model that goes on."""

    @property
    def affine(self) -> AffineMapper:
        """The affine map that it begins with, or is."""

    @property
    def refiner(self) -> Refiner | None:
        """The network behind it, or None."""

    @property
    def native_layers(self) -> int:
        """Target layers that are the target's own, see :class:`AffineMapper`."""

    @property
    def product_dtype(self) -> torch.dtype:
        """Number format of the matrix products."""

    @property
    def report(self) -> Mapping[str, float]:
        """What the fit chose and measured."""

    @property
    def source_layers(self) -> dict[Component, list[int]]:
        """Source layers that must be stripped, by component."""

    @property
    def parameters(self) -> int:
        """Coefficients."""

    @property
    def storage_bytes(self) -> int:
        """Bytes of the coefficients in their present number formats."""

    def with_precision(self, dtype: torch.dtype) -> Self:
        """The same mapper with weights and products in ``dtype``."""

    def first_tokens(self, tokens: int) -> list[int]:
        """By target layer, the first of ``tokens`` that it still attends to."""

    def native_tokens(self, tokens: int) -> int:
        """How many of the last of ``tokens`` the target runs for its native prefix."""

    def planted_places(self, layer: int, tokens: int) -> list[int]:
        """Among the tokens that a mapped layer holds, those that give way to the prefix."""

    def map(self, inputs: MapperInputs, first_tokens: Sequence[int]) -> ContentKV:
        """Target content of every layer from its own first token on."""

    def mean_content(self, like: ContentKV) -> ContentKV:
        """One mean at every token of ``like``: a control that knows no token."""
