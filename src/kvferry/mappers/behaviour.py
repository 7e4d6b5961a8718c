"""What a mapped cache does under the target's own queries: rows to judge and to fit it on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.correction import (
    Blocks,
    InputCode,
    coded_moments,
    corrected,
    group_of,
    input_codes,
)
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.observation import Observation
from kvferry.stats.attention_fit import AttentionSample, fit_attention
from kvferry.stats.functional import AttendedMoments, functional_values

log = logging.getLogger(__name__)

Attention = Literal["native", "translated"]
Pointwise = float | Literal["auto"]

POINTWISE = (10.0, 1.0, 0.1, 0.01)

EARLIEST_ROW = 0.25
"""Queries from the first quarter of a text see little of it; a hand-off's queries see all."""


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

    def judging(self, statistics: Statistics) -> Iterator[Observation]:
        """Texts that decide whether a fit is kept.

        Raises:
            ConfigurationError: there is no text that the moments have not seen.
        """
        split = statistics.held_out("selection", "other_domain")
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
class BehaviouralCalibration:
    """Keys, then values under those keys, corrected until the target behaves as natively.

    Args:
        keys_rank: of the correction that brings attention back; 0 leaves keys alone.
        steps, learning_rate: of that correction, see :func:`refit_keys`.
        values: correct values so that attention outputs come out right.
        pointwise: weight of the values themselves in that, see :func:`refit_values`.
        directions: leading directions of the inputs that both corrections read.
        reading: the texts.
        attention: what values are fitted under, see :func:`refit_values`.
    """

    keys_rank: int
    steps: int
    learning_rate: float
    values: bool
    pointwise: Pointwise
    directions: int
    reading: Reading
    attention: Attention = "translated"

    def rules(self, rank_field: str = "behavioural_keys_rank") -> dict[str, bool]:
        """What settings must be, and whether they are; ``rank_field`` is the rank's public name."""
        return {
            **self.reading.rules(),
            f"{rank_field} must not be negative": self.keys_rank >= 0,
            "steps and directions must be at least 1": min(self.steps, self.directions) >= 1,
            "learning_rate must be positive": self.learning_rate > 0,
            "pointwise must be auto or not negative": self.pointwise == "auto"
            or self.pointwise >= 0,
        }

    def apply(self, statistics: Statistics, mapper: AffineMapper, ridge: float) -> AffineMapper:
        """``mapper`` corrected; ``ridge`` is the penalty it was fitted with."""
        if self.keys_rank:
            mapper = refit_keys(
                statistics,
                mapper,
                self.reading,
                directions=self.directions,
                rank=self.keys_rank,
                steps=self.steps,
                learning_rate=self.learning_rate,
            )
        if self.values:
            mapper = refit_values(
                statistics,
                mapper,
                self.reading,
                rank=self.directions,
                pointwise=self.pointwise,
                ridge=ridge,
                attention=self.attention,
            )
        return mapper


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


def refit_values(
    statistics: Statistics,
    mapper: AffineMapper,
    reading: Reading,
    *,
    rank: int,
    pointwise: Pointwise,
    ridge: float,
    attention: Attention = "translated",
) -> AffineMapper:
    """Values such that attention outputs, not values, come out right; keys stay.

    The correction of each layer's map lies in a code of its inputs, so one reading serves all
    layers. A KV head whose held-out error does not fall keeps what it had.

    Args:
        rank: directions of the inputs that a correction may read.
        pointwise: weight of the values themselves, see :func:`functional_values`; "auto" takes for
            each KV head the one of 10, 1, 0.1 and 0.01 that does best on the held-out texts.
        ridge: penalty as a share of the inputs' mean variance, as in the mapper's own fit.
        attention: "translated" attends to the mapped keys and so makes up for their errors;
            "native" to the target's own.
    """
    weights = POINTWISE if pointwise == "auto" else (pointwise,)
    codes = input_codes(statistics, mapper, "values", rank, reading.seed)
    texts = reading.fitted(statistics)
    fitted = _attended(mapper, texts, codes, reading, attention)
    texts = reading.judging(statistics)
    held = _attended(mapper, texts, codes, reading, attention)
    corrections = {}
    for code in codes.values():
        for layer, part in coded_moments(statistics, mapper, "values", code).items():
            heads = mapper.target.layers[layer].kv_heads
            best = torch.zeros_like(_by_head(part.c_ze, heads))
            for weight in weights:
                change = functional_values(
                    fitted[layer],
                    part.c_zz,
                    _by_head(part.c_ze, heads),
                    pointwise=weight,
                    penalty=ridge * code.mean_variance * part.penalty,
                    start=ridge * code.mean_variance * _by_head(part.start, heads),
                )
                better = held[layer].error(change) < held[layer].error(best)
                best = torch.where(better[:, None, None], change, best)
            corrections[layer] = best.transpose(0, 1).flatten(1)
    return corrected(mapper, "values", codes, corrections)


def refit_keys(
    statistics: Statistics,
    mapper: AffineMapper,
    reading: Reading,
    *,
    directions: int,
    rank: int,
    steps: int,
    learning_rate: float,
) -> AffineMapper:
    """Keys such that the target's attention goes where it goes natively; values stay.

    Each layer by itself, see :func:`fit_attention`; a layer whose held-out divergence does not fall
    keeps what it had. All texts stay in memory, at about two keys a token and layer in half
    precision.

    Args:
        directions: leading directions of the inputs that a correction may read.
        rank: of the correction.
        steps: of the optimiser, one text each.
        learning_rate: see :func:`fit_attention`.
    """
    codes = input_codes(statistics, mapper, "keys", directions, reading.seed)
    texts = reading.fitted(statistics)
    fitted = _attention_samples(mapper, texts, codes, reading)
    texts = reading.judging(statistics)
    held = _attention_samples(mapper, texts, codes, reading)
    corrections, divergences = {}, []
    layers = mapped_layers(mapper)
    with statistics.watch("fit keys to attention", len(layers)) as step:
        for layer in layers:
            change, before, after = fit_attention(
                fitted.pop(layer),
                held.pop(layer),
                rank=rank,
                steps=steps,
                learning_rate=learning_rate,
                seed=reading.seed,
            )
            log.debug("layer %d: attention KL %.4f to %.4f", layer, before, after)
            corrections[layer] = change
            divergences.append((before, after))
            step()
    report = {
        "attention_kl_before": sum(b for b, _ in divergences) / len(divergences),
        "attention_kl_after": sum(a for _, a in divergences) / len(divergences),
        "layers_with_new_keys": float(sum(a < b for b, a in divergences)),
    }
    done = corrected(mapper, "keys", codes, corrections)
    return replace(done, report={**mapper.report, **report})


def _attention_samples(
    mapper: AffineMapper,
    texts: Iterable[Observation],
    codes: Mapping[Blocks, InputCode],
    reading: Reading,
) -> dict[int, list[AttentionSample]]:
    """By layer, what :func:`fit_attention` needs of every text."""
    found: dict[int, list[AttentionSample]] = {layer: [] for layer in mapped_layers(mapper)}
    for text in read_mapped(mapper, texts, reading.rows, reading.seed):
        coded = {
            blocks: code.rows(text.seen.inputs, text.seen.prefix).half()
            for blocks, code in codes.items()
        }
        # Layers share rotary tables, and tensors made in inference mode cannot meet a gradient.
        tables: dict[int, Tensor] = {}
        for layer, samples in found.items():
            ask = text.seen.queries[layer].at(text.rows)
            code = coded[group_of(mapper, "keys", layer).blocks]
            cos, sin = (tables.setdefault(id(t), t.clone()) for t in (ask.cos, ask.sin))
            samples.append(
                AttentionSample(
                    ask=replace(ask, queries=ask.queries.half(), cos=cos, sin=sin),
                    native=text.seen.target.keys[layer][0].half(),
                    mapped=text.content.keys[layer][0].half(),
                    code=_without(code, planted_tokens(mapper, layer, len(code))),
                )
            )
    return found


def _attended(
    mapper: AffineMapper,
    texts: Iterable[Observation],
    codes: Mapping[Blocks, InputCode],
    reading: Reading,
    attention: Attention,
) -> dict[int, AttendedMoments]:
    """By layer, attended codes against what mapped values leave of the native outputs."""
    found: dict[int, AttendedMoments] = {}
    for text in read_mapped(mapper, texts, reading.rows, reading.seed):
        native = text.seen.target
        coded = {
            blocks: code.rows(text.seen.inputs, text.seen.prefix) for blocks, code in codes.items()
        }
        for layer in mapped_layers(mapper):
            shape, ask = mapper.target.layers[layer], text.seen.queries[layer]
            z = coded[group_of(mapper, "values", layer).blocks]
            z = _without(z, planted_tokens(mapper, layer, native.tokens))
            if layer not in found:
                found[layer] = AttendedMoments(shape.kv_heads, z.shape[1], shape.head_dim)
            keys = text.content if attention == "translated" else native
            weights = ask.weights(text.rows, keys.keys[layer][0])
            wanted = ask.attend(text.rows, native.keys[layer][0], native.values[layer][0])
            values = text.content.values[layer][0].repeat_interleave(
                len(weights) // shape.kv_heads, dim=0
            )
            found[layer].update(weights @ z, wanted - weights @ values)
    return found


def _without(
    code: Float[Tensor, "tokens width"], planted: list[int]
) -> Float[Tensor, "tokens width"]:
    return code.index_fill(0, torch.tensor(planted, device=code.device), 0) if planted else code


def _by_head(flat: Float[Tensor, "width outputs"], heads: int) -> Float[Tensor, "heads width dim"]:
    return flat.reshape(len(flat), heads, -1).transpose(0, 1)
