"""The entry: fast answers, exit codes, grids."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import kvferry.app
from kvferry.app import compose as composing
from kvferry.app import run
from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder
from kvferry.app.loggers import RunLogger
from kvferry.app.schema import RunConfig
from kvferry.errors import InputError

ROOT = Path(__file__).parents[2]

PROBE = """
import sys
from kvferry.app.run import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "polars", "wandb") if name in sys.modules]
print("heavy:", *heavy)
sys.exit(code)
"""


def cpu_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize(
    "words", [["--help"], ["--cfg", "job", "size=pico"], ["--cfg", "job", "mapper=mobility"]]
)
def test_help_and_config_are_quick(words: list[str]) -> None:
    """Processor time, as the machine that runs the tests may be busy."""
    before = cpu_seconds()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy:\n")
    assert cpu_seconds() - before < 2
    assert ("heterofold" if words == ["--help"] else "calibration_passages") in done.stdout
    assert ("mobility" in done.stdout) == (words[-1] != "size=pico")


def test_wrong_settings_end_with_two_and_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "run.py", "--mapper=heterofld", "+typo=1", "seed=x", "--cfg", "job"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "3 settings are wrong" in done.stderr and "Traceback" not in done.stderr
    assert "Did you mean `heterofold`?" in done.stderr


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Fake stages; each call is kept as (stage, mapper, seed). Seed 13 fails."""
    calls: list[tuple[str, str, int]] = []
    fake = types.ModuleType("kvferry.app.pipeline")

    def stage(name: str) -> None:
        def run_it(cfg: RunConfig, folder: Path, log: RunLogger) -> None:
            calls.append((name, cfg.mapper.name, cfg.seed))
            if cfg.seed == 13:
                raise InputError("Thirteen.", fix="Another.")
            if cfg.seed == 99:
                raise KeyboardInterrupt

        setattr(fake, name, run_it)

    for name in ("fit", "evaluate", "report"):
        stage(name)
    monkeypatch.setitem(sys.modules, "kvferry.app.pipeline", fake)
    monkeypatch.setattr(kvferry.app, "pipeline", fake, raising=False)
    monkeypatch.setattr(composing, "bind_mapper", lambda config, mistakes: None)
    return calls


def test_one_run(pipeline: list[tuple[str, str, int]], tmp_path: Path) -> None:
    words = ["experiment=smoke", f"outputs={tmp_path}"]
    assert run.main([*words, "--seed=3"]) == 0
    assert pipeline == [(stage, "anchored", 3) for stage in ("fit", "evaluate", "report")]
    assert RunFolder.of(compose([*words, "seed=3"])).status == "done"
    assert run.main([*words, "seed=13"]) == 1
    assert run.main([*words, "seed=99"]) == 130
    assert run.main([*words, "plan=true", "seed=4"]) == 0
    assert not RunFolder.of(compose([*words, "seed=4"])).path.exists()


def test_a_grid_runs_every_job_and_sums_up(
    pipeline: list[tuple[str, str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment=smoke", f"outputs={tmp_path}", "-m"]
    grid = ["mapper=full_head_ridge,heterofold", "seed=1,13"]
    assert run.main([*words, *grid]) == 1, "one of the jobs fails, the others go on"
    said = capsys.readouterr().out
    assert [call for call in pipeline if call[0] == "report"] == [
        ("report", "full_head_ridge", 1),
        ("report", "heterofold", 1),
    ]
    assert said.count("done") >= 2 and said.count("failed") == 2
    pipeline.clear()
    assert run.main([*words, "mapper=full_head_ridge,heterofold", "seed=1"]) == 0
    assert not pipeline, "finished jobs are not run again"
    assert run.main([*words, "seed=99,2"]) == 130
    assert pipeline == [("fit", "anchored", 99)], "ctrl-C ends the whole grid"


def test_a_wrong_grid_starts_no_job(pipeline: list[tuple[str, str, int]], tmp_path: Path) -> None:
    assert run.main(["experiment=smoke", f"outputs={tmp_path}", "-m", "seed=1,-1"]) == 2
    assert not pipeline and not list(tmp_path.iterdir())


def test_composing_a_run_is_quick() -> None:
    compose()
    started = time.process_time()
    compose()
    assert time.process_time() - started < 1.5
