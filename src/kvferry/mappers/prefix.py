"""The target's own prefix in a mapped cache."""

from __future__ import annotations

from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.mapper import Mapper


def keep_prefix(content: ContentKV, prefix: ContentKV, mapper: Mapper) -> ContentKV:
    """Put the target's own ``prefix`` over the mapped one, in place.

    Where it has left the window, it stands in for as many mapped tokens as the mapper says.
    """
    width = prefix.tokens
    for component in COMPONENTS:
        mapped: dict[int, Tensor] = getattr(content, component)
        own: dict[int, Tensor] = getattr(prefix, component)
        for layer, x in mapped.items():
            if x.shape[2] == content.tokens:
                x[:, :, :width] = own[layer]
            elif places := mapper.planted_places(layer, content.tokens):
                x[:, :, places] = own[layer][:, :, :1]
    return content
