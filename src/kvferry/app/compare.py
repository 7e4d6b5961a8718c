"""`kvferry compare`: many runs in one table a pair."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.app.compose import compose
from kvferry.app.folder import ROWS, SOLVE_SECONDS, labelled, load_config
from kvferry.app.schema import LocalLoggerConfig, MapperConfig
from kvferry.errors import ConfigurationError, InputError
from kvferry.results.comparison import Contender, comparison_tables
from kvferry.results.rows import read_rows, write_atomically


def compare(runs: Sequence[str], *, to: Path | None = None, intervals: bool = False) -> str:
    """The tables, in markdown.

    Args:
        runs: run folders, each alone or as ``label=folder``; those that scored no text are left
            out, conversations among them.
        to: a file that receives them as well.
        intervals: behind KL and recall kept.

    Raises:
        InputError: no folder has rows.
        RowsError, StorageError: rows are damaged, or the file cannot be written.
    """
    contenders = [c for run in runs if (c := _contender(run)) is not None]
    if not contenders:
        raise InputError(
            "There is nothing to compare.",
            found=f"no {ROWS} in {', '.join(runs[:3])}",
            fix="name folders of evaluated runs, for instance outputs/*",
        )
    tables = comparison_tables(contenders, intervals=intervals)
    if to is not None:
        write_atomically(to, f"{tables}\n".encode())
    return tables


def settings_apart(config: MapperConfig) -> Iterator[str]:
    """Words for the settings in which a mapper differs from its YAML."""
    try:
        usual = compose([f"mapper={config.name}"]).mapper
    except ConfigurationError:
        return  # it has settings that every run must name, or is of another version
    yield from _apart(config.options, usual.options, "")


def _apart(mine: Mapping[str, Any], usual: Mapping[str, Any], where: str) -> Iterator[str]:
    if mine.get("name") != usual.get("name"):
        yield f"{where.removesuffix('.')}={mine.get('name')}"
        return
    for key, value in mine.items():
        other = usual.get(key, value)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _apart(value, other, f"{where}{key}.")
        elif value != other:
            yield f"{where}{key}={value}"


def _contender(run: str) -> Contender | None:
    label, folder = labelled(run)
    if not (folder / ROWS).is_file():
        return None
    found = Contender(label or _label(folder), read_rows(folder / ROWS), _fit_seconds(folder))
    return found if found.splits else None


def _label(folder: Path) -> str:
    try:
        config = load_config(folder).mapper
        return " ".join([config.name, *settings_apart(config)])
    except ConfigurationError:
        # Made by another version: the folder's name says which run it was.
        return folder.name


def _fit_seconds(folder: Path) -> float | None:
    path, found = folder / LocalLoggerConfig().file, None
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found = json.loads(line).get(SOLVE_SECONDS, found)
            except ValueError:
                return found  # a kill cut it short
    return found
