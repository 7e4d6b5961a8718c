"""Where measurements go beside the run folder's own files, which stay the truth."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from kvferry.app.schema import (
    CsvLoggerConfig,
    LocalLoggerConfig,
    LoggerConfig,
    RunConfig,
    TensorBoardLoggerConfig,
    WandbLoggerConfig,
)
from kvferry.errors import KVFerryError
from kvferry.results.rows import read_rows

Row = Mapping[str, Any]


class LoggerError(KVFerryError):
    """A logger cannot be opened."""


class RunLogger(Protocol):
    """What a run reports, whoever listens."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The resolved settings, once, before anything else."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers of one moment, keyed like `fit/seconds`."""

    def log_rows(self, rows: Sequence[Row]) -> None:
        """The result rows, with the columns of `ResultRow`."""

    def log_figure(self, name: str, path: Path) -> None:
        """A picture that lies in a PNG file."""

    def close(self, failed: bool = False) -> None:
        """Flush and finish; nothing may be logged afterwards."""


def row_name(row: Row) -> str:
    """One row's place in a flat list of metrics: task/split/condition/metric."""
    return "/".join(str(row[key]) for key in ("task", "split", "condition", "metric"))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The headline numbers: finite values that belong to no single layer.

    A name that occurs at several context lengths gets its length appended.
    """
    whole = [row for row in rows if row.get("layer") is None and math.isfinite(row["value"])]
    lengths: dict[str, set[int]] = {}
    for row in whole:
        lengths.setdefault(row_name(row), set()).add(row["context_tokens"])
    return {
        row_name(row) + (f"/{row['context_tokens']}" if len(lengths[row_name(row)]) > 1 else ""):
        row["value"]
        for row in whole
    }  # fmt: skip


def publish(rows_file: Path, figures: Path, log: RunLogger) -> None:
    """Send a run folder's results to a logger: rows, headline numbers, figures."""
    if rows_file.exists():
        rows = [asdict(row) for row in read_rows(rows_file)]
        log.log_rows(rows)
        log.log_metrics(summary(rows))
    for path in sorted(figures.glob("*.png")):
        log.log_figure(path.stem, path)


class LocalLogger:
    """One JSON object a line. Rows and figures are files of the run folder already."""

    def __init__(self, config: LocalLoggerConfig, folder: Path) -> None:
        self._file = (folder / config.file).open("a", encoding="utf-8")

    def log_config(self, config: Mapping[str, Any]) -> None:
        """`config.yaml` has the rest; the hash says which settings the lines below belong to."""
        self._write({"config_hash": config.get("config_hash")})

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a line."""
        self._write({**({} if step is None else {"step": step}), **metrics})

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Say how many there are."""
        self._write({"rows": len(rows)})

    def log_figure(self, name: str, path: Path) -> None:
        """Nothing: the file is here."""

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


class CsvLogger:
    """`metrics.csv` in long form (step, metric, value) and `rows.csv`."""

    def __init__(self, config: CsvLoggerConfig, folder: Path) -> None:
        self._folder = folder / config.folder
        self._folder.mkdir(parents=True, exist_ok=True)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Nothing: `config.yaml` has it."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a line for each metric."""
        path = self._folder / "metrics.csv"
        head = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if head:
                writer.writerow(["step", "metric", "value"])
            writer.writerows(["" if step is None else step, *item] for item in metrics.items())

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Write the table anew."""
        if not rows:
            return
        with (self._folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    def log_figure(self, name: str, path: Path) -> None:
        """Nothing: a table holds no picture."""

    def close(self, failed: bool = False) -> None:
        """Nothing is open between calls."""


class TensorBoardLogger:
    """Scalars by context length, pictures, and the settings as text."""

    def __init__(self, config: TensorBoardLoggerConfig, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _not_installed("TensorBoard", "tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder / config.folder))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The settings as indented text."""
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """A scalar each."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step or 0)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Curves over layers; whole-model numbers come as metrics."""
        for row in rows:
            if row.get("layer") is not None:
                self._writer.add_scalar(f"{row_name(row)}/by_layer", row["value"], row["layer"])

    def log_figure(self, name: str, path: Path) -> None:
        """The picture."""
        from matplotlib.image import imread

        self._writer.add_image(name, imread(path), dataformats="HWC")

    def close(self, failed: bool = False) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbLogger:
    """One W&B run: settings, summary, tables, pictures. Offline it lies in the run folder."""

    def __init__(self, config: WandbLoggerConfig, folder: Path, name: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _not_installed("W&B", "wandb") from error
        self._wandb: Any = wandb
        try:
            self._run: Any = wandb.init(
                project=config.project,
                entity=config.entity,
                mode=config.mode,
                group=config.group,
                tags=list(config.tags) or None,
                name=name,
                dir=str(folder),
                # A grid runs many jobs in one process: each is a run of its own.
                reinit="finish_previous",
            )
        except (wandb.Error, OSError) as error:
            raise LoggerError(
                "W&B cannot start a run.",
                found=str(error).splitlines()[0] if str(error) else type(error).__name__,
                fix="Run `wandb login`, or write to the run folder: logger.wandb.mode=offline.",
            ) from error

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The settings."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """History and summary; ``step`` is kept beside the metrics, as W&B counts its own."""
        self._run.log({**({} if step is None else {"step": step}), **metrics})

    def log_rows(self, rows: Sequence[Row]) -> None:
        """All rows as one table, and one table for each task (retention, latency grids)."""
        if not rows:
            return
        tables = {"rows": list(rows)}
        for row in rows:
            tables.setdefault(f"tables/{row['task']}", []).append(row)
        columns = list(rows[0])
        for name, members in tables.items():
            data = [[_finite(row[column]) for column in columns] for row in members]
            self._run.log({name: self._wandb.Table(columns=columns, data=data)})

    def log_figure(self, name: str, path: Path) -> None:
        """The picture, heat maps among them."""
        self._run.log({f"figures/{name}": self._wandb.Image(str(path))})

    def close(self, failed: bool = False) -> None:
        """Finish the run, so that the next one in this process is another."""
        self._run.finish(exit_code=int(failed))


class Loggers:
    """Several loggers as one."""

    def __init__(self, members: Sequence[RunLogger]) -> None:
        self._members = list(members)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """To all of them."""
        for member in self._members:
            member.log_config(config)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """To all of them."""
        for member in self._members:
            member.log_metrics(metrics, step)

    def log_rows(self, rows: Sequence[Row]) -> None:
        """To all of them."""
        for member in self._members:
            member.log_rows(rows)

    def log_figure(self, name: str, path: Path) -> None:
        """To all of them."""
        for member in self._members:
            member.log_figure(name, path)

    def close(self, failed: bool = False) -> None:
        """Close every one, also when one of them cannot be closed.

        Raises:
            ExceptionGroup: what the closing of some of them raised.
        """
        errors: list[Exception] = []
        for member in self._members:
            try:
                member.close(failed)
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("some loggers could not be closed", errors)


def open_loggers(cfg: RunConfig, folder: Path) -> RunLogger:
    """Every logger that the settings name, as one.

    Raises:
        LoggerError: one of them cannot be opened; those opened before it are closed again.
    """
    # TensorFlow is never needed, and its log lines would drown ours.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    opened: list[RunLogger] = []
    try:
        for start in _starters(cfg.logger, folder, f"{cfg.name}-{cfg.config_hash}"):
            opened.append(start())
    except BaseException:
        Loggers(opened).close(failed=True)
        raise
    return Loggers(opened)


def _starters(config: LoggerConfig, folder: Path, name: str) -> list[Callable[[], RunLogger]]:
    local, table = config.local, config.csv
    board, wandb = config.tensorboard, config.wandb
    starters: list[Callable[[], RunLogger]] = []
    if local is not None:
        starters.append(lambda: LocalLogger(local, folder))
    if table is not None:
        starters.append(lambda: CsvLogger(table, folder))
    if board is not None:
        starters.append(lambda: TensorBoardLogger(board, folder))
    if wandb is not None:
        starters.append(lambda: WandbLogger(wandb, folder, name))
    return starters


def _not_installed(what: str, package: str) -> LoggerError:
    return LoggerError(
        f"{what} is not installed.",
        fix=f"pip install 'kvferry[tracking]' (or pip install {package}), or leave the logger out.",
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
