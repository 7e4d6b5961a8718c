"""Both models over the same text: the pair of caches that everything is fitted and judged on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Int64
from torch import Tensor

from kvferry.align.spans import TokenText
from kvferry.align.tokens import AlignmentMode, TokenAlignment, align_tokens
from kvferry.errors import InputError
from kvferry.lm.content import ContentKV
from kvferry.lm.model import LanguageModel
from kvferry.mappers.inputs import MapperInputs, SourceCode


@dataclass(frozen=True)
class TokenPair:
    """One text in the tokens of both models, their sink prefixes included.

    Args:
        source_ids, target_ids: what each cache holds, in order.
        alignment: source tokens of each target token.
        text: what both spell.
    """

    source_ids: list[int]
    target_ids: list[int]
    alignment: TokenAlignment
    text: str


@dataclass(frozen=True)
class PairTrace:
    """Position-free caches of both models over one text."""

    tokens: TokenPair
    source: ContentKV
    target: ContentKV

    def inputs(self, code: SourceCode | None) -> MapperInputs:
        """What a mapper may read of this text."""
        return MapperInputs(
            source=self.source,
            alignment=self.tokens.alignment.to(self.target.mask.device),
            anchors=self.target,
            native=self.target,
            code=code,
        )


@dataclass(frozen=True)
class PairReader:
    """Tokenises, aligns and reads text with a source and a target.

    Args:
        mode: which source tokens a target token reads.
        device: where the content of both caches goes once it is read; None: where the target lies.
    """

    source: LanguageModel
    target: LanguageModel
    mode: AlignmentMode = "owner"
    device: torch.device | None = None

    @property
    def content_device(self) -> torch.device:
        """Where whatever reads both caches works: the models may lie on two devices."""
        return self.target.device if self.device is None else self.device

    @cached_property
    def source_text(self) -> TokenText:
        """Spelling of source token ids."""
        return TokenText.from_tokenizer(self.source.tokenizer)

    @cached_property
    def target_text(self) -> TokenText:
        """Spelling of target token ids."""
        return TokenText.from_tokenizer(self.target.tokenizer)

    def tokenize(self, text: str, max_source_tokens: int | None = None) -> TokenPair:
        """Tokens of ``text``, cut to ``max_source_tokens`` of the source.

        Raises:
            InputError: the text has no tokens, or the two tokenizers spell it differently.
        """
        body = self.source.encode(text)[:max_source_tokens]
        return self.pair_from_source([*self.source.sink_ids, *body])

    def pair_from_source(self, source_ids: Sequence[int]) -> TokenPair:
        """Align the ids that a source cache holds with the target's own tokens of their text.

        The source is never tokenised again: its ids may differ from what its tokenizer would
        choose, as generated ones do.

        Raises:
            InputError: there is no text, or the target's tokenizer changes its length.
        """
        text, source_spans = self.source_text.character_spans(list(source_ids))
        # A cut may fall inside a character; the target cannot read half of one.
        text = text.rstrip("�") if text.endswith("�") else text
        target_ids = [*self.target.sink_ids, *self.target.encode(text)]
        if len(target_ids) == len(self.target.sink_ids):
            raise InputError(
                "The context holds no text.",
                found=f"{len(source_ids)} source tokens that spell nothing",
                fix="pass a document with at least one word",
            )
        return self.align(source_ids, source_spans, target_ids, text)

    def align(
        self,
        source_ids: Sequence[int],
        source_spans: Int64[Tensor, "source 2"],
        target_ids: Sequence[int],
        text: str,
    ) -> TokenPair:
        """Align given tokens of both models over ``text``."""
        spelled, target_spans = self.target_text.character_spans(list(target_ids))
        if len(spelled) != len(text):
            raise InputError(
                "The target's tokenizer does not give the text back as it was.",
                found=f"{len(spelled)} characters after tokenising {len(text)}",
                expected="the same characters in the same places",
                fix="normalise the text (Unicode NFC, no control characters) before reading it",
            )
        alignment = align_tokens(source_spans, target_spans, self.mode)
        return TokenPair(list(source_ids), list(target_ids), alignment, text)

    def read(self, pairs: Sequence[TokenPair]) -> list[PairTrace]:
        """Prefill both models over some texts at once; one trace a text, padding removed."""
        sources = [
            row.to(self.content_device)
            for row in _read_rows(self.source, [pair.source_ids for pair in pairs])
        ]
        targets = [
            row.to(self.content_device)
            for row in _read_rows(self.target, [pair.target_ids for pair in pairs])
        ]
        return [PairTrace(*row) for row in zip(pairs, sources, targets, strict=True)]

    def anchors(self, target_ids: Sequence[int]) -> ContentKV:
        """The target's free layer-0 content of ``target_ids``."""
        ids = torch.tensor([list(target_ids)], device=self.target.device)
        keys, values = self.target.anchors(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return ContentKV({0: keys}, {0: values}, positions, torch.ones_like(ids, dtype=torch.bool))


def _read_rows(model: LanguageModel, rows: Sequence[Sequence[int]]) -> list[ContentKV]:
    ids, mask = model.batch(rows)
    content = model.content(model.prefill(ids, mask))
    return [
        content.slice_tokens(content.tokens - len(row), content.tokens).select_row(index)
        for index, row in enumerate(rows)
    ]
