"""Mapper artefacts on a model hub: publish a folder, find one again, checked on both ways.

huggingface_hub's `ModelHubMixin` builds an object from one `config.json`. A mapper is only itself
beside the two models it was fitted to, so here its API and a whole folder are used instead: every
check of `load_mapper` stays between a download and the first product.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import ArtefactError, HubError
from kvferry.lm.hub import first_line, hub_problem
from kvferry.lm.model import LanguageModel
from kvferry.lm.store import new_file, new_folder
from kvferry.mappers.artefact import (
    CARD,
    CONFIG,
    MANIFEST,
    MEASURED,
    WEIGHTS,
    Manifest,
    check_mapper,
    load_mapper,
)
from kvferry.mappers.card import named_at
from kvferry.mappers.mapper import Mapper

FILES = (WEIGHTS, MANIFEST, CONFIG, CARD, MEASURED)


@dataclass(frozen=True)
class MapperArtefact:
    """A whole mapper folder on this machine.

    Args:
        folder: holds weights, manifest, settings and card.
        manifest: read from it, its weights' digest checked.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, revision: str | None = None, api: Any = None
    ) -> MapperArtefact:
        """Find a mapper: a local folder of this name first, then the hub.

        Args:
            name: a folder, or a hub id like owner/name.
            revision: commit, branch or tag on the hub.
            api: a `huggingface_hub.HfApi`; the default one unless given.

        Raises:
            ArtefactError: no such folder, or a mapper that is damaged or of another format.
            HubError: not on the hub, gated, or the hub does not answer.
        """
        folder = Path(name).expanduser()
        if not folder.is_dir():
            if is_path(str(name)):
                raise ArtefactError(
                    f"There is no folder {folder}.",
                    fix="name the folder of a fitted mapper, or a hub id like owner/name",
                )
            folder = _download(str(name), revision, api)
        return cls(folder, check_mapper(folder))

    def load(self, source: LanguageModel, target: LanguageModel) -> tuple[Mapper, Manifest]:
        """The mapper itself, after every check against the two models: `load_mapper`.

        Raises:
            ArtefactError: a mapper of another pair, revision or tokenizer.
        """
        return load_mapper(self.folder, source, target)

    def save_pretrained(self, folder: str | Path) -> MapperArtefact:
        """Copy it, whole or not at all, to a folder that does not hold anything yet.

        Raises:
            ArtefactError: something else lies there.
            StorageError: the disk is full or the folder cannot be written.
        """
        place = Path(folder).expanduser()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ArtefactError(
                f"There is something in {place} already.",
                fix="name a folder that is new or empty",
            )
        with new_folder(place) as temporary:
            for name in FILES:
                if (self.folder / name).is_file():
                    shutil.copyfile(self.folder / name, temporary / name)
        return MapperArtefact(place, check_mapper(place))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        revision: str | None = None,
        message: str | None = None,
        api: Any = None,
    ) -> str:
        """Publish it; the card then names its place.

        Args:
            repo_id: owner/name; made if it is not there.
            private: of a repository that is made.
            revision: branch to commit to.
            message: of the commit.
            api: a `huggingface_hub.HfApi`; the default one unless given.

        Returns:
            The address of the commit.

        Raises:
            ArtefactError: the folder was damaged meanwhile.
            HubError: not logged in, not allowed, a malformed name, or no answer.
        """
        check_mapper(self.folder)
        api = _default_api() if api is None else api
        try:
            api.whoami()
            api.create_repo(repo_id, repo_type="model", private=private, exist_ok=True)
            with self._named(repo_id):
                commit = api.upload_folder(
                    repo_id=repo_id,
                    repo_type="model",
                    folder_path=str(self.folder),
                    allow_patterns=list(FILES),
                    revision=revision,
                    commit_message=message or f"{self.manifest.method}, {self.manifest.short_hash}",
                )
        except Exception as error:
            _raise_told(repo_id, error)
            raise
        return str(getattr(commit, "commit_url", commit))

    @contextmanager
    def _named(self, repo_id: str) -> Iterator[None]:
        """The card names the hub id from here on, unless the body fails."""
        card = self.folder / CARD
        if not card.is_file():
            raise ArtefactError(f"This mapper has no card: {card}", fix="fit the mapper again")
        before = card.read_text()
        self._write_card(named_at(before, repo_id))
        try:
            yield
        except BaseException:
            self._write_card(before)
            raise

    def _write_card(self, text: str) -> None:
        with new_file(self.folder / CARD) as temporary:
            temporary.write_text(text)


def _download(repository: str, revision: str | None, api: Any) -> Path:
    api = _default_api() if api is None else api
    try:
        return Path(
            api.snapshot_download(repository, revision=revision, allow_patterns=list(FILES))
        )
    except Exception as error:
        _raise_told(repository, error)
        raise


def _default_api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="kvferry")


def _raise_told(repository: str, error: Exception) -> None:
    told = hub_problem(error, repository)
    if told is not None:
        problem, fix = told
        raise HubError(
            f"The mapper {repository} {problem}.", found=first_line(error), fix=fix
        ) from error


def is_path(name: str) -> bool:
    """Whether a name can only be a folder: absolute, relative by dots, or more than owner/name."""
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1
