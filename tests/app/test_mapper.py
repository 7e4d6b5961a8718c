"""A mapper's settings are bound to the fields of its class."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.app.mapper import build_mapper
from kvferry.app.schema import MapperConfig
from kvferry.errors import ConfigurationError


@dataclass(frozen=True)
class Sample:
    """Stands in for a mapper."""

    ridge: float = 1e-3
    window: int | str = "all"


def config(**options: object) -> MapperConfig:
    return MapperConfig("sample", f"{__name__}.Sample", options)


def test_settings_become_fields() -> None:
    assert type(build_mapper(config(ridge=1))).__name__ == "Sample"
    assert build_mapper(config(window=3)).window == 3


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (config(rigde=1.0), "Did you mean `mapper.ridge`?"),
        (config(ridge="much"), "mapper.ridge: must be a number"),
        (MapperConfig("x", f"{__name__}.Sampel"), "Did you mean `Sample`?"),
        (MapperConfig("x", "kvferry.nowhere.X"), "cannot be imported"),
        (MapperConfig("x", "X"), "cannot be imported"),
    ],
)
def test_what_does_not_fit_is_named(wrong: MapperConfig, expected: str) -> None:
    with pytest.raises(ConfigurationError, match="settings of mapper") as caught:
        build_mapper(wrong)
    assert expected in str(caught.value)
