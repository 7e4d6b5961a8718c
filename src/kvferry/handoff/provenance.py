"""Where a cache came from: a mapped one is an approximation and must never pass for a prefix."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Provenance:
    """The stamp on every cache that a hand-off gives.

    Args:
        source, target: names of the two models.
        mapper: pretty name of the method; empty where nothing was mapped.
        mapper_hash: digest of the mapper's weights; likewise.
        mapped_tokens: context tokens whose KV is approximate.
        native_tokens: context tokens that the target read itself (prefix and tail).
        hand_offs: how often the context was carried, this time included: above 1 the source's own
            cache was a mapped one in part.
        instead: why the target read the context itself; empty where the cache was carried.
        exact: whether it did; an exact-prefix cache must refuse what says False.
    """

    source: str
    target: str
    mapper: str
    mapper_hash: str
    mapped_tokens: int
    native_tokens: int
    hand_offs: int = 1
    instead: str = ""
    exact: bool = False
