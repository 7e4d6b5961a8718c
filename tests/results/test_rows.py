from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from kvferry.errors import StorageError
from kvferry.results import (
    Interval,
    ResultRow,
    RowsError,
    RowStamp,
    append_rows,
    merge_rows,
    read_rows,
    write_rows,
)
from kvferry.results.rows import SCHEMA

KEY_PARTS = (
    *("pair", "mapper", "mapper_hash", "task", "split", "condition", "metric"),
    *("layer", "turn", "context_tokens", "seed"),
)
STAMP = RowStamp("a_b", "A", "B", "anchored", "h1", 0, "cpu", "float32", "c", "g")


def one(metric: str = "kl", value: float = 0.1, **changes: object) -> ResultRow:
    row = STAMP.row(
        task="ladder",
        split="wiki",
        condition="mapped",
        metric=metric,
        value=Interval(value, value - 0.01, value + 0.01, 24),
        context_tokens=768,
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def test_file_returns_the_same_rows(tmp_path: Path, rows: list[ResultRow]) -> None:
    path = tmp_path / "new" / "rows.parquet"
    write_rows(path, rows)
    back = read_rows(path)
    assert len(back) == len(rows)
    for ours, theirs in zip(rows, back, strict=True):
        assert repr(ours) == repr(theirs)  # nan equals nan in a repr
    assert os.listdir(path.parent) == ["rows.parquet"]


def test_columns_are_those_of_the_design() -> None:
    wanted = (
        "pair source target mapper mapper_hash task split condition metric value ci_low ci_high n "
        "seed context_tokens unit device dtype config_hash git_commit created layer turn"
    )
    assert set(SCHEMA) == set(wanted.split())
    assert {SCHEMA[name] for name in ("value", "ci_low", "ci_high")} == {pl.Float64()}


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(RowsError, match="Did you mean 'recall_kept'"):
        one("recall_keep")
    with pytest.raises(RowsError, match="Did you mean 'mapped'"):
        one(condition="maped")
    with pytest.raises(RowsError, match="latency split"):
        one("map_ms", task="latency", split="mean")


@pytest.mark.parametrize("changes", [{"unit": "ms"}, {"layer": 3}])
def test_a_row_that_contradicts_its_metric_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RowsError):
        one("kl", **changes)


def test_per_layer_rows_are_allowed_where_they_make_sense() -> None:
    assert one("r2_keys", layer=0).layer == 0
    with pytest.raises(RowsError):
        one("r2_keys", layer=-1)


def test_turns_and_conversations_go_together() -> None:
    assert one(task="multi_turn", turn=3).turn == 3
    for changes in ({"turn": 1}, {"task": "multi_turn"}, {"task": "multi_turn", "turn": 0}):
        with pytest.raises(RowsError, match="wrong turn"):
            one(**changes)  # type: ignore[arg-type]


def test_files_from_before_there_were_turns_are_read(tmp_path: Path, rows: list[ResultRow]) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, rows)
    pl.read_parquet(path).drop("turn").write_parquet(path)
    assert [row.key for row in read_rows(path)] == [row.key for row in rows]


def test_a_bare_number_needs_n() -> None:
    shared = {"task": "ladder", "split": "wiki", "condition": "mapped", "context_tokens": 8}
    with pytest.raises(RowsError, match="neither an interval nor n"):
        STAMP.row(metric="kl", value=0.1, **shared)  # type: ignore[arg-type]
    row = STAMP.row(metric="kl", value=0.1, n=3, **shared)  # type: ignore[arg-type]
    assert row.n == 3 and math.isnan(row.ci_low) and not row.has_interval


def test_a_rerun_replaces_its_own_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [one(value=0.5), one("nll", 3.0)])
    held = append_rows(path, [one(value=0.1), one(value=0.2, seed=1), one("r2_keys", layer=2)])
    assert [(row.metric, row.seed, row.value) for row in held] == [
        ("kl", 0, 0.1),
        ("nll", 0, 3.0),
        ("kl", 1, 0.2),
        ("r2_keys", 0, 0.1),
    ]
    assert read_rows(path) == held


@pytest.mark.parametrize(
    "field",
    KEY_PARTS,
)
def test_every_part_of_the_key_separates_rows(field: str) -> None:
    base = one(task="multi_turn", turn=1) if field == "turn" else one("r2_keys")
    other = {"condition": "zero", "metric": "r2_values", "layer": 1, "turn": 2}
    other |= {"context_tokens": 9, "seed": 9}
    changed = dataclasses.replace(base, **{field: other.get(field, "other")})
    assert len(merge_rows([base], [changed])) == 2
    assert len(merge_rows([base], [dataclasses.replace(base, value=9.0, created="x")])) == 1


def test_two_rows_with_one_key_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(RowsError, match="same measurement"):
        write_rows(tmp_path / "rows.parquet", [one(), one(value=0.3)])
    assert not list(tmp_path.iterdir())


def test_empty_file_of_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", [])
    assert read_rows(tmp_path / "rows.parquet") == []


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with pytest.raises(RowsError, match="no result file"):
        read_rows(path)
    write_rows(path, [one()])
    whole = path.read_bytes()
    for damaged in (b"", b"not parquet", whole[: len(whole) // 2], whole[:-4]):
        path.write_bytes(damaged)
        with pytest.raises(RowsError, match="cannot be read"):
            read_rows(path)


def test_another_schema_is_named_column_by_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [one()])
    table = pl.read_parquet(path)
    table.drop("seed").with_columns(surprise=1, n=pl.lit("many")).write_parquet(path)
    with pytest.raises(RowsError) as caught:
        read_rows(path)
    for word in ("seed (missing", "surprise (", "n (String instead of Int64)"):
        assert word in str(caught.value)
    table.with_columns(metric=pl.lit("klkl")).write_parquet(path)
    with pytest.raises(RowsError, match="Unknown metric"):
        read_rows(path)
    table.with_columns(value=pl.lit(None, dtype=pl.Float64)).write_parquet(path)
    with pytest.raises(RowsError, match="holes"):
        read_rows(path)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    write_rows(path, [one(value=0.5)])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_rows(path, [one(value=0.1)])
    assert [row.value for row in read_rows(path)] == [0.5]
    assert os.listdir(tmp_path) == ["rows.parquet"]


def test_results_need_no_other_part_of_the_package() -> None:
    code = (
        "import sys, kvferry.results, kvferry.results.report\n"
        "own = [m for m in sys.modules if m.startswith('kvferry.')]\n"
        "other = [m for m in own if not m.startswith(('kvferry.results', 'kvferry.errors'))]\n"
        "print(other, 'torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False False"
