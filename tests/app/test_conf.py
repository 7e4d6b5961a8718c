"""Every shipped YAML composes, says what it is, and agrees with the code it configures."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvferry.app import checks
from kvferry.app.arguments import split
from kvferry.app.compose import compose
from kvferry.app.mapper import build_mapper
from kvferry.app.paths import conf_dir
from kvferry.app.schema import STAGES, Condition
from kvferry.results.catalogue import CONDITIONS

CONF = conf_dir()
FILES = sorted(p for p in CONF.rglob("*.yaml") if p.parent.name not in ("conf", "help"))
MAPPERS = sorted((CONF / "mapper").glob("*.yaml"))


def names(files: list[Path]) -> list[str]:
    return [f"{file.parent.name}/{file.stem}" for file in files]


def choose(file: Path, text: Path) -> list[str]:
    """The words that select this file, with what it needs besides."""
    group, name = file.parent.name, file.stem
    if group == "model":
        return [f"model@pair.source={name}"]
    needs = {
        "data/text": [f"data.path={text}"],
        "data/hub": [f"data.dataset={text}"],
        "experiment/prototype": [f"data.path={text}"],
        "mapper/fitted": ["mapper.artefact=owner/name"],
        "mapper/identity": ["pair=smollm2_smollm2"],
        "trainer/tensor_parallel": ["pair=llama70b_qwen7b"],
    }
    return [f"{group}={name}", *needs.get(f"{group}/{name}", [])]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is optional is no matter of the files."""
    monkeypatch.setattr(checks, "installed", lambda name: True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("One passage.\n\nAnother.\n")
    return path


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_every_yaml_composes(file: Path, text: Path) -> None:
    cfg = compose(choose(file, text))
    if file.parent.name in ("pair", "mapper"):
        assert getattr(cfg, file.parent.name).name == file.stem
    if file.parent.name == "model":
        assert cfg.source.cache is not None, "plans need its shape"
    if file.parent.name == "data":
        assert cfg.data.source == file.stem


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_every_yaml_opens_with_what_it_is(file: Path) -> None:
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    opening = "\n".join(head)
    if file.parent.name == "model" and "GGUF" not in opening and "python" not in opening:
        assert "Fetched once" in opening
        return
    for part in ("python run.py", "Hardware:", "Expected:"):
        assert part in opening, f"{file.name} does not say `{part}`"


@pytest.mark.parametrize("file", FILES, ids=names(FILES))
def test_the_command_in_the_header_is_right(file: Path, text: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The command that a YAML advertises composes, with its example files in place."""
    monkeypatch.chdir(text.parent)
    for name in ("notes.txt", "novels.txt", "facts.txt", "wiki.txt"):
        Path(name).write_text("x\n")
    lines = [line[1:].strip() for line in file.read_text().splitlines() if line.startswith("#")]
    commands = [line for line in lines if line.startswith("python run.py")]
    for command in commands:
        words = command.split("  ")[0].replace("'", "").split()[2:]
        args = split([word for word in words if word != "\\"])
        compose(args.overrides)


@pytest.mark.parametrize("file", MAPPERS, ids=names(MAPPERS))
def test_a_mapper_yaml_lists_every_field_of_its_class(file: Path) -> None:
    values = OmegaConf.load(file)
    module, _, name = str(values["_target_"]).rpartition(".")
    cls = getattr(importlib.import_module(module), name, None)
    assert cls is not None
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    placed = {str(key).partition("@")[2] for entry in values.get("defaults", ()) for key in entry}
    assert (set(values) | placed) - {"_target_", "name", "defaults"} == fields
    build_mapper(compose(choose(file, Path("notes.txt"))).mapper)


def test_the_schema_speaks_the_language_of_the_results() -> None:
    assert set(Condition.__args__) <= set(CONDITIONS)  # type: ignore[attr-defined]
    assert STAGES == ("fit", "evaluate", "report")
