"""Keys, then values under those keys, corrected until the target behaves as natively."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.behaviour import Reading, read_mapped
from kvferry.mappers.behaviour_samples import Codes, TextSample, attended, layer_samples
from kvferry.mappers.correction import Blocks, InputCode, coded_moments, corrected, input_codes
from kvferry.mappers.layout import Component
from kvferry.mappers.observation import Observation, Watch
from kvferry.stats.attention_fit import fit_attention
from kvferry.stats.functional import AttendedMoments, functional_values

log = logging.getLogger(__name__)

Attention = Literal["native", "translated"]
Pointwise = float | Literal["auto"]

POINTWISE = (10.0, 1.0, 0.1, 0.01)


@dataclass(frozen=True)
class BehaviouralCalibration:
    """Corrections of keys and of values, in a short code of their inputs, from one reading.

    Args:
        keys_rank: of the correction that brings attention back; 0 leaves keys alone.
        steps, learning_rate: of that correction, see :func:`fit_attention`.
        values: correct values so that attention outputs come out right.
        pointwise: weight of the values themselves in that, see :func:`functional_values`; "auto"
            takes for each KV head the one of 10, 1, 0.1 and 0.01 that does best on held-out texts.
        directions: leading directions of the inputs that both corrections read.
        reading: the texts.
        attention: "translated" fits values under the mapped keys' attention and so makes up for
            their errors, "native" under the target's own.
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
        """``mapper`` corrected, each layer or KV head only where held-out texts gain by it.

        For keys all texts stay in memory, at about two keys a token and layer in half precision,
        and half as much again for values. Values alone are fitted as texts are read.

        Args:
            ridge: the penalty that ``mapper`` was fitted with.
        """
        if not self.keys_rank and not self.values:
            return mapper
        wanted: dict[Component, bool] = {"keys": bool(self.keys_rank), "values": self.values}
        codes: Codes = {
            component: input_codes(
                statistics, mapper, component, self.directions, self.reading.seed
            )
            for component, asked in wanted.items()
            if asked
        }
        fitted: Iterable[TextSample] = self._samples(mapper, self.reading.fitted(statistics), codes)
        held: Iterable[TextSample] = self._samples(mapper, self.reading.judging(statistics), codes)
        changes: dict[int, Tensor] = {}
        if self.keys_rank:
            fitted, held = list(fitted), list(held)
            changes, report = self._keys(fitted, held, statistics.watch)
            mapper = corrected(mapper, "keys", codes["keys"], changes)
            mapper = replace(mapper, report={**mapper.report, **report})
        if self.values:
            under = changes if self.attention == "translated" else None
            mapper = self._values(
                statistics,
                mapper,
                codes["values"],
                attended(fitted, under),
                attended(held, under),
                ridge,
            )
        return mapper

    def _samples(
        self, mapper: AffineMapper, texts: Iterable[Observation], codes: Codes
    ) -> Iterator[TextSample]:
        for text in read_mapped(mapper, texts, self.reading.rows, self.reading.seed):
            yield layer_samples(mapper, text, codes)

    def _keys(
        self, fitted: Sequence[TextSample], held: Sequence[TextSample], watch: Watch
    ) -> tuple[dict[int, Tensor], dict[str, float]]:
        """The change of each layer's keys, and how near attention came."""
        changes, divergences = {}, []
        with watch("fit keys to attention", len(fitted[0])) as step:
            for layer in fitted[0]:
                changes[layer], before, after = fit_attention(
                    [text[layer].keys for text in fitted],
                    [text[layer].keys for text in held],
                    rank=self.keys_rank,
                    steps=self.steps,
                    learning_rate=self.learning_rate,
                    seed=self.reading.seed,
                )
                log.debug("layer %d: attention KL %.4f to %.4f", layer, before, after)
                divergences.append((before, after))
                step()
        report = {
            "attention_kl_before": sum(b for b, _ in divergences) / len(divergences),
            "attention_kl_after": sum(a for _, a in divergences) / len(divergences),
            "layers_with_new_keys": float(sum(a < b for b, a in divergences)),
        }
        return changes, report

    def _values(
        self,
        statistics: Statistics,
        mapper: AffineMapper,
        codes: Mapping[Blocks, InputCode],
        fitted: Mapping[int, AttendedMoments],
        held: Mapping[int, AttendedMoments],
        ridge: float,
    ) -> AffineMapper:
        weights = POINTWISE if self.pointwise == "auto" else (self.pointwise,)
        changes = {}
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
                changes[layer] = best.transpose(0, 1).flatten(1)
        return corrected(mapper, "values", codes, changes)


def _by_head(flat: Float[Tensor, "width outputs"], heads: int) -> Float[Tensor, "heads width dim"]:
    return flat.reshape(len(flat), heads, -1).transpose(0, 1)
