"""Where a text repeats itself: what a model that recalls goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Int64
from torch import Tensor

LEAST_REPEATED = 4
"""Tokens: shorter repeats are grammar."""


def recalled_tokens(ids: Sequence[int], least: int = LEAST_REPEATED) -> Int64[Tensor, " tokens"]:
    """By token, where the one that follows it stood before; -1 where nothing is repeated.

    It must have followed the same ``least`` tokens; of several such places the last one counts.
    """
    found = torch.full((len(ids),), -1, dtype=torch.int64)
    ends: dict[tuple[int, ...], int] = {}
    for at, (_, follower) in enumerate(pairwise(ids)):
        if at + 1 < least:
            continue
        stretch = (*ids[at + 1 - least : at + 1], follower)
        found[at] = ends.get(stretch, -1)
        ends[stretch] = at + 1
    return found
