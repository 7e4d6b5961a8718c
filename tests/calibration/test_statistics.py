"""Calibration resumes, is counted once, and keeps what it has read."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
import torch

from kvferry.calibration import statistics
from kvferry.calibration.corpus import load_miniature
from kvferry.calibration.reader import PairReader
from kvferry.calibration.statistics import (
    CalibrationPlan,
    collect_statistics,
)
from kvferry.calibration.trace_store import TraceStore
from kvferry.errors import InputError
from kvferry.mappers.base import Statistics
from kvferry.mappers.layout import COMPONENTS
from tests.pairs import reader_of, traces_of

PLAN = CalibrationPlan(passage_tokens=80, code_width=8)
TEXTS = [p.text for p in load_miniature(5, sentences=10, seed=3)]


def trainer() -> pytorch_lightning.Trainer:
    return pytorch_lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def assert_same(one: Statistics, other: Statistics, tolerance: float = 1e-9) -> None:
    for component in COMPONENTS:
        a, b = one.moments[component], other.moments[component]
        assert a.rows == b.rows
        for name in ("mean_x", "mean_y", "c_xx", "c_xy"):
            assert torch.allclose(getattr(a, name), getattr(b, name), rtol=1e-5, atol=tolerance)


@pytest.fixture
def reader() -> PairReader:
    return reader_of("llama", "gemma3")


def test_a_killed_calibration_goes_on_where_it_was(reader: PairReader, tmp_path: Path) -> None:
    whole = collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path / "whole")
    read: list[int] = []

    def die_in_the_third(passages: int) -> None:
        read.append(passages)
        if sum(read) == 3:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        collect_statistics(
            reader, TEXTS, PLAN, trainer(), tmp_path / "cut", save_every=2, each=die_in_the_third
        )
    resumed: list[int] = []
    again = collect_statistics(
        reader, TEXTS, PLAN, trainer(), tmp_path / "cut", save_every=2, each=resumed.append
    )
    assert resumed[0] == 2, "the two saved passages are not read again"
    assert sum(resumed) == len(TEXTS)
    assert_same(whole, again, tolerance=1e-6)


def test_ctrl_c_arrives_as_such_and_still_works_afterwards(
    reader: PairReader, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)

    def press(passages: int) -> None:
        if passages:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path, each=press)
    assert signal.getsignal(signal.SIGINT) is before
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_that_is_told_to_end_ends(reader: PairReader, tmp_path: Path) -> None:
    """Lightning's own handler of SIGTERM would note it and read on."""
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []
    collect_statistics(
        reader,
        TEXTS,
        PLAN,
        trainer(),
        tmp_path,
        each=lambda passages: seen.append(signal.getsignal(signal.SIGTERM)),
    )
    assert seen[-1] is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


KILLED = """
import os, signal, sys
from pathlib import Path
from kvferry.calibration import moments_store, statistics
from tests.calibration.test_statistics import PLAN, TEXTS, trainer
from tests.pairs import reader_of

calls = {"save_file": 0, "new_file": 0}

def deadly(name, step):
    real = getattr(moments_store, name)
    def call(*args):
        calls[name] += 1
        if calls[name] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    setattr(moments_store, name, call)

deadly(sys.argv[1], int(sys.argv[2]))
reader = reader_of("llama", "gemma3")
statistics.collect_statistics(reader, TEXTS, PLAN, trainer(), Path(sys.argv[3]), save_every=2)
"""


@pytest.mark.parametrize(
    ("call", "step", "kept"),
    # A save writes keys, values and code, then renames progress.json.
    [("save_file", 2, 0), ("save_file", 5, 2), ("new_file", 2, 2)],
)
def test_a_kill_in_the_middle_of_a_save_costs_no_more_than_that_save(
    call: str, step: int, kept: int, reader: PairReader, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", KILLED, call, str(step), str(tmp_path)]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run(words, env=environment, capture_output=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    told: list[int] = []
    again = collect_statistics(
        reader, TEXTS, PLAN, trainer(), tmp_path, save_every=2, each=told.append
    )
    assert told[0] == kept and sum(told) == len(TEXTS)
    assert again.moments["keys"].rows == again.moments["values"].rows
    (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert len(list(place.iterdir())) == 4, "what the killed save left is gone"
    whole = collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path / "whole")
    assert_same(whole, again, tolerance=1e-6)


def test_more_text_reads_only_what_is_new(
    reader: PairReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [p.text for p in load_miniature(8, sentences=10, seed=4)]
    first = collect_statistics(reader, texts[:4], PLAN, trainer(), tmp_path)
    told: list[int] = []
    more = collect_statistics(reader, texts, PLAN, trainer(), tmp_path, each=told.append)
    assert told[0] == 4 and sum(told) == 8
    monkeypatch.setattr(statistics, "source_code", lambda *_: first.code)
    fresh = collect_statistics(reader, texts, PLAN, trainer(), tmp_path / "fresh")
    assert_same(more, fresh, tolerance=1e-6)
    for other in (texts[1:], texts[:3] + texts[4:]):
        told.clear()
        collect_statistics(reader, other, PLAN, trainer(), tmp_path, each=told.append)
        assert told[0] == 0, "only a prefix counts, and only a whole one"
    told.clear()
    plan = dataclasses.replace(PLAN, passage_tokens=70)
    collect_statistics(reader, texts, plan, trainer(), tmp_path, each=told.append)
    assert told[0] == 0, "another plan is another base"


def test_damaged_moments_are_collected_anew(reader: PairReader, tmp_path: Path) -> None:
    collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path)
    (path,) = tmp_path.rglob("keys*.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    told: list[int] = []
    collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path, each=told.append)
    assert told[0] == 0 and sum(told) == len(TEXTS)


def test_finished_moments_are_read_from_disk(reader: PairReader, tmp_path: Path) -> None:
    first = collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path)
    told: list[int] = []
    second = collect_statistics(reader, TEXTS, PLAN, None, tmp_path, each=told.append)  # type: ignore[arg-type]
    assert told == [len(TEXTS)], "a trainer of None shows that nothing was run"
    assert_same(first, second)
    assert PLAN.key(reader, TEXTS) != PLAN.key(reader, TEXTS[:4])
    assert PLAN.key(reader, TEXTS) != CalibrationPlan(passage_tokens=81).key(reader, TEXTS)


def test_batches_with_padding_count_the_same_rows(reader: PairReader, tmp_path: Path) -> None:
    one = collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path / "1")
    two = collect_statistics(reader, TEXTS, PLAN, trainer(), tmp_path / "2", batch_size=2)
    assert_same(one, two, tolerance=1e-4)


def test_nothing_to_calibrate_on_is_said(reader: PairReader, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to calibrate"):
        collect_statistics(reader, [], PLAN, trainer(), tmp_path)


def test_a_stored_trace_is_the_trace(
    reader: PairReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TraceStore(tmp_path, reader)
    trace = traces_of("llama", "gemma3", 1)[0]
    store.read(trace.tokens)
    (path,) = tmp_path.rglob("*.safetensors")

    def unexpected(*_: object) -> None:
        raise AssertionError("the models were run again")

    with monkeypatch.context() as patch:
        patch.setattr(PairReader, "read", unexpected)
        again = store.read(trace.tokens)
    for component in COMPONENTS:
        for side in ("source", "target"):
            kept = getattr(getattr(again, side), component)
            fresh = getattr(getattr(trace, side), component)
            assert list(kept) == list(fresh)
            assert all(torch.allclose(kept[i], fresh[i], atol=1e-5) for i in fresh)
    path.write_bytes(path.read_bytes()[:500])
    assert store.read(trace.tokens).target.tokens == trace.target.tokens, "a torn file is replaced"
    assert path.stat().st_size > 500 and not list(tmp_path.rglob("*.tmp"))
