"""The run folder: named by the settings, marked stage by stage, locked while in use."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from kvferry.app.binding import Mistake, bind
from kvferry.app.schema import STAGES, RunConfig, StageName, to_plain
from kvferry.errors import ConfigurationError, KVFerryError
from kvferry.results.rows import write_atomically

Status = Literal["new", "unfinished", "failed", "done"]

CONFIG = "config.yaml"
ROWS = "rows.parquet"
FIGURES = "figures"
REPORT = "report.html"
MAPPER = "mapper"
CHECKPOINTS = "training"
CURVES = "training.jsonl"
SOLVE_SECONDS = "fit/solve_s"
"""In the local log: from the calibration text read to the mapper."""

TO_GO_ON_FROM: Mapping[StageName, str] = {"fit": CHECKPOINTS}
"""Folder that a stage leaves for its next try; of no use once the stage is finished."""


class FolderInUseError(KVFerryError):
    """Another process works in this run folder."""


@dataclass(frozen=True)
class RunFolder:
    """Paths and marks of one run.

    `DONE` and `FAILED` say how the last call ended; `.stages/NAME.json` stands for a finished
    stage, so that a killed run resumes after the last one.
    """

    path: Path

    @classmethod
    def of(cls, cfg: RunConfig) -> RunFolder:
        """The folder that belongs to these settings, whether it exists or not."""
        return cls(Path(cfg.outputs).expanduser() / f"{cfg.name}-{cfg.config_hash}")

    @property
    def status(self) -> Status:
        """How the last call ended."""
        if (self.path / "DONE").exists():
            return "done"
        if (self.path / "FAILED").exists():
            return "failed"
        return "unfinished" if (self.path / CONFIG).exists() else "new"

    def begin(self, cfg: RunConfig) -> None:
        """Create the folder with its `config.yaml`, and take back an earlier verdict.

        Raises:
            StorageError: the folder cannot be written or the disk is full.
        """
        text = OmegaConf.to_yaml(OmegaConf.create(to_plain(cfg)))
        write_atomically(self.path / CONFIG, text.encode())
        for name in ("DONE", "FAILED"):
            (self.path / name).unlink(missing_ok=True)

    def has(self, stage: StageName) -> bool:
        """Whether a stage is finished."""
        return self._mark(stage).exists()

    def finish(self, stage: StageName, seconds: float) -> None:
        """Mark a stage as finished, and let go of what it would have gone on from."""
        self._write_json(self._mark(stage), {"seconds": round(seconds, 3)})
        self._clear(stage)

    def forget(self, stages: Iterable[StageName]) -> None:
        """Take back marks; what the stages wrote stays until they write it again.

        A stage that was finished starts anew, one that was stopped goes on.
        """
        for stage in stages:
            if self.has(stage):
                self._clear(stage)
            self._mark(stage).unlink(missing_ok=True)

    def succeed(self) -> None:
        """Write `DONE`, with the time that each finished stage took."""
        marks = {s: json.loads(self._mark(s).read_text()) for s in STAGES if self.has(s)}
        self._write_json(self.path / "DONE", {"stages": marks})

    def fail(self, trace: str) -> None:
        """Write `FAILED`, with the traceback."""
        write_atomically(self.path / "FAILED", trace.encode())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the system gives the lock back when the process dies.

        Raises:
            FolderInUseError: another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise FolderInUseError(
                    "Another process works in this run folder.",
                    found=f"process {file.read().strip() or 'unknown'} in {self.path}",
                    fix="Wait for it, stop it, or change a setting (a name or a seed will do).",
                ) from None
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
            yield

    def _clear(self, stage: StageName) -> None:
        if stage in TO_GO_ON_FROM:
            shutil.rmtree(self.path / TO_GO_ON_FROM[stage], ignore_errors=True)

    def _mark(self, stage: StageName) -> Path:
        return self.path / ".stages" / f"{stage}.json"

    def _write_json(self, path: Path, values: dict[str, Any]) -> None:
        stamped = {"finished": datetime.now(UTC).isoformat(timespec="seconds"), **values}
        write_atomically(path, (json.dumps(stamped, indent=2) + "\n").encode())


def labelled(run: str) -> tuple[str, Path]:
    """What a run is to be called, or nothing, and its folder: ``FOLDER`` or ``LABEL=FOLDER``.

    Both may hold equals signs: what is behind the label is a folder that exists.
    """
    words = run.split("=")
    for count in range(len(words)):
        folder = Path("=".join(words[count:])).expanduser()
        if folder.is_dir():
            return "=".join(words[:count]), folder
    return "", Path(run).expanduser()


def load_config(folder: Path) -> RunConfig:
    """The settings that a run folder was made with.

    Raises:
        ConfigurationError: no such file, or written by an incompatible version.
    """
    mistakes: list[Mistake] = []
    cfg: RunConfig | None = None
    try:
        values = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
        cfg = bind(RunConfig, values, mistakes)  # type: ignore[arg-type]
    except (OSError, OmegaConfBaseException, YAMLError, AttributeError) as error:
        mistakes.append(Mistake("", str(error)))
    if cfg is None:
        raise ConfigurationError(
            f"{folder} is not a run folder of this version.",
            found="; ".join(str(mistake) for mistake in mistakes),
            fix="Name a folder that `python run.py` has made.",
        )
    return cfg


def latest(
    outputs: Path, *, pair: str | None = None, holding: str | None = None
) -> RunFolder | None:
    """The run folder below ``outputs`` that was finished last, or None.

    Args:
        outputs: folder of run folders.
        pair: only runs of this pair.
        holding: only runs that hold a file or folder of this name.
    """
    marks = sorted(outputs.glob("*/DONE"), key=lambda mark: mark.stat().st_mtime, reverse=True)
    for folder in (RunFolder(mark.parent) for mark in marks):
        if holding is not None and not (folder.path / holding).exists():
            continue
        if pair is None or _pair_of(folder.path) == pair:
            return folder
    return None


def _pair_of(folder: Path) -> str | None:
    try:
        return load_config(folder).pair.name
    except ConfigurationError:
        # Made by another version: not a candidate, and no reason to stop the search.
        return None
