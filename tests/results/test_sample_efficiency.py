"""Curves over calibration tokens: what belongs together is pooled, what is unknown left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.results.rows import ResultRow
from kvferry.results.sample_efficiency import SAMPLE_METRICS, sample_curves
from tests.results.conftest import SAMPLES, make_sample_rows


def test_every_length_of_text_is_a_point(samples: list[ResultRow]) -> None:
    curves = {(c.mapper, c.split, c.metric): c for c in sample_curves(samples)}
    assert len(curves) == 2 * 2 * 3
    assert [c.metric for c in sample_curves(samples)] == sorted(
        (c.metric for c in curves.values()), key=SAMPLE_METRICS.index
    )
    for mapper, by_tokens in SAMPLES.items():
        curve = curves[mapper, "wiki", "recall_kept"]
        assert [tokens for tokens, _ in curve.points] == list(by_tokens)
        assert [cell.value for _, cell in curve.points] == [v[2] for v in by_tokens.values()]
        assert curve.n == "24"


def test_seeds_are_pooled_and_other_settings_replaced(samples: list[ResultRow]) -> None:
    (first, *_) = sample_curves([*samples, *make_sample_rows(seed=1)])
    assert first.points[0][1].seeds == 2 and first.points[0][1].n == 48
    later = [
        replace(row, mapper_hash=f"x{row.mapper_hash}", created="2999-01-01T00:00:00+00:00",
                value=row.value if row.metric == "calibration_tokens" else 0.5)
        for row in samples
    ]  # fmt: skip
    (again, *_) = sample_curves([*later, *samples])
    assert {cell.value for _, cell in again.points} == {0.5}
    assert all(cell.seeds == 1 for _, cell in again.points)


def test_rows_whose_text_is_unknown_make_no_point(samples: list[ResultRow]) -> None:
    known = [row for row in samples if row.metric != "calibration_tokens" or row.value > 2_000]
    assert len(known) == len(samples) - 2
    assert all(curve.points[0][0] == 8_000 for curve in sample_curves(known))
    assert pytest.approx(5) == len(sample_curves(known)[0].points)
