"""The words after `run.py`: Hydra's options, and overrides made uniform before Hydra reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from kvferry.app.binding import Mistake, did_you_mean

_VALUED = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn",
           "--config-dir", "-cd", "--info", "-i", "--experimental-rerun"}  # fmt: skip
_ALONE = {"--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r",
          "--multirun", "-m", "--shell-completion", "-sc"}  # fmt: skip
_NO_CHECK = {"--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc"}
MINIATURE = (
    "eval=smoke",
    "data.calibration_passages=8",
    "data.training_passages=0",
    "data.held_out_passages=4",
)
_HYPHENS = re.compile(r"^--(?=[^=\s]+=)")


@dataclass(frozen=True)
class Arguments:
    """A command line, sorted.

    Attributes:
        options: flags for Hydra, with their values.
        overrides: `key=value` and the like, without leading hyphens.
    """

    options: tuple[str, ...]
    overrides: tuple[str, ...]

    @property
    def multirun(self) -> bool:
        """Whether a grid is asked for."""
        return bool({"-m", "--multirun"} & set(self.options))

    @property
    def only_shows(self) -> bool:
        """Whether the configuration is only printed, and nothing runs."""
        names = {option.partition("=")[0] for option in self.options}
        return bool(names & {"--cfg", "-c", "--info", "-i"})

    @property
    def needs_no_check(self) -> bool:
        """Whether Hydra answers without composing what the user asked for."""
        return bool(_NO_CHECK & set(self.options))


def split(argv: Sequence[str]) -> Arguments:
    """Sort a command line; `--a=b`, as W&B agents write it, means `a=b`."""
    options: list[str] = []
    overrides: list[str] = []
    waiting = False
    for word in argv:
        name = word.partition("=")[0]
        if waiting or word in _ALONE | _VALUED or (name in _VALUED and name.startswith("--")):
            options.append(word)
            waiting = not waiting and word in _VALUED
        else:
            overrides.append(_HYPHENS.sub("", word))
    return Arguments(tuple(options), (*overrides, *_for_miniatures(overrides)))


def _for_miniatures(overrides: Sequence[str]) -> list[str]:
    """Little text and a short evaluation for miniatures, whose numbers mean nothing anyway."""
    given = {word.partition("=")[0] for word in overrides}
    if "size=pico" not in overrides or "experiment" in given:
        return []
    return [word for word in MINIATURE if word.partition("=")[0] not in given]


def parse(words: Sequence[str], mistakes: list[Mistake]) -> list[Override]:
    """Parse each override alone, so that one malformed word does not hide the others."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for word in words:
        try:
            parsed += parser.parse_overrides([word])
        except HydraException:
            mistakes.append(Mistake("", f"`{word}` is not of the form key=value"))
    return parsed


def is_group(override: Override, conf: Path) -> bool:
    """Whether an override chooses an option of a group, and does not set a value."""
    return (conf / override.key_or_group).is_dir()


def belongs_to_hydra(override: Override) -> bool:
    """Whether an override speaks to Hydra itself (launcher, sweeper, folders)."""
    return override.key_or_group.split("/")[0].split(".")[0] == "hydra"


def group_mistakes(override: Override, choices: Sequence[object], conf: Path) -> list[Mistake]:
    """Unknown options of a group, each with the closest known name."""
    group = override.key_or_group
    known = sorted(file.stem for file in (conf / group).glob("*.yaml"))
    mistakes: list[Mistake] = []
    for choice in choices:
        if choice is None or str(choice) in known:
            continue
        hint = did_you_mean(str(choice), known)
        every = "" if hint and len(known) > 12 else f"\n      one of: {', '.join(known)}"
        mistakes.append(Mistake(group, f"there is no `{choice}`.{hint}{every}"))
    return mistakes


def forced(override: Override, conf: Path) -> str:
    """The override as Hydra shall read it.

    A value is forced (`++`), so that an unknown key reaches our own check instead of Hydra's.
    """
    text = override.input_line or ""
    if is_group(override, conf) or belongs_to_hydra(override) or override.is_delete():
        return text
    return "++" + text.lstrip("+")
