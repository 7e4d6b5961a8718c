"""Every mapper method once, and every architecture: the generic tests run over both lists."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.cachelink import CacheLink
from kvferry.mappers.controls import Random
from kvferry.mappers.dense_latent import DenseLatent
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.heterofold import HeteroFold
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.mlp import MLP
from kvferry.mappers.mobility import Mobility
from kvferry.mappers.polished import Polished
from tests.pairs import learnable

# "random" is a control, yet saved, loaded and handed over like any other.
METHODS: dict[str, MapperMethod] = {
    "full_head_ridge": FullHeadRidge(),
    "full_head_ridge_top2": FullHeadRidge(source_layers=2),
    "heterofold": HeteroFold(directions=16, steps=4, passages=2, held_out=1, rows=8),
    "heterofold_anchored": HeteroFold(
        recolour_keys="auto",
        behavioural_keys=False,
        behavioural_values=False,
        held_out=1,
        rows=8,
        anchor_context=1,
        neighbours=True,
        native_layers=1,
    ),
    "heterofold_all": HeteroFold(
        window="all", recolour_metric="raw", behavioural_keys=False, behavioural_values=False
    ),
    "cachelink": CacheLink(directions=16, passages=2, held_out=1, rows=8),
    "cachelink_anchored": CacheLink(
        source_layers=2,
        anchor_context=1,
        neighbours=True,
        native_layers=1,
        planted_sinks=1,
        behavioural_keys=True,
        steps=2,
        directions=16,
        passages=2,
        held_out=1,
        rows=8,
    ),
    "anchored": Anchored(steps=4, passages=2, held_out=1, rows=8),
    "cachebridge": CacheBridge(source_layers=2, passages=6, boundaries=8),
    "cachebridge_anchored": CacheBridge(
        source_layers="all",
        heads="hungarian",
        weigh_values=False,
        passages=4,
        anchor_context=1,
        neighbours=True,
        native_layers=2,
    ),
    "random": Random(),
    "anchored_native": Anchored(native_layers=2, recolour_values=0.5, behavioural_keys=False),
    "anchored_sinks": Anchored(
        planted_sinks=3,
        selector="sinkhorn",
        source_layers=2,
        steps=4,
        passages=2,
        held_out=1,
        rows=8,
    ),
    "mobility": Mobility(
        rank=2,
        directions=8,
        width=8,
        kernel=2,
        training_steps=2,
        passages=2,
        held_out=1,
        validate_every=2,
        shortest_context=32,
    ),
    "polished": Polished(
        start=Anchored(native_layers=2, behavioural_keys=False),
        rank=2,
        directions=8,
        training_steps=2,
        passages=2,
        held_out=1,
        validate_every=2,
        shortest_context=32,
    ),
    "mlp": MLP(
        source_layers=2,
        hidden=8,
        tokens=32,
        rows=8,
        training_steps=2,
        passages=2,
        held_out=1,
        validate_every=2,
    ),
    "mlp_anchored": MLP(
        start=Anchored(native_layers=2, behavioural_keys=False),
        aim="generation",
        source_layers="all",
        anchor_context=1,
        neighbours=True,
        hidden=8,
        per_head=True,
        shortest_context=32,
        rows=8,
        training_steps=2,
        passages=2,
        held_out=1,
        validate_every=1,
    ),
    "dense": DenseLatent(
        expansion=2,
        training_steps=2,
        answer_steps=2,
        tokens=32,
        answers=2,
        answer_tokens=6,
        context_tokens=32,
        passages=2,
        held_out=1,
        validate_every=2,
    ),
    "dense_anchored": DenseLatent(
        heads="all",
        selector="relative_depth",
        source_layers=2,
        expansion=1,
        training_steps=2,
        answer_steps=0,
        passages=2,
        held_out=1,
        validate_every=2,
        anchor_context=1,
        neighbours=True,
        native_layers=2,
        planted_sinks=1,
    ),
    "mlp_plain": MLP(
        form="plain",
        source_layers=2,
        hidden=8,
        training_steps=2,
        passages=2,
        held_out=1,
        validate_every=2,
    ),
}

# Source and target miniatures; together every architecture stands on both sides.
PAIRS: tuple[tuple[str, str], ...] = (
    ("llama", "gemma3"),
    ("gemma3", "llama"),
    ("llama3", "ministral3"),
    ("ministral3", "llama3"),
    ("qwen3", "mistral"),
    ("mistral", "qwen3"),
    ("qwen2", "gemma2"),
    ("gemma2", "qwen2"),
)

_PLACE = tempfile.TemporaryDirectory(prefix="kvferry-matrix-")


@cache
def fitted(method: str, source: str, target: str) -> Mapper:
    """A method of the matrix on a pair, once a session; those that learn take a few steps."""
    place = Path(_PLACE.name)
    statistics = learnable(source, target, place / f"{method}-{source}-{target}", place / "traces")
    return METHODS[method].fit(statistics)
