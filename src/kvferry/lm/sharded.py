"""A language model whose weights lie on several ranks: all of them run each forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvferry.lm import cache as kv_cache
from kvferry.lm.attention import AttentionCall, record_attention
from kvferry.lm.cache import LayerKV
from kvferry.lm.model import LanguageModel
from kvferry.lm.rank_group import RankGroup
from kvferry.lm.rope import RotaryTables


@dataclass(frozen=True)
class Work:
    """What one rank runs in one forward pass.

    Args:
        member: which of the group's models.
        ids, mask, positions: tokens; the mask covers the cache too, None hides nothing.
        cache: what they come on top of; grows in place.
        keep_logits: logits of the last so many tokens; 0 keeps all.
        layers: keys and values of the first so many layers are wanted, and nothing else.
        product_dtype: number format of matrix products, where coarser than the weights'.
        recorded: the attention calls are recorded.
        answered: what comes out is sent back.
    """

    member: int
    ids: Tensor
    mask: Tensor | None
    positions: Tensor
    cache: Any = field(default_factory=kv_cache.full_length_cache)
    keep_logits: int = 0
    layers: int | None = None
    product_dtype: torch.dtype | None = None
    recorded: bool = False
    answered: bool = True


@dataclass(frozen=True)
class Answer:
    """What comes out of a pass: logits and the grown cache, or the first layers alone."""

    logits: Tensor | None = None
    cache: Any = None
    first: tuple[LayerKV, ...] = ()


class Shards(Protocol):
    """How a forward pass is divided among ranks, and put together again."""

    stops_early: bool
    """Whether a pass may end after its first layers."""

    def divide(self, work: Work) -> list[Work]:
        """One part a rank."""

    def join(self, work: Work, answers: Sequence[Answer]) -> Answer:
        """The answer to the whole; the cache of ``work`` has grown by it."""

    def whole(self, part: Tensor, head_dim: int) -> Tensor:
        """All heads of a tensor of which this rank holds some."""


@dataclass(frozen=True)
class WeightShards:
    """Every rank holds a slice of each weight, and gathers all of it when it comes to it (ZeRO-3).

    The rows of a batch are read side by side. A rank without rows of its own reads one token, since
    the others wait for its slices.
    """

    group: RankGroup
    stops_early = False  # its hooks count the modules of whole passes

    def divide(self, work: Work) -> list[Work]:
        """Rows of a prompt; what stands on a cache is run by the first rank alone."""
        count, batch = self.group.count, work.ids.shape[0]
        if work.recorded or work.layers or kv_cache.cached_tokens(work.cache):
            batch = 1
        if batch == 1:
            return [work, *[self._company(work)] * (count - 1)]
        parts = [
            replace(
                work,
                ids=work.ids[rows],
                mask=None if work.mask is None else work.mask[rows],
                positions=work.positions[rows],
                cache=kv_cache.map_cache(work.cache, lambda x: x),
            )
            for rows in torch.arange(batch).tensor_split(min(batch, count))
        ]
        return [*parts, *[self._company(work)] * (count - batch)]

    def join(self, work: Work, answers: Sequence[Answer]) -> Answer:
        """Rows under each other."""
        if len(answers) == 1:
            return answers[0]
        kv_cache.fill_from_parts(work.cache, [answer.cache for answer in answers], dim=0)
        logits = [answer.logits for answer in answers if answer.logits is not None]
        return Answer(torch.cat(logits), work.cache)

    def whole(self, part: Tensor, head_dim: int) -> Tensor:
        """Each rank has all heads of its rows."""
        return part

    @staticmethod
    def _company(work: Work) -> Work:
        first = work.positions.new_zeros(1, 1)
        return Work(work.member, first, None, first, keep_logits=1, answered=False)


@dataclass(frozen=True)
class HeadShards:
    """Every rank computes some heads of each layer (tensor parallel), of the same tokens."""

    group: RankGroup
    stops_early = True

    def divide(self, work: Work) -> list[Work]:
        """The same tokens for all, and to each the cache of its heads."""
        heads = [partial(_chunk, count=self.group.count, rank=r) for r in range(self.group.count)]
        return [replace(work, cache=kv_cache.map_cache(work.cache, own)) for own in heads]

    def join(self, work: Work, answers: Sequence[Answer]) -> Answer:
        """Heads beside each other; the logits are the same everywhere."""
        if work.layers:
            layers = zip(*(answer.first for answer in answers), strict=True)
            return Answer(first=tuple(_side_by_side(layer) for layer in layers))
        kv_cache.fill_from_parts(work.cache, [answer.cache for answer in answers], dim=1)
        return Answer(answers[0].logits, work.cache)

    def whole(self, part: Tensor, head_dim: int) -> Tensor:
        """Gather the heads of all ranks."""
        return self.group.whole_heads(part, head_dim)


def _chunk(heads: Tensor, count: int, rank: int) -> Tensor:
    return heads.chunk(count, dim=1)[rank]


def _side_by_side(parts: Sequence[LayerKV]) -> LayerKV:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


class ShardedLanguageModel(LanguageModel):
    """On the first rank a language model like any other; the others run their part for it.

    Caches lie whole on the first rank, so that everything that is done with them stays as it is.

    Args:
        model, tokenizer, name, revision: as in :class:`LanguageModel`; this rank's part.
        group: the ranks; all of them add the same models in the same order.
        shards: how a forward pass is divided.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        revision: str,
        group: RankGroup,
        shards: Shards,
    ) -> None:
        super().__init__(model, tokenizer, name, revision, device=group.device)
        self._group, self._shards = group, shards
        self._recorded = False
        self._member = len(group.members)
        group.members.append(self)
        # The model's own rotary module counts as a part of a pass, which the others do not see.
        rotary = type(self.base.rotary_emb)(config=self.base.config).to(group.device)
        self.rotary = RotaryTables(rotary, self.geometry)

    @contextmanager
    def recording(self) -> Iterator[list[AttentionCall]]:
        """Collect the attention calls of every forward pass inside the block, all heads of them."""
        self._recorded = True
        try:
            with record_attention(self.model, self._shards.whole) as calls:
                yield calls
        finally:
            self._recorded = False

    def run(self, work: Work) -> Answer:
        """This rank's part of a pass."""
        if work.recorded and self._group.index:
            with record_attention(self.model, self._shards.whole):
                return self._run(work)
        return self._run(work)

    def _forward(
        self, ids: Tensor, cache: Any, mask: Tensor | None, positions: Tensor, keep_logits: int
    ) -> Tensor:
        work = Work(self._member, ids, mask, positions, cache, keep_logits, recorded=self._recorded)
        logits = self._together(work).logits
        assert logits is not None
        return logits

    def _first_layers(
        self,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        count: int,
        product_dtype: torch.dtype | None = None,
    ) -> list[LayerKV]:
        work = Work(self._member, ids, mask, positions, layers=count, product_dtype=product_dtype)
        return list(self._together(work).first)

    def _together(self, work: Work) -> Answer:
        own, *others = self._shards.divide(work)
        for rank, part in enumerate(others, start=1):
            self._group.send(part, to=rank)
        answers = [self.run(own)]
        answers += [
            self._group.receive(rank) for rank, part in enumerate(others, 1) if part.answered
        ]
        return self._shards.join(work, answers)

    # Gathered weights outlive a pass, and must not be inference tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _run(self, work: Work) -> Answer:
        if work.layers and self._shards.stops_early:
            first = super()._first_layers(
                work.ids, work.mask, work.positions, work.layers, work.product_dtype
            )
            return Answer(first=tuple(first))
        logits = super()._forward(
            work.ids, work.cache, work.mask, work.positions, 1 if work.layers else work.keep_logits
        )
        if work.layers:
            return Answer(first=tuple(kv_cache.read_cache(work.cache)[: work.layers]))
        return Answer(logits, work.cache)
