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


class TraceStore:
    """One safetensors file a text, in the number format of the models.

    Args:
        folder: where traces lie; one folder a pair of models.
    """

    def __init__(self, folder: Path, reader: PairReader) -> None:
        models = [
            (model.revision, model.geometry.fingerprint(), model.tokenizer_hash, str(model.dtype))
            for model in (reader.source, reader.target)
        ]
        key = hashlib.sha256(json.dumps(models).encode()).hexdigest()[:16]
        self.folder = folder / key
        self.reader = reader

    def read(self, tokens: TokenPair) -> PairTrace:
        """The trace of a text, from disk where it is whole, else from both models.

        Raises:
            StorageError: the disk is full; nothing half-written stays.
        """
        path = self.folder / f"{_digest(tokens)}.safetensors"
        try:
            stored = load_file(path, device=str(self.reader.content_device))
            touch(path)
            return PairTrace(tokens, _content(stored, "source"), _content(stored, "target"))
        except (FileNotFoundError, SafetensorError, KeyError):
            (trace,) = self.reader.read([tokens])
            self._write(path, trace)
            return trace

    def _write(self, path: Path, trace: PairTrace) -> None:
        tensors = {**_tensors(trace.source, "source"), **_tensors(trace.target, "target")}
        with new_file(path) as temporary:
            save_file(tensors, temporary)


def _digest(tokens: TokenPair) -> str:
    ids = json.dumps([tokens.source_ids, tokens.target_ids])
    return hashlib.sha256(ids.encode()).hexdigest()[:24]


def _tensors(content: ContentKV, side: str) -> dict[str, Tensor]:
    return {
        f"{side}.{component}.{layer}": x.contiguous()
        for component in COMPONENTS
        for layer, x in getattr(content, component).items()
    }


def _content(stored: dict[str, Tensor], side: str) -> ContentKV:
    def layers(component: str) -> dict[int, Tensor]:
        prefix = f"{side}.{component}."
        names = sorted((n for n in stored if n.startswith(prefix)), key=_layer)
        return {_layer(name): stored[name] for name in names}

    keys = layers("keys")
    tokens = keys[0].shape[2]
    positions = torch.arange(tokens, device=keys[0].device)[None]
    return ContentKV(keys, layers("values"), positions, torch.ones_like(positions).bool())


def _layer(name: str) -> int:
    return int(name.rsplit(".", 1)[1])
