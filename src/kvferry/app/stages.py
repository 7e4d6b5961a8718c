"""Run the stages that are missing in a run folder, and always leave it in a state that says so."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.text import Text

from kvferry.app.folder import FIGURES, REPORT, ROWS, TO_GO_ON_FROM, RunFolder
from kvferry.app.loggers import RunLogger, open_loggers, publish
from kvferry.app.mapper import build_mapper
from kvferry.app.memory import memory_plan
from kvferry.app.schema import STAGES, RunConfig, StageName, to_plain
from kvferry.errors import ConfigurationError, KVFerryError, StorageError


class Stage(Protocol):
    """One step of a run. It reads and writes files of the run folder only."""

    def __call__(self, cfg: RunConfig, folder: Path, log: RunLogger) -> None:
        """Do it, or raise."""


OpenLoggers = Callable[[RunConfig, Path], RunLogger]


def run_stages(
    cfg: RunConfig,
    stages: Mapping[StageName, Stage],
    *,
    console: Console | None = None,
    opened: OpenLoggers = open_loggers,
) -> int:
    """Run what is not finished yet.

    Args:
        cfg: the settings.
        stages: the function behind each stage name.
        console: where progress and the verdict go.
        opened: makes the logger; it is closed whatever happens.

    Returns:
        Exit code: 0 when done, 1 when a stage failed. Its traceback is in `FAILED`.

    Raises:
        KeyboardInterrupt: passed on, after the folder is left resumable.
    """
    console = console or Console()
    folder = RunFolder.of(cfg)
    try:
        with folder.lock():
            return _run_locked(cfg, stages, folder, console, opened)
    except KeyboardInterrupt:
        console.show_cursor()
        same = "The same command without force=true" if cfg.force else "The same command"
        _say(console, f"\nInterrupted. {same} resumes: finished stages in {folder.path} are kept.")
        raise
    except KVFerryError as error:
        _say(console, f"Stopped. {error}", "red")
        return 1


def _run_locked(
    cfg: RunConfig,
    stages: Mapping[StageName, Stage],
    folder: RunFolder,
    console: Console,
    opened: OpenLoggers,
) -> int:
    pending = _pending(cfg, folder)
    if not pending:
        _say(console, f"Already finished: {folder.path} (force=true runs it again)")
        if folder.status != "done":
            folder.succeed()
        return 0
    folder.begin(cfg)
    # What follows a stage was made from its output.
    folder.forget(STAGES[STAGES.index(pending[0]) :])
    try:
        with _disk_errors(folder.path), _closing(opened(cfg, folder.path)) as log:
            log.log_config({**to_plain(cfg), "config_hash": cfg.config_hash})
            for stage in pending:
                _run_stage(stage, stages[stage], cfg, folder, console, log)
            publish(folder.path / ROWS, folder.path / FIGURES, log)
            folder.succeed()
    except Exception as error:
        folder.fail(traceback.format_exc())
        _say(console, _verdict(error, folder), "red")
        return 1
    report = folder.path / REPORT
    _say(console, f"Done. {report if report.exists() else folder.path}", "green")
    return 0


def _run_stage(
    name: StageName,
    stage: Stage,
    cfg: RunConfig,
    folder: RunFolder,
    console: Console,
    log: RunLogger,
) -> None:
    console.rule(f"{name}  ·  {cfg.pair.name}  ·  {cfg.mapper.name}", align="left")
    started = time.perf_counter()
    stage(cfg, folder.path, log)
    seconds = time.perf_counter() - started
    folder.finish(name, seconds)
    log.log_metrics({f"stage/{name}_s": seconds})


def _pending(cfg: RunConfig, folder: RunFolder) -> list[StageName]:
    """The stages to run, in order; once one runs, all that are asked for after it run too."""
    asked = [stage for stage in STAGES if stage in cfg.stages]
    first = next((i for i, stage in enumerate(asked) if cfg.force or not folder.has(stage)), None)
    pending = [] if first is None else asked[first:]
    for stage in pending[:1]:
        missing = [s for s in STAGES[: STAGES.index(stage)] if not folder.has(s) and s not in asked]
        if missing:
            raise ConfigurationError(
                f"Stage {stage} needs what {' and '.join(missing)} leaves in the run folder.",
                found=f"stages=[{','.join(cfg.stages)}], and nothing of {missing[0]} in "
                f"{folder.path}",
                fix=f"Run with stages=[{','.join([*missing, *asked])}].",
            )
    return pending


@contextmanager
def _closing(log: RunLogger) -> Iterator[RunLogger]:
    failed = True
    try:
        yield log
        failed = False
    finally:
        log.close(failed=failed)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageError(
            "The disk is full.",
            found=f"{error.filename or path}: {error.strerror}",
            fix="Free some space and run the same command again; finished stages are kept.",
        ) from error


def _verdict(error: Exception, folder: RunFolder) -> str:
    if isinstance(error, KVFerryError):
        return f"Failed. {error}\n  traceback: {folder.path / 'FAILED'}"
    return (
        f"Failed: {type(error).__name__}: {error}\n"
        f"  This was not expected. The traceback is in {folder.path / 'FAILED'}."
    )


def _say(console: Console, text: str, style: str = "") -> None:
    # As it is: messages name settings like stages=[fit], which would be taken for markup.
    console.print(Text(text, style=style), soft_wrap=True)


def describe_plan(cfg: RunConfig) -> Sequence[str]:
    """What a run would do, from the settings and the folder alone."""
    folder = RunFolder.of(cfg)
    done = [stage for stage in STAGES if folder.has(stage)]
    pending = _pending(cfg, folder)
    return [
        f"folder: {folder.path} ({folder.status})",
        f"finished: {', '.join(done) or 'nothing'}",
        f"would run: {', '.join(pending) or 'nothing'}",
        *memory_plan(cfg),
        *(_training_plan(cfg, folder) if "fit" in pending else ()),
    ]


def _training_plan(cfg: RunConfig, folder: RunFolder) -> Iterator[str]:
    """What a network would learn from; nothing where the mapper has none."""
    # Both import PyTorch, which only a plan needs here.
    from kvferry.app.corpora import SELECTION
    from kvferry.mappers.base import MapperMethod

    method: MapperMethod = build_mapper(cfg.mapper)
    stopped = not folder.has("fit") and (folder.path / TO_GO_ON_FROM["fit"]).is_dir()
    for schedule in method.schedules:
        data, kind = cfg.data, "calibration"
        found = data.calibration_passages + data.mixed_domain
        if data.training_passages:
            found, kind = data.training_passages, "training"
        texts = min(schedule.passages, found)
        judges = min(schedule.held_out, SELECTION)
        yield (
            f"would train: {schedule.steps:,} steps, a text each, in turn from {texts} {kind} "
            f"texts of up to {cfg.data.passage_tokens:,} tokens; {judges} others judge every "
            f"{schedule.validate_every:,} steps"
            + (", from the last checkpoint on" if stopped else "")
        )
