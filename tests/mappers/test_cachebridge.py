"""CacheBridge reads one head, weighs rows by attention, and equals the slow way of doing so."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvferry.calibration.reader import PairReader, PairTrace
from kvferry.errors import ConfigurationError, InputError
from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry, LayerGeometry
from kvferry.mappers import attention_weighted
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.attention_weighted import row_relevance
from kvferry.mappers.base import Statistics
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.head_sums import HeadSums
from kvferry.mappers.head_support import (
    head_columns,
    select_heads_and_layers,
    single_head_r2,
)
from kvferry.mappers.layout import COMPONENTS, component_layout
from kvferry.stats.moments import Moments
from kvferry.stats.ridge import held_out_r2, ridge
from tests.pairs import TOKENS, reader_of, statistics_of, traces_of

PLAIN = CacheBridge(weigh_keys=False, weigh_values=False)
PAIRS = [
    ("llama", "gemma2"),
    ("gemma2", "qwen2"),
    ("gemma3", "llama"),
    ("mistral", "qwen3"),
    ("qwen3", "gemma3"),
]


def geometry(layers: int, heads: int, dim: int) -> KVGeometry:
    return KVGeometry("made_up", (LayerGeometry(heads, dim),) * layers, heads, 8, 8, 8, "{}")


class Family:
    """Target heads that are linear in a few source heads, and noise."""

    def __init__(self, heads: int = 4, dim: int = 6, noise: float = 0.5, mixing: float = 0.0):
        generator = torch.Generator().manual_seed(0)
        self.generator, self.noise = generator, noise
        self.source, self.target = geometry(3, heads, dim), geometry(2, heads, dim)
        self.order, self.layers = (2, 0, 3, 1)[:heads], (2, 0)
        shape = 2, heads, heads, dim, dim
        self.maps = mixing * torch.randn(shape, generator=generator)
        for head, source in enumerate(self.order):
            own = torch.randn(2, dim, dim, generator=generator)
            self.maps[:, head, source] += own
        self.maps /= dim**0.5

    def statistics(self, rows: int) -> Statistics:
        moments, layouts = {}, {}
        heads, dim = self.source.layers[0].kv_heads, self.source.layers[0].head_dim
        for component in COMPONENTS:
            layouts[component] = component_layout(
                component, self.source, self.target, code_width=0, anchor_context=-1,
                native_layers=0,
            )  # fmt: skip
            x = torch.randn(rows, 3, heads, dim, generator=self.generator) + 1.0
            y = torch.einsum("nlsd,lhsde->nlhe", x[:, list(self.layers)], self.maps)
            y = y + self.noise * torch.randn(y.shape, generator=self.generator)
            width = heads * dim
            blocks = [slice(0, width), slice(width, 2 * width)]
            moments[component] = Moments(3 * width, 2 * width, y_blocks=blocks).update(
                x.flatten(1), y.flatten(1)
            )
        return Statistics(self.source, self.target, layouts, moments, None)


def held_out(mapper: AffineMapper, statistics: Statistics) -> float:
    """Mean R² of all outputs on the rows of ``statistics``."""
    scores = []
    for group in mapper.groups:
        layout = statistics.layouts[group.component]
        heads = [group.head] if group.head >= 0 else range(mapper.target.layers[0].kv_heads)
        every = torch.arange(sum(mapper.target.widths))
        places = [head_columns(mapper.target, i, h) for i in group.target_layers for h in heads]
        columns = torch.cat([every[place] for place in places])
        part = statistics.moments[group.component].select(layout.columns(group.blocks), columns)
        constant = group.output_mean - group.input_mean @ group.weight
        scores += held_out_r2(group.weight, constant, part).tolist()
    return sum(scores) / len(scores)


def test_planted_heads_and_layers_are_found_and_all_but_the_noise_is_explained() -> None:
    family = Family(noise=0.5)
    statistics = family.statistics(20_000)
    support = select_heads_and_layers(statistics, 1, "hungarian")
    assert support.heads.sources == family.order
    assert support.layers.layers == tuple((layer,) for layer in family.layers)
    found = replace(PLAIN, source_layers=1, heads="hungarian").fit(statistics)
    variance = sum(float(c.diagonal().sum()) for c in statistics.moments["keys"].c_yy) / 48
    assert held_out(found, family.statistics(20_000)) == pytest.approx(
        1 - 0.25 / variance, abs=0.02
    )
    wrong = replace(PLAIN, source_layers="all", heads="index").fit(statistics)
    assert held_out(wrong, family.statistics(20_000)) < 0.1, "control: the assignment matters"


def test_one_head_wins_on_few_rows_and_all_heads_on_many() -> None:
    """Gate 4: heads that mix a little are worth their coefficients only with enough rows."""
    family = Family(heads=4, dim=6, noise=1.0, mixing=0.25)
    test = family.statistics(20_000)
    scores = {}
    for rows in (60, 20_000):
        statistics = family.statistics(rows)
        local = replace(PLAIN, source_layers="all", heads="hungarian").fit(statistics)
        full = FullHeadRidge().fit(statistics)
        scores[rows] = held_out(local, test), held_out(full, test)
    assert scores[60][0] > scores[60][1] + 0.05
    assert scores[20_000][1] > scores[20_000][0] + 0.05


@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("qwen3", "mistral")])
@pytest.mark.parametrize("layers", [2, "all"])
def test_coefficients_are_fewer_by_the_number_of_source_heads(
    source: str, target: str, layers: int
) -> None:
    statistics = statistics_of(source, target)
    local = replace(PLAIN, source_layers=layers).fit(statistics)
    full = FullHeadRidge(source_layers=layers).fit(statistics)
    numbers = [sum(group.weight.numel() for group in m.groups) for m in (local, full)]
    assert numbers[1] == numbers[0] * statistics.source.layers[0].kv_heads


def test_only_heads_that_are_read_are_touched() -> None:
    """Four source heads to two: the index rule reads heads 0 and 2."""
    statistics, trace = statistics_of("gemma2", "qwen2"), traces_of("gemma2", "qwen2", 1)[0]
    mapper = replace(PLAIN, source_layers=2).fit(statistics)
    read = {block.head for group in mapper.groups for block in group.blocks}
    assert read < set(range(statistics.source.layers[0].kv_heads))

    def poison(x: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x, float("nan"))
        out[:, sorted(read)] = x[:, sorted(read)]
        return out

    poisoned = PairTrace(trace.tokens, trace.source.map_layers(poison), trace.target)
    clean, same = mapped(mapper, trace), mapped(mapper, poisoned)
    for layer in clean.keys:
        assert torch.equal(clean.keys[layer], same.keys[layer])
        assert torch.equal(clean.values[layer], same.values[layer])


def mapped(mapper: AffineMapper, trace: PairTrace, first: list[int] | None = None) -> ContentKV:
    return mapper.map(trace.inputs(None), first or [0] * len(mapper.target.layers))


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("rule", ["index", "hungarian"])
def test_batched_products_are_those_of_each_head(source: str, target: str, rule: str) -> None:
    """Also where windowed layers are asked for their last tokens only."""
    method = replace(PLAIN, source_layers=2, heads=rule, anchor_context=0, neighbours=True)
    mapper = method.fit(statistics_of(source, target))
    trace = traces_of(source, target, 1)[0]
    tokens = trace.target.tokens
    first = [0 if layer.window is None else 17 for layer in mapper.target.layers]
    out = mapped(mapper, trace, first)
    inputs = trace.inputs(mapper.code)
    for group in mapper.groups:
        rows = inputs.rows(group.blocks, 0, tokens)
        alone = (rows - group.input_mean) @ group.weight + group.output_mean
        parts = alone.chunk(len(group.target_layers), dim=1)
        for layer, part in zip(group.target_layers, parts, strict=True):
            found = getattr(out, group.component)[layer][0, group.head]
            torch.testing.assert_close(found, part[first[layer] :], atol=2e-4, rtol=1e-4)


def geometry_width(statistics: Statistics) -> int:
    return statistics.source.layers[0].head_dim


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_one_reading_equals_two_passes_over_whole_matrices(source: str, target: str) -> None:
    """Weights with their mean and alpha first, then means, then products: all in fp64."""
    statistics = statistics_of(source, target)
    seen = list(statistics.observe(5))
    rows, inputs = sum(int(one.counted.sum()) for one in seen), 2 * geometry_width(statistics)
    floor = 0.6 * rows / inputs
    method = CacheBridge(source_layers=2, passages=5, boundaries=6, floor=floor, ridge=1e-2)
    mapper = method.fit(statistics)
    moved = 0
    for group in mapper.groups:
        (layer,) = group.target_layers
        x, y, r = [], [], []
        for one in seen:
            counted = one.counted
            x.append(one.inputs.rows(group.blocks, 0, len(counted))[counted].double())
            y.append(getattr(one.target, group.component)[layer][0, group.head, counted].double())
            r.append(row_relevance(one, layer, 6)[group.component][group.head, counted].double())
        xs, ys, rs = torch.cat(x), torch.cat(y), torch.cat(r)
        rs = rs / rs.mean()
        assert xs.shape == (rows, inputs)
        spare = rows / (floor * inputs) - 1
        alpha = min(1.0, float((spare / rs.var(correction=0)).sqrt()))
        weights = 1 + alpha * (rs - 1)
        moved += 0 < alpha < 1
        if alpha < 1:
            assert float(weights.sum() ** 2 / weights.square().sum()) == pytest.approx(0.6 * rows)
        mean_x, mean_y = weights @ xs / rows, weights @ ys / rows
        left = (xs - mean_x).T * weights / rows
        wanted = ridge(left @ (xs - mean_x), left @ (ys - mean_y), relative=1e-2)
        predicted = (xs - mean_x) @ wanted + mean_y
        found = (xs.float() - group.input_mean) @ group.weight + group.output_mean
        assert float((found - predicted).std() / ys.std()) < 1e-3
    assert moved, "control: somewhere the floor binds"


def test_without_spare_rows_it_is_plain_ridge() -> None:
    """Gate 6: a floor that no weighting can keep leaves the unweighted map of the same rows."""
    statistics = statistics_of("qwen3", "gemma3")
    assert all(bool(one.counted.any()) for one in statistics.observe(12))
    plain = replace(PLAIN, source_layers=2).fit(statistics)
    held = CacheBridge(source_layers=2, passages=12, floor=1e9).fit(statistics)
    weighted = CacheBridge(source_layers=2, passages=12, floor=1.0).fit(statistics)
    trace = traces_of("qwen3", "gemma3", 1)[0]
    one, other, third = (mapped(m, trace) for m in (plain, held, weighted))
    for layer in one.values:
        torch.testing.assert_close(one.values[layer], other.values[layer], atol=2e-3, rtol=1e-3)
    last = max(one.values)
    assert not torch.allclose(one.values[last], third.values[last], atol=1e-2), "control"


def test_little_memory_means_more_readings_and_the_same_map() -> None:
    statistics = statistics_of("llama", "gemma3")
    method = CacheBridge(source_layers=2, passages=3, boundaries=4)
    readings: list[int] = []
    replay = statistics.replay
    assert replay is not None

    def counting(passages, split="calibration", *, copies=False):  # type: ignore[no-untyped-def]
        readings.append(passages)
        return replay(passages)

    watched = replace(statistics, replay=counting)
    once = method.fit(watched)
    assert readings == [3]
    often = replace(method, sums_gigabytes=1e-6).fit(watched)
    assert len(readings) > 3
    by_place = {(g.component, g.target_layers, g.head): g for g in often.groups}
    for group in once.groups:
        other = by_place[group.component, group.target_layers, group.head]
        torch.testing.assert_close(group.weight, other.weight, rtol=1e-4, atol=1e-5)


def test_sums_of_one_reading_are_gone_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else `sums_gigabytes` are held twice."""
    readings: list[list[weakref.ref[HeadSums]]] = []

    class Counted(HeadSums):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            assert not any(one() for reading in readings[:-1] for one in reading)
            readings[-1].append(weakref.ref(self))

    statistics = statistics_of("llama", "gemma3")
    together = attention_weighted._readings

    def parts(*args: Any) -> Iterator[Any]:
        for part in together(*args):
            readings.append([])
            yield part

    monkeypatch.setattr(attention_weighted, "HeadSums", Counted)
    monkeypatch.setattr(attention_weighted, "_readings", parts)
    CacheBridge(source_layers=2, passages=2, boundaries=4, sums_gigabytes=1e-6).fit(statistics)
    assert len(readings) > 3 and all(readings)


def test_heads_of_concatenated_reads_keep_their_columns() -> None:
    """Two source tokens side by side: a head is no longer one run of columns."""
    models = reader_of("qwen3", "gemma3")
    reader = PairReader(models.source, models.target, "owner_previous")
    text = traces_of("qwen3", "gemma3", 1)[0].tokens.text
    trace = reader.read([reader.tokenize(text, TOKENS)])[0]
    layout = component_layout(
        "keys", models.source.geometry, models.target.geometry, code_width=0,
        anchor_context=0, native_layers=0, reads=2,
    )  # fmt: skip
    heads = models.source.geometry.layers[0].kv_heads
    blocks = [block.of_head(1, heads) for block in layout.blocks[:3]]
    whole = trace.inputs(None).rows(layout.blocks, 0, 40)
    part = trace.inputs(None).rows(blocks, 0, 40)
    assert torch.equal(whole[:, layout.columns(blocks)], part)


def test_the_mean_control_fills_every_head() -> None:
    mapper = replace(PLAIN, source_layers=1).fit(statistics_of("gemma3", "llama"))
    out = mapped(mapper, traces_of("gemma3", "llama", 1)[0])
    mean = mapper.mean_content(out)
    for layer, x in mean.values.items():
        assert float(x.std(dim=2).max()) < 1e-4
        assert float((x - out.values[layer]).abs().max()) > 0


def test_heads_that_differ_between_layers_are_refused() -> None:
    statistics = Family().statistics(200)
    layers = (*statistics.source.layers[:2], LayerGeometry(2, 12))
    odd = replace(statistics, source=replace(statistics.source, layers=layers))
    with pytest.raises(InputError, match="matched through layers"):
        single_head_r2(odd)


def test_settings_out_of_range_are_all_named() -> None:
    with pytest.raises(ConfigurationError, match=r"heads.*passages.*floor"):
        CacheBridge(heads="best", passages=0, floor=-1.0)  # type: ignore[arg-type]
