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
from kvferry.mappers.behaviour import Reading, mapped_layers, read_mapped
from kvferry.mappers.behaviour_samples import Codes, TextSample, attended, layer_samples
from kvferry.mappers.correction import (
    Blocks,
    InputCode,
    coded_moments,
    columns_of,
    corrected,
    group_of,
    input_codes,
    with_weights,
)
from kvferry.mappers.observation import Observation, Watch
from kvferry.stats.attention_fit import fit_attention
from kvferry.stats.functional import AttendedMoments, functional_values

log = logging.getLogger(__name__)

Attention = Literal["native", "translated"]
Pointwise = float | Literal["auto"]

POINTWISE = (10.0, 1.0, 0.1, 0.01)


@dataclass(frozen=True)
class BehaviouralCalibration:
    """Keys remixed until they are attended to natively, then values corrected, from one reading.

    Args:
        keys: remix the keys of each layer, see :func:`fit_attention`.
        steps, learning_rate: of that.
        values: correct values so that attention outputs come out right.
        pointwise: weight of the values themselves in that, see :func:`functional_values`; "auto"
            takes for each KV head the one of 10, 1, 0.1 and 0.01 that does best on held-out texts.
        directions: leading directions of their inputs that corrections of values read.
        reading: the texts.
        attention: "translated" fits values under the mapped keys' attention and so makes up for
            their errors, "native" under the target's own.
        recall: how much more attention counts, in the fit of keys, that finds what a text repeats,
            see :meth:`kvferry.stats.attention_fit.AttentionSample.wanted`.
    """

    keys: bool
    steps: int
    learning_rate: float
    values: bool
    pointwise: Pointwise
    directions: int
    reading: Reading
    attention: Attention = "translated"
    recall: float = 0.0

    def rules(self) -> dict[str, bool]:
        """What settings must be, and whether they are."""
        return {
            **self.reading.rules(),
            "steps and directions must be at least 1": min(self.steps, self.directions) >= 1,
            "learning_rate must be positive": self.learning_rate > 0,
            "recall must not be negative": self.recall >= 0,
            "pointwise must be auto or not negative": self.pointwise == "auto"
            or self.pointwise >= 0,
        }

    def apply(self, statistics: Statistics, mapper: AffineMapper, ridge: float) -> AffineMapper:
        """``mapper`` corrected, each layer or KV head only where held-out texts gain by it.

        For keys all texts stay in memory: two keys a token and layer in half precision, and half as
        much again for values. Values alone are fitted as texts are read.

        Args:
            ridge: the penalty that ``mapper`` was fitted with.
        """
        if not (self.keys or self.values) or not mapped_layers(mapper):
            return mapper
        codes: Codes = (
            input_codes(statistics, mapper, "values", self.directions, self.reading.seed)
            if self.values
            else {}
        )
        fitted: Iterable[TextSample] = self._samples(mapper, self.reading.fitted(statistics), codes)
        if self.reading.can_judge(statistics):
            held: Iterable[TextSample] = self._samples(
                mapper, self.reading.judging(statistics), codes
            )
        else:
            log.warning(
                "No text is left to judge corrections of keys and values: those that they are "
                "fitted on will. Lower data.calibration_passages, and some is left."
            )
            fitted = held = list(fitted)
        remixes: dict[int, Tensor] = {}
        if self.keys:
            kept = list(fitted), list(held)
            fitted, held = kept
            remixes, report = self._keys(*kept, statistics.watch)
            mapper = with_remixed_keys(mapper, remixes)
            mapper = replace(mapper, report={**mapper.report, **report})
        if self.values:
            under = remixes if self.attention == "translated" else None
            mapper = self._values(
                statistics,
                mapper,
                codes,
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
        """The remix of each layer's keys, and how near attention came."""
        remixes, divergences = {}, []
        with watch("fit keys to attention", len(fitted[0])) as step:
            for layer in fitted[0]:
                remixes[layer], before, after = fit_attention(
                    [text[layer].keys for text in fitted],
                    [text[layer].keys for text in held],
                    steps=self.steps,
                    learning_rate=self.learning_rate,
                    recall=self.recall,
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
        return remixes, report

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


def with_remixed_keys(
    mapper: AffineMapper, remixes: Mapping[int, Float[Tensor, "features features"]]
) -> AffineMapper:
    """The mapper with its keys y of each layer become y + (y - mean) R, folded into the weights."""
    weights = {}
    for layer, remix in remixes.items():
        group = group_of(mapper, "keys", layer)
        weight = group.weight[:, columns_of(mapper, group, layer)].double()
        weights[layer] = weight + weight @ remix.double()
    return with_weights(mapper, "keys", weights)


def _by_head(flat: Float[Tensor, "width outputs"], heads: int) -> Float[Tensor, "heads width dim"]:
    return flat.reshape(len(flat), heads, -1).transpose(0, 1)
