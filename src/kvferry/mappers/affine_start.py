"""The affine map that a network is put behind."""

from __future__ import annotations

from kvferry.errors import ConfigurationError
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import MapperMethod, Statistics


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
