"""The only place that touches the cache classes of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from kvferry.errors import ArtefactError, UnsupportedTransformersError

LayerKV = tuple[Float[Tensor, "batch heads tokens dim"], Float[Tensor, "batch heads tokens dim"]]


def full_length_cache() -> Any:
    """An empty cache that keeps every token, also in sliding-window layers."""
    return DynamicCache()


def build_empty_cache(config: Any) -> Any:
    """An empty cache of the model's own kind: sliding-window layers keep their window."""
    return DynamicCache(config=config)


def read_cache(cache: Any, device: torch.device | None = None) -> list[LayerKV]:
    """Keys and values of each layer as the model cached them (rotated), where they are or on one.

    Raises:
        UnsupportedTransformersError: the cache has no readable layers.
    """
    layers = getattr(cache, "layers", None)
    if not layers or not all(hasattr(layer, "keys") for layer in layers):
        raise _unsupported(f"{type(cache).__name__} without readable layers")
    if device is None:
        return [(layer.keys, layer.values) for layer in layers]
    return [(layer.keys.to(device), layer.values.to(device)) for layer in layers]


def require_full_length(cache: Any) -> None:
    """Refuse a cache whose sliding-window layers have dropped tokens.

    Raises:
        ArtefactError: some layers are shorter than others, naming them.
    """
    lengths = [keys.shape[-2] for keys, _ in read_cache(cache)]
    short = [index for index, length in enumerate(lengths) if length < max(lengths)]
    if short:
        raise ArtefactError(
            "The source cache is truncated: its sliding-window layers kept only their window.",
            found=f"{min(lengths)} tokens in layers {short}, {max(lengths)} elsewhere",
            expected=f"{max(lengths)} tokens in every layer",
            fix="prefill with LanguageModel.prefill, or pass a cache from full_length_cache()",
        )


def full_length_cache_of(layers: Sequence[LayerKV]) -> Any:
    """A cache that keeps every token, filled with ``layers`` (rotated keys, values)."""
    cache: Any = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def build_cache(config: Any, layers: Sequence[LayerKV], total_tokens: int) -> Any:
    """A cache of the model's own kind, filled with ``layers`` (rotated keys, values).

    Sliding-window layers may be given whole or only their last ``window - 1`` tokens; they
    remember that ``total_tokens`` have passed, so that masks and positions come out right.

    Raises:
        UnsupportedTransformersError: the cache classes have changed.
    """
    cache: Any = DynamicCache(config=config)
    if len(cache.layers) != len(layers):
        raise _unsupported(f"{len(cache.layers)} cache layers for {len(layers)} model layers")
    for slot, (keys, values) in zip(cache.layers, layers, strict=True):
        window = getattr(slot, "sliding_window", None)
        slot.lazy_initialization(keys, values)
        if window is None:
            slot.keys, slot.values = keys, values
            continue
        if not hasattr(slot, "cumulative_length"):
            raise _unsupported("a sliding-window cache layer without cumulative_length")
        kept = min(window - 1, keys.shape[-2])
        slot.keys, slot.values = keys[:, :, -kept:], values[:, :, -kept:]
        slot.cumulative_length = total_tokens
    return cache


def forward_with_cache(
    model: Any,
    ids: Tensor,
    cache: Any,
    attention_mask: Tensor | None,
    positions: Tensor,
    keep_logits: int,
) -> Tensor:
    """Run ``ids`` on top of ``cache`` (changed in place) and return logits.

    Args:
        keep_logits: logits of the last so many tokens; 0 keeps all.
    """
    out = model(
        input_ids=ids,
        cache=cache,
        attention_mask=attention_mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=keep_logits,
    )
    return cast(Tensor, out.logits)


class _LayerReached(Exception):
    """Raised by the recorder to leave the forward pass; never seen outside this file."""


class _FirstLayersCache(DynamicCache):
    """Keeps the keys and values of the first layers and ends the forward pass there."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, **kwargs: Any
    ) -> Any:
        kept = super().update(key_states, value_states, layer_idx, **kwargs)
        if layer_idx == self.count - 1:
            raise _LayerReached
        return kept


def first_layers_kv(
    base_model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor, count: int
) -> list[LayerKV]:
    """Rotated keys and values of the first ``count`` layers, running only ``count - 1`` of them.

    The keys and values of layer 0 need no attention at all: they are a function of the token.
    """
    cache = _FirstLayersCache(count)
    try:
        base_model(
            input_ids=ids, cache=cache, attention_mask=mask, position_ids=positions, use_cache=True
        )
    except _LayerReached:
        return read_cache(cache, ids.device)
    raise _unsupported(f"a forward pass that never filled cache layer {count - 1}")


def copy_cache(cache: Any, rows: int = 1) -> Any:
    """An independent copy: decoding from it leaves the original alone.

    Args:
        rows: how often a cache of one row is repeated, without copying it.
    """
    return map_cache(cache, (lambda x: x.expand(rows, -1, -1, -1)) if rows > 1 else (lambda x: x))


def map_cache(cache: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A cache of the same kind that holds ``change`` of each layer's keys and values."""
    twin = DynamicCache()
    twin.layers = []
    for layer in cache.layers:
        clone = object.__new__(type(layer))
        clone.__dict__.update(layer.__dict__)
        if layer.keys is not None:
            clone.keys, clone.values = change(layer.keys), change(layer.values)
        twin.layers.append(clone)
    return twin


def fill_from_parts(cache: Any, parts: Sequence[Any], dim: int) -> None:
    """Let ``cache`` hold what caches of its rows (``dim=0``) or of its heads (1) hold together."""
    others = [iter(read_cache(part)) for part in parts]
    joined = map_cache(parts[0], lambda x: x)
    for layer in joined.layers:
        keys, values = zip(*(next(other) for other in others), strict=True)
        layer.keys, layer.values = torch.cat(keys, dim=dim), torch.cat(values, dim=dim)
    cache.layers = joined.layers


def cached_tokens(cache: Any) -> int:
    """Tokens that have passed through the cache."""
    return max((int(layer.get_seq_length()) for layer in cache.layers), default=0)


def check_transformers() -> None:
    """Refuse a transformers whose cache interface differs from the one driven here.

    Raises:
        UnsupportedTransformersError: names the version found and the range that works.
    """
    probe = DynamicCache()
    layer_ok = hasattr(probe, "layers") and hasattr(probe, "update")
    try:
        probe.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
        layer_ok = layer_ok and hasattr(probe.layers[0], "keys")
    except (TypeError, AttributeError, IndexError):
        layer_ok = False
    if not layer_ok:
        raise _unsupported("a DynamicCache without layers[i].keys")


def _unsupported(found: str) -> UnsupportedTransformersError:
    return UnsupportedTransformersError(
        "This version of transformers keeps its KV cache in a way that kvferry does not know.",
        found=f"transformers {transformers.__version__}: {found}",
        expected="transformers >= 5.24, < 5.40",
        fix="pip install 'transformers>=5.24,<5.40'",
    )
