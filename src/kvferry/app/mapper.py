"""From a mapper's YAML to an instance of its class."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from kvferry.app.binding import Mistake, bind, did_you_mean
from kvferry.app.schema import MapperConfig
from kvferry.errors import ConfigurationError


def build_mapper(config: MapperConfig) -> Any:
    """The mapper that a configuration describes, not fitted yet.

    Raises:
        ConfigurationError: the class does not exist or its fields do not fit the settings.
    """
    mistakes: list[Mistake] = []
    mapper = bind_mapper(config, mistakes)
    if mistakes:
        raise ConfigurationError(
            f"The settings of mapper `{config.name}` are wrong:\n"
            + "\n".join(f"  * {mistake}" for mistake in mistakes),
            fix=f"Compare conf/mapper/{config.name}.yaml with the fields of {config.target}.",
        )
    return mapper


def bind_mapper(config: MapperConfig, mistakes: list[Mistake], where: str = "mapper") -> Any:
    """Like `build_mapper`, but collects mistakes; imports the class, and with it PyTorch.

    A setting that is a group with a `_target_` of its own is a mapper inside this one.
    """
    module_name, _, class_name = config.target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        mistakes.append(
            Mistake(f"{where}._target_", f"{config.target} cannot be imported: {error}")
        )
        return None
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        hint = did_you_mean(class_name, [n for n in vars(module) if not n.startswith("_")])
        mistakes.append(
            Mistake(f"{where}._target_", f"{module_name} has no mapper class {class_name}.{hint}")
        )
        return None
    before = len(mistakes)
    options = {k: _inner(v, mistakes, f"{where}.{k}") for k, v in config.options.items()}
    # What is wrong inside stands in the list already; the rest is still looked at.
    sound = {key: value for key, value in options.items() if value is not _WRONG}
    bound = bind(cls, sound, mistakes, where=where)
    return bound if len(mistakes) == before else None


def _inner(value: Any, mistakes: list[Mistake], where: str) -> Any:
    if not isinstance(value, Mapping) or "_target_" not in value:
        return value
    options = {k: v for k, v in value.items() if k not in ("_target_", "name")}
    inner = MapperConfig(str(value.get("name", "")), str(value["_target_"]), options)
    bound = bind_mapper(inner, mistakes, where)
    return _WRONG if bound is None else bound


_WRONG = object()
