"""The sweep file: the very command that an agent issues runs here."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvferry.app import arguments
from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder
from kvferry.app.loggers import summary
from kvferry.results.rows import read_rows

ROOT = Path(__file__).parents[2]
SWEEP = ROOT / "sweeps" / "mappers.yaml"
SMALL = ["size=pico", "eval=smoke", "data.passage_tokens=128", "logger.wandb.mode=offline"]
SMALL += ["data.calibration_passages=8", "data.held_out_passages=4"]


def sweep() -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(SWEEP), resolve=False)
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def agent_commands() -> list[list[str]]:
    """What W&B's agent would execute for each point of the grid."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    loaded = sweep()
    axes = {
        name: spec.get("values", [spec.get("value")]) for name, spec in loaded["parameters"].items()
    }
    command = create_sweep_command(loaded["command"])
    commands: list[list[str]] = []
    for point in itertools.product(*axes.values()):
        values = {name: {"value": value} for name, value in zip(axes, point, strict=True)}
        expanded = create_sweep_command_args({"args": values})
        words: list[str] = []
        for word in command:
            match word:
                case "${program}":
                    words.append(loaded["program"])
                case "${args_no_hyphens}":
                    words += expanded["args_no_hyphens"]
                case "${env}":
                    words.append("/usr/bin/env")
                case "${interpreter}":
                    words.append("python")
                case _:
                    words.append(word)
        commands.append(words)
    return commands


def test_every_point_composes() -> None:
    commands = agent_commands()
    loaded = sweep()["parameters"]
    assert len(commands) == len(loaded["mapper"]["values"]) * len(loaded["pair"]["values"]) * 3
    for command in commands:
        assert not any(word.startswith("${") for word in command)
        words = command[command.index("run.py") + 1 :]
        cfg = compose(arguments.split(words).overrides)
        assert cfg.logger.wandb is not None
    assert len({tuple(command) for command in commands}) == len(commands)


def test_the_agents_command_runs(tmp_path: Path) -> None:
    command = agent_commands()[0]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Passage {i}. " + "A ferry carries it over. " * 60
                                for i in range(12)))  # fmt: skip
    more = [*SMALL, "data=text", f"data.path={text}", f"outputs={tmp_path}"]
    # The agent calls the `python` of its own environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, *more],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = command[command.index("run.py") + 1 :]
    folder = RunFolder.of(compose([*words, *more]))
    assert folder.status == "done"
    assert list(folder.path.glob("wandb/offline-run-*"))
    logged = summary([asdict(row) for row in read_rows(folder.path / "rows.parquet")])
    # The split is the domain's name: here the file's.
    assert sweep()["metric"]["name"].replace("wikipedia", "text") in logged
