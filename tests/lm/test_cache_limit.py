"""The cache keeps to its size, and lets go of what was used longest ago."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.errors import ConfigurationError
from kvferry.lm.cache_limit import (
    VARIABLE,
    beyond,
    cache_limit_bytes,
    entries,
    evict,
    touch,
)
from kvferry.lm.store import locked


def trace(root: Path, name: str, size: int, used: float) -> Path:
    path = root / "traces" / "pair" / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (used, used))
    return path


def moments(root: Path, name: str, size: int, used: float) -> Path:
    place = root / "moments" / name
    place.mkdir(parents=True)
    for part in ("keys.safetensors", "progress.json"):
        (place / part).write_bytes(b"x" * (size // 2))
        os.utime(place / part, (used, used))
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """100 bytes each, used in the order of their names, and a model that does not count."""
    moments(tmp_path, "a", 100, 10)
    trace(tmp_path, "b", 100, 20)
    moments(tmp_path, "c", 100, 30)
    trace(tmp_path, "d", 100, 40)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_bytes(b"x" * 1000)
    return tmp_path


def names(root: Path) -> list[str]:
    return [entry.path.stem for entry in entries(root)]


def test_what_was_used_longest_ago_goes(root: Path) -> None:
    assert names(root) == ["a", "b", "c", "d"]
    assert not beyond(root, 400)
    goners = beyond(root, 250)
    assert [entry.path.stem for entry in goners] == ["a", "b"]
    assert names(root) == ["a", "b", "c", "d"], "saying what would go removes nothing"
    assert evict(goners) == goners
    assert names(root) == ["c", "d"]
    assert evict(goners) == []
    evict(beyond(root, 0))
    assert names(root) == [] and (root / "models" / "weights").exists()


def test_use_saves_an_entry(root: Path) -> None:
    touch(root / "moments" / "a" / "progress.json")
    assert names(root)[-1] == "a"
    assert [entry.path.stem for entry in beyond(root, 250)] == ["b", "c"]


def test_what_the_run_uses_stays(root: Path) -> None:
    assert [entry.path.stem for entry in beyond(root, 0, since=30)] == ["a", "b"]


def test_what_another_process_writes_stays(root: Path) -> None:
    with locked(root / "moments" / "a"):
        gone = evict(beyond(root, 200))
    assert [entry.path.stem for entry in gone] == ["b"]
    assert names(root) == ["a", "c", "d"]


def test_the_limit_is_named_or_forty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert cache_limit_bytes() == 40_000_000_000
    monkeypatch.setenv(VARIABLE, "1.5")
    assert cache_limit_bytes() == 1_500_000_000
    assert cache_limit_bytes(2) == 2_000_000_000, "a setting wins over the variable"
    for wrong in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigurationError, match="no size"):
            cache_limit_bytes()
