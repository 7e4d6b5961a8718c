"""A frozen causal language model with the few operations that a cache hand-off needs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvferry.errors import InputError
from kvferry.lm import cache as kv_cache
from kvferry.lm.attention import AttentionCall, record_attention
from kvferry.lm.coarse import CoarseLinears
from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.lm.rope import RotaryTables, apply_rope, strip_rope


@dataclass(frozen=True)
class Prefill:
    """What reading a prompt leaves behind.

    Args:
        cache: the model's cache, as transformers keeps it.
        ids, mask: the tokens read and which of them are real (left padding).
        logits: of the last token of each row.
        hand_offs: how often a part of the cache was carried over; 0 where all of it was read.
    """

    cache: Any
    ids: Int[Tensor, "batch tokens"]
    mask: Bool[Tensor, "batch tokens"]
    logits: Float[Tensor, "batch vocab"]
    hand_offs: int = 0

    @property
    def positions(self) -> Int[Tensor, "batch tokens"]:
        """Rope position of each token."""
        return positions_of(self.mask)

    def grown(
        self, ids: Int[Tensor, "batch new"], logits: Float[Tensor, "batch kept vocab"]
    ) -> Prefill:
        """After ``ids`` were run on top of the cache, with the logits that this gave."""
        return replace(
            self,
            ids=torch.cat((self.ids, ids), dim=1),
            mask=torch.cat((self.mask, torch.ones_like(ids, dtype=torch.bool)), dim=1),
            logits=logits[:, -1],
        )


def positions_of(mask: Bool[Tensor, "batch tokens"]) -> Int[Tensor, "batch tokens"]:
    """Positions count the real tokens of each row from zero; padding gets zero."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


class LanguageModel:
    """Tokenizer, frozen weights and geometry; prefill, score and decode.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its fast tokenizer.
        name: how tables call it.
        revision: what identifies its weights (a commit or a digest).
        device: where tokens go and caches come from; by default that of the first weight.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str,
        device: torch.device | None = None,
    ) -> None:
        kv_cache.check_transformers()
        self._device = device
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.geometry = KVGeometry.from_config(model.config)
        self.rotary = RotaryTables(self.base.rotary_emb, self.geometry)
        self._coarse_linears = CoarseLinears(self.model)

    @property
    def base(self) -> Any:
        """The decoder without the language-model head."""
        return self.model.get_decoder()

    @property
    def device(self) -> torch.device:
        """Where the weights lie, or the first of them."""
        first: torch.device = next(iter(self.model.parameters())).device
        return first if self._device is None else self._device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the cache."""
        dtype: torch.dtype = next(iter(self.model.parameters())).dtype
        return dtype

    @cached_property
    def layer_devices(self) -> list[torch.device]:
        """Where each layer runs, and keeps its cache."""
        chosen: dict[str, Any] = getattr(self.model, "hf_device_map", {})
        return [
            self._device_of(f"{self.model.base_model_prefix}.layers.{layer}", chosen)
            for layer in range(len(self.geometry.layers))
        ]

    def _device_of(self, module: str, chosen: dict[str, Any]) -> torch.device:
        """Where a module runs, by its own entry or that of what it is part of."""
        while module and module not in chosen:
            module = module.rpartition(".")[0]
        place = chosen.get(module)
        if isinstance(place, int):
            return torch.device("cuda", place)
        # What lies in memory or on disk is run where the tokens are.
        return self.device if place in (None, "cpu", "disk") else torch.device(place)

    @cached_property
    def sink_ids(self) -> list[int]:
        """The input-independent prefix that holds the attention sink: one special token."""
        candidates = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        adds_bos = bool(self.tokenizer.encode("a", add_special_tokens=True)[:1] == candidates[:1])
        if not adds_bos and "<|endoftext|>" in self.tokenizer.get_vocab():
            return [int(self.tokenizer.convert_tokens_to_ids("<|endoftext|>"))]
        return [next(int(c) for c in (*candidates, 0) if c is not None)]

    @cached_property
    def tokenizer_hash(self) -> str:
        """Sixteen hex digits that change with vocabulary, merges or normalisation."""
        text: str = self.tokenizer.backend_tokenizer.to_str()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        named = self.model.config.get_text_config(decoder=True).eos_token_id
        listed = named if isinstance(named, list) else [named]
        own = [self.tokenizer.eos_token_id, *listed, *self.sink_ids]
        return frozenset(int(token) for token in own if token is not None)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def text_of(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def batch(
        self, rows: Sequence[Sequence[int]]
    ) -> tuple[Int[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
        """Left-padded ids and their mask.

        Raises:
            InputError: a row is empty or longer than the model's context.
        """
        longest = max((len(row) for row in rows), default=0)
        if not rows or any(len(row) == 0 for row in rows):
            raise InputError("There are no tokens to read.", fix="pass at least one token a row")
        self.require_room(longest)
        pad = self.sink_ids[0]
        ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
        return ids.to(self.device), mask.to(self.device)

    def require_room(self, tokens: int) -> None:
        """Refuse more tokens than the model has positions for.

        Raises:
            InputError: says both numbers.
        """
        if tokens > self.geometry.max_positions:
            raise InputError(
                f"The text is longer than the context of {self.name}.",
                found=f"{tokens} tokens",
                expected=f"at most {self.geometry.max_positions}",
                fix="shorten the document or choose a model with a longer context",
            )

    @torch.inference_mode()
    def prefill(
        self,
        ids: Int[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"] | None = None,
        full_length: bool = True,
    ) -> Prefill:
        """Read ``ids``; ``full_length`` keeps all tokens in sliding-window layers too."""
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        cache = (
            kv_cache.full_length_cache()
            if full_length
            else kv_cache.build_empty_cache(self.model.config)
        )
        logits = self._forward(ids, cache, _needed(mask), positions_of(mask), keep_logits=1)
        return Prefill(cache=cache, ids=ids, mask=mask, logits=logits[:, -1])

    def content(
        self,
        prefill: Prefill,
        key_layers: Sequence[int] | None = None,
        value_layers: Sequence[int] | None = None,
    ) -> ContentKV:
        """Position-free KV of the layers asked for (default all).

        Raises:
            ArtefactError: the cache has lost tokens of its sliding-window layers.
        """
        kv_cache.require_full_length(prefill.cache)
        tables = self.rotary.at(prefill.positions)
        raw = kv_cache.read_cache(prefill.cache, self.device)
        every = range(len(raw))
        return ContentKV(
            keys={
                layer: strip_rope(raw[layer][0], *tables[layer])
                for layer in (every if key_layers is None else key_layers)
            },
            values={
                layer: raw[layer][1] for layer in (every if value_layers is None else value_layers)
            },
            positions=prefill.positions,
            mask=prefill.mask,
        )

    def cache_from(self, content: ContentKV, full_length: bool = False) -> Any:
        """A cache to decode from: keys rotated to their positions, windows cut.

        Layers may hold only their last tokens (windowed layers need no more); ``full_length`` keeps
        all of them, for a cache that is carried on.
        """
        layers = list(self.rotated(content).values())
        if full_length:
            return kv_cache.full_length_cache_of(layers)
        return kv_cache.build_cache(self.model.config, layers, content.tokens)

    def rotated(self, content: ContentKV) -> dict[int, kv_cache.LayerKV]:
        """Keys at their positions, and values, in the cache's number format, by layer."""
        tables = self.rotary.at(content.positions)
        layers = {}
        for layer in sorted(content.keys):
            keys, values = content.keys[layer], content.values[layer]
            cos, sin = (table[:, -keys.shape[2] :] for table in tables[layer])
            rotated, place = apply_rope(keys, cos, sin), self.layer_devices[layer]
            layers[layer] = rotated.to(place, self.dtype), values.to(place, self.dtype)
        return layers

    @torch.inference_mode()
    def anchors(
        self, ids: Int[Tensor, "batch tokens"]
    ) -> tuple[Float[Tensor, "batch heads tokens dim"], Float[Tensor, "batch heads tokens dim"]]:
        """Position-free keys and values of layer 0: a function of each token alone."""
        unique, place = torch.unique(ids, return_inverse=True)
        zero = torch.zeros(1, unique.numel(), dtype=torch.long, device=ids.device)
        ((keys, values),) = self._first_layers(unique[None], None, zero, 1)
        cos, sin = self.rotary.at(zero)[0]
        keys = strip_rope(keys, cos, sin)
        return _look_up(keys, place), _look_up(values, place)

    @torch.inference_mode()
    def native_prefix(
        self,
        ids: Int[Tensor, "batch tokens"],
        mask: Bool[Tensor, "batch tokens"],
        count: int,
        product_dtype: torch.dtype | None = None,
        first_position: int = 0,
    ) -> ContentKV:
        """Position-free KV of the first ``count`` layers, running ``count - 1`` of them.

        Args:
            product_dtype: number format of matrix products and attention, where coarser than the
                weights'; the KV is then as exact as that format.
            first_position: of ``ids``, where the tokens before them are out of all windows.
        """
        positions = positions_of(mask) + first_position
        raw = self._first_layers(ids, _needed(mask), positions, count, product_dtype)
        tables = self.rotary.at(positions)
        return ContentKV(
            keys={i: strip_rope(k, *tables[i]) for i, (k, _) in enumerate(raw)},
            values={i: v.to(self.dtype) for i, (_, v) in enumerate(raw)},
            positions=positions,
            mask=mask,
        )

    @torch.inference_mode()
    def extend(
        self,
        cache: Any,
        ids: Int[Tensor, "batch tokens"],
        past_mask: Bool[Tensor, "batch past"],
        keep_logits: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """Run ``ids`` on top of ``cache`` (grown in place); logits of the last ``keep_logits``.

        ``past_mask`` covers every token that the cache stands for, also those that a windowed
        layer has dropped.
        """
        return self.differentiable_extend(cache, ids, past_mask, keep_logits)

    def differentiable_extend(
        self,
        cache: Any,
        ids: Int[Tensor, "batch tokens"],
        past_mask: Bool[Tensor, "batch past"],
        keep_logits: int = 0,
    ) -> Float[Tensor, "batch kept vocab"]:
        """As :meth:`extend`; gradients reach the content that the cache was built from."""
        mask = torch.cat((past_mask, torch.ones_like(ids, dtype=torch.bool)), dim=1)
        positions = positions_of(mask)[:, past_mask.shape[1] :]
        with self._coarse_linears.under_autocast(ids.device.type):
            return self._forward(ids, cache, _needed(mask), positions, keep_logits)

    @torch.inference_mode()
    def generate(
        self,
        cache: Any,
        prompt_ids: Sequence[int],
        past_mask: Bool[Tensor, "batch past"],
        max_new_tokens: int,
    ) -> Iterator[int]:
        """Greedy decoding of one row from ``cache``; yields token ids as they come.

        Raises:
            InputError: the prompt is empty (its last token is what makes logits exist).
        """
        if not prompt_ids:
            raise InputError("The suffix is empty.", fix="give at least one token to go on from")
        mask = past_mask
        step = torch.tensor([list(prompt_ids)], device=self.device)
        for _ in range(max_new_tokens):
            logits = self.extend(cache, step, mask, keep_logits=1)
            mask = torch.cat((mask, torch.ones_like(step, dtype=torch.bool)), dim=1)
            token = int(logits[0, -1].argmax())
            if token in self.stop_ids:
                return
            yield token
            step = torch.tensor([[token]], device=self.device)

    def recording(self) -> AbstractContextManager[list[AttentionCall]]:
        """Collect the attention calls of every forward pass inside the block."""
        return record_attention(self.model, lambda part, head_dim: part.to(self.device))

    def _forward(
        self, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor, keep_logits: int
    ) -> Tensor:
        """One pass on top of ``cache``, which grows in place; see `forward_with_cache`."""
        return kv_cache.forward_with_cache(self.model, ids, cache, mask, positions, keep_logits)

    def _first_layers(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        count: int,
        product_dtype: torch.dtype | None = None,
    ) -> list[kv_cache.LayerKV]:
        """Rotated keys and values of the first ``count`` layers."""
        coarse = product_dtype not in (None, torch.float32, self.dtype)
        with torch.autocast(self.device.type, product_dtype, enabled=coarse):
            return kv_cache.first_layers_kv(self.base, ids, mask, positions, count)


def _needed(mask: Tensor) -> Tensor | None:
    """None where nothing is masked: the model then takes its fastest attention path."""
    return None if bool(mask.all()) else mask.long()


def _look_up(table: Tensor, place: Tensor) -> Tensor:
    """``[1, heads, unique, dim]`` at ``[batch, tokens]`` -> ``[batch, heads, tokens, dim]``."""
    return table[0][:, place].transpose(0, 1)
