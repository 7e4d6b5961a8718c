"""HeteroFold: parameters as published, strengths by attention outputs, behaviour brought back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

import pytest
import torch

from kvferry.align.layers import relative_depth
from kvferry.calibration.corpus import load_miniature
from kvferry.calibration.replay import TextReplay
from kvferry.errors import SettingsError
from kvferry.lm.geometry import KVGeometry, LayerGeometry
from kvferry.mappers import behavioural_fit
from kvferry.mappers.affine import AffineGroup, AffineMapper, sink_places
from kvferry.mappers.anchors import AnchorReads
from kvferry.mappers.base import Recolouring, Statistics, fit_affine, layer_reads
from kvferry.mappers.behaviour import (
    Reading,
    attention_error,
    mapped_after_prefix,
    planted_tokens,
    query_rows,
    read_mapped,
)
from kvferry.mappers.behaviour_samples import LayerSample, attended, layer_samples
from kvferry.mappers.behavioural_fit import BehaviouralCalibration, with_remixed_keys
from kvferry.mappers.correction import columns_of, group_of, input_codes
from kvferry.mappers.heterofold import HeteroFold
from kvferry.mappers.layout import COMPONENTS, component_layout
from kvferry.mappers.observation import Observation, Replay, ReplaySplit, surrogate_sinks
from kvferry.mappers.strength import GRID, blend, choose_strengths
from tests.pairs import TOKENS, reader_of, statistics_of

PUBLISHED = {"Llama-3.1-8B": (32, 201.3), "Qwen3-4B": (36, 226.5), "Ministral-3-14B": (40, 251.7)}
"""Depths of the published configurations, all with 8 KV heads of 128; millions of weights."""


@dataclass(frozen=True)
class Watched:
    """A replay that keeps a record of what it was asked for, and may lack some splits."""

    replay: Replay
    splits: tuple[ReplaySplit, ...]
    readings: list[ReplaySplit] = field(default_factory=list)

    @classmethod
    def of(
        cls, statistics: Statistics, splits: tuple[ReplaySplit, ...] = get_args(ReplaySplit)
    ) -> Watched:
        assert statistics.replay is not None
        return cls(statistics.replay, splits)

    def __call__(
        self, passages: int, split: ReplaySplit = "calibration", *, copies: bool = False
    ) -> Iterator[Observation]:
        assert split in self.splits
        self.readings.append(split)
        return self.replay(passages, split, copies=copies)

    def count(self, split: ReplaySplit) -> int:
        return self.replay.count(split) if split in self.splits else 0


def geometry(depth: int, kv_heads: int = 8, head_dim: int = 128) -> KVGeometry:
    layers = (LayerGeometry(kv_heads, head_dim),) * depth
    return KVGeometry("planned", layers, 32, 4096, 128_256, 131_072, "{}")


@pytest.mark.parametrize("target", PUBLISHED)
@pytest.mark.parametrize("source", PUBLISHED)
def test_parameters_are_as_published(source: str, target: str) -> None:
    """2 L (3 x 1024) 1024 weights; without storage, on the meta device. Means come on top."""
    depth, millions = PUBLISHED[target]
    ours, theirs = geometry(PUBLISHED[source][0]), geometry(depth)
    support = relative_depth(len(ours.layers), depth, HeteroFold().window)  # type: ignore[arg-type]
    groups = []
    for component in COMPONENTS:
        layout = component_layout(
            component, ours, theirs, code_width=0, anchor_context=-1, native_layers=0
        )
        blocks = layout.of_kind("source")
        for layer, reads in enumerate(support.layers):
            read = tuple(blocks[i] for i in reads)
            wide, out = sum(b.width for b in read), theirs.layers[layer].width
            empty = (torch.empty(size, device="meta") for size in ((wide, out), (wide,), (out,)))
            groups.append(AffineGroup(component, (layer,), read, *empty))
    mapper = AffineMapper(ours, theirs, tuple(groups))
    weights = sum(group.weight.numel() for group in mapper.groups)
    assert round(weights / 1e6, 1) == millions
    assert mapper.parameters == weights + 2 * depth * (3 * 1024 + 1024)
    wider = relative_depth(len(ours.layers), depth, 5)
    assert sum(len(reads) for reads in wider.layers) * 1024 * 1024 * 2 > weights, "control"


def with_texts(statistics: Statistics, source: str, target: str) -> Statistics:
    """Texts to fit on, others to choose on, and a third kind to judge on."""
    texts: dict[ReplaySplit, list[str]] = {
        "calibration": [p.text for p in load_miniature(16, sentences=16, seed=0)],
        "selection": [p.text for p in load_miniature(4, sentences=16, seed=5)],
        "other_domain": [p.text for p in load_miniature(4, sentences=16, seed=77)],
    }
    replay = TextReplay(reader_of(source, target), texts, TOKENS, statistics.code)
    return replace(statistics, replay=replay)


def ends(statistics: Statistics) -> tuple[AffineMapper, AffineMapper]:
    depth, target_depth = len(statistics.source.layers), len(statistics.target.layers)
    support = relative_depth(depth, target_depth, 3)
    reads = {c: layer_reads(statistics, c, support, AnchorReads()) for c in COMPONENTS}
    plain, full = (
        fit_affine(statistics, reads, relative_ridge=1e-3, recolouring=Recolouring(s, s))
        for s in (0.0, 1.0)
    )
    return plain, full


def test_strengths_are_the_best_of_the_grid() -> None:
    """Against every blend, folded and mapped on its own; and they differ between layers."""
    statistics = with_texts(statistics_of("llama", "gemma3"), "llama", "gemma3")
    plain, full = ends(statistics)
    held = list(statistics.observe(2, "selection"))
    chosen = choose_strengths(plain, full, held, keys=GRID, values=(0.0, 0.5), rows=16)
    score: dict[tuple[float, float], list[float]] = {}
    for strength in GRID:
        for value in (0.0, 0.5):
            every = dict.fromkeys(range(6), strength), dict.fromkeys(range(6), value)
            mapper = blend(plain, full, dict(zip(COMPONENTS, every, strict=True)))
            score[strength, value] = _cosines(mapper, held)
    for layer in range(6):
        best = max(score, key=lambda pair: score[pair][layer])
        mine = chosen["keys"][layer], chosen["values"][layer]
        assert score[mine][layer] == pytest.approx(score[best][layer], abs=1e-4)
    assert len(set(chosen["keys"].values())) > 1 or set(chosen["keys"].values()) == {0.0}


def _cosines(mapper: AffineMapper, texts: list) -> list[float]:  # type: ignore[type-arg]
    total = torch.zeros(len(mapper.target.layers))
    for text in read_mapped(mapper, texts, 16, 0):
        native = text.seen.target
        for layer in range(len(total)):
            ask = text.seen.queries[layer]
            true = ask.attend(text.rows, native.keys[layer][0], native.values[layer][0])
            mapped = text.content.keys[layer][0], text.content.values[layer][0]
            total[layer] += float(
                torch.cosine_similarity(ask.attend(text.rows, *mapped), true, dim=-1).mean()
            )
    return total.tolist()


def test_a_blend_of_zero_and_one_are_its_ends() -> None:
    statistics = statistics_of("llama", "gemma3")
    plain, full = ends(statistics)
    for strength, wanted in ((0.0, plain), (1.0, full)):
        every = dict.fromkeys(range(6), strength)
        mapper = blend(plain, full, {"keys": every, "values": every})
        for mine, theirs in zip(mapper.groups, wanted.groups, strict=True):
            torch.testing.assert_close(mine.weight, theirs.weight)


@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("llama3", "ministral3")])
def test_calibration_brings_behaviour_back(source: str, target: str) -> None:
    """Never above its start on the texts that choose, and below it on texts that nobody saw."""
    statistics = with_texts(statistics_of(source, target), source, target)
    plain = HeteroFold(behavioural_keys=False, behavioural_values=False)
    fitted = replace(plain, behavioural_keys=True, steps=80, learning_rate=1e-2, directions=24)
    fitted = replace(fitted, behavioural_values=True, passages=16, held_out=4, rows=32)
    keys = replace(fitted, behavioural_values=False)
    before, after = plain.fit(statistics), fitted.fit(statistics)
    only_keys = keys.fit(statistics)
    for mine, theirs in zip(after.groups, only_keys.groups, strict=True):
        same = torch.equal(mine.weight, theirs.weight)
        assert same == (mine.component == "keys"), "values move after keys, and move nothing else"
    choosing = list(statistics.observe(4, "selection"))
    start = _divergence(before, choosing)
    assert bool((_divergence(only_keys, choosing) <= start + 1e-3).all())
    unseen = list(statistics.observe(4, "other_domain"))
    assert _divergence(only_keys, unseen).mean() < _divergence(before, unseen).mean()
    assert attention_error(after, unseen, 32).mean() < attention_error(before, unseen, 32).mean()


def test_one_reading_serves_keys_and_values() -> None:
    """As if values had been fitted from a reading of their own, but for half precision."""
    statistics = with_texts(statistics_of("llama", "gemma3"), "llama", "gemma3")
    watched = Watched.of(statistics)
    readings = watched.readings
    counted = replace(statistics, replay=watched)
    _, start = ends(counted)
    both = BehaviouralCalibration(
        keys=True,
        steps=40,
        learning_rate=1e-2,
        values=True,
        pointwise=0.1,
        directions=16,
        reading=Reading(passages=8, held_out=2, rows=32),
    )
    once = both.apply(counted, start, 1e-3)
    assert readings == ["calibration", "selection"]
    keys_first = replace(both, values=False).apply(counted, start, 1e-3)
    after = replace(both, keys=False).apply(counted, keys_first, 1e-3)
    assert len(readings) == 6
    moved: dict[str, float] = {"keys": 0.0, "values": 0.0}
    for mine, theirs, before in zip(once.groups, after.groups, start.groups, strict=True):
        far = float((before.weight - theirs.weight).abs().max())
        assert float((mine.weight - theirs.weight).abs().max()) <= 0.02 * far
        moved[mine.component] += far
    assert min(moved.values()) > 0, "control: both were corrected somewhere"


def test_a_folded_remix_is_what_was_fitted() -> None:
    statistics = statistics_of("llama", "gemma3")
    mapper = replace(ends(statistics)[0], planted_sinks=2)
    remixes = {layer: 0.1 * torch.randn(w, w) for layer, w in enumerate(mapper.target.widths)}
    texts = list(read_mapped(mapper, statistics.observe(1), 8, 0))
    folded = read_mapped(with_remixed_keys(mapper, remixes), statistics.observe(1), 8, 0)
    sample, content = layer_samples(mapper, texts[0], {}), next(folded).content
    for layer, remix in remixes.items():
        wanted = sample[layer].keys.remixed(remix)
        moved = float((wanted - texts[0].content.keys[layer][0]).abs().max())
        assert moved > 0.1
        # Samples are kept in half precision.
        torch.testing.assert_close(content.keys[layer][0], wanted, atol=1e-2 * moved, rtol=1e-2)


def test_key_gain_moves_keys_from_their_mean_and_nothing_else() -> None:
    statistics = statistics_of("llama", "gemma3")
    plain, far = (HeteroFold(key_gain=gain, window="all").fit(statistics) for gain in (1.0, 1.5))
    seen = next(statistics.observe(1))
    near, wide = (mapper.map(seen.inputs, [0] * 6) for mapper in (plain, far))
    for layer in range(6):
        group = group_of(plain, "keys", layer)
        mean = group.output_mean[columns_of(plain, group, layer)]
        first, second = (x.keys[layer][0].transpose(0, 1).flatten(1) - mean for x in (near, wide))
        torch.testing.assert_close(second, 1.5 * first, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(near.values[layer], wide.values[layer])
    with pytest.raises(SettingsError, match="key_gain"):
        HeteroFold(key_gain=0.0)


def test_without_text_to_judge_by_the_fitted_texts_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = statistics_of("llama", "gemma3")
    alone = Watched.of(statistics, splits=("calibration",))
    method = HeteroFold(behavioural_keys=True, steps=20, passages=4, rows=16)
    warned: list[str] = []
    monkeypatch.setattr(behavioural_fit.log, "warning", warned.append)
    report = method.fit(replace(statistics, replay=alone)).report
    assert report["attention_kl_after"] < report["attention_kl_before"]
    assert len(warned) == 1 and "No text is left to judge" in warned[0]


def _divergence(mapper: AffineMapper, texts: list) -> torch.Tensor:  # type: ignore[type-arg]
    """KL of native and mapped attention, by layer."""
    total = torch.zeros(len(mapper.target.layers))
    for text in read_mapped(mapper, texts, 32, 0):
        for layer in range(len(total)):
            ask = text.seen.queries[layer].at(text.rows)
            true = ask.scores(text.seen.target.keys[layer][0]).softmax(-1)
            got = ask.scores(text.content.keys[layer][0]).softmax(-1)
            ratio = torch.where(true > 0, true * (true / got.clamp(min=1e-30)).log(), 0.0)
            total[layer] += float(ratio.nan_to_num().sum(-1).mean())
    return total / len(texts)


def test_planted_sinks_stand_where_the_hand_off_puts_them_and_are_not_fitted() -> None:
    statistics = statistics_of("llama", "gemma3")
    mapper = replace(ends(statistics)[0], planted_sinks=2)
    seen = next(statistics.observe(1))
    content, plain = (
        mapped_after_prefix(m, seen) for m in (mapper, replace(mapper, planted_sinks=0))
    )
    windowed = [i for i, layer in enumerate(mapper.target.layers) if layer.window is not None]
    assert windowed and len(windowed) < 6
    for layer, shape in enumerate(mapper.target.layers):
        changed = (content.keys[layer] != plain.keys[layer]).any(dim=-1).any(dim=1)[0].nonzero()
        held = seen.target.tokens - (shape.window - 1) if shape.window else 0
        wanted = [held + p for p in sink_places(2, shape.window - 1)] if shape.window else []
        assert changed.flatten().tolist() == wanted == planted_tokens(mapper, layer, content.tokens)
        for token in wanted:
            own = seen.target.values[layer][:, :, 0]
            assert torch.equal(content.values[layer][:, :, token], own)


def test_what_rests_on_sinks_is_not_for_keys_to_learn() -> None:
    """Surrogate and planted sinks are left out of attention; the prefix, native in both, counts."""
    statistics = statistics_of("llama", "gemma3")
    mapper = replace(ends(statistics)[0], planted_sinks=1)
    text = next(read_mapped(mapper, statistics.observe(1), 8, 0))
    tokens, prefix = text.seen.target.tokens, set(range(text.seen.prefix))
    with torch.inference_mode():
        for values in text.seen.target.values.values():
            values[:, :, tokens // 2] = values[:, :, 0]
    sinks = set(surrogate_sinks(text.seen.target).nonzero().flatten().tolist()) - prefix
    assert tokens // 2 in sinks and len(sinks) < tokens // 2
    for layer, sample in layer_samples(mapper, text, {}).items():
        planted = set(planted_tokens(mapper, layer, tokens))
        assert set(sample.keys.left_out.nonzero().flatten().tolist()) == sinks | planted
        assert set(sample.keys.fixed.nonzero().flatten().tolist()) == prefix | planted


def test_rows_are_late_distinct_and_repeatable() -> None:
    statistics = statistics_of("llama", "gemma3")
    texts = list(statistics.observe(2))
    first, again = (list(query_rows(texts, 8, 3)) for _ in range(2))
    for (seen, rows), (_, same) in zip(first, again, strict=True):
        assert torch.equal(rows, same) and len(set(rows.tolist())) == 8
        assert int(rows.min()) > seen.prefix and int(rows.max()) < seen.target.tokens
    assert not torch.equal(first[0][1], first[1][1])


def test_values_at_tokens_left_out_count_for_nothing() -> None:
    """A map cannot know which tokens are sinks: what it says there must not bend the rest."""
    statistics = statistics_of("llama", "gemma3")
    mapper = replace(ends(statistics)[0], planted_sinks=1)
    text = next(read_mapped(mapper, statistics.observe(1), 8, 0))
    codes = input_codes(statistics, mapper, "values", 8, 0)
    sample = layer_samples(mapper, text, codes)
    wild: dict[int, LayerSample] = {}
    for layer, one in sample.items():
        outputs, out = one.outputs, one.keys.left_out
        assert outputs is not None
        assert bool(out.any()) or mapper.target.layers[layer].window is None
        values = torch.where(out[:, None], 9.0, outputs.values)
        code = torch.where(out[:, None], 9.0, outputs.code)
        wild[layer] = replace(one, outputs=replace(outputs, values=values, code=code))
    for remixes in (None, {}):
        calm, odd = attended([sample], remixes), attended([wild], remixes)
        for layer, moments in calm.items():
            torch.testing.assert_close(odd[layer].gram, moments.gram)
            torch.testing.assert_close(odd[layer].cross, moments.cross)
