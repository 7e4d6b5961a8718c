"""`kvferry turns` on miniatures: two runs, one conversation, one folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvferry.app.cli import app
from kvferry.app.folder import RunFolder
from kvferry.app.run import execute
from kvferry.errors import ConfigurationError, InputError
from kvferry.results.rows import read_rows
from tests.app.test_pipeline import settings

SHORT = ["--turns", "3", "--contexts", "2", "--first-tokens", "120", "--turn-tokens", "16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Mappers of both directions."""
    outputs = tmp_path_factory.mktemp("both") / "outputs"
    folders = []
    for pair in ("smollm2_gemma3", "gemma3_smollm2"):
        cfg = settings(outputs, f"pair={pair}", "mapper=anchored", "stages=[fit]")
        assert execute(cfg) == 0
        folders.append(RunFolder.of(cfg).path)
    return folders[0], folders[1]


def call(there: Path, back: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["turns", str(there), str(back), *SHORT, *words])


def test_turns_leave_rows_report_and_figure(runs: tuple[Path, Path]) -> None:
    done = call(*runs)
    assert done.exit_code == 0, done.output
    (folder,) = runs[0].parent.glob("*-turns-*")
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "rows.parquet",
        "report.html",
        "figures",
    }
    assert (folder / "figures" / "smollm2_gemma3_turns.png").read_bytes()[:4] == b"\x89PNG"
    rows = read_rows(folder / "rows.parquet")
    assert {(row.turn, row.condition) for row in rows} == {
        (turn, condition)
        for turn in (1, 2, 3)
        for condition in ("native", "zero", "mapped", "fresh")
    }
    first = {row.condition: row.value for row in rows if (row.turn, row.metric) == (1, "kl")}
    assert first["native"] < 1e-5 < first["zero"] and first["mapped"] == first["fresh"] > 1e-5
    assert "hand-off 3 ·" in " ".join(done.output.split())
    before = (folder / "rows.parquet").stat().st_mtime_ns
    again = call(*runs)
    assert again.exit_code == 0 and "Already measured" in again.output
    assert (folder / "rows.parquet").stat().st_mtime_ns == before
    assert call(*runs, "--force").exit_code == 0
    assert (folder / "rows.parquet").stat().st_mtime_ns > before


def test_wrong_runs_and_wrong_lengths_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    there, back = runs
    assert isinstance(call(there, there).exception, ConfigurationError)
    assert isinstance(call(there, tmp_path).exception, ConfigurationError)
    many = call(there, back, "--contexts", "99")
    assert isinstance(many.exception, ConfigurationError) and "--contexts" in str(many.exception)
    out = tmp_path / "out"
    long = call(there, back, "--first-tokens", "40000", "--out", str(out))
    assert isinstance(long.exception, InputError) and "too short" in str(long.exception)
    assert not out.exists() and not list(tmp_path.iterdir())
