"""What a hand-off gives: a cache to decode from, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvferry.handoff.policy import Decision
from kvferry.handoff.provenance import Provenance
from kvferry.lm.content import ContentKV


@dataclass(frozen=True)
class MappedCache:
    """A cache that the target decodes from at once.

    Args:
        cache: of the target's own kind; decoding grows it in place.
        ids, mask: the target tokens that it stands for, and which of them are real (left padding).
        suffix_ids: target tokens of each row still to be run: the suffix, healed at the boundary.
        provenance: what it is made of, one a row.
        milliseconds: time spent in each step.
        beneath: of a cache at full length, what was mapped in the layers with planted sinks; None
            where windowed layers hold their windows alone, and nothing can be carried on.
        decision: of the policy, where one was asked.
    """

    cache: Any
    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]
    suffix_ids: list[list[int]]
    provenance: list[Provenance]
    milliseconds: dict[str, float] = field(default_factory=dict)
    beneath: ContentKV | None = None
    decision: Decision | None = None


def pad_left(rows: Sequence[ContentKV]) -> ContentKV:
    """One batch from single rows; layers of a row may hold only its last tokens."""
    if len(rows) == 1:
        return rows[0]
    longest = max(row.tokens for row in rows)

    def stack(component: str) -> dict[int, Tensor]:
        out = {}
        for layer in getattr(rows[0], component):
            parts = [getattr(row, component)[layer] for row in rows]
            width = max(part.shape[2] for part in parts)
            out[layer] = torch.cat(
                [torch.nn.functional.pad(p, (0, 0, width - p.shape[2], 0)) for p in parts]
            )
        return out

    def widen(x: Tensor, tokens: int) -> Tensor:
        return torch.nn.functional.pad(x, (longest - tokens, 0))

    return ContentKV(
        keys=stack("keys"),
        values=stack("values"),
        positions=torch.cat([widen(row.positions, row.tokens) for row in rows]),
        mask=torch.cat([widen(row.mask, row.tokens) for row in rows]),
    )
