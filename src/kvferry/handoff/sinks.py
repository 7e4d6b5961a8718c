"""Planted sinks in a cache that is carried on: they stand in while decoding, and are then lifted.

A windowed layer decodes with the target's own prefix in the place of some mapped tokens. A cache
that is carried on must not lose those tokens, so what was mapped there is kept beneath.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kvferry.lm.cache import LayerKV
from kvferry.lm.content import ContentKV
from kvferry.mappers.mapper import Mapper


def plant_sinks(content: ContentKV, prefix: ContentKV, mapper: Mapper) -> ContentKV:
    """Content at full length with ``prefix`` at the planted places of its windowed layers.

    The same tokens give way as in a cache that holds the windows alone; ``content`` stays as it is.
    """
    keys, values = dict(content.keys), dict(content.values)
    first = mapper.first_tokens(content.tokens)
    for layer in content.keys:
        places = [first[layer] + place for place in mapper.planted_places(layer, content.tokens)]
        if places:
            keys[layer], values[layer] = keys[layer].clone(), values[layer].clone()
            keys[layer][:, :, places] = prefix.keys[layer][:, :, :1]
            values[layer][:, :, places] = prefix.values[layer][:, :, :1]
    return replace(content, keys=keys, values=values)


def beneath(mapped: ContentKV, planted: ContentKV) -> ContentKV:
    """The layers of ``mapped`` that planting changed."""
    changed = [layer for layer in mapped.keys if not mapped.keys[layer].equal(planted.keys[layer])]
    return replace(
        mapped,
        keys={layer: mapped.keys[layer] for layer in changed},
        values={layer: mapped.values[layer] for layer in changed},
    )


def lift_sinks(held: Sequence[LayerKV], mapped: Mapping[int, LayerKV]) -> list[LayerKV]:
    """The layers of a cache with what was mapped where it was mapped, and what was read since.

    Args:
        held: rotated keys and values that a cache holds by now, by layer.
        mapped: of the layers with planted sinks, the rotated content beneath.
    """
    layers = list(held)
    for layer, (keys, values) in mapped.items():
        since = [x[:, :, keys.shape[2] :] for x in held[layer]]
        layers[layer] = torch.cat((keys, since[0]), dim=2), torch.cat((values, since[1]), dim=2)
    return layers
