"""Loggers: the same calls end up where each keeps them, and every logger is closed."""

from __future__ import annotations

import builtins
import csv
import json
import math
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.loggers import LoggerError, Loggers, open_loggers, publish, summary
from kvferry.app.schema import (
    CsvLoggerConfig,
    LocalLoggerConfig,
    LoggerConfig,
    RunConfig,
    TensorBoardLoggerConfig,
    WandbLoggerConfig,
)
from kvferry.app.training import CurveLogger
from kvferry.results.rows import ResultRow, RowStamp, write_rows
from kvferry.results.statistics import Interval
from tests.app.conftest import Memory

STAMP = RowStamp("a_b", "A", "B", "anchored", "h", 0, "cpu", "float32", "c", "g")


def some_rows() -> list[ResultRow]:
    def row(metric: str, condition: str, value: float, **more: Any) -> ResultRow:
        where = {"task": "ladder", "split": "in_domain", "context_tokens": 64, **more}
        return STAMP.row(
            metric=metric, condition=condition, value=Interval(value, value, value, 2), **where
        )

    timed = {"task": "latency", "split": "p50"}
    return [
        row("kl", "mapped", 0.25),
        row("kl", "zero", math.inf),
        row("r2_keys", "mapped", 0.5, layer=0),
        row("r2_keys", "mapped", 0.75, layer=1),
        row("map_ms", "mapped", 3.0, **timed, **{"context_tokens": 128}),
        row("map_ms", "mapped", 4.0, **timed, **{"context_tokens": 512}),
    ]


@pytest.fixture
def results(tmp_path: Path) -> tuple[Path, Path]:
    """A rows file and a folder with one picture."""
    import matplotlib.image
    import numpy as np

    rows, figures = tmp_path / "rows.parquet", tmp_path / "figures"
    write_rows(rows, some_rows())
    figures.mkdir()
    matplotlib.image.imsave(figures / "r2_by_layer.png", np.zeros((4, 5, 3)))
    return rows, figures


def log_all(cfg: RunConfig, config: LoggerConfig, folder: Path, results: tuple[Path, Path]) -> None:
    log = open_loggers(replace(cfg, logger=config), folder)
    log.log_config({"pair": "a_b", "config_hash": "c"})
    log.log_metrics({"stage/fit_s": 1.5}, step=3)
    publish(*results, log)
    log.close()


def test_summary_names_lengths_only_where_they_differ(results: tuple[Path, Path]) -> None:
    memory = Memory()
    publish(*results, memory)
    assert memory.metrics == [
        {
            "ladder/in_domain/mapped/kl": 0.25,
            "latency/p50/mapped/map_ms/128": 3.0,
            "latency/p50/mapped/map_ms/512": 4.0,
        }
    ]
    assert len(memory.rows) == 6 and memory.figures == ["r2_by_layer"]
    assert summary([]) == {}


def test_local_and_csv(cfg: RunConfig, tmp_path: Path, results: tuple[Path, Path]) -> None:
    config = LoggerConfig(local=LocalLoggerConfig(), csv=CsvLoggerConfig())
    log_all(cfg, config, tmp_path, results)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[:2] == [{"config_hash": "c"}, {"step": 3, "stage/fit_s": 1.5}]
    with (tmp_path / "csv" / "rows.csv").open() as file:
        assert [float(row["value"]) for row in csv.DictReader(file)][:2] == [0.25, math.inf]
    table = (tmp_path / "csv" / "metrics.csv").read_text().splitlines()
    assert table[:2] == ["step,metric,value", "3,stage/fit_s,1.5"]


def test_tensorboard(cfg: RunConfig, tmp_path: Path, results: tuple[Path, Path]) -> None:
    log_all(cfg, LoggerConfig(tensorboard=TensorBoardLoggerConfig()), tmp_path, results)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("ladder/in_domain/mapped/kl")[0].value == 0.25
    layers = events.Scalars("ladder/in_domain/mapped/r2_keys/by_layer")
    assert [(event.step, event.value) for event in layers] == [(0, 0.5), (1, 0.75)]
    assert events.Tags()["images"] == ["r2_by_layer"]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a run file: a seven-byte head, then log blocks of 32 KiB.

    Every fragment has a head of its own (checksum, length, kind); kinds 1 and 2 start a record,
    1 and 4 end one, and a block's last few bytes are padding when no head fits.
    """
    from wandb.proto import wandb_internal_pb2

    data, at, buffer, block, head = path.read_bytes(), 7, b"", 32768, 7
    while at + head <= len(data):
        room = block - at % block
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if room < head or kind == 0:
            at += room
            continue
        fragment = data[at + head : at + head + length]
        at += head + length
        buffer = fragment if kind in (1, 2) else buffer + fragment
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(buffer)
            yield record


def read_wandb(folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(config, history merged, exit code) of the one offline run below a folder.

    W&B writes from a process of its own, which a busy machine may let finish after the run.
    """
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(60):
        found = records_of(file)
        if found[2] >= 0:
            break
        time.sleep(1)
    return found


def records_of(file: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """As far as they are written; -1 in place of the exit code where the end is missing."""
    config: dict[str, Any] = {}
    history: dict[str, Any] = {}
    code = -1

    def items(found: Any) -> dict[str, Any]:
        return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in found}

    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= items(record.run.config.update)
        elif kind == "config":
            config |= items(record.config.update)
        elif kind == "history":
            history |= items(record.history.item)
        elif kind == "exit":
            code = record.exit.exit_code
    return config, history, code


def test_wandb_offline_run_reads_back(
    cfg: RunConfig, tmp_path: Path, results: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_all(cfg, LoggerConfig(wandb=WandbLoggerConfig(mode="offline")), tmp_path, results)
    config, history, code = read_wandb(tmp_path)
    assert config["pair"] == "a_b" and code == 0
    assert history["ladder/in_domain/mapped/kl"] == 0.25
    assert history["stage/fit_s"] == 1.5
    (run,) = tmp_path.glob("wandb/offline-run-*")
    table = json.loads((run / "files" / history["tables/latency/path"]).read_text())
    values = [dict(zip(table["columns"], row, strict=True))["value"] for row in table["data"]]
    assert values == [3.0, 4.0]
    assert history["rows/nrows"] == 6
    picture = run / "files" / history["figures/r2_by_layer/path"]
    assert picture.read_bytes() == (results[1] / "r2_by_layer.png").read_bytes()


def test_wandb_gets_the_curves(
    cfg: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline they lie in its file; disabled, nothing is written and nothing fails."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    for mode in ("offline", "disabled"):
        config = LoggerConfig(wandb=WandbLoggerConfig(mode=mode))  # type: ignore[arg-type]
        log = open_loggers(replace(cfg, logger=config), tmp_path / mode)
        curves = CurveLogger(tmp_path / f"{mode}.jsonl", log)
        curves.begin(0, {"held_out/recall_kl": 0.9})
        curves.log_metrics({"train/learning_rate": 1e-3, "epoch": 0}, step=6)
        log.close()
    _, history, _ = read_wandb(tmp_path / "offline")
    assert history["held_out/recall_kl"] == 0.9 and history["train/learning_rate"] == 1e-3
    assert history["step"] == 7 and "epoch" not in history
    assert not list((tmp_path / "disabled").rglob("*.wandb"))


def test_a_missing_package_is_a_typed_error(
    cfg: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    real = builtins.__import__

    def without_wandb(name: str, *args: Any, **more: Any) -> Any:
        if name == "wandb":
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    config = LoggerConfig(local=LocalLoggerConfig(), wandb=WandbLoggerConfig())
    with pytest.raises(LoggerError, match="pip install"):
        open_loggers(replace(cfg, logger=config), tmp_path)


def test_one_that_cannot_close_does_not_keep_the_others_open() -> None:
    class Stuck(Memory):
        def close(self, failed: bool = False) -> None:
            raise OSError("stuck")

    first, last = Memory(), Memory()
    with pytest.raises(ExceptionGroup):
        Loggers([first, Stuck(), last]).close(failed=True)
    assert first.closed == last.closed == [True]
