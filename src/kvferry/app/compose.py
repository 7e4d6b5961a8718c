"""From words on a command line to a checked `RunConfig`, with every mistake in one message."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvferry.app import arguments
from kvferry.app.binding import Mistake, bind
from kvferry.app.checks import check
from kvferry.app.mapper import bind_mapper
from kvferry.app.paths import conf_dir
from kvferry.app.schema import MapperConfig, RunConfig
from kvferry.errors import ConfigurationError

HYDRA_VERSION_BASE = "1.3"
CONFIG_NAME = "config"


def compose(
    overrides: Sequence[str] = (), *, conf: Path | None = None, deep: bool = False
) -> RunConfig:
    """The run that these overrides describe.

    Args:
        overrides: `key=value` words as on the command line, without sweeps.
        conf: the configuration tree; by default the checkout's.
        deep: also check the mapper's settings, which imports its class and with it PyTorch.

    Raises:
        ConfigurationError: lists everything that is wrong with them.
    """
    mistakes: list[Mistake] = []
    cfg = _compose(overrides, conf or conf_dir(), mistakes, deep)
    raise_if_any(mistakes)
    assert cfg is not None
    return cfg


def jobs(overrides: Sequence[str], *, conf: Path | None = None) -> list[list[str]]:
    """The grid that Hydra's basic sweeper makes of these overrides, one list of words a job."""
    conf = conf or conf_dir()
    parsed = [o for o in _parse_in(conf, overrides) if not arguments.belongs_to_hydra(o)]
    return [list(job) for job in itertools.product(*(_choices(o, conf) for o in parsed))]


def survey(
    overrides: Sequence[str], *, conf: Path | None = None, deep: bool = False
) -> list[RunConfig]:
    """Compose every job of a grid, or raise with the mistakes of all of them.

    Args as `compose`, but the overrides may be sweeps.

    Raises:
        ConfigurationError: each mistake once.
    """
    conf = conf or conf_dir()
    mistakes: list[Mistake] = []
    words = [o.input_line or "" for o in arguments.parse(overrides, mistakes)]
    composed = [_compose(job, conf, mistakes, deep) for job in jobs(words, conf=conf)]
    raise_if_any(mistakes)
    return [cfg for cfg in composed if cfg is not None]


def from_values(
    values: Mapping[str, Any], mistakes: list[Mistake], deep: bool = False
) -> RunConfig | None:
    """Bind a composed configuration, given as plain containers, and check it."""
    options = dict(values.get("mapper") or {})
    mapper = {
        key: options.pop(written)
        for key, written in (("name", "name"), ("target", "_target_"))
        if written in options
    }
    found: list[Mistake] = []
    cfg = bind(RunConfig, {**values, "mapper": {**mapper, "options": options}}, found)
    # A YAML writes them flat.
    mistakes += [mistake.at("mapper.options.", "mapper.") for mistake in found]
    if cfg is not None:
        mistakes += check(cfg)
    if deep and "target" in mapper:
        bind_mapper(MapperConfig(mapper.get("name", ""), mapper["target"], options), mistakes)
    return cfg


def raise_if_any(mistakes: Iterable[Mistake]) -> None:
    """Raise one error that lists all mistakes, each once.

    Raises:
        ConfigurationError: there is at least one.
    """
    lines = list(dict.fromkeys(str(mistake) for mistake in mistakes))
    if lines:
        count = "One setting is wrong" if len(lines) == 1 else f"{len(lines)} settings are wrong"
        raise ConfigurationError(
            f"{count}:\n" + "\n".join(f"  * {line}" for line in lines),
            fix="Correct them and run again; `python run.py --help` lists every choice.",
        )


def _compose(
    overrides: Sequence[str], conf: Path, mistakes: list[Mistake], deep: bool
) -> RunConfig | None:
    accepted: list[str] = []
    unknown: set[str] = set()
    for override in arguments.parse(overrides, mistakes):
        if arguments.belongs_to_hydra(override):
            continue
        if override.is_sweep_override():
            mistakes.append(_unasked_sweep(override))
            continue
        if arguments.is_group(override, conf):
            value = override.value()
            found = arguments.group_mistakes(
                override, value if isinstance(value, list) else [value], conf
            )
            mistakes += found
            if found:
                unknown.add(override.key_or_group)
                continue
        accepted.append(arguments.forced(override, conf))
    # A setting below a group whose choice is unknown cannot be judged.
    accepted = [word for word in accepted if word.lstrip("+").split(".")[0] not in unknown]
    try:
        with _hydra(conf):
            composed = hydra_compose(CONFIG_NAME, overrides=accepted)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        mistakes.append(Mistake("", str(error).strip()))
        return None
    assert isinstance(values, dict)
    named = {str(key): value for key, value in values.items()}
    return from_values(named, mistakes, deep and "mapper" not in unknown)


def _hydra(conf: Path) -> initialize_config_dir:
    GlobalHydra.instance().clear()
    return initialize_config_dir(str(conf), version_base=HYDRA_VERSION_BASE)


def _parse_in(conf: Path, overrides: Sequence[str]) -> list[Override]:
    with _hydra(conf):
        loader = GlobalHydra.instance().config_loader()
        return OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))


def _choices(override: Override, conf: Path) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    value = override.value()
    if isinstance(value, Glob):
        names = sorted(file.stem for file in (conf / override.key_or_group).glob("*.yaml"))
        return [f"{override.get_key_element()}={name}" for name in value.filter(names)]
    return [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]


def _unasked_sweep(override: Override) -> Mistake:
    key = override.key_or_group
    values = (override.input_line or "").partition("=")[2]
    several = f" or, for all of them in one run, `{key}=[{values}]`" if key == "logger" else ""
    return Mistake(key, f"`{values}` are several values: add -m to run the grid{several}")
