"""The run folder: resume, force, failure, interruption, lock."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.app.compose import compose
from kvferry.app.folder import CHECKPOINTS, RunFolder, latest, load_config
from kvferry.app.schema import STAGES, RunConfig, StageName
from kvferry.app.stages import Stage, describe_plan, run_stages
from kvferry.errors import InputError
from tests.app.conftest import Memory


class Fakes:
    """Stages that count their calls; one of them may be told to raise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.raises: dict[str, BaseException] = {}

    def stage(self, name: StageName) -> Stage:
        def run(cfg: RunConfig, folder: Path, log: object) -> None:
            self.calls.append(name)
            if name in self.raises:
                raise self.raises[name]
            (folder / f"{name}.txt").write_text(name)

        return run

    def all(self) -> dict[StageName, Stage]:
        return {name: self.stage(name) for name in STAGES}


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


Go = Callable[..., tuple[int, str]]


@pytest.fixture
def go(fakes: Fakes, memory: Memory) -> Go:
    def run(cfg: RunConfig) -> tuple[int, str]:
        screen = io.StringIO()
        code = run_stages(
            cfg,
            fakes.all(),
            console=Console(file=screen, width=200),
            opened=lambda cfg, folder: memory,
        )
        return code, screen.getvalue()

    return run


def test_the_same_config_runs_once(cfg: RunConfig, fakes: Fakes, memory: Memory, go: Go) -> None:
    code, said = go(cfg)
    assert code == 0 and str(RunFolder.of(cfg).path) in said
    assert fakes.calls == ["fit", "evaluate", "report"]
    assert memory.config["config_hash"] == cfg.config_hash and memory.closed == [False]
    assert load_config(RunFolder.of(cfg).path) == cfg
    code, said = go(cfg)
    assert code == 0 and "force=true" in said
    assert len(fakes.calls) == 3 and len(memory.closed) == 1


def test_force_and_other_settings_run_again(cfg: RunConfig, fakes: Fakes, go: Go) -> None:
    go(cfg)
    go(replace(cfg, force=True))
    assert fakes.calls == list(STAGES) * 2
    go(replace(cfg, seed=cfg.seed + 1))
    assert fakes.calls == list(STAGES) * 3, "control: another seed is another folder"


def test_a_repeated_stage_makes_what_follows_stale(cfg: RunConfig, fakes: Fakes, go: Go) -> None:
    go(cfg)
    go(replace(cfg, force=True, stages=("evaluate",)))
    folder = RunFolder.of(cfg)
    assert folder.has("fit") and folder.has("evaluate") and not folder.has("report")
    go(cfg)
    assert fakes.calls[3:] == ["evaluate", "report"]


def test_a_finished_stage_starts_anew_and_a_stopped_one_goes_on(
    cfg: RunConfig, fakes: Fakes, go: Go
) -> None:
    checkpoint = RunFolder.of(cfg).path / CHECKPOINTS / "last.ckpt"
    found: list[bool] = []

    def fit(cfg: RunConfig, folder: Path, log: object) -> None:
        found.append(checkpoint.exists())
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.write_text("half-way")
        if "fit" in fakes.raises:
            raise fakes.raises["fit"]

    fakes.stage = lambda name: fit if name == "fit" else Fakes().stage(name)  # type: ignore[method-assign]
    fakes.raises["fit"] = KeyboardInterrupt()
    for again in (cfg, replace(cfg, force=True)):
        with pytest.raises(KeyboardInterrupt):
            go(again)
    assert found == [False, True]
    fakes.raises.clear()
    go(cfg)
    assert found[2] and not checkpoint.exists(), "nothing is kept for a finished stage"
    checkpoint.parent.mkdir()
    checkpoint.write_text("left by another version")
    go(replace(cfg, force=True))
    assert found == [False, True, True, False]


def test_failure_is_marked_and_resumed(
    cfg: RunConfig, fakes: Fakes, memory: Memory, go: Go
) -> None:
    fakes.raises["evaluate"] = InputError("No text.", fix="Give some.")
    code, said = go(cfg)
    folder = RunFolder.of(cfg)
    assert code == 1 and folder.status == "failed" and memory.closed == [True]
    assert "No text." in said and "Give some." in said and "Traceback" not in said
    assert "Traceback" in (folder.path / "FAILED").read_text()
    fakes.raises.clear()
    assert go(cfg)[0] == 0
    assert fakes.calls == ["fit", "evaluate", "evaluate", "report"]
    assert folder.status == "done" and not (folder.path / "FAILED").exists()


def test_an_unexpected_error_shows_no_traceback(cfg: RunConfig, fakes: Fakes, go: Go) -> None:
    fakes.raises["fit"] = KeyError("layer")
    code, said = go(cfg)
    assert code == 1 and "Traceback" not in said
    assert "KeyError" in said and "FAILED" in said


def test_a_full_disk_says_so(cfg: RunConfig, fakes: Fakes, go: Go) -> None:
    fakes.raises["fit"] = OSError(errno.ENOSPC, "No space left on device", "mapper.bin")
    code, said = go(cfg)
    assert code == 1 and "The disk is full." in said and "same command" in said


def test_a_stage_asks_for_what_it_needs(cfg: RunConfig, fakes: Fakes, go: Go) -> None:
    code, said = go(replace(cfg, stages=("evaluate",)))
    assert code == 1 and "stages=[fit,evaluate]" in said and not fakes.calls
    assert go(replace(cfg, stages=("fit",)))[0] == 0
    assert go(replace(cfg, stages=("evaluate",)))[0] == 0


def test_interruption_leaves_a_resumable_folder(
    cfg: RunConfig, fakes: Fakes, memory: Memory, go: Go
) -> None:
    fakes.raises["evaluate"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        go(cfg)
    folder = RunFolder.of(cfg)
    assert folder.status == "unfinished" and memory.closed == [True]
    fakes.raises.clear()
    go(cfg)
    assert fakes.calls == ["fit", "evaluate", "evaluate", "report"]


def hold(cfg: RunConfig, held: object, release: object) -> None:
    with RunFolder.of(cfg).lock():
        held.set()  # type: ignore[attr-defined]
        release.wait(60)  # type: ignore[attr-defined]


def test_two_processes_do_not_share_a_folder(cfg: RunConfig, fakes: Fakes, go: Go) -> None:
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(cfg, held, release))
    other.start()
    try:
        assert held.wait(60)
        code, said = go(cfg)
        assert code == 1 and f"process {other.pid}" in said and not fakes.calls
    finally:
        release.set()
        other.join()
    assert go(cfg)[0] == 0, "control: the lock ends with its process"


def test_latest_finds_the_last_finished_run(cfg: RunConfig, go: Go, tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    go(cfg)
    newer = replace(cfg, seed=5)
    go(newer)
    os.utime(RunFolder.of(cfg).path / "DONE", (1, 1))
    outputs = Path(cfg.outputs)
    assert latest(outputs) == RunFolder.of(newer)
    assert latest(outputs, pair=cfg.pair.name) == RunFolder.of(newer)
    assert latest(outputs, pair="other") is None
    assert latest(outputs, holding="mapper") is None


def test_plan_tells_without_running(cfg: RunConfig, go: Go) -> None:
    full = replace(cfg, size="full")
    said = "\n".join(describe_plan(full))
    assert "would run: fit, evaluate, report" in said and "0.5 GiB" in said
    assert "would train" not in said, "a closed form has nothing to train"
    go(cfg)
    assert "would run: nothing" in "\n".join(describe_plan(cfg))


def test_plan_says_what_is_learned_from(tmp_path: Path) -> None:
    words = ["mapper=mobility", "mapper.training_steps=90", f"outputs={tmp_path}"]
    words += ["data.calibration_passages=30", "mapper.held_out=4"]
    said = "\n".join(describe_plan(compose([*words, "data.training_passages=7"])))
    assert "7 training texts" in said
    cfg = compose([*words, "data.training_passages=0"])
    said = "\n".join(describe_plan(cfg))
    assert "would train: 90 steps" in said and "30 calibration texts" in said
    assert "4 others" in said and "last checkpoint" not in said
    (RunFolder.of(cfg).path / CHECKPOINTS).mkdir(parents=True)
    assert "from the last checkpoint on" in "\n".join(describe_plan(cfg))


SLOW_RUN = """
    import sys, time
    from kvferry.app import run
    import types
    def fit(cfg, folder, log): print("fitting", flush=True); log.log_metrics({"a": 1.0})
    def evaluate(cfg, folder, log): print("evaluating", flush=True); time.sleep(float(sys.argv[1]))
    def report(cfg, folder, log): pass
    fake = types.ModuleType("kvferry.app.pipeline")
    fake.fit, fake.evaluate, fake.report = fit, evaluate, report
    sys.modules["kvferry.app.pipeline"] = fake
    import kvferry.app
    kvferry.app.pipeline = fake
    from kvferry.app.compose import compose
    sys.exit(run.guarded(lambda: run.execute(compose(sys.argv[2:]))))
"""


@pytest.mark.parametrize(
    ("sent", "more"),
    [(signal.SIGINT, []), (signal.SIGINT, ["force=true"]), (signal.SIGKILL, [])],
)
def test_a_stopped_process_resumes(sent: signal.Signals, more: list[str], tmp_path: Path) -> None:
    """Ctrl-C ends with 130 and one line; a kill cannot say anything; both resume after fit."""
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SLOW_RUN))
    words = ["experiment=smoke", f"outputs={tmp_path / 'out'}"]
    process = subprocess.Popen(
        [sys.executable, str(script), "600", *words, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell starts background jobs with ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while "evaluating" not in (line := process.stdout.readline()):
        assert line, "the process ended early"
    time.sleep(0.2)
    process.send_signal(sent)
    rest, _ = process.communicate(timeout=120)
    if sent is signal.SIGINT:
        assert process.returncode == 130
        without = " without force=true" if more else ""
        assert f"The same command{without} resumes" in rest and "Traceback" not in rest
    again = subprocess.run(
        [sys.executable, str(script), "0", *words], capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "fitting" not in again.stdout and "evaluating" in again.stdout
