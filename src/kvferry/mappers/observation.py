"""What a method sees besides moments: texts under both models, with the target's queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from jaxtyping import Bool
from torch import Tensor

from kvferry.lm.attention import QueryTrace
from kvferry.lm.content import ContentKV
from kvferry.mappers.inputs import MapperInputs

ReplaySplit = Literal["calibration", "selection", "other_domain"]
MIN_SHARED = 0.9
"""Below this share of shared token boundaries, dropping the other rows costs more than it cleans:
the hand-off will meet them all the time."""


@dataclass(frozen=True)
class Observation:
    """One calibration text.

    Args:
        inputs: what a mapper may read of it.
        target: the target's own content, every layer at full length.
        queries: by target layer.
        prefix: first target tokens that stay native: no mapped token is among them.
    """

    inputs: MapperInputs
    target: ContentKV
    queries: tuple[QueryTrace, ...]
    prefix: int

    @property
    def counted(self) -> Bool[Tensor, " tokens"]:
        """Target tokens to fit on, as moments count them but judged by this text alone.

        The prefix stays native, and the first token after it has no left context to tell of.
        """
        exact = self.inputs.alignment.exact
        shared = float(exact.double().mean()) >= MIN_SHARED
        counted = exact.clone() if shared else torch.ones_like(exact)
        counted[: self.prefix + 1] = False
        return counted


class Replay(Protocol):
    """Reads calibration texts again; each pass runs both models."""

    def __call__(self, passages: int, split: ReplaySplit = "calibration") -> Iterator[Observation]:
        """Observations of up to ``passages`` texts, spread evenly over those of ``split``.

        Args:
            split: "calibration": texts of the moments. "selection": of the same domain, unseen by
                moments and evaluation, to choose settings on. "other_domain": likewise, of another.
        """
        ...
