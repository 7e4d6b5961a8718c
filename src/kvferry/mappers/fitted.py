"""A mapper that was fitted before: measured again, or the start of one that learns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from kvferry.errors import ArtefactError, ConfigurationError
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.artefact import read_manifest
from kvferry.mappers.base import MapperMethod, Statistics, require
from kvferry.mappers.hub import MapperArtefact, is_path
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.mapper import Mapper


@dataclass(frozen=True)
class Fitted(MapperMethod):
    """The mapper of a finished run: nothing is fitted anew.

    Args:
        artefact: folder of a fitted mapper, or its hub id.
    """

    artefact: str

    pretty_name: ClassVar[str] = "A mapper fitted before"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"
    needs_moments: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require({"artefact must be the folder of a fitted mapper, or a hub id": self._plausible})

    def native_depth(self, target: KVGeometry) -> int:
        """That of the mapper.

        Raises:
            ArtefactError, HubError: it is damaged, or not to be found.
        """
        return MapperArtefact.from_pretrained(self.artefact).manifest.native_layers

    def fit(self, statistics: Statistics) -> Mapper:
        """The mapper as it was saved.

        Raises:
            ArtefactError: damaged, or a mapper of another pair, revision or tokenizer.
            ConfigurationError: a network is to learn behind it, and it reads another source code
                than these statistics.
        """
        mapper = statistics.saved(self.artefact)
        code = mapper.affine.code
        if statistics.moments and code is not None and not _same_code(code, statistics.code):
            raise ConfigurationError(
                "This mapper was calibrated on other text than this run reads.",
                found=self.artefact,
                expected="the same corpus, data.calibration_passages and seed: its code of all "
                "source layers is made from them",
                fix="set data.* as in the config.yaml beside the mapper, or fit a start here",
            )
        return mapper

    @property
    def _plausible(self) -> bool:
        if not Path(self.artefact).expanduser().is_dir():
            return "/" in self.artefact and not is_path(self.artefact)
        try:
            read_manifest(Path(self.artefact).expanduser())
        except ArtefactError:
            return False
        return True


def _same_code(one: SourceCode, other: SourceCode | None) -> bool:
    return other is not None and all(
        torch.equal(one.projection[c].cpu(), other.projection[c].cpu()) for c in COMPONENTS
    )
