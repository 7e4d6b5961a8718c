"""Models and mappers of a large pair: their shapes, with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights

from kvferry.align.layers import LayerSupport, all_layers, relative_depth
from kvferry.lm.geometry import KVGeometry
from kvferry.lm.miniature_tokenizer import train_tokenizer
from kvferry.lm.model import LanguageModel
from kvferry.lm.pico import RECIPES
from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.anchors import AnchorReads
from kvferry.mappers.base import Statistics, layer_reads
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock, component_layout

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ModelShape:
    """What sets the time of a model: its configuration without its weights.

    Args:
        architecture: of the miniature tokenizer that stands in for its own.
        config_class: in transformers; what ``options`` leaves out is its default.
    """

    architecture: str
    config_class: str
    options: dict[str, Any]


_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MODELS = {
    "llama3_1_8b": ModelShape(
        "llama3",
        "LlamaConfig",
        _HEADS
        | {
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "ministral3_14b": ModelShape(
        "ministral3",
        "Ministral3Config",
        _HEADS
        | {
            "num_hidden_layers": 40,
            "hidden_size": 5120,
            "intermediate_size": 16384,
            "vocab_size": 131072,
        },
    ),
}
_TINY = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
}


def build_model(name: str, device: torch.device, tiny: bool) -> LanguageModel:
    """A model of the shape ``name`` with random weights, made where it stays."""
    shape = MODELS[name]
    options = dict(shape.options)
    if tiny:
        options |= _TINY | {"num_hidden_layers": options["num_hidden_layers"] // 8}
    config = getattr(transformers, shape.config_class)(**options)
    build: Any = transformers.AutoModelForCausalLM.from_config
    with torch.device(device), no_init_weights():
        model = build(config, dtype=DTYPE, attn_implementation="sdpa")
    model.to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.fill_(1.0)
    tokenizer = train_tokenizer(RECIPES[shape.architecture].tokenizer, seed=0)
    return LanguageModel(model, tokenizer, name=name, revision="random")


def mapper_shapes(source: KVGeometry, target: KVGeometry) -> dict[str, AffineMapper]:
    """HeteroFold as published; and ours with layer 0 native, without code and native prefix."""
    depths = len(source.layers), len(target.layers)
    return {
        "window 3": random_mapper(source, target, relative_depth(*depths, 3), AnchorReads()),
        "all layers + anchors": random_mapper(
            source, target, all_layers(*depths), AnchorReads(context=3, native_layers=1)
        ),
    }


def random_mapper(
    source: KVGeometry, target: KVGeometry, support: LayerSupport, anchors: AnchorReads
) -> AffineMapper:
    """The groups that a fit would leave, with random weights, on the default device."""
    native = anchors.native_depth(target)
    layouts = {
        component: component_layout(
            component,
            source,
            target,
            code_width=0,
            anchor_context=anchors.context,
            native_layers=native,
        )
        for component in COMPONENTS
    }
    statistics = Statistics(source, target, layouts, moments={}, code=None)
    groups = []
    for component in COMPONENTS:
        by_layer = layer_reads(statistics, component, support, anchors)
        for blocks in dict.fromkeys(by_layer[native:]):
            layers = [i for i, read in enumerate(by_layer) if read == blocks and i >= native]
            groups.append(random_group(component, target, layers, blocks))
    return AffineMapper(
        source=source,
        target=target,
        groups=tuple(groups),
        native_layers=native,
        product_dtype=DTYPE,
    )


def random_group(
    component: Component,
    target: KVGeometry,
    layers: Sequence[int],
    blocks: tuple[FeatureBlock, ...],
) -> AffineGroup:
    """Weights that keep the size of what they read."""
    features = sum(block.width for block in blocks)
    outputs = sum(target.layers[layer].width for layer in layers)
    return AffineGroup(
        component=component,
        target_layers=tuple(layers),
        blocks=blocks,
        weight=torch.randn(features, outputs, dtype=DTYPE).mul_(features**-0.5),
        input_mean=torch.zeros(features),
        output_mean=torch.zeros(outputs),
    )
