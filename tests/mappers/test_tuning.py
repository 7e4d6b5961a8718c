"""Settings left to the fit are the best of their grid on text that the fit has not seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.calibration.replay import TextReplay
from kvferry.errors import ConfigurationError
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.full_head_ridge import FullHeadRidge
from kvferry.mappers.heterofold import HeteroFold
from kvferry.mappers.tuning import RIDGES, mean_cosine
from tests.pairs import TOKENS, reader_of, statistics_of, traces_of

PLAIN_HETEROFOLD = HeteroFold(ridge="auto", behavioural_keys=False, behavioural_values=False)


def scarce() -> Statistics:
    """Moments of two texts: too few rows for a small penalty."""
    return statistics_of("llama", "gemma3", passages=2)


@pytest.mark.parametrize(
    "method", [FullHeadRidge(ridge="auto"), PLAIN_HETEROFOLD], ids=lambda m: m.pretty_name
)
def test_the_penalty_is_the_best_of_the_grid(method: MapperMethod) -> None:
    statistics = scarce()
    chosen = method.fit(statistics)
    texts = list(statistics.observe(6, "selection"))
    scores = {r: mean_cosine(replace(method, ridge=r).fit(statistics), texts) for r in RIDGES}
    best = max(scores, key=lambda r: scores[r])
    assert chosen.report["chosen_ridge"] == best
    assert chosen.report["choosing_attention_cosine"] == pytest.approx(scores[best])
    assert {r: chosen.report[f"cosine_ridge_{r}"] for r in RIDGES} == pytest.approx(scores)
    assert chosen.report["choosing_passages"] == 3 and not chosen.report["choosing_other_domain"]
    assert best > min(RIDGES) and scores[best] > scores[min(RIDGES)], "control: it matters"
    same = replace(method, ridge=best).fit(statistics)
    for group, other in zip(chosen.groups, same.groups, strict=True):
        assert torch.equal(group.weight, other.weight)


def test_layers_and_penalty_are_chosen_one_after_the_other() -> None:
    statistics = scarce()
    method = FullHeadRidge(source_layers="auto", ridge="auto")
    report = method.fit(statistics).report
    texts = list(statistics.observe(6, "selection"))

    def score(**values: object) -> float:
        return mean_cosine(replace(method, **values).fit(statistics), texts)  # type: ignore[arg-type]

    counts = {4: score(source_layers=4, ridge=1e-3), 5: score(source_layers="all", ridge=1e-3)}
    layers = max(counts, key=lambda k: counts[k])
    assert report["chosen_source_layers"] == layers
    count = "all" if layers == 5 else layers
    assert "cosine_ridge_0.001" not in report, "what was fitted already is not fitted again"
    ridges = {r: score(source_layers=count, ridge=r) for r in RIDGES}
    assert report["chosen_ridge"] == max(ridges, key=lambda r: ridges[r])


def test_another_domain_is_asked_first() -> None:
    statistics = scarce()
    texts = [trace.tokens.text for trace in traces_of("llama", "gemma3", 6)]
    replay = TextReplay(
        reader_of("llama", "gemma3"),
        {"calibration": texts[:2], "selection": texts[2:4], "other_domain": texts[4:]},
        TOKENS,
        statistics.code,
    )
    report = Anchored(ridge="auto").fit(replace(statistics, replay=replay)).report
    assert report["choosing_other_domain"] == 1.0 and report["choosing_passages"] == 2


@pytest.mark.parametrize("has_replay", [False, True])
def test_settings_are_never_chosen_on_calibration_text(has_replay: bool) -> None:
    statistics = scarce()
    texts = [trace.tokens.text for trace in traces_of("llama", "gemma3", 2)]
    only = TextReplay(reader_of("llama", "gemma3"), {"calibration": texts}, TOKENS, None)
    bare = replace(statistics, replay=only if has_replay else None)
    for method in (FullHeadRidge(ridge="auto"), Anchored(source_layers="auto")):
        with pytest.raises(ConfigurationError, match=r"there is none[\s\S]*to do:"):
            method.fit(bare)
    FullHeadRidge().fit(bare)


def test_auto_and_an_absolute_penalty_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="absolute_ridge"):
        FullHeadRidge(ridge="auto", absolute_ridge=0.01)
