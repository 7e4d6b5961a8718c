"""The whole way on miniatures: run, resume, ask. What a user sees, without a download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvferry.app.ask import ask
from kvferry.app.asking import AskRequest
from kvferry.app.cli import app
from kvferry.app.compose import compose
from kvferry.app.folder import RunFolder
from kvferry.app.run import execute
from kvferry.app.schema import RunConfig
from kvferry.app.screen import AskScreen
from kvferry.errors import ArtefactError, InputError
from kvferry.results.rows import read_rows

SMALL = ["data.calibration_passages=8", "data.held_out_passages=4", "data.passage_tokens=200"]


def settings(outputs: Path, *words: str) -> RunConfig:
    return compose(["experiment=smoke", *SMALL, f"outputs={outputs}", *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    outputs = tmp_path_factory.mktemp("outputs")
    cfg = settings(outputs, "pair=smollm2_gemma3", "mapper=anchored")
    assert execute(cfg) == 0
    return cfg


def test_a_run_leaves_what_it_promises(finished: RunConfig) -> None:
    folder = RunFolder.of(finished).path
    names = {path.name for path in folder.iterdir()}
    assert {"DONE", "config.yaml", "rows.parquet", "report.html", "mapper", "figures"} <= names
    assert "FAILED" not in names
    rows = read_rows(folder / "rows.parquet")
    conditions = {row.condition for row in rows if row.metric == "kl"}
    assert {"native", "mapped", "mapped_tail", "zero", "random", "wrong_passage"} <= conditions
    assert {row.task for row in rows} == {"ladder", "latency", "size"}
    assert all(row.config_hash == finished.config_hash for row in rows)
    page = (folder / "report.html").read_text()
    assert "SmolLM2" in page and "http://" not in page.replace("http://www.w3.org", "")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert any("fit/parameters" in json.loads(line) for line in lines)


def test_the_same_settings_give_the_same_numbers(finished: RunConfig, tmp_path: Path) -> None:
    again = settings(tmp_path, "pair=smollm2_gemma3", "mapper=anchored")
    assert again.config_hash == finished.config_hash
    assert execute(again) == 0

    def numbers(cfg: RunConfig) -> dict[object, float]:
        rows = read_rows(RunFolder.of(cfg).path / "rows.parquet")
        return {row.key: row.value for row in rows if row.task == "ladder"}

    first, second = numbers(finished), numbers(again)
    assert first.keys() == second.keys()
    assert first == pytest.approx(second, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "words",
    [
        ["mapper=full_head_ridge"],
        ["mapper=heterofold", "mapper.recolour_keys=auto", "mapper.steps=10", "mapper.passages=4"],
        ["mapper=cachelink", "mapper.key_rank=4", "mapper.steps=10", "mapper.passages=4"],
        ["mapper=random"],
    ],
)
def test_every_mapper_of_the_tree_runs(words: list[str], tmp_path: Path) -> None:
    cfg = settings(tmp_path, "pair=llama8b_ministral14b", *words)
    assert execute(cfg) == 0


def test_the_identity_on_one_model_keeps_everything(tmp_path: Path) -> None:
    cfg = settings(tmp_path, "pair=gemma3_gemma3", "mapper=identity", "trainer.map_dtype=float32")
    assert execute(cfg) == 0
    rows = read_rows(RunFolder.of(cfg).path / "rows.parquet")
    kept = {
        row.metric: row.value for row in rows if row.condition == "mapped" and row.layer is None
    }
    assert kept["kl"] < 1e-5 and kept["top1_agreement"] == 1.0
    assert kept["nll_retention"] == pytest.approx(1.0, abs=1e-2)


def ask_about(finished: RunConfig, document: str, **changes: object) -> str:
    folder = RunFolder.of(finished).path
    console = Console(record=True, width=100, force_terminal=False)
    values = {
        "document": document,
        "question": "What is it about?",
        "pair": None,
        "mapper": str(folder),
        "outputs": folder.parent,
        "native_tail": 8,
        "max_new_tokens": 6,
    } | changes
    request = AskRequest.create(**values)  # type: ignore[arg-type]
    with AskScreen(console, "title").showing() as screen:
        ask(request, screen)
    return console.export_text()


def test_a_question_is_answered_both_ways_with_times(finished: RunConfig) -> None:
    shown = ask_about(finished, "The ferry carries letters and bread to the islands. " * 20)
    assert "carried over" in shown and "native" in shown
    assert shown.count("first token after") == 2 and "reads" in shown


def test_a_document_beyond_the_context_is_refused(finished: RunConfig) -> None:
    with pytest.raises(InputError, match="longer than"):
        ask_about(finished, "The ferry carries letters. " * 4000)


def test_the_mapper_of_another_pair_is_refused(finished: RunConfig) -> None:
    with pytest.raises(ArtefactError, match="another source"):
        ask_about(finished, "The ferry carries letters. " * 9, pair="gemma3_smollm2")


def test_bad_documents_end_with_a_message_and_exit_code(
    finished: RunConfig, tmp_path: Path
) -> None:
    runner = CliRunner()
    mapper = str(RunFolder.of(finished).path)
    for name, content in {"empty": b"", "binary": b"\x00\x01\x02" * 50}.items():
        path = tmp_path / name
        path.write_bytes(content)
        done = runner.invoke(app, ["ask", "why?", "--document", str(path), "--mapper", mapper])
        assert done.exit_code != 0 and isinstance(done.exception, InputError)
