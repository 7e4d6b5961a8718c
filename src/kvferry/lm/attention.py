"""Which attention a model runs, and what it computes: watched without changing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvferry.lm.rope import apply_rope, strip_rope


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one forward pass.

    Args:
        layer: index of the layer.
        queries: rotated, ``[batch, query_heads, queries, dim]``.
        scale, softcap: what scores are multiplied with, and capped at (None: not).
        keys, values: of context and new tokens, rotated, ``[batch, kv_heads, tokens, dim]``.
        output: ``[batch, queries, query_heads, dim]``.
    """

    layer: int
    queries: Float[Tensor, "batch query_heads queries dim"]
    scale: float
    softcap: float | None
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


def softcapped(scores: Float[Tensor, "*shape"], cap: float | None) -> Float[Tensor, "*shape"]:
    """Scores bent to stay within ``cap``; as they are where it is None."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


@dataclass(frozen=True)
class QueryTrace:
    """What one layer's queries asked of one text without padding, as a function of its keys.

    Args:
        queries: rotated, ``[query_heads, tokens, dim]``.
        cos, sin: of the layer at each token, ``[1, tokens, rotary]``.
        window: tokens that a query sees, itself included; None sees all before it.
    """

    queries: Float[Tensor, "query_heads tokens dim"]
    cos: Float[Tensor, "1 tokens rotary"]
    sin: Float[Tensor, "1 tokens rotary"]
    scale: float
    softcap: float | None = None
    window: int | None = None

    def rotate(
        self, content: Float[Tensor, "kv_heads tokens dim"]
    ) -> Float[Tensor, "kv_heads tokens dim"]:
        """Position-free keys put at their positions."""
        return apply_rope(content[None], self.cos, self.sin)[0]

    def content_queries(
        self, rows: Int64[Tensor, " rows"], keys_at: Int64[Tensor, " rows"]
    ) -> Float[Tensor, "query_heads rows dim"]:
        """Queries un-rotated by the position of the key that each meets: R_i^-1 q_c.

        Their product with a position-free key is the score of the rotated pair, before scaling.
        """
        turned = strip_rope(self.queries[None, :, rows], self.cos[:, keys_at], self.sin[:, keys_at])
        length = (self.cos[:, keys_at] ** 2 + self.sin[:, keys_at] ** 2).unsqueeze(1)
        rotary = length.shape[-1]
        turned[..., :rotary] *= length
        return turned[0]

    def at(self, rows: Int64[Tensor, " rows"]) -> RowQueries:
        """The queries at ``rows`` alone: all that need be kept of a text to ask them again."""
        return RowQueries(
            queries=self.queries[:, rows],
            rows=rows,
            cos=self.cos,
            sin=self.sin,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
        )

    def weights(
        self, rows: Int64[Tensor, " rows"], content: Float[Tensor, "kv_heads tokens dim"]
    ) -> Float[Tensor, "query_heads rows tokens"]:
        """Attention of the queries at ``rows`` over position-free keys, native or mapped.

        Only the rows asked for are formed: memory is their number times the tokens.
        """
        return self.at(rows).scores(content).softmax(dim=-1)

    def score_slopes(
        self, rows: Int64[Tensor, " rows"], content: Float[Tensor, "kv_heads tokens dim"]
    ) -> Float[Tensor, "query_heads rows tokens"] | None:
        """How much of a small change of a score the cap lets through; None where there is no cap.

        The derivative of `c tanh(s / c)`, by query and token as :meth:`weights`.
        """
        if self.softcap is None:
            return None
        capped = torch.tanh(self.at(rows).uncapped(content) / self.softcap)
        return (1 - capped.square()).flatten(0, 1)

    def attend(
        self,
        rows: Int64[Tensor, " rows"],
        content: Float[Tensor, "kv_heads tokens dim"],
        values: Float[Tensor, "kv_heads tokens dim"],
    ) -> Float[Tensor, "query_heads rows dim"]:
        """Attention output of the queries at ``rows``."""
        return attention_output(self.weights(rows, content), values)


@dataclass(frozen=True)
class RowQueries:
    """Some queries of a text, and where they stand in it.

    Args:
        queries: rotated, ``[query_heads, rows, dim]``.
        rows: the token of each.
        cos, sin, scale, softcap, window: as in :class:`QueryTrace`.
    """

    queries: Float[Tensor, "query_heads rows dim"]
    rows: Int64[Tensor, " rows"]
    cos: Float[Tensor, "1 tokens rotary"]
    sin: Float[Tensor, "1 tokens rotary"]
    scale: float
    softcap: float | None
    window: int | None

    def uncapped(
        self, content: Float[Tensor, "kv_heads tokens dim"]
    ) -> Float[Tensor, "kv_heads group rows tokens"]:
        """Scaled products with every key, hidden ones too, before any cap."""
        keys = apply_rope(content[None], self.cos, self.sin)[0]
        groups = self.queries.shape[0] // keys.shape[0]
        queries = self.queries.float().view(keys.shape[0], groups, len(self.rows), -1)
        return torch.einsum("hgrd,htd->hgrt", queries, keys) * self.scale

    def scores(
        self, content: Float[Tensor, "kv_heads tokens dim"]
    ) -> Float[Tensor, "query_heads rows tokens"]:
        """What a softmax over tokens makes attention of; minus infinity where a key is hidden."""
        scores = softcapped(self.uncapped(content), self.softcap)
        behind = self.rows[:, None] - torch.arange(content.shape[1], device=self.rows.device)
        hidden = behind < 0
        if self.window is not None:
            hidden = hidden | (behind >= self.window)
        return scores.masked_fill(hidden, -torch.inf).flatten(0, 1)


def attention_output(
    weights: Float[Tensor, "query_heads rows tokens"],
    values: Float[Tensor, "kv_heads tokens dim"],
) -> Float[Tensor, "query_heads rows dim"]:
    """Values as attention weighs them; neighbouring query heads share a KV head."""
    heads = len(values)
    grouped = weights.reshape(heads, -1, *weights.shape[1:])
    return torch.einsum("hgrt,htd->hgrd", grouped, values.float()).flatten(0, 1)


@contextmanager
def record_attention(
    model: Any, whole: Callable[[Tensor, int], Tensor] = lambda part, head_dim: part
) -> Iterator[list[AttentionCall]]:
    """Collect the attention calls of every forward pass inside the block.

    Args:
        whole: what is recorded of a tensor, which may hold only some heads, in the dimension given,
            or lie on another device.
    """
    name = model.config._attn_implementation
    registry: Any = ALL_ATTENTION_FUNCTIONS
    known = registry.get(name)
    calls: list[AttentionCall] = []

    def recorder(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> Any:
        original = known if known is not None else _eager(module)

        queries = whole(query, 1)
        hidden = None if mask is None else mask.to(queries.device)

        def again(keys: Tensor, values: Tensor) -> Tensor:
            output: Tensor = original(module, queries, keys, values, hidden, **options)[0]
            return output

        result = original(module, query, key, value, mask, **options)
        calls.append(
            AttentionCall(
                layer=module.layer_idx,
                queries=queries,
                scale=float(options.get("scaling") or query.shape[-1] ** -0.5),
                softcap=options.get("softcap"),
                keys=whole(key, 1),
                values=whole(value, 1),
                output=whole(result[0], 2),
                _again=again,
            )
        )
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
