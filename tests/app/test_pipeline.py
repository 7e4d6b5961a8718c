"""The whole way on miniatures: run, resume, ask. What a user sees, without a download."""

from __future__ import annotations

import json
import os
from dataclasses import replace
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
from kvferry.errors import ArtefactError, HubError, InputError
from kvferry.evals.measured import QUALITY
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.measured import Measured
from kvferry.handoff.policy import Policy
from kvferry.mappers.artefact import read_manifest
from kvferry.mappers.card import NOT_EVALUATED
from kvferry.mappers.tuning import RIDGES
from kvferry.results.rows import read_rows

SMALL = ["data.calibration_passages=8", "data.held_out_passages=4", "data.passage_tokens=200"]


def settings(outputs: Path, *words: str) -> RunConfig:
    # A fixture of module scope runs before the cache is made private: name one.
    places = [f"outputs={outputs}", f"cache={outputs.parent / 'kvferry-cache'}"]
    return compose(["experiment=smoke", *SMALL, *places, *words])


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


def test_what_a_policy_needs_is_saved_with_the_mapper(finished: RunConfig) -> None:
    folder = RunFolder.of(finished).path / "mapper"
    measured = Measured.load(folder, read_manifest(folder))
    assert measured is not None and measured.timed_tokens == (32, 128)
    assert measured.quality["miniature"].keys() == set(QUALITY)
    assert measured.carry is not None and measured.prefill is not None
    handoff = Handoff.load(folder)
    source = handoff.reader.source
    ids, mask = source.batch([[*source.sink_ids, *source.encode("The ferry carries bread. " * 9)]])
    prefill = source.prefill(ids, mask)
    for policy in (Policy(least_quality=-9.0, margin_ms=-1e9), Policy(least_quality=2.0)):
        made = handoff.transfer(prefill, policy=policy)
        assert made.decision is not None
        assert made.provenance[0].exact is not made.decision.carry


def test_the_card_shows_what_was_measured(finished: RunConfig) -> None:
    card = (RunFolder.of(finished).path / "mapper" / "README.md").read_text()
    assert "recall kept" in card.lower() and "| zero context |" in card and "n = 2" in card
    assert NOT_EVALUATED not in card and "license: gemma" in card
    settings = (RunFolder.of(finished).path / "mapper" / "config.yaml").read_text()
    assert "recolour_keys" in settings
    assert str(RunFolder.of(finished).path.parent) not in card + settings


def test_push_without_a_login_is_a_message(
    finished: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_api.get_token", lambda: None)
    words = ["push", str(RunFolder.of(finished).path), "me/ferry"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, HubError) and "hf auth login" in str(done.exception)
    done = CliRunner().invoke(app, ["push", "/no/such/run", "me/ferry"])
    assert isinstance(done.exception, ArtefactError)


def test_two_ranks_calibrate_and_one_writes(tmp_path: Path) -> None:
    words = ["trainer=two_cpu_ranks", "seed=7", f"cache={tmp_path / 'cache'}"]
    cfg = settings(tmp_path, "pair=smollm2_gemma3", "mapper=heterofold", *words)
    assert execute(cfg) == 0
    folder = RunFolder.of(cfg).path
    rows = read_rows(folder / "rows.parquet")
    assert len({row.key for row in rows}) == len(rows) > 0
    manifest = json.loads((folder / "mapper" / "manifest.json").read_text())
    alone = settings(tmp_path, "pair=smollm2_gemma3", "mapper=heterofold", "seed=7", "stages=[fit]")
    assert execute(alone) == 0
    other = json.loads((RunFolder.of(alone).path / "mapper" / "manifest.json").read_text())
    assert manifest["calibration"] == other["calibration"]
    assert not (folder / "rank-1.log").read_text().count("Traceback")
    told = (folder / "metrics.jsonl").read_text().splitlines()
    assert sum("fit/rows" in line for line in told) == 1


def test_the_cache_keeps_to_its_limit_and_what_the_run_uses(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old = cache / "traces" / "other" / "old.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 1000)
    os.utime(old, (1, 1))
    cfg = settings(tmp_path, "mapper=heterofold", f"cache={cache}", "cache_limit_gb=0")
    assert cfg.config_hash == settings(tmp_path, "mapper=heterofold").config_hash
    assert execute(cfg) == 0
    assert not old.exists()
    assert list((cache / "traces").rglob("*.safetensors")), "its own traces are the run's"
    assert list((cache / "moments").rglob("progress.json"))


def test_the_same_settings_give_the_same_numbers(finished: RunConfig, tmp_path: Path) -> None:
    again = settings(tmp_path, "pair=smollm2_gemma3", "mapper=anchored")
    assert again.config_hash == finished.config_hash
    assert execute(again) == 0

    def numbers(cfg: RunConfig) -> dict[object, float]:
        rows = read_rows(RunFolder.of(cfg).path / "rows.parquet")
        # Moments read back from disk lie elsewhere in memory, and BLAS rounds by address: the last
        # bit of a weight, and so the hash, may differ.
        return {replace(row, mapper_hash="").key: row.value for row in rows if row.task == "ladder"}

    first, second = numbers(finished), numbers(again)
    assert first.keys() == second.keys()
    assert first == pytest.approx(second, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "words",
    [
        ["mapper=full_head_ridge"],
        ["mapper=heterofold", "mapper.recolour_keys=auto", "mapper.steps=10", "mapper.passages=4"],
        [
            "mapper=cachelink",
            "mapper.behavioural_keys=true",
            "mapper.steps=10",
            "mapper.passages=4",
        ],
        ["mapper=random"],
    ],
)
def test_every_mapper_of_the_tree_runs(words: list[str], tmp_path: Path) -> None:
    cfg = settings(tmp_path, "pair=llama8b_ministral14b", *words)
    assert execute(cfg) == 0


def test_what_the_fit_chooses_is_on_record(tmp_path: Path) -> None:
    """Chosen settings and mixed-in text, in manifest and log."""
    other = tmp_path / "letters.txt"
    other.write_text("\n\n".join(f"Letter {i}: " + "all is well here. " * 9 for i in range(8)))
    words = ["mapper=anchored", "mapper.ridge=auto", "stages=[fit]"]
    mixed = [f"data.out_of_domain=[{other}]", "data.mixed_domain=2"]
    cfg = settings(tmp_path, "pair=smollm2_gemma3", *words, *mixed)
    assert execute(cfg) == 0
    folder = RunFolder.of(cfg).path
    manifest = json.loads((folder / "mapper" / "manifest.json").read_text())
    assert manifest["fields"]["ridge"] == "auto"
    metrics = manifest["metrics"]
    assert metrics["chosen_ridge"] in RIDGES and metrics["choosing_other_domain"] == 1.0
    assert manifest["calibration"]["passages"] == 10 == 8 + manifest["calibration"]["mixed_domain"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("fit/chosen_ridge") == metrics["chosen_ridge"] for line in lines)


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
    assert shown.count("policy: ") == 1 and "kl_retention" in shown
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
