"""The installed command line: messages instead of tracebacks, and nothing heavy for help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvferry import __version__
from kvferry.app import cli
from kvferry.app.asking import AskRequest
from kvferry.app.folder import RunFolder
from kvferry.app.schema import RunConfig
from kvferry.app.screen import AskScreen


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvferry", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code if isinstance(caught.value.code, int) else 0


@pytest.fixture
def fitted(cfg: RunConfig) -> RunFolder:
    """A finished run that holds something like a mapper."""
    folder = RunFolder.of(cfg)
    folder.begin(cfg)
    (folder.path / "mapper").mkdir()
    (folder.path / "mapper" / "manifest.json").write_text("{}")
    folder.succeed()
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AskRequest]:
    """The requests that reach the models."""
    seen: list[AskRequest] = []

    def ask(request: AskRequest, screen: AskScreen) -> None:
        seen.append(request)
        screen.write("carried", "Yes.")
        screen.finish("carried", 0.1)

    fake = types.ModuleType("kvferry.app.ask")
    fake.ask = ask  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvferry.app.ask", fake)
    return seen


def test_ask_takes_the_latest_mapper_and_its_settings(
    fitted: RunFolder,
    cfg: RunConfig,
    asked: list[AskRequest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = tmp_path / "document.txt"
    document.write_text("A text.")
    words = ["ask", "--document", str(document), "--native-tail", "8", "Is it?"]
    where = ["--outputs", cfg.outputs]
    assert call(monkeypatch, *words, *where) == 0
    assert call(monkeypatch, *words, "--mapper", str(fitted.path)) == 0
    assert call(monkeypatch, *words, "--mapper", str(fitted.path / "mapper")) == 0
    assert [request.mapper for request in asked] == [fitted.path / "mapper"] * 3
    assert all(request.config == cfg and request.native_tail == 8 for request in asked)
    assert "Yes." in capsys.readouterr().out
    assert call(monkeypatch, *words, *where, "--pair", "gemma3_smollm2") == 1
    assert "no finished run" in capsys.readouterr().err
    assert call(monkeypatch, *words, "--pair", "gemma3_smollm2", "--mapper", str(fitted.path)) == 0
    assert asked[-1].config.pair.name == "gemma3_smollm2", "the artefact then refuses the pair"


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["ask", "--document", "/no/such", "Who?"], 1, "cannot be read"),
        (["ask", "--document", __file__, " "], 1, "question is empty"),
        (["ask", "--document", __file__, "--pair", "smollm2_gema3", "Who?"], 1, "Did you mean"),
        (["ask", "--document", __file__, "--outputs", "/no", "Who?"], 1, "python run.py"),
        (["ask", "--document", __file__, "--mapper", "/no", "Who?"], 1, "no fitted mapper"),
        (["ask", "--document", __file__, "--native-tail", "-1", "Who?"], 2, "native-tail"),
        (["ask", "Who?"], 2, "--document"),
    ],
)
def test_bad_input_is_a_message(
    words: list[str],
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *words) == code
    said = capsys.readouterr().err
    assert expected in said and "Traceback" not in said


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == __version__


def test_doctor_tells_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "x.bin").write_bytes(b"1234")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "doctor", "--json", "--cache", str(tmp_path)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cache_bytes"] == {"models": 4} and report["machine"]["cores"] >= 1
    found = {package["name"]: package for package in report["packages"]}
    assert found["torch"]["found"] and not found["torch"]["optional"]
    assert all(found[name]["tested"] for name in ("torch", "transformers", "wandb"))
    pairs = {pair["name"]: pair for pair in report["pairs"]}
    assert pairs["smollm2_gemma3"]["weight_bytes"] > pairs["smollm2_smollm2"]["weight_bytes"] > 0
    assert not any(pair["ready"] for pair in report["pairs"])
    assert "make demo" in report["next_step"]
    assert call(monkeypatch, "doctor") == 0
    assert "smollm2_gemma3" in capsys.readouterr().out


def test_clean_says_what_it_would_free_and_frees_it_when_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE_LIMIT_GB", "0.002")
    files = [tmp_path / "traces" / "pair" / f"{index}.safetensors" for index in range(3)]
    files[0].parent.mkdir(parents=True)
    for index, file in enumerate(files):
        file.write_bytes(b"x" * 1_000_000)
        os.utime(file, (index, index))
    (tmp_path / "models").mkdir()
    words = ["clean", "--cache", str(tmp_path)]
    assert call(monkeypatch, *words) == 0
    said = capsys.readouterr().out
    assert "Would free 1.00 MB" in said and "--yes" in said and all(f.exists() for f in files)
    assert call(monkeypatch, *words, "--yes") == 0
    assert "Freed 1.00 MB" in capsys.readouterr().out
    assert [file.exists() for file in files] == [False, True, True]
    assert call(monkeypatch, *words, "--to-gb", "0", "--yes") == 0
    assert not any(file.exists() for file in files) and (tmp_path / "models").is_dir()
    capsys.readouterr()
    assert call(monkeypatch, "doctor", "--json", "--cache", str(tmp_path)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cache_limit_bytes"] == 2_000_000 and report["cache_bounded_bytes"] == 0


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['kvferry', '--help']; from kvferry.app import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'hydra')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout
