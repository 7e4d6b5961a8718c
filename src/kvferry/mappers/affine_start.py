"""The affine map that a network is put behind."""

from __future__ import annotations

from abc import abstractmethod

import torch

from kvferry.errors import ConfigurationError
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.learning import OffersGeneration, Schedule
from kvferry.mappers.refined import RefinedMapper, Refiner


def affine_start(start: MapperMethod, statistics: Statistics, needed_by: str) -> AffineMapper:
    """``start`` fitted.

    Raises:
        ConfigurationError: it is not affine.
    """
    fitted = start.fit(statistics)
    if fitted.refiner is not None:
        raise ConfigurationError(
            f"{needed_by} starts from an affine map.",
            found=start.pretty_name,
            fix="set mapper@mapper.start to anchored, heterofold or another closed form",
        )
    return fitted.affine


class LearnsBehindStart(OffersGeneration, MapperMethod):
    """A method that fits ``start`` and learns a change of it from what the target says."""

    start: MapperMethod

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """See :class:`MapperMethod`."""
        return (self._schedule,)

    def native_depth(self, target: KVGeometry) -> int:
        """That of the start."""
        return self.start.native_depth(target)

    @abstractmethod
    def _residual(self, statistics: Statistics, affine: AffineMapper) -> Refiner:
        """What learns behind ``affine``; it changes nothing yet."""

    def _learned(self, statistics: Statistics) -> RefinedMapper:
        """The start, and the trained change behind it.

        Raises:
            ConfigurationError: the start is not affine, or there is no trainer or text to learn
                from.
        """
        affine = affine_start(self.start, statistics, self.pretty_name)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            refiner = self._residual(statistics, affine)
        return statistics.learned(RefinedMapper(affine, refiner), self._generation)
