from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.results.statistics import (
    StatisticsError,
    _student_quantile,
    floor_normalised,
    kl_retention,
    mean_interval,
    median_interval,
    paired_difference,
    percentile_summary,
    ratio_interval,
    speedup_interval,
)


def covered(n: int, sets: int = 300) -> float:
    generator = np.random.default_rng(n)
    hits = 0
    for index in range(sets):
        found = mean_interval(generator.normal(3.0, 1.0, n), draws=1000, seed=index)
        hits += found.low <= 3.0 <= found.high
    return hits / sets


@pytest.mark.parametrize("n", [8, 24, 48])
def test_intervals_cover_the_truth_as_often_as_they_say(n: int) -> None:
    # Three standard errors of .95 in 300 sets are .038; plain percentiles reach .89 at n = 8.
    assert 0.912 <= covered(n) <= 0.988


def test_retention_covers_its_truth_when_passages_differ_widely() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for index in range(150):
        native = generator.normal(3.0, 0.5, 24)
        zero = native + generator.gamma(4.0, 0.15, 24)  # on average .6 worse
        mapped = native + 0.2 * (zero - native) + generator.normal(0, 0.05, 24)
        found = floor_normalised(mapped, zero, native, draws=1000, seed=index)
        hits += found.low <= 0.8 <= found.high
    assert 0.90 <= hits / 150 <= 0.99


def test_pairing_removes_what_passages_share() -> None:
    generator = np.random.default_rng(2)
    passage = generator.normal(0, 5.0, 48)
    a = passage + 0.3 + generator.normal(0, 0.1, 48)
    b = passage + generator.normal(0, 0.1, 48)
    paired = paired_difference(a, b)
    assert paired.low > 0.2 and paired.high < 0.4
    broken = paired_difference(a, generator.permutation(b))  # control: pairs lost
    assert broken.high - broken.low > 10 * (paired.high - paired.low)


def test_planted_values_are_recovered() -> None:
    native, zero = [3.0, 3.2, 2.8], [4.0, 4.4, 3.6]
    mapped = [3.25, 3.5, 3.0]  # a quarter of the way from native to zero
    assert floor_normalised(mapped, zero, native).value == pytest.approx(0.75)
    assert ratio_interval([1.0, 3.0], [2.0, 6.0]).value == pytest.approx(0.5)
    assert kl_retention([0.1, 0.2], [0.5, 0.7]).value == pytest.approx(1 - 0.15 / 0.6)
    assert floor_normalised(native, zero, native).low == pytest.approx(1.0)
    assert floor_normalised(zero, zero, native).high == pytest.approx(0.0)


def test_ratio_of_means_is_not_the_mean_of_ratios() -> None:
    numerator, denominator = np.array([1.0, 10.0]), np.array([0.1, 20.0])
    found = ratio_interval(numerator, denominator)
    assert found.value == pytest.approx(11 / 20.1)
    assert abs(found.value - (numerator / denominator).mean()) > 4


def test_same_seed_same_numbers() -> None:
    values = np.random.default_rng(3).normal(size=24)
    assert mean_interval(values, seed=5) == mean_interval(values, seed=5)
    assert mean_interval(values, seed=5) != mean_interval(values, seed=6)


def test_large_samples_come_in_pieces_with_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(4).normal(size=50)
    whole = mean_interval(values, draws=2000)
    monkeypatch.setattr("kvferry.results.statistics.CHUNK_ELEMENTS", 50 * 64)
    pieces = mean_interval(values, draws=2000)
    assert pieces.low == pytest.approx(whole.low, abs=0.03)
    assert pieces.high == pytest.approx(whole.high, abs=0.03)


def test_one_passage_has_a_value_and_no_interval() -> None:
    for found in (
        mean_interval([0.4]),
        ratio_interval([0.4], [0.8]),
        floor_normalised([3.2], [4.0], [3.0]),
        median_interval([12.0]),
        speedup_interval([12.0], [3.0]),
    ):
        assert math.isfinite(found.value) and found.n == 1
        assert math.isnan(found.low) and math.isnan(found.high)


def test_no_interval_where_native_and_zero_cannot_be_told_apart() -> None:
    generator = np.random.default_rng(5)
    native = generator.normal(3, 0.5, 12)
    zero = native + generator.normal(0, 0.5, 12)
    found = floor_normalised(native + 0.1, zero, native)
    assert math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(ratio_interval([1.0, 2.0], [0.0, 0.0]).low)


def test_bad_input_is_a_typed_error() -> None:
    for wrong in ([], [[1.0, 2.0]], [1.0, math.nan], [math.inf]):
        with pytest.raises(StatisticsError):
            mean_interval(wrong)
    with pytest.raises(StatisticsError, match="same passages"):
        paired_difference([1.0, 2.0], [1.0])


def test_timings() -> None:
    times = [10.0, 11.0, 12.0, 13.0, 100.0]
    summary = percentile_summary(times)
    assert summary.p50 == 12.0 and 13.0 < summary.p95 <= 100.0 and summary.n == 5
    middle = median_interval(times)
    assert middle.low <= 12.0 <= middle.high
    fast = speedup_interval([40.0, 41.0, 39.0, 40.0], [4.0, 4.1, 3.9])
    assert fast.value == pytest.approx(10.0) and 9 < fast.low < 10 < fast.high < 11 and fast.n == 3


def test_student_quantile_against_the_table() -> None:
    for freedom, expected in ((3, 3.182), (7, 2.365), (23, 2.069), (200, 1.972)):
        assert _student_quantile(0.975, freedom) == pytest.approx(expected, rel=0.01)


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30),
    scale=st.floats(0.1, 10),
    shift=st.floats(-10, 10),
)
def test_mean_interval_follows_scale_and_shift(
    values: list[float], scale: float, shift: float
) -> None:
    before = mean_interval(values, draws=200)
    after = mean_interval([scale * value + shift for value in values], draws=200)
    assert before.low <= before.high
    size = 1e-9 * (1 + max(map(abs, values)) * scale + abs(shift))
    assert after.low == pytest.approx(scale * before.low + shift, abs=size)
    assert after.high == pytest.approx(scale * before.high + shift, abs=size)
