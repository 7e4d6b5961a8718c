"""A bound on what runs leave in the cache: what was used longest ago goes first."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from kvferry.errors import ConfigurationError

BOUNDED = ("moments", "traces")
"""Folders of the cache that grow with every run and can be made again from models and text."""

DEFAULT_GB = 40.0
VARIABLE = "KVFERRY_CACHE_LIMIT_GB"


@dataclass(frozen=True)
class Entry:
    """Something that is made, used and removed as a whole.

    Args:
        path: a folder of moments or a file of traces.
        bytes: what it takes.
        used: when it was last used, in seconds since the epoch.
    """

    path: Path
    bytes: int
    used: float


def cache_limit_bytes(limit_gb: float | None = None) -> int:
    """The bound: the argument, `$KVFERRY_CACHE_LIMIT_GB`, 40 GB.

    Raises:
        ConfigurationError: the variable holds no number.
    """
    named = os.environ.get(VARIABLE)
    if limit_gb is None and named:
        try:
            limit_gb = float(named)
        except ValueError:
            limit_gb = math.nan
        if not 0 <= limit_gb < math.inf:
            raise ConfigurationError(
                f"{VARIABLE} is no size.", found=named, expected="a number of GB", fix="correct it"
            )
    return int((DEFAULT_GB if limit_gb is None else limit_gb) * 1e9)


def touch(path: Path) -> None:
    """Note that an entry is used; a cache that cannot be written is used all the same."""
    with suppress(OSError):
        os.utime(path)


def entries(root: Path) -> list[Entry]:
    """Everything that the bound counts, what was used longest ago first."""
    found = [_measured(path) for path in _members(root)]
    return sorted((e for e in found if e is not None), key=lambda e: (e.used, str(e.path)))


def beyond(root: Path, limit: int, since: float = math.inf) -> list[Entry]:
    """What has to go for the rest to take at most ``limit`` bytes.

    Args:
        since: entries used from this moment on stay, whatever they take.
    """
    known = entries(root)
    excess = sum(entry.bytes for entry in known) - limit
    out: list[Entry] = []
    for entry in known:
        if excess <= 0 or entry.used >= since:
            break
        out.append(entry)
        excess -= entry.bytes
    return out


def evict(goners: Iterable[Entry]) -> list[Entry]:
    """Remove entries, all but those that another process is writing; returns what went."""
    return [entry for entry in goners if _remove(entry.path)]


def _members(root: Path) -> Iterator[Path]:
    moments, traces = (root / name for name in BOUNDED)
    yield from (path for path in moments.glob("*") if path.is_dir())
    # A name that begins with a dot is being written.
    yield from (p for p in traces.glob("*/*") if p.is_file() and not p.name.startswith("."))


def _measured(path: Path) -> Entry | None:
    try:
        if path.is_file():
            stat = path.stat()
            return Entry(path, stat.st_size, stat.st_mtime)
        stats = [file.stat() for file in path.rglob("*") if file.is_file()]
        used = max((stat.st_mtime for stat in stats), default=path.stat().st_mtime)
        return Entry(path, sum(stat.st_size for stat in stats), used)
    except FileNotFoundError:
        return None  # another process was quicker


def _remove(path: Path) -> bool:
    if not path.exists():
        return False
    if path.is_file():
        path.unlink(missing_ok=True)
        return True
    try:
        with FileLock(f"{path}.lock", timeout=0):
            shutil.rmtree(path, ignore_errors=True)
    except Timeout:
        return False
    return not path.exists()
