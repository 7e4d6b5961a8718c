"""Every mapper method once, and every architecture: the generic tests run over both lists."""

from __future__ import annotations

from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.cachelink import CacheLink
from kvferry.mappers.controls import Random
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.heterofold import HeteroFold

# "random" is a control, yet saved, loaded and handed over like any other.
METHODS: dict[str, MapperMethod] = {
    "full_head_ridge": FullHeadRidge(),
    "full_head_ridge_top2": FullHeadRidge(source_layers=2),
    "heterofold": HeteroFold(directions=16, steps=4, passages=2, held_out=1, rows=8),
    "heterofold_anchored": HeteroFold(
        recolour_keys="auto",
        behavioural_keys_rank=0,
        behavioural_values=False,
        held_out=1,
        rows=8,
        anchor_context=1,
        neighbours=True,
        native_layers=1,
    ),
    "heterofold_all": HeteroFold(
        window="all", recolour_metric="raw", behavioural_keys_rank=0, behavioural_values=False
    ),
    "cachelink": CacheLink(directions=16, passages=2, held_out=1, rows=8),
    "cachelink_anchored": CacheLink(
        source_layers=2,
        anchor_context=1,
        neighbours=True,
        native_layers=1,
        planted_sinks=1,
        key_rank=2,
        steps=2,
        directions=16,
        passages=2,
        held_out=1,
        rows=8,
    ),
    "anchored": Anchored(),
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
    "anchored_native": Anchored(native_layers=2, recolour_values=0.5),
    "anchored_sinks": Anchored(planted_sinks=3, selector="sinkhorn", source_layers=2),
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
