"""What behavioural fits keep of each text: queries, native and mapped content, codes of inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.lm.attention import attention_output
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.behaviour import MappedText, mapped_layers, planted_tokens
from kvferry.mappers.correction import Blocks, InputCode, columns_of, group_of
from kvferry.mappers.observation import surrogate_sinks
from kvferry.stats.attention_fit import AttentionSample
from kvferry.stats.functional import AttendedMoments

Codes = Mapping[Blocks, InputCode]
"""The code of each set of input features that values are mapped from."""


@dataclass(frozen=True)
class OutputSample:
    """What values are fitted to in one layer of one text.

    Args:
        wanted: native attention outputs of the layer's queries, from the tokens that count.
        values: mapped.
        code: the inputs that a change of values may read, zero where values are native.
    """

    wanted: Float[Tensor, "query_heads rows dim"]
    values: Float[Tensor, "kv_heads tokens dim"]
    code: Float[Tensor, "tokens width"]


@dataclass(frozen=True)
class LayerSample:
    """What the fits need of one layer of one text; half precision is enough to keep.

    Args:
        keys: the layer's queries over native and mapped keys.
        outputs: None where values stay as they are.
    """

    keys: AttentionSample
    outputs: OutputSample | None


TextSample = Mapping[int, LayerSample]
"""By mapped layer."""


def layer_samples(mapper: AffineMapper, text: MappedText, codes: Codes) -> TextSample:
    """What the fits need of one text; what values need, where there are codes."""
    seen, native = text.seen, text.seen.target
    coded = {blocks: code.rows(seen.inputs, seen.prefix).half() for blocks, code in codes.items()}
    # Layers share rotary tables, and tensors made in inference mode cannot meet a gradient.
    tables: dict[int, Tensor] = {}
    prefix = torch.arange(native.tokens, device=native.mask.device) < seen.prefix
    windowed = any(layer.window is not None for layer in mapper.target.layers)
    sinks = surrogate_sinks(native) & ~prefix if windowed else torch.zeros_like(prefix)
    recalled = seen.recalled[text.rows]
    found = {}
    for layer in mapped_layers(mapper):
        planted = torch.zeros_like(prefix)
        planted[planted_tokens(mapper, layer, native.tokens)] = True
        fixed = prefix | planted
        group = group_of(mapper, "keys", layer)
        ask, keys, values = seen.queries[layer], native.keys[layer][0], native.values[layer][0]
        kept = ask.at(text.rows)
        cos, sin = (tables.setdefault(id(t), t.clone()) for t in (kept.cos, kept.sin))
        attention = AttentionSample(
            ask=replace(kept, queries=kept.queries.half(), cos=cos, sin=sin),
            native=keys.half(),
            mapped=text.content.keys[layer][0].half(),
            mean=group.output_mean[columns_of(mapper, group, layer)],
            fixed=fixed,
            # Where attention rests that has no use for the text is not for a map to say.
            left_out=sinks | planted,
            recalled=recalled,
        )
        found[layer] = LayerSample(
            keys=attention,
            outputs=OutputSample(
                wanted=attention_output(attention.attention(), values).half(),
                values=text.content.values[layer][0].half(),
                code=coded[group_of(mapper, "values", layer).blocks].masked_fill(fixed[:, None], 0),
            )
            if codes
            else None,
        )
    return found


def attended(
    texts: Iterable[TextSample], remixes: Mapping[int, Tensor] | None
) -> dict[int, AttendedMoments]:
    """By layer, attended codes against what mapped values leave of the native outputs.

    Args:
        texts: with outputs.
        remixes: of mapped keys, by layer, where they are what is attended to; None: native keys.
    """
    found: dict[int, AttendedMoments] = {}
    for text in texts:
        for layer, sample in text.items():
            keys, outputs = sample.keys, sample.outputs
            assert outputs is not None, "read without codes of values"
            heads, _, dim = outputs.values.shape
            if layer not in found:
                found[layer] = AttendedMoments(heads, outputs.code.shape[1], dim)
            weights = keys.attention() if remixes is None else keys.translated(remixes.get(layer))
            left = outputs.wanted.float() - attention_output(weights, outputs.values)
            found[layer].update(weights @ outputs.code.float(), left)
    return found
