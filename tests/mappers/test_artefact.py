"""An artefact is whole and belongs to this pair, or it is refused by name: gate 12."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.calibration.reader import PairReader
from kvferry.errors import ArtefactError, StorageError
from kvferry.lm.pico import pico_language_model
from kvferry.mappers import artefact
from kvferry.mappers.artefact import Manifest, ModelIdentity, load_mapper, save_mapper
from tests.matrix import METHODS, fitted
from tests.pairs import reader_of, statistics_of, traces_of

SOURCE, TARGET = "llama", "gemma3"


def manifest_of(reader: PairReader, method: str = "anchored") -> Manifest:
    return Manifest(
        pair="pico",
        method=METHODS[method].pretty_name,
        reference_url=METHODS[method].reference_url,
        fields=dict(vars(METHODS[method])),
        source=ModelIdentity.of(reader.source),
        target=ModelIdentity.of(reader.target),
        calibration={"passages": 12},
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "mapper"
    reader = reader_of(SOURCE, TARGET)
    mapper = METHODS["anchored"].fit(statistics_of(SOURCE, TARGET))
    save_mapper(folder, mapper, manifest_of(reader), "pair: pico\n")
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_what_is_loaded_maps_as_what_was_saved(method: str, tmp_path: Path) -> None:
    reader = reader_of(SOURCE, TARGET)
    mapper = fitted(method, SOURCE, TARGET)
    save_mapper(tmp_path / "m", mapper, manifest_of(reader, method), "pair: pico\n")
    again, manifest = load_mapper(tmp_path / "m", reader.source, reader.target)
    trace = traces_of(SOURCE, TARGET, 1)[0]
    first = [0] * len(mapper.target.layers)
    before, after = mapper.map(trace.inputs(None), first), again.map(trace.inputs(None), first)
    for layer in before.keys:
        assert torch.equal(before.keys[layer], after.keys[layer])
        assert torch.equal(before.values[layer], after.values[layer])
    settings = json.loads(json.dumps(asdict(METHODS[method])))  # type: ignore[call-overload]
    assert manifest.fields == settings and again.parameters == mapper.parameters
    names = {"mapper.safetensors", "manifest.json", "config.yaml", "README.md"}
    assert {path.name for path in (tmp_path / "m").iterdir()} == names


def _flip_byte(folder: Path) -> None:
    path = folder / artefact.WEIGHTS
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def _truncate(folder: Path) -> None:
    path = folder / artefact.WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / artefact.MANIFEST
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped byte": (_flip_byte, "missing, truncated or changed"),
    "truncated": (_truncate, "missing, truncated or changed"),
    "no weights": (lambda f: (f / artefact.WEIGHTS).unlink(), "missing, truncated or changed"),
    "no manifest": (lambda f: (f / artefact.MANIFEST).unlink(), "no readable mapper"),
    "half a manifest": (
        lambda f: (f / artefact.MANIFEST).write_text('{"format_'),
        "no readable mapper",
    ),
    "format version": (_edit(lambda m: m.update(format_version=99)), "another format"),
    "missing entry": (_edit(lambda m: m.pop("method")), "incomplete or edited"),
    "other tokenizer": (
        _edit(lambda m: m["target"].update(tokenizer="0" * 16)),
        "another target: the tokenizer differs",
    ),
    "a fine-tune of the same shape": (
        _edit(lambda m: m["source"].update(revision="other")),
        "another source: the revision differs",
    ),
    "rope": (
        _edit(lambda m: m["target"].update(rope_parameters="{}")),
        "another target: the rope parameters differs",
    ),
    "groups": (_edit(lambda m: m["groups"].append(m["groups"][0])), "do not belong together"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(damage: str, saved: Path, tmp_path: Path) -> None:
    reader = reader_of(SOURCE, TARGET)
    folder = tmp_path / "mapper"
    shutil.copytree(saved, folder)
    load_mapper(folder, reader.source, reader.target)
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(ArtefactError, match=message) as caught:
        load_mapper(folder, reader.source, reader.target)
    assert "to do:" in str(caught.value)


def test_another_pair_is_refused(saved: Path) -> None:
    with pytest.raises(ArtefactError, match="another source"):
        load_mapper(saved, reader_of("qwen3", TARGET).source, reader_of(SOURCE, TARGET).target)


def test_other_weights_of_the_same_shape_are_another_model(saved: Path) -> None:
    reader = reader_of(SOURCE, TARGET)
    with pytest.raises(ArtefactError, match="revision"):
        load_mapper(saved, pico_language_model(SOURCE, 1), reader.target)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artefact, "save_file", full)
    mapper = METHODS["heterofold"].fit(statistics_of(SOURCE, TARGET))
    with pytest.raises(StorageError, match="disk is full"):
        save_mapper(tmp_path / "m", mapper, manifest_of(reader_of(SOURCE, TARGET)), "")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_mapper(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mapper"
    shutil.copytree(saved, folder)
    before = (folder / artefact.WEIGHTS).read_bytes()
    mapper = METHODS["heterofold"].fit(statistics_of(SOURCE, TARGET))
    reader = reader_of(SOURCE, TARGET)
    with pytest.raises(TypeError):
        save_mapper(folder, mapper, manifest_of(reader), None)  # type: ignore[arg-type]
    assert (folder / artefact.WEIGHTS).read_bytes() == before
