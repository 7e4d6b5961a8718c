"""One figure of many runs, asked for or at the end of a grid."""

from __future__ import annotations

import io
import sys
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.app import cli
from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder
from kvferry.app.grid import summarise
from kvferry.app.plot import gather
from kvferry.results.rows import write_rows
from tests.results.conftest import make_rows, make_sample_rows

FIGURE = "smollm2_gemma3_sample_efficiency.png"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvferry", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code if isinstance(caught.value.code, int) else 0


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Folders with the rows of one fit each, and one without."""
    rows = sorted(make_sample_rows(), key=lambda row: row.mapper_hash)
    folders = [tmp_path / "empty"]
    folders[0].mkdir()
    for name, mine in groupby(rows, key=lambda row: row.mapper_hash):
        folders.append(tmp_path / name)
        write_rows(folders[-1] / "rows.parquet", list(mine))
    return [str(folder) for folder in folders]


def test_run_folders_make_a_figure(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = tmp_path / "drawn"
    assert call(monkeypatch, "plot", "sample-efficiency", *runs, "--to", str(where)) == 0
    assert capsys.readouterr().out.strip() == str(where / FIGURE)
    assert (where / FIGURE).read_bytes()[:4] == b"\x89PNG"


def test_a_label_names_the_mapper_of_a_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", make_rows())
    named, plain = gather([f"ten layers={tmp_path}"]), gather([str(tmp_path)])
    assert {row.mapper for row in plain} == {"anchored"}
    assert {row.mapper for row in named} == {"ten layers"}
    assert [row.value for row in named] == [row.value for row in plain]


def test_what_cannot_be_drawn_is_a_message(
    runs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, expected in (
        (["sample-eficiency", *runs], "sample-efficiency, tradeoff"),
        (["sample-efficiency", runs[0]], "outputs/*"),
        (["sample-efficiency", runs[1]], "several numbers of tokens"),
    ):
        assert call(monkeypatch, "plot", *words, "--to", str(tmp_path / "drawn")) == 1
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "drawn").exists()


def test_a_grid_over_lengths_of_text_draws_it_by_itself(tmp_path: Path) -> None:
    words = ["experiment=smoke", f"outputs={tmp_path}", "pair=smollm2_gemma3"]
    counts = sorted({row.value for row in make_sample_rows() if row.task == "size"})[:2]
    configs = [compose([*words, f"data.calibration_passages={i + 4}"]) for i in range(2)]
    for cfg, tokens in zip(configs, counts, strict=True):
        folder = RunFolder.of(cfg)
        folder.begin(cfg)
        mine = [r for r in make_sample_rows() if r.mapper_hash == f"full{int(tokens)}"]
        write_rows(folder.path / "rows.parquet", mine)
        folder.succeed()
    out = io.StringIO()
    assert summarise(configs, Console(file=out, width=200)) == 0
    assert (tmp_path / "figures" / FIGURE).exists() and FIGURE in out.getvalue()


def test_a_grid_without_them_draws_nothing(tmp_path: Path) -> None:
    cfg = compose(["experiment=smoke", f"outputs={tmp_path}"])
    folder = RunFolder.of(cfg)
    folder.begin(cfg)
    write_rows(folder.path / "rows.parquet", make_rows())
    folder.succeed()
    assert summarise([cfg], Console(file=io.StringIO(), width=200)) == 0
    assert not (tmp_path / "figures").exists()
