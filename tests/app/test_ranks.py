"""Processes beside a run: one that fails is named, and none is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.app import ranks
from kvferry.app.ranks import RankError, companions
from kvferry.errors import InputError

FAILS_AFTER_START = "import sys; print('ready', flush=True); sys.exit('boom: no memory')"
STAYS = "import os; print('ready', flush=True); os.read(0, 1)"


def test_a_single_rank_starts_nothing(tmp_path: Path) -> None:
    with companions(tmp_path, 1) as rank:
        assert rank is None
    assert list(tmp_path.iterdir()) == []


def test_one_that_cannot_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="Rank 1") as caught, companions(tmp_path, 2):
        raise AssertionError("never ready")
    assert "is not a run folder" in str(caught.value)


@pytest.mark.parametrize("seen", [RuntimeError("closed by peer"), InputError("Lost.", fix="?")])
def test_one_that_dies_later_is_named_instead_of_the_closed_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Exception
) -> None:
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-c", FAILS_AFTER_START))
    with pytest.raises(RankError, match="boom: no memory"), companions(tmp_path, 3) as rank:
        assert rank is not None and (rank.index, rank.count) == (0, 3)
        raise seen


def test_none_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-c", STAYS))
    monkeypatch.setattr(ranks, "_PATIENCE", 0.1)
    started: list[ranks._Worker] = []
    start = ranks._Worker.start
    monkeypatch.setattr(
        ranks._Worker, "start", lambda *words: started.append(start(*words)) or started[-1]
    )
    with companions(tmp_path, 3):
        assert [worker.process.poll() for worker in started] == [None, None]
    with pytest.raises(ZeroDivisionError), companions(tmp_path, 2):
        raise ZeroDivisionError
    assert all(worker.process.poll() is not None for worker in started) and len(started) == 3
