"""Which attention a model runs, and what it computes: watched without changing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one forward pass.

    Args:
        layer: index of the layer.
        keys, values: of context and new tokens, rotated, ``[batch, kv_heads, tokens, dim]``.
        output: ``[batch, queries, query_heads, dim]``.
    """

    layer: int
    keys: Float[Tensor, "batch kv_heads tokens dim"]
    values: Float[Tensor, "batch kv_heads tokens dim"]
    output: Float[Tensor, "batch queries query_heads dim"]
    _again: Any

    def with_context(
        self,
        keys: Float[Tensor, "batch kv_heads context dim"],
        values: Float[Tensor, "batch kv_heads context dim"],
    ) -> Float[Tensor, "batch queries query_heads dim"]:
        """The same queries over other context keys and values; new tokens keep their own."""
        context = keys.shape[2]
        mixed_keys, mixed_values = self.keys.clone(), self.values.clone()
        mixed_keys[:, :, :context] = keys
        mixed_values[:, :, :context] = values
        output: Tensor = self._again(mixed_keys, mixed_values)
        return output


def attention_implementation(config: Any) -> str:
    """ "sdpa", or "eager" where scores are soft-capped, which sdpa leaves out."""
    text = config.get_text_config(decoder=True)
    return "eager" if getattr(text, "attn_logit_softcapping", None) else "sdpa"


@contextmanager
def record_attention(model: Any) -> Iterator[list[AttentionCall]]:
    """Collect the attention calls of every forward pass inside the block."""
    name = model.config._attn_implementation
    registry: Any = ALL_ATTENTION_FUNCTIONS
    known = registry.get(name)
    calls: list[AttentionCall] = []

    def recorder(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        original = known if known is not None else _eager(module)

        def again(keys: Tensor, values: Tensor) -> Tensor:
            output: Tensor = original(module, query, keys, values, mask, **options)[0]
            return output

        result = original(module, query, key, value, mask, **options)
        calls.append(AttentionCall(module.layer_idx, key, value, result[0], again))
        return result

    # Under its own name, so that the model keeps building the masks that belong to it.
    registry[name] = recorder
    try:
        yield calls
    finally:
        registry.pop(name)


def _eager(module: Any) -> Any:
    """The eager attention of the file that defines ``module``: it is in no registry."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward")  # noqa: B009
