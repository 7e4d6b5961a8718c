"""`kvferry push`: a run's mapper to a model hub, with its card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.app.folder import MAPPER
from kvferry.mappers.artefact import CARD, MANIFEST
from kvferry.mappers.card import NOT_EVALUATED
from kvferry.mappers.hub import MapperArtefact


@dataclass(frozen=True)
class Published:
    """Where a mapper went, and whether its card shows what it keeps."""

    address: str
    evaluated: bool


def push(
    run: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    api: Any = None,
) -> Published:
    """Publish the mapper of a run.

    Args:
        run: a run folder, or a mapper folder.
        repo_id: owner/name on the hub.
        private, revision, api: see `MapperArtefact.push_to_hub`.

    Raises:
        ArtefactError: there is no whole mapper.
        HubError: not logged in, not allowed, a malformed name, or no answer.
    """
    run = run.expanduser()
    inside = run / MAPPER
    artefact = MapperArtefact.from_pretrained(
        (inside if (inside / MANIFEST).is_file() else run).absolute()
    )
    address = artefact.push_to_hub(repo_id, private=private, revision=revision, api=api)
    card = artefact.folder / CARD
    return Published(address, card.is_file() and NOT_EVALUATED not in card.read_text())
