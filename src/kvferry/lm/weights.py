"""Safetensors folders, looked at without loading: are they whole, and which weights are they."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvferry.errors import ModelUnavailableError

_SAMPLE = 4096


def check_weights(folder: Path) -> list[Path]:
    """The safetensors files that make up a model, each as long as its own header says.

    Raises:
        ModelUnavailableError: no weights, a missing shard, or a truncated file.
    """
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    shards = [folder / name for name in sorted(names)]
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise _bad_weights(folder, f"missing {', '.join(missing)}", f"{len(names)} file(s)")
    for path in shards:
        _, _, end = _header(path)
        if path.stat().st_size != end:
            found = f"{path.name}: {path.stat().st_size:,} bytes"
            raise _bad_weights(folder, found, f"{end:,} bytes")
    return shards


def content_fingerprint(folder: Path, shards: list[Path]) -> str:
    """Digest of the configuration and of three samples of every tensor.

    Cheap for large models, and different for a fine-tune of the same shape.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in shards:
        header, start, _ = _header(path)
        spans = sorted(
            entry["data_offsets"] for key, entry in header.items() if key != "__metadata__"
        )
        digest.update(json.dumps(header, sort_keys=True).encode())
        with path.open("rb") as stream:
            for first, last in spans:
                for offset in (first, (first + last) // 2, max(first, last - _SAMPLE)):
                    stream.seek(start + offset)
                    digest.update(stream.read(min(_SAMPLE, last - offset)))
    return digest.hexdigest()


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Header, offset of the first tensor, and the length the file must have."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header: dict[str, Any] = json.loads(stream.read(min(length, 100_000_000)))
        except ValueError as error:
            raise _bad_weights(path.parent, f"{path.name}: no header", "safetensors") from error
    ends = [entry["data_offsets"][1] for k, entry in header.items() if k != "__metadata__"]
    return header, 8 + length, 8 + length + max(ends, default=0)


def _bad_weights(folder: Path, found: str, expected: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"The weights in {folder} are incomplete.",
        found=found,
        expected=expected,
        fix="Copy or download the folder again.",
    )
