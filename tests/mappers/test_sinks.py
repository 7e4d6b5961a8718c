"""Planted surrogate sinks are found, kept where they help, and off changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kvferry.calibration.replay import TextReplay
from kvferry.errors import ConfigurationError
from kvferry.handoff.handoff import Handoff
from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.artefact import load_mapper, save_mapper
from kvferry.mappers.base import Statistics
from kvferry.mappers.observation import Observation, ReplaySplit
from tests.mappers.test_artefact import manifest_of
from tests.pairs import reader_of, statistics_of, traces_of

PAIR = ("llama", "gemma3")
WINDOWED = tuple(
    i for i, layer in enumerate(statistics_of(*PAIR).target.layers) if layer.window is not None
)


def frequent() -> int:
    """The token that stands most often in the texts: some lie in every window."""
    ids = [i for trace in traces_of(*PAIR, 12) for i in trace.tokens.target_ids[1:]]
    return max(set(ids), key=ids.count)


def plant(seen: Observation, token: int) -> Observation:
    """Windowed layers lean on ``token``: a constant key that all queries like, a small value."""
    at = torch.tensor([int(i) == token for i in seen.inputs.token_ids])
    keys, values = dict(seen.target.keys), dict(seen.target.values)
    queries = list(seen.queries)
    for layer in WINDOWED:
        trace = queries[layer]
        liked = torch.ones(trace.queries.shape[-1])
        keys[layer], values[layer] = keys[layer].clone(), values[layer].clone()
        keys[layer][:, :, at] = 4.0 * liked
        values[layer][:, :, at] = 0.5 * liked
        still = torch.ones_like(trace.cos), torch.zeros_like(trace.sin)
        queries[layer] = replace(
            trace, queries=trace.queries + liked, cos=still[0], sin=still[1], scale=0.25
        )
    target = replace(seen.target, keys=keys, values=values)
    return replace(seen, target=target, queries=tuple(queries))


@dataclass(frozen=True)
class PlantedReplay:
    """A replay whose observations of some splits carry the planted sink."""

    plain: TextReplay
    token: int
    splits: tuple[ReplaySplit, ...]

    def __call__(self, passages: int, split: ReplaySplit = "calibration") -> Iterator[Observation]:
        for seen in self.plain(passages, split):
            yield plant(seen, self.token) if split in self.splits else seen

    def count(self, split: ReplaySplit) -> int:
        return self.plain.count(split)


def planted(*splits: ReplaySplit) -> Statistics:
    statistics = statistics_of(*PAIR)
    assert isinstance(statistics.replay, TextReplay)
    return replace(statistics, replay=PlantedReplay(statistics.replay, frequent(), splits))


@pytest.fixture(scope="module")
def kept() -> AffineMapper:
    return Anchored(native_sinks=1).fit(planted("calibration", "selection"))


def test_a_planted_sink_is_found_and_kept(kept: AffineMapper) -> None:
    assert kept.sinks is not None and kept.sinks.token_ids == (frequent(),)
    mapped = [layer for layer in WINDOWED if layer >= kept.native_layers]
    assert list(kept.sinks.keys) == mapped and kept.report["sink_layers"] == len(mapped)
    for layer in mapped:
        assert torch.allclose(kept.sinks.keys[layer], torch.tensor(4.0), atol=1e-4)
        assert torch.allclose(kept.sinks.values[layer], torch.tensor(0.5), atol=1e-4)
    assert kept.report["sink_cosine_gain"] > 0.1
    assert kept.report["sink_mass"] > 0.5 > kept.report["sink_fair_mass"]
    assert kept.report["sink_r2_keys"] > 0.999 > 0.5 > kept.report["sink_mapped_r2_keys"]


def test_only_its_tokens_in_its_layers_change(kept: AffineMapper) -> None:
    trace = traces_of(*PAIR, 1)[0]
    whole = [0] * len(kept.target.layers)
    ids = torch.tensor(trace.tokens.target_ids)
    at = ids == frequent()
    assert kept.sinks is not None and 3 <= int(at.sum()) < len(ids)
    off = Anchored().fit(statistics_of(*PAIR))
    assert off.sinks is None and "sink_tokens" not in off.report
    with_sink, without = (m.map(trace.inputs(None), whole) for m in (kept, off))
    for layer in range(len(whole)):
        for component in ("keys", "values"):
            got, plain = (getattr(c, component)[layer] for c in (with_sink, without))
            assert torch.equal(got[:, :, ~at], plain[:, :, ~at])
            if layer in kept.sinks.keys:
                rows = getattr(kept.sinks, component)[layer][0]
                assert torch.allclose(got[0, :, at], rows[:, None].expand_as(got[0, :, at]))
            else:
                assert torch.equal(got, plain)


def test_rows_that_do_not_help_unseen_text_are_not_kept() -> None:
    """Control: the sink shows in the calibration text alone."""
    mapper = Anchored(native_sinks=1).fit(planted("calibration"))
    assert mapper.report["sink_layers"] == 0 and mapper.sinks is None


def test_it_survives_the_artefact_and_reaches_the_cache(kept: AffineMapper, tmp_path: Path) -> None:
    reader = reader_of(*PAIR)
    save_mapper(tmp_path / "m", kept, manifest_of(reader), "pair: pico\n")
    again, manifest = load_mapper(tmp_path / "m", reader.source, reader.target)
    assert manifest.sink_tokens == [frequent()] and again.parameters == kept.parameters
    assert manifest.metrics["sink_mass"] == kept.report["sink_mass"]
    assert again.sinks is not None and kept.sinks is not None
    trace = traces_of(*PAIR, 1)[0]
    content = Handoff(reader, again).map_content(trace.source, trace.tokens)
    for layer, rows in kept.sinks.keys.items():
        held = content.keys[layer]
        last = torch.tensor(trace.tokens.target_ids)[-held.shape[2] :] == frequent()
        assert torch.equal(again.sinks.keys[layer], rows) and bool(last.any())
        got = held[0, :, last]
        assert torch.allclose(got, rows[0][:, None].expand_as(got))


def test_texts_within_the_window_are_refused_and_full_attention_is_left_alone() -> None:
    statistics = statistics_of(*PAIR)
    assert isinstance(statistics.replay, TextReplay)
    short = replace(statistics, replay=replace(statistics.replay, passage_tokens=12))
    with pytest.raises(ConfigurationError, match="no calibration passage is that long"):
        Anchored(native_sinks=1).fit(short)
    full = Anchored(native_sinks=3).fit(statistics_of("gemma3", "llama"))
    assert full.sinks is None and full.report == {}
    with pytest.raises(ConfigurationError, match="native_sinks must not be negative"):
        Anchored(native_sinks=-1)
