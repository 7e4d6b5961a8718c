"""Several runs in one table: whose numbers stand where, and what a run is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvferry.app import cli
from kvferry.app.compare import compare, settings_apart
from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder, labelled
from kvferry.errors import InputError
from kvferry.results.rows import write_rows
from tests.results.conftest import make_rows


def run_of(words: list[str], outputs: Path, solve_s: float, **rows: object) -> Path:
    """A run folder as an evaluation leaves it."""
    cfg = compose(["experiment=smoke", f"outputs={outputs}", *words])
    folder = RunFolder.of(cfg)
    folder.begin(cfg)
    name = {"mapper": cfg.mapper.name, "mapper_hash": folder.path.name[-10:]}
    write_rows(folder.path / "rows.parquet", make_rows(cfg.pair.name, **{**name, **rows}))  # type: ignore[arg-type]
    lines = [{"config_hash": "x"}, {"fit/solve_s": solve_s}]
    (folder.path / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return folder.path


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, Path]:
    ours = ["native", "mapped", "mapped_tail", "zero"]
    return {
        "ours": run_of(
            ["pair=smollm2_gemma3", "mapper=anchored", "mapper.native_layers=4"],
            tmp_path,
            42.0,
            factor=0.5,
            conditions=tuple(ours),
        ),
        "theirs": run_of(["pair=smollm2_gemma3", "mapper=full_head_ridge"], tmp_path, 300.0),
        "back": run_of(["pair=gemma3_smollm2", "mapper=full_head_ridge"], tmp_path, 1.0),
    }


def cells(table: str, label: str) -> dict[str, str]:
    lines = [line for line in table.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    (line,) = [line for line in lines if line.startswith(f"| {label} |")]
    return dict(zip(heads, [cell.strip() for cell in line.split("|")[1:-1]], strict=True))


def test_each_run_has_a_line_in_the_table_of_its_pair(runs: dict[str, Path]) -> None:
    there, back = compare([str(path) for path in runs.values()]).split("\n\nGemma-3-270M to ")
    assert there.startswith("SmolLM2-135M-Instruct to Gemma-3-270M: wiki n = 48, factbook n = 8")
    ours, theirs = cells(there, "anchored native_layers=4"), cells(there, "full_head_ridge")
    assert (ours["KL"], theirs["KL"]) == ("**0.062**", "0.124"), "the best one is bold"
    assert (ours["Recall kept"], theirs["Recall kept"]) == ("**0.806**", "0.612")
    assert theirs["with a native tail"] == "0.044 / 0.608"
    assert theirs["novel"] == f"{0.124 * 1.4:.3f} / {1 - 0.388 * 1.4:.3f}"
    assert (ours["fit"], theirs["fit"]) == ("42 s", "5 min")
    assert ours["prefill / map, 128"] == "7.6x"
    assert cells(back, "full_head_ridge")["fit"] == "1 s"
    assert "anchored" not in back


def test_controls_stand_once_from_the_run_that_has_them(runs: dict[str, Path]) -> None:
    table = compare([str(runs["ours"]), str(runs["theirs"])])
    assert cells(table, "shuffled")["KL"] == "5.989"
    assert cells(table, "zero context")["Recall kept"] == "0.000"
    alone = compare([str(runs["ours"])])
    assert "shuffled" not in alone and "zero context" in alone


def test_a_run_is_called_as_its_user_says(runs: dict[str, Path]) -> None:
    table = compare([f"Ridge, all layers={runs['theirs']}"], intervals=True)
    assert cells(table, "Ridge, all layers")["KL"].startswith("**0.124 [0.1")


def test_a_folder_of_a_sweep_is_no_label(tmp_path: Path) -> None:
    swept = tmp_path / "lr=0.1"
    swept.mkdir()
    assert labelled(str(swept)) == ("", swept)
    assert labelled(f"a map={swept}") == ("a map", swept)
    assert labelled(f"key_gain=1.05={swept}") == ("key_gain=1.05", swept)
    assert labelled("nowhere") == ("", Path("nowhere"))


def test_settings_that_differ_name_a_run() -> None:
    words = ["mapper=mobility", "mapper@mapper.start=heterofold", "mapper.rank=8"]
    assert set(settings_apart(compose(words).mapper)) == {"start=heterofold", "rank=8"}
    words = ["mapper=mobility", "mapper.start.native_layers=10"]
    assert [*settings_apart(compose(words).mapper)] == ["start.native_layers=10"]
    assert [*settings_apart(compose(["mapper=fitted", "mapper.artefact=a/b"]).mapper)] == []


def test_folders_without_rows_are_left_out(
    runs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    timed = run_of(["pair=gemma3_smollm2"], tmp_path, 1.0, conditions=())
    to = tmp_path / "table.md"
    left_out = [str(tmp_path / "empty"), str(timed)]
    words = ["compare", *left_out, str(runs["back"]), "--to", str(to)]
    monkeypatch.setattr(sys, "argv", ["kvferry", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code and capsys.readouterr().out == to.read_text()
    with pytest.raises(InputError, match="nothing to compare"):
        compare([*left_out, str(tmp_path / "none")])
