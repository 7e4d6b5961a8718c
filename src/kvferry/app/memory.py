"""What models, caches and moments will take, told from the settings alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvferry.app.schema import RunConfig
from kvferry.lm.sources import CacheShape, ModelSpec

_BYTES = {"float32": 4, "bfloat16": 2}


def cache_shape(model: ModelSpec) -> CacheShape | None:
    """Shape of a model's KV cache in the size of the run; None where its YAML does not say."""
    if model.size == "full":
        return model.cache
    from kvferry.lm.pico import RECIPES  # heavy: only where a miniature is asked about

    recipe = RECIPES.get(model.pico_architecture)
    return CacheShape(recipe.layers, recipe.kv_heads, recipe.head_dim) if recipe else None


def memory_plan(cfg: RunConfig) -> Iterator[str]:
    """One line each: weights and caches of both models, and the moments of the calibration."""
    itemsize = _BYTES[cfg.trainer.model_dtype]
    tokens = cfg.trainer.batch_size * cfg.data.passage_tokens
    shapes = [cache_shape(model) for model in (cfg.source, cfg.target)]
    for side, shape in zip(("source", "target"), shapes, strict=True):
        model: ModelSpec = getattr(cfg, side)
        own: str | None = getattr(cfg.trainer, f"{side}_device")
        weights = _weights(model, cfg, own)
        cache = ""
        if shape is not None:
            held = 2 * sum(shape.widths) * itemsize * tokens
            cache = f"; KV cache of {tokens:,} tokens: {_size(held)}"
        yield f"{side}: {model.name}, {weights}{cache}"
    if shapes[0] is not None and shapes[1] is not None:
        place = cfg.trainer.fit_device or "the target's device"
        yield f"moments: {_size(moments_bytes(cfg, shapes[0], shapes[1]))} on {place}"
        if kept := kept_keys_bytes(cfg, shapes[1]):
            yield f"keys of the texts that are read again: {_size(kept)} on {place}"


def moments_bytes(cfg: RunConfig, source: CacheShape, target: CacheShape) -> int:
    """Sums of keys and values in float64, for inputs as wide as calibration collects them."""
    from kvferry.calibration.statistics import CalibrationPlan
    from kvferry.lm.geometry import KVGeometry, LayerGeometry

    def geometry(shape: CacheShape) -> KVGeometry:
        layers = (LayerGeometry(shape.kv_heads, shape.head_dim),) * shape.layers
        return KVGeometry("", layers, 0, 0, 0, 0, "")

    plan = CalibrationPlan(cfg.data.passage_tokens)
    layouts = plan.layouts_of(geometry(source), geometry(target))
    return sum(_sums(layout.width, target.widths) for layout in layouts.values())


def kept_keys_bytes(cfg: RunConfig, target: CacheShape) -> int:
    """Native and mapped keys in half precision, where keys are remixed: they stay until the end.

    Queries, a few hundred a text, are not counted; nor are values, which are read once.
    """
    most = 0
    options: Any = cfg.mapper.options
    while isinstance(options, Mapping):
        if options.get("behavioural_keys"):
            texts = options["passages"] + options["held_out"]
            most = max(most, 2 * 2 * sum(target.widths) * cfg.data.passage_tokens * texts)
        options = options.get("start")
    return most


def _sums(inputs: int, outputs: Sequence[int]) -> int:
    inside = sum(width * width for width in outputs)
    return 8 * (inputs * inputs + inputs * sum(outputs) + inside)


def _weights(model: ModelSpec, cfg: RunConfig, own: str | None) -> str:
    trainer = cfg.trainer
    if model.size == "pico":
        all_of_it, total = "a random miniature", 0
    else:
        total = model.parameters * _BYTES[trainer.model_dtype]
        all_of_it = f"{_size(total)} of weights in {trainer.model_dtype}"
    if own is not None:
        return f"{all_of_it} on {own}"
    if trainer.sharding == "device_map":
        return f"{all_of_it}, spread over all devices"
    if trainer.shares_models:
        ranks = _ranks(cfg)
        part = f", {_size(total / ranks)} each" if total else ""
        return f"{all_of_it}, {trainer.sharding} over {ranks} ranks{part}"
    copies = f", on each of {trainer.devices} devices" if trainer.devices != 1 else ""
    return all_of_it + copies


def _ranks(cfg: RunConfig) -> int:
    if cfg.trainer.devices != "auto":
        return cfg.trainer.devices
    import torch

    return max(torch.cuda.device_count(), 1)


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:,.1f} MiB"
