"""Traces on disk, so that a second mapper is evaluated without running both models again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvferry.calibration.reader import PairReader, PairTrace, TokenPair
from kvferry.lm.cache_limit import touch
from kvferry.lm.content import ContentKV
from kvferry.lm.store import new_file
from kvferry.mappers.layout import COMPONENTS

SEAL = "sha256"


class TraceStore:
    """One safetensors file a text, with a digest of its tensors.

    Args:
        folder: where traces lie; one folder a pair of models.
        dtype: number format on disk; that of the models by default.
    """

    def __init__(self, folder: Path, reader: PairReader, dtype: torch.dtype | None = None) -> None:
        models = [
            (model.revision, model.geometry.fingerprint(), model.tokenizer_hash, str(model.dtype))
            for model in (reader.source, reader.target)
        ]
        stored = [] if dtype is None else [str(dtype)]
        key = hashlib.sha256(json.dumps([*models, *stored]).encode()).hexdigest()[:16]
        self.folder = folder / key
        self.reader = reader
        self.dtype = dtype

    def read(self, tokens: TokenPair) -> PairTrace:
        """The trace of a text, from disk where it is whole, else from both models.

        Raises:
            StorageError: the disk is full; nothing half-written stays.
        """
        path = self.folder / f"{_digest(tokens)}.safetensors"
        try:
            trace = self._load(path, tokens)
        except (FileNotFoundError, SafetensorError, KeyError):
            self._write(path, self.reader.read([tokens])[0])
            trace = self._load(path, tokens)
        touch(path)
        return trace

    def _load(self, path: Path, tokens: TokenPair) -> PairTrace:
        stored = load_file(path)
        if not torch.equal(stored.pop(SEAL), _seal(stored)):
            raise KeyError(f"{path} is not what was written")
        device = self.reader.content_device
        source, target = (
            _content(stored, side, device, model.dtype)
            for side, model in (("source", self.reader.source), ("target", self.reader.target))
        )
        return PairTrace(tokens, source, target)

    def _write(self, path: Path, trace: PairTrace) -> None:
        tensors = {**_tensors(trace.source, "source"), **_tensors(trace.target, "target")}
        if self.dtype is not None:
            tensors = {name: x.to(self.dtype) for name, x in tensors.items()}
        tensors = {name: x.cpu() for name, x in tensors.items()}
        with new_file(path) as temporary:
            save_file({**tensors, SEAL: _seal(tensors)}, temporary)


def _seal(tensors: dict[str, Tensor]) -> Tensor:
    """sha256 of all tensors, as bytes: a trace that was damaged on disk is read again."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _digest(tokens: TokenPair) -> str:
    ids = json.dumps([tokens.source_ids, tokens.target_ids])
    return hashlib.sha256(ids.encode()).hexdigest()[:24]


def _tensors(content: ContentKV, side: str) -> dict[str, Tensor]:
    return {
        f"{side}.{component}.{layer}": x.contiguous()
        for component in COMPONENTS
        for layer, x in getattr(content, component).items()
    }


def _content(
    stored: dict[str, Tensor], side: str, device: torch.device | str, dtype: torch.dtype
) -> ContentKV:
    def layers(component: str) -> dict[int, Tensor]:
        prefix = f"{side}.{component}."
        names = sorted((n for n in stored if n.startswith(prefix)), key=_layer)
        return {_layer(name): stored[name].to(device, dtype) for name in names}

    keys = layers("keys")
    tokens = keys[0].shape[2]
    positions = torch.arange(tokens, device=keys[0].device)[None]
    return ContentKV(keys, layers("values"), positions, torch.ones_like(positions).bool())


def _layer(name: str) -> int:
    return int(name.rsplit(".", 1)[1])
