"""What a run's settings ask of the trainer, and the file of curves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.app.compose import compose
from kvferry.app.corpora import load_corpora
from kvferry.app.training import CurveLogger, TrainingProgress, learner
from kvferry.results.training import read_curves
from kvferry.training.averaging import AveragedWeights
from tests.app.conftest import Memory
from tests.pairs import reader_of, statistics_of


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_training_that_goes_on_leaves_no_line_twice(
    tmp_path: Path, memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "training.jsonl"
    path.write_text('{"step": 99, "train/loss": 7.0}\n')
    curves = CurveLogger(path, memory)
    curves.begin(0, {"held_out/loss": 0.9})
    assert steps_of(path) == [0] and memory.metrics == [{"held_out/loss": 0.9}]
    for step in range(5):
        curves.log_metrics({"train/loss": 0.5, "epoch": 0}, step=step)
    curves.log_metrics({"held_out/loss": 0.8}, step=3)
    with path.open("a") as lines:
        lines.write('{"step": 5, "train/lo')
    curves.begin(4, {"held_out/loss": 0.9})
    assert steps_of(path) == [0, 1, 2, 3, 4, 4], "up to the checkpoint, and its look"
    assert "goes on after step 4" in capsys.readouterr().out
    path.unlink()
    curves.begin(4, {})
    assert steps_of(path) == [], "a file that went away is no reason to stop"


def test_a_later_phase_leaves_the_earlier_ones_alone(tmp_path: Path, memory: Memory) -> None:
    """Also when it is stopped before its first checkpoint, and again after it."""
    path = tmp_path / "training.jsonl"
    first, second = CurveLogger(path, memory), CurveLogger(path, memory, done_before=2)
    first.begin(0, {"held_out/loss": 0.02})
    first.log_metrics({"train/loss": 0.02}, step=1)
    first.log_metrics({"held_out/loss": 0.01}, step=1)
    for _ in range(2):
        second.begin(0, {"held_out/loss": 0.9})
        second.log_metrics({"train/loss": 0.8}, step=0)
    assert steps_of(path) == [0, 2, 2, 2, 3]
    second.log_metrics({"train/loss": 0.7}, step=1)
    second.begin(1, {"held_out/loss": 0.9})
    assert steps_of(path) == [0, 2, 2, 2, 3]
    one, other = read_curves(path)
    assert one.held_out["loss"] == [(0, 0.02), (2, 0.01)]
    assert other.held_out["loss"] == [(2, 0.9)] and other.start == 2
    first.begin(2, {})
    assert steps_of(path) == [0, 2, 2], "control: what follows a phase comes again with it"


def test_settings_reach_the_trainer(tmp_path: Path, memory: Memory) -> None:
    reader, statistics = reader_of("llama", "gemma3"), statistics_of("llama", "gemma3")

    def asked(*words: str) -> Any:
        cfg = compose(["experiment=smoke", "trainer=cpu", f"cache={tmp_path}", *words])
        corpora = load_corpora(cfg, tmp_path)
        return learner(cfg, tmp_path, reader, corpora, statistics, memory)

    found = asked("trainer.gradient_clip=0.5", "trainer.gradient_checkpointing=true")
    assert found.material.gradient_checkpointing
    assert found.options.options["gradient_clip_val"] == 0.5
    (bar,) = found.options.callbacks(9)
    assert isinstance(bar, TrainingProgress) and bar.steps == 9
    found = asked("trainer.gradient_clip=0", "trainer.ema=0.9")
    assert found.options.options["gradient_clip_val"] is None
    _, average = found.options.callbacks(9)
    assert isinstance(average, AveragedWeights) and average.decay == 0.9
    for words, precision in (
        (["trainer.map_dtype=bfloat16"], "bf16-mixed"),
        (["trainer.map_dtype=float32"], "32-true"),
        (["trainer.map_dtype=bfloat16", "trainer.training_precision=32-true"], "32-true"),
    ):
        assert asked(*words).options.options["precision"] == precision


def test_the_bar_goes_whatever_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning tears no callback down after an exception; a bar that stays hides the cursor."""
    shown: list[object] = []

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Any]:
        shown.append(total)
        try:
            yield lambda steps=1: shown.append(steps)
        finally:
            shown.append("gone")

    monkeypatch.setattr("kvferry.app.training.progress", bar)
    shows: Any = TrainingProgress(9)
    trainer = SimpleNamespace(global_step=4)
    shows.on_train_start(trainer, None)
    shows.on_train_batch_end(trainer, None)
    shows.on_exception(trainer, None, KeyboardInterrupt())
    shows.teardown(trainer, None, "fit")
    assert shown == [9, 4, 1, "gone"]
