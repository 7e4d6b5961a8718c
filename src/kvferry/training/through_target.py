"""The Lightning modules whose gradients pass through the frozen target."""

from __future__ import annotations

from typing import Generic, TypeVar

from kvferry.lm.content import ContentKV
from kvferry.lm.model import LanguageModel
from kvferry.mappers.learning import Answering, Generation
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.material import Material
from kvferry.training.module import RefinerModule

Asked = TypeVar("Asked", Generation, Answering)


class ThroughTarget(RefinerModule, Generic[Asked]):
    """Learns what the target says on top of the mapped cache.

    Args:
        mapper: whose refiner learns.
        aim: what is asked, and the weight of each answer.
        material: the frozen target that answers, its prefix, how much native content varies, and
            whether a forward pass is kept or run again backwards.
    """

    def __init__(self, mapper: RefinedMapper, aim: Asked, material: Material) -> None:
        super().__init__(mapper, aim.schedule)
        self.aim: Asked = aim
        self.prefix: ContentKV = material.prefix
        self.variance = material.mapped_variance(mapper)
        self.gradient_checkpointing = material.gradient_checkpointing
        # A plain list keeps the frozen model out of the module's own parameters.
        self._target: list[LanguageModel] = [material.reader.target]
