"""Keys and values that a token id alone decides, kept instead of mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.mappers.layout import COMPONENTS, Component


@dataclass(frozen=True)
class TokenConstants:
    """Native content of some target tokens, the same wherever they stand.

    Args:
        token_ids: of the target.
        keys, values: by target layer, position-free, one row for each of ``token_ids``; layers
            that are absent keep what the maps make.
    """

    token_ids: tuple[int, ...]
    keys: dict[int, Float[Tensor, "ids kv_heads head_dim"]]
    values: dict[int, Float[Tensor, "ids kv_heads head_dim"]]

    @property
    def tensors(self) -> list[Tensor]:
        """All stored rows."""
        return [*self.keys.values(), *self.values.values()]

    def only(self, layers: Sequence[int]) -> TokenConstants:
        """The same constants for some layers alone."""
        keys = {layer: self.keys[layer] for layer in layers}
        return TokenConstants(self.token_ids, keys, {i: self.values[i] for i in layers})

    def put(
        self,
        content: Mapping[Component, dict[int, Tensor]],
        ids: Int64[Tensor, " tokens"],
        first_tokens: Sequence[int],
    ) -> None:
        """Write them over ``content``, in place, wherever ``ids`` holds one of the tokens.

        Args:
            content: by component and layer, ``[1, kv_heads, tokens held, head_dim]``.
            first_tokens: by layer, the first token that is held.
        """
        known = torch.tensor(self.token_ids, device=ids.device)
        meets = ids[:, None] == known
        for layer in self.keys:
            place, which = meets[first_tokens[layer] :].nonzero(as_tuple=True)
            for component in COMPONENTS:
                rows: Tensor = getattr(self, component)[layer][which]
                held = content[component][layer]
                held[:, :, place] = rows.transpose(0, 1).to(held.dtype)
