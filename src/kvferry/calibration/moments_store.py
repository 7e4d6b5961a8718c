"""Collected moments on disk: saved while they grow, found again, taken further by more text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvferry.errors import InputError
from kvferry.lm.cache_limit import touch
from kvferry.lm.store import locked, new_file, storage_errors
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS, Component
from kvferry.stats.moments import Moments

PROGRESS = "progress.json"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError, InputError)


@dataclass(frozen=True)
class Collection:
    """Moments of some passages, and what they were made with.

    Args:
        texts: sha256 of each passage, in order.
        code: the source code behind "code" columns, None where there are none.
        moments: by component.
        shared_only: whether only rows at shared token boundaries count.
    """

    texts: tuple[str, ...]
    code: SourceCode | None
    moments: dict[Component, Moments]
    shared_only: bool


class MomentsStore:
    """One folder a list of passages.

    Each save writes new files, then renames `progress.json`, which names them, then removes the
    old ones. A process that is killed at any moment leaves the last whole save behind.

    Args:
        folder: where the folders lie.
        base: digest of all that must agree but the passages: models, plan, alignment.
        device: where moments that are found go on growing.
    """

    def __init__(self, folder: Path, base: str, device: torch.device | str = "cpu") -> None:
        self.folder, self.base, self.device = folder, base, device

    @contextmanager
    def writing(self, key: str) -> Iterator[None]:
        """Keep other processes from collecting, or evicting, the same moments meanwhile."""
        with locked(self.folder / key):
            yield

    def done(self, key: str) -> int:
        """Passages that are collected under ``key``; no weight is read."""
        try:
            return int(_progress(self.folder / key)["passages"])
        except _UNREADABLE:
            return 0

    def find(self, key: str, texts: Sequence[str], shared_only: bool) -> Collection | None:
        """The collection that holds most of the first passages of ``texts`` and no others.

        Its own folder is looked into first; those of shorter lists come after. What cannot be read
        is passed over.
        """
        for place in self._candidates(key, tuple(texts), shared_only):
            try:
                found = _load(place, tuple(texts), shared_only, self.device)
            except _UNREADABLE:
                continue
            touch(place / PROGRESS)
            return found
        return None

    def save(self, key: str, collection: Collection) -> None:
        """Write a collection; the one before it stays whole until this one is.

        Raises:
            StorageError: the disk is full or the folder cannot be written.
        """
        place = self.folder / key
        tag = f"-{len(collection.texts):06d}"
        tensors = {str(c): m.state_dict() for c, m in collection.moments.items()}
        if collection.code is not None:
            tensors["code"] = {
                str(c): p.contiguous() for c, p in collection.code.projection.items()
            }
        paths = {name: place / f"{name}{tag}.safetensors" for name in tensors}
        try:
            with storage_errors(place):
                place.mkdir(parents=True, exist_ok=True)
                for name, path in paths.items():
                    save_file(tensors[name], path)
                    path.chmod(0o644)
            with new_file(place / PROGRESS) as temporary:
                temporary.write_text(json.dumps(self._record(collection, tag)))
        except Exception:
            for path in paths.values():
                path.unlink(missing_ok=True)
            raise
        for path in place.iterdir():
            if path.name != PROGRESS and path not in paths.values():
                path.unlink(missing_ok=True)

    def _record(self, collection: Collection, tag: str) -> dict[str, Any]:
        return {
            "passages": len(collection.texts),
            "tag": tag,
            "base": self.base,
            "shared_only": collection.shared_only,
            "texts": list(collection.texts),
        }

    def _candidates(self, key: str, texts: tuple[str, ...], shared_only: bool) -> list[Path]:
        sizes: dict[Path, tuple[int, bool]] = {}
        for place in self.folder.glob("*"):
            try:
                known = _progress(place)
                count, own = int(known["passages"]), place.name == key
            except _UNREADABLE:
                continue
            # The key says as much as the rest, and the oldest records hold no more than a count.
            same = own or (
                known.get("base") == self.base
                and known.get("shared_only") == shared_only
                and known.get("texts") == list(texts[:count])
            )
            if same and 0 < count <= len(texts):
                sizes[place] = (count, own)
        return sorted(sizes, key=lambda place: sizes[place], reverse=True)


def _progress(place: Path) -> Mapping[str, Any]:
    record: Mapping[str, Any] = json.loads((place / PROGRESS).read_text())
    return record


def _load(
    place: Path, texts: tuple[str, ...], shared_only: bool, device: torch.device | str
) -> Collection:
    known = _progress(place)
    tag, count = known.get("tag", ""), int(known["passages"])
    states = {c: load_file(place / f"{c}{tag}.safetensors") for c in COMPONENTS}
    moments = {c: Moments.from_state_dict(state, device=device) for c, state in states.items()}
    stored = place / f"code{tag}.safetensors"
    projection = load_file(stored) if stored.exists() else None
    code = None if projection is None else SourceCode({c: projection[c] for c in COMPONENTS})
    return Collection(texts[:count], code and code.on(device), moments, shared_only)
