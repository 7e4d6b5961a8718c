"""`ResultRow`: one typed measurement, and the parquet file that holds many.

Conventions a reader of the file needs:

* `layer` is None for a whole-model number and the target layer for a per-layer one.
* `turn` counts the hand-offs of a conversation from 1 (task `multi_turn`) and is None elsewhere;
  `source` and `target` are those of the turn, `pair` and `context_tokens` those of the model that
  starts. Files written before there were turns lack the column and are read as they were.
* Timings have task `latency` and split `p50` or `p95`; `context_tokens` is the context length.
* `ci_low` and `ci_high` are nan where no interval can be given (one passage, a p95).
* `created` is an ISO 8601 time in UTC.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from kvferry.errors import KVFerryError, StorageError
from kvferry.results.catalogue import (
    CONDITIONS,
    LATENCY_SPLITS,
    LATENCY_TASK,
    METRICS,
    MULTI_TURN_TASK,
)
from kvferry.results.statistics import Interval

RowKey = tuple[str, str, str, str, str, str, str, int | None, int | None, int, int]
NULLABLE = ("layer", "turn")


class RowsError(KVFerryError):
    """A result row or a file of them breaks the schema."""


def _unknown(kind: str, name: str, known: Iterable[str]) -> RowsError:
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Use one of the expected names."
    return RowsError(
        f"Unknown {kind} in a result row.",
        found=repr(name),
        expected=", ".join(known),
        fix=f"{hint} New ones are added in results/catalogue.py.",
    )


@dataclass(frozen=True)
class ResultRow:
    """One measurement; the fields are the columns of `rows.parquet`.

    Raises:
        RowsError: unknown metric or condition, wrong unit, a layer where none belongs, or a turn
            without a conversation.
    """

    pair: str
    source: str
    target: str
    mapper: str
    mapper_hash: str
    task: str
    split: str
    condition: str
    metric: str
    layer: int | None
    turn: int | None
    value: float
    ci_low: float
    ci_high: float
    n: int
    seed: int
    context_tokens: int
    unit: str
    device: str
    dtype: str
    config_hash: str
    git_commit: str
    created: str

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise _unknown("metric", self.metric, METRICS)
        if self.condition not in CONDITIONS:
            raise _unknown("condition", self.condition, CONDITIONS)
        if self.task == LATENCY_TASK and self.split not in LATENCY_SPLITS:
            raise _unknown("latency split", self.split, LATENCY_SPLITS)
        metric = METRICS[self.metric]
        if self.unit != metric.unit:
            raise RowsError(
                f"A {self.metric} row has the wrong unit.",
                found=self.unit,
                expected=metric.unit,
                fix="Convert the value, or build rows with RowStamp, which fills the unit.",
            )
        if self.layer is not None and (not metric.per_layer or self.layer < 0):
            raise RowsError(
                f"A {self.metric} row carries a layer it cannot have.",
                found=f"layer {self.layer}",
                expected="a layer >= 0" if metric.per_layer else "no layer",
                fix="Set layer=None for whole-model numbers.",
            )
        if (self.turn is not None and self.turn > 0) != (self.task == MULTI_TURN_TASK):
            raise RowsError(
                f"A row of task {self.task} has the wrong turn.",
                found=self.turn,
                expected="1 or more" if self.task == MULTI_TURN_TASK else "none",
                fix=f"Count turns from 1 in task {MULTI_TURN_TASK}, and leave them out elsewhere.",
            )

    @property
    def key(self) -> RowKey:
        """What makes this row the same measurement as another; a re-run replaces it."""
        return (
            self.pair,
            self.mapper,
            self.mapper_hash,
            self.task,
            self.split,
            self.condition,
            self.metric,
            self.layer,
            self.turn,
            self.context_tokens,
            self.seed,
        )

    @property
    def has_interval(self) -> bool:
        """Whether both limits are numbers."""
        return math.isfinite(self.ci_low) and math.isfinite(self.ci_high)


@dataclass(frozen=True)
class RowStamp:
    """What all rows of one run share; `row` adds what was measured."""

    pair: str
    source: str
    target: str
    mapper: str
    mapper_hash: str
    seed: int
    device: str
    dtype: str
    config_hash: str
    git_commit: str

    def row(
        self,
        *,
        task: str,
        split: str,
        condition: str,
        metric: str,
        value: Interval | float,
        context_tokens: int,
        n: int | None = None,
        layer: int | None = None,
        turn: int | None = None,
    ) -> ResultRow:
        """A row stamped now, with the metric's unit.

        Args:
            value: an `Interval`, or a bare number, which then needs `n` and has no interval.

        Raises:
            RowsError: as `ResultRow`, or a bare number without `n`.
        """
        if metric not in METRICS:
            raise _unknown("metric", metric, METRICS)
        if isinstance(value, Interval):
            interval = value
        elif n is not None:
            interval = Interval(float(value), math.nan, math.nan, n)
        else:
            raise RowsError(
                f"A {metric} row has neither an interval nor n.",
                found=value,
                fix="Pass an Interval, or n=... with a bare number.",
            )
        return ResultRow(
            **asdict(self),
            task=task,
            split=split,
            condition=condition,
            metric=metric,
            layer=layer,
            turn=turn,
            value=interval.value,
            ci_low=interval.low,
            ci_high=interval.high,
            n=interval.n,
            context_tokens=context_tokens,
            unit=METRICS[metric].unit,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


_TYPES: dict[str, pl.DataType] = {
    "str": pl.String(),
    "float": pl.Float64(),
    "int": pl.Int64(),
    "int | None": pl.Int64(),
}
SCHEMA = pl.Schema({field.name: _TYPES[str(field.type)] for field in fields(ResultRow)})


def merge_rows(old: Sequence[ResultRow], new: Sequence[ResultRow]) -> list[ResultRow]:
    """`old` with every row of the same key replaced by its namesake in `new`, the rest appended."""
    merged = {row.key: row for row in old}
    merged.update((row.key, row) for row in new)
    return list(merged.values())


def frame(rows: Sequence[ResultRow]) -> pl.DataFrame:
    """The rows as a polars table with the columns of `SCHEMA`."""
    return pl.DataFrame([asdict(row) for row in rows], schema=SCHEMA, orient="row")


def write_rows(path: Path, rows: Sequence[ResultRow]) -> None:
    """Write parquet so that `path` holds either the old file or the whole new one.

    Raises:
        RowsError: two rows have the same key.
        StorageError: the folder cannot be written or the disk is full.
    """
    seen: set[RowKey] = set()
    for row in rows:
        if row.key in seen:
            raise RowsError(
                "Two rows claim to be the same measurement.",
                found=row.key,
                fix="Give them different split, seed or context_tokens, or use append_rows.",
            )
        seen.add(row.key)
    buffer = io.BytesIO()
    frame(rows).write_parquet(buffer)
    write_atomically(path, buffer.getvalue())


def append_rows(path: Path, rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Merge `rows` into the file at `path` (made if absent); returns what it now holds.

    Raises:
        RowsError: the file is damaged or of another schema.
        StorageError: it cannot be written.
    """
    merged = merge_rows(read_rows(path) if path.exists() else [], rows)
    write_rows(path, merged)
    return merged


def read_rows(path: Path) -> list[ResultRow]:
    """The rows of a parquet file.

    Raises:
        RowsError: no such file, not parquet, other columns or types, or an unknown metric.
    """
    if not path.is_file():
        raise RowsError(
            "There is no result file here.", found=path, fix="Run the evaluation stage first."
        )
    try:
        table = pl.read_parquet(path, use_pyarrow=False)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise RowsError(
            "The result file cannot be read as parquet.",
            found=f"{path}: {error}",
            fix="Delete it and run the evaluation stage again.",
        ) from error
    if set(SCHEMA) - set(table.columns) == {"turn"}:
        table = table.with_columns(turn=pl.lit(None, dtype=pl.Int64))
        table = table.select(*SCHEMA, *(name for name in table.columns if name not in SCHEMA))
    if table.schema != SCHEMA:
        wrong = [
            f"{name} ({table.schema.get(name, 'missing')} instead of {SCHEMA.get(name, 'none')})"
            for name in dict.fromkeys([*SCHEMA, *table.schema])
            if table.schema.get(name) != SCHEMA.get(name)
        ]
        raise RowsError(
            "The result file has other columns than this version writes.",
            found=", ".join(wrong) or "another column order",
            expected=", ".join(SCHEMA),
            fix="Run the evaluation stage again with this version.",
        )
    empty = [name for name in SCHEMA if name not in NULLABLE and table[name].null_count()]
    if empty:
        raise RowsError(
            "The result file has holes.",
            found=f"missing values in {', '.join(empty)}",
            fix="Delete it and run the evaluation stage again.",
        )
    return [ResultRow(**record) for record in table.iter_rows(named=True)]


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary file beside `path`, then rename it.

    Raises:
        StorageError: the folder cannot be written or the disk is full.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(
            f"{path.name} could not be written.",
            found=f"{path.parent}: {error.strerror or error}",
            fix="Free disk space or choose a folder that you may write to.",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
