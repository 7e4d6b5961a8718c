"""CacheLink: attention outputs come out nearer to native ones, even where values do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvferry.calibration.corpus import load_miniature
from kvferry.calibration.replay import TextReplay
from kvferry.errors import ConfigurationError
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.behaviour import Reading, attention_error, read_mapped
from kvferry.mappers.behavioural_fit import BehaviouralCalibration
from kvferry.mappers.cachelink import CacheLink, query_metrics
from kvferry.mappers.correction import coded_moments, corrected, group_of, input_codes
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.observation import Observation, ReplaySplit
from tests.pairs import TOKENS, reader_of, statistics_of

CACHELINK = CacheLink(directions=48, passages=32, held_out=8, rows=48)


def with_texts(source: str, target: str) -> Statistics:
    """Texts to fit on, others to choose on, and a third kind to judge on; each read once."""
    statistics = statistics_of(source, target, 32)
    counts = {"calibration": (32, 0), "selection": (8, 5), "other_domain": (8, 77)}
    texts = {
        split: [p.text for p in load_miniature(count, sentences=16, seed=seed)]
        for split, (count, seed) in counts.items()
    }
    replay = TextReplay(reader_of(source, target), texts, TOKENS, statistics.code)  # type: ignore[arg-type]
    seen = {split: list(replay(count, split)) for split, (count, _) in counts.items()}  # type: ignore[arg-type]

    class Again:
        def __call__(
            self, passages: int, split: ReplaySplit = "calibration", *, copies: bool = False
        ) -> Iterator[Observation]:
            return iter(seen[split][:passages])

        def count(self, split: ReplaySplit) -> int:
            return len(seen.get(split, ()))

    return replace(statistics, replay=Again())


@pytest.mark.parametrize(("source", "target"), [("qwen3", "mistral"), ("llama3", "ministral3")])
def test_attention_outputs_improve_even_where_values_do_not(source: str, target: str) -> None:
    """The acceptance of "functional", on texts that neither fit nor choice has seen."""
    statistics = with_texts(source, target)
    unseen = list(statistics.observe(8, "other_domain"))
    ridge = FullHeadRidge().fit(statistics)
    linked = CACHELINK.fit(statistics)
    won = attention_error(linked, unseen) - attention_error(ridge, unseen)
    lost = _value_error(linked, unseen) - _value_error(ridge, unseen)
    assert float(won.mean()) < 0
    assert bool(((won < 0) & (lost > 0)).any()), "somewhere outputs gain what values lose"


def _value_error(mapper: AffineMapper, texts: list[Observation]) -> torch.Tensor:
    depth = len(mapper.target.layers)
    error = torch.zeros(depth)
    for text in read_mapped(mapper, texts, 4, 0):
        native = text.seen.target.values
        for layer in range(depth):
            left = text.content.values[layer] - native[layer]
            error[layer] += float(left.square().mean() / native[layer].square().mean())
    return error


def test_native_attention_ignores_mapped_keys_and_translated_answers_to_them() -> None:
    statistics = statistics_of("llama", "gemma3")
    plain = FullHeadRidge().fit(statistics)
    turned = replace(
        plain,
        groups=tuple(
            replace(g, weight=2 * g.weight) if g.component == "keys" else g for g in plain.groups
        ),
    )
    for attention in ("native", "translated"):
        values = BehaviouralCalibration(
            keys=False,
            steps=1,
            learning_rate=1.0,
            values=True,
            pointwise=0.1,
            directions=8,
            reading=Reading(passages=4, held_out=2, rows=16),
            attention=attention,  # type: ignore[arg-type]
        )
        found = [values.apply(statistics, mapper, ridge=1e-3) for mapper in (plain, turned)]
        first, second = (
            torch.cat([group_of(m, "values", layer).weight for layer in range(6)], dim=1)
            for m in found
        )
        assert torch.equal(first, second) == (attention == "native")


def test_parts_that_are_off_change_nothing() -> None:
    statistics = statistics_of("llama", "gemma3")
    ridge = FullHeadRidge().fit(statistics)
    off = CacheLink(key_metric=False, functional_values=False).fit(replace(statistics, replay=None))
    for mine, theirs in zip(off.groups, ridge.groups, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
    with pytest.raises(ConfigurationError, match="calibration text"):
        CacheLink().fit(replace(statistics, replay=None))


def test_heads_without_gain_and_native_layers_keep_what_they_had() -> None:
    """With hopeless rows nothing is kept; exact layers stay exact."""
    statistics = statistics_of("llama", "gemma3")
    method = CacheLink(
        native_layers=2, directions=8, key_metric=False, passages=1, held_out=1, rows=2
    )
    mapper = method.fit(statistics)
    ridge = FullHeadRidge(native_layers=2).fit(statistics)
    assert {layer for g in mapper.groups for layer in g.target_layers} == set(range(2, 6))
    for mine, theirs in zip(mapper.groups, ridge.groups, strict=True):
        if mine.component == "keys":
            assert torch.equal(mine.weight, theirs.weight)
    held = list(statistics.observe(1, "selection"))
    ours, plain = (attention_error(m, held, rows=2) for m in (mapper, ridge))
    assert bool((ours <= plain + 1e-4).all()) and float(ours[:2].abs().max()) < 1e-6


def test_a_correction_of_ridge_in_code_is_worth_nothing_pointwise() -> None:
    """Ridge is optimal: left over and penalty cancel in every direction. Control: other weights."""
    statistics = statistics_of("llama", "gemma3")
    mapper = FullHeadRidge(ridge=1e-3).fit(statistics)
    codes = input_codes(statistics, mapper, "values", 12, 0)
    (code,) = codes.values()
    for layer, part in coded_moments(statistics, mapper, "values", code).items():
        scale = float(part.start.abs().max()) * code.mean_variance * 1e-3
        gradient = part.c_ze - 1e-3 * code.mean_variance * part.start
        assert float(gradient.abs().max()) < 1e-2 * scale
        moved = corrected(mapper, "values", codes, {layer: 0.1 + 0 * part.start.float()})
        other = coded_moments(statistics, moved, "values", code)[layer]
        assert float((other.c_ze - 1e-3 * code.mean_variance * other.start).abs().max()) > scale
        group, was = group_of(moved, "values", layer), group_of(mapper, "values", layer)
        assert not torch.equal(group.weight, was.weight)


def test_metrics_are_symmetric_and_leave_native_layers_out() -> None:
    statistics = statistics_of("llama", "gemma3")
    mapper = FullHeadRidge(native_layers=1).fit(statistics)
    found = query_metrics(mapper, statistics.observe(1), rows=8, seed=0)
    assert set(found) == set(range(1, 6))
    for layer, metric in found.items():
        shape = statistics.target.layers[layer]
        assert metric.shape == (shape.kv_heads, shape.head_dim, shape.head_dim)
        torch.testing.assert_close(metric, metric.transpose(1, 2))
        assert bool((torch.linalg.eigvalsh(metric) > -1e-9).all())
        assert float(metric.diagonal(dim1=1, dim2=2).sum()) > 0


def test_settings_out_of_range_are_all_named() -> None:
    with pytest.raises(ConfigurationError, match=r"metric_floor.*passages.*pointwise.*attention"):
        CacheLink(passages=0, metric_floor=0.0, pointwise=-1.0, attention="both")  # type: ignore[arg-type]
