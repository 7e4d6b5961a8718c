"""A mapper that learns, the whole way on miniatures: stopped twice, resumed, reported, loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvferry.app import run
from kvferry.app.compose import compose
from kvferry.app.folder import CHECKPOINTS, CURVES, RunFolder
from kvferry.app.models import load_handoff, load_reader
from kvferry.app.run import execute
from kvferry.app.schema import RunConfig
from kvferry.calibration.corpus import load_miniature
from kvferry.handoff.handoff import Handoff
from kvferry.mappers.artefact import WEIGHTS
from kvferry.mappers.refined import RefinedMapper

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 40, 5
WORDS = [
    "experiment=smoke",
    "pair=smollm2_gemma3",
    "mapper=mobility",
    "data.passage_tokens=200",
    "trainer=cpu",
    "trainer.threads=1",
    f"mapper.training_steps={STEPS}",
    f"mapper.validate_every={EVERY}",
    "mapper.learning_rate=3e-3",
    "mapper.warmup=2",
    "mapper.rank=4",
    "mapper.directions=16",
    "mapper.width=16",
    "mapper.kernel=3",
    "mapper.passages=4",
    "mapper.held_out=2",
    "mapper.shortest_context=32",
]


def words(folder: Path, *more: str) -> list[str]:
    # A fixture of module scope runs before the cache is made private: name one.
    return [*WORDS, f"outputs={folder / 'outputs'}", f"cache={folder.parent / 'cache'}", *more]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    cfg = compose(words(tmp_path_factory.mktemp("whole"), "logger=[local,csv]"))
    assert execute(cfg) == 0
    return cfg


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / CURVES).read_text().splitlines()]


def steps(folder: Path, prefix: str) -> list[int]:
    return [int(line["step"]) for line in lines(folder) if f"{prefix}/loss" in line]


def test_the_report_shows_how_it_learned(finished: RunConfig) -> None:
    folder = RunFolder.of(finished).path
    page = (folder / "report.html").read_text()
    assert "<h2>Training</h2>" in page and f"of {STEPS}" in page
    assert (folder / "figures" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert steps(folder, "train") == list(range(1, STEPS + 1))
    assert steps(folder, "held_out") == list(range(0, STEPS + 1, EVERY))
    assert {"train/learning_rate", "train/gradient_norm", "train/recall_kl"} <= {*lines(folder)[1]}
    assert {"held_out/kl", "held_out/recall_kl"} <= {*lines(folder)[0]}
    assert not (folder / CHECKPOINTS).exists(), "a finished stage has nothing to go on from"


def test_every_logger_gets_the_curves(finished: RunConfig) -> None:
    folder = RunFolder.of(finished).path
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in told if "train/loss" in line or "held_out/loss" in line] == lines(
        folder
    )
    table = (folder / "csv" / "metrics.csv").read_text()
    assert f"\n{STEPS},held_out/recall_kl," in table and "\n1,train/learning_rate," in table


def test_the_folder_maps_as_the_run_did(finished: RunConfig) -> None:
    folder = RunFolder.of(finished).path
    manifest = json.loads((folder / "mapper" / "manifest.json").read_text())
    assert manifest["refiner"]["class"].endswith("GatedResidual")
    assert manifest["fields"]["start"]["recolour_keys"] == 0.8
    loaded = Handoff.load(folder / "mapper")
    assert isinstance(loaded.mapper, RefinedMapper)
    ours, _ = load_handoff(finished, folder, load_reader(finished), torch.float32)
    text = load_miniature(1, sentences=8, seed=5)[0].text

    def carried(handoff: Handoff) -> list[torch.Tensor]:
        source = handoff.reader.source
        ids, mask = source.batch([source.encode(text)])
        cache = handoff.transfer(source.prefill(ids, mask)).cache
        return [layer.keys for layer in cache.layers]

    for one, other in zip(carried(loaded), carried(ours), strict=True):
        assert torch.equal(one, other)


def started(sent: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "run.py", *sent],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"src{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell starts background jobs with ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def stopped(sent: list[str], how: signal.Signals, after: int, folder: Path) -> tuple[int, str]:
    """Exit code and output of a run that is stopped once it has looked at step ``after``."""
    process = started(sent)
    try:
        for _ in waiting(process):
            if (folder / CURVES).is_file() and f'"step": {after + 1},' in (
                folder / CURVES
            ).read_text():
                break
        process.send_signal(how)
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, said


def resumed_after(said: str) -> int:
    """The step: that of the last look at least."""
    found = re.search(r"goes on after step (\d+)\n", said)
    assert found is not None, said
    return int(found[1])


def waiting(process: subprocess.Popen[str]) -> Iterator[None]:
    while process.poll() is None:
        yield
        time.sleep(0.01)
    raise AssertionError(process.communicate()[0])


def test_ctrl_c_and_a_kill_change_nothing(
    finished: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command three times: ctrl-C, then SIGKILL, then to its end."""
    whole = RunFolder.of(finished).path
    sent = words(tmp_path, f"cache={finished.cache}", "stages=[fit]")
    state = RunFolder.of(compose(sent))
    code, said = stopped(sent, signal.SIGINT, EVERY, state.path)
    assert code == 130 and "The same command resumes" in said and "Traceback" not in said
    assert (
        state.status == "unfinished"
        and (state.path / CHECKPOINTS / "generation" / "last.ckpt").is_file()
    )
    seen = max(steps(state.path, "train"))
    # Beyond what the first process has written.
    later = (seen // EVERY + 2) * EVERY
    code, said = stopped(sent, signal.SIGKILL, later, state.path)
    assert code == -signal.SIGKILL and seen // EVERY * EVERY <= resumed_after(said) <= seen
    reached = max(steps(state.path, "train"))
    assert later < reached < STEPS
    capsys.readouterr()
    assert run.main(sent) == 0 and state.status == "done"
    assert reached // EVERY * EVERY <= resumed_after(capsys.readouterr().out) <= reached
    assert steps(state.path, "train") == steps(whole, "train")
    assert [x for x in lines(state.path) if "held_out/loss" in x] == [
        x for x in lines(whole) if "held_out/loss" in x
    ]
    ours, theirs = (load_file(f / "mapper" / WEIGHTS) for f in (state.path, whole))
    assert all(torch.allclose(x, theirs[name], atol=1e-6) for name, x in ours.items())
