"""What a mapped cache does under the target's own queries: rows to judge and to fit it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.base import Statistics
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.observation import Observation, ReplaySplit

EARLIEST_ROW = 0.25
"""Queries from the first quarter of a text see little of it; a hand-off's queries see all."""

UNSEEN: tuple[ReplaySplit, ...] = ("selection", "other_domain")
"""Splits that may judge a fit, the better one first."""


@dataclass(frozen=True)
class Reading:
    """How much text a behavioural fit reads.

    Args:
        passages: calibration texts to fit on; each is read by both models.
        held_out: texts of the selection split that decide whether a fit is kept.
        rows: queries of each text and layer, drawn at random.
        seed: of the draw.
        copies: repeat an early stretch at the end of each text, so that recall is fitted as well.
    """

    passages: int = 32
    held_out: int = 8
    rows: int = 64
    seed: int = 0
    copies: bool = False

    def fitted(self, statistics: Statistics) -> Iterator[Observation]:
        """Texts to fit on."""
        return statistics.observe(self.passages, copies=self.copies)

    def can_judge(self, statistics: Statistics) -> bool:
        """Whether any text is left that the moments have not seen."""
        return any(statistics.has(split) for split in UNSEEN)

    def judging(self, statistics: Statistics) -> Iterator[Observation]:
        """Texts that decide whether a fit is kept.

        Raises:
            ConfigurationError: there is no text that the moments have not seen.
        """
        split = statistics.held_out(*UNSEEN)
        return statistics.observe(self.held_out, split, copies=self.copies)

    def rules(self) -> dict[str, bool]:
        """What settings must be, and whether they are."""
        return {
            "passages, held_out and rows must be at least 1": min(
                self.passages, self.held_out, self.rows
            )
            >= 1
        }


@dataclass(frozen=True)
class MappedText:
    """One text as the target holds it and as the mapper gives it, prefix native in both.

    Args:
        seen: the text.
        content: mapped, native prefix in its place.
        rows: tokens whose queries judge.
    """

    seen: Observation
    content: ContentKV
    rows: Int64[Tensor, " rows"]


def query_rows(
    texts: Iterable[Observation], rows: int, seed: int
) -> Iterator[tuple[Observation, Int64[Tensor, " rows"]]]:
    """Each text with tokens whose queries judge it, drawn anew for each from one seed."""
    generator = torch.Generator().manual_seed(seed)
    for seen in texts:
        tokens = seen.target.tokens
        first = min(max(seen.prefix + 1, int(EARLIEST_ROW * tokens)), tokens - 1)
        chosen = first + torch.randperm(tokens - first, generator=generator)[:rows].sort().values
        yield seen, chosen.to(seen.target.mask.device)


def read_mapped(
    mapper: Mapper, texts: Iterable[Observation], rows: int, seed: int
) -> Iterator[MappedText]:
    """Map each text."""
    for seen, chosen in query_rows(texts, rows, seed):
        yield MappedText(seen, mapped_after_prefix(mapper, seen), chosen)


def mapped_after_prefix(mapper: Mapper, seen: Observation) -> ContentKV:
    """Mapped content of every token but the prefix, which stays native, and planted sinks."""
    out = mapper.map(seen.inputs, [0] * len(mapper.target.layers))
    for component in ("keys", "values"):
        native: dict[int, Tensor] = getattr(seen.target, component)
        mapped: dict[int, Tensor] = getattr(out, component)
        for layer in mapped_layers(mapper):
            mapped[layer][:, :, : seen.prefix] = native[layer][:, :, : seen.prefix]
            planted = planted_tokens(mapper, layer, out.tokens)
            mapped[layer][:, :, planted] = native[layer][:, :, :1]
    return out


def planted_tokens(mapper: Mapper, layer: int, tokens: int) -> list[int]:
    """Tokens of a windowed layer that give way to the prefix, were the context to end here."""
    first = mapper.first_tokens(tokens)[layer]
    return [first + place for place in mapper.planted_places(layer, tokens)]


def mapped_layers(mapper: Mapper) -> range:
    """Target layers that are not native."""
    return range(mapper.native_layers, len(mapper.target.layers))


def attention_error(
    mapper: Mapper, texts: Iterable[Observation], rows: int = 64, seed: int = 0
) -> Float[Tensor, " layers"]:
    """|mapped - native|² of attention outputs as a share of |native|², by target layer.

    Both keys and values are mapped, native layers score 0, and the queries are native.
    """
    depth = len(mapper.target.layers)
    error, total = torch.zeros(depth), torch.zeros(depth)
    for text in read_mapped(mapper, texts, rows, seed):
        native = text.seen.target
        for layer in range(depth):
            ask = text.seen.queries[layer]
            true = ask.attend(text.rows, native.keys[layer][0], native.values[layer][0])
            keys, values = text.content.keys[layer][0], text.content.values[layer][0]
            got = ask.attend(text.rows, keys, values)
            error[layer] += float((got - true).square().sum())
            total[layer] += float(true.square().sum())
    return error / total
