"""Every notebook source runs from top to bottom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.py"))


@pytest.mark.parametrize("source", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_OUTPUTS", str(tmp_path / "outputs"))
    notebook = tmp_path / f"{source.stem}.ipynb"
    command = [sys.executable, "-m", "jupytext", "--to", "ipynb", "--execute"]
    done = subprocess.run(
        [*command, str(source), "--output", str(notebook)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert notebook.exists()
