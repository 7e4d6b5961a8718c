from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from kvferry.results.rows import ResultRow
from kvferry.results.views import latency_blocks, layer_profiles, quality_blocks

Maker = Callable[..., list[ResultRow]]


def test_continuation_and_recall_share_a_block(rows: list[ResultRow]) -> None:
    blocks = quality_blocks(rows)
    assert [block.split for block in blocks] == ["wiki", "factbook", "novel"]
    mapped = blocks[0].find("mapped")
    assert mapped is not None
    assert mapped.cells["kl"].value == pytest.approx(0.124)
    assert mapped.cells["recall_kept"].value == pytest.approx(0.612)
    assert blocks[0].n == "48"


def test_layer_rows_do_not_leak_into_the_whole_model_numbers(rows: list[ResultRow]) -> None:
    mapped = quality_blocks(rows)[0].find("mapped")
    assert mapped is not None and "r2_keys" not in mapped.cells
    assert mapped.cells["attention_cosine"].value == pytest.approx(0.741)


def test_best_follows_the_direction_of_the_metric(rows: list[ResultRow]) -> None:
    block = quality_blocks(rows)[0]
    kl, recall = block.best("kl"), block.best("recall_kept")
    assert kl is not None and kl.condition == "mapped_tail"  # not native, whose KL is 0
    assert recall is not None and recall.condition == "mapped"


def test_anchors_appear_once_beside_several_mappers(grid: list[ResultRow]) -> None:
    block = quality_blocks(grid)[0]
    conditions = [line.condition for line in block.lines]
    assert conditions.count("native") == conditions.count("zero") == 1
    assert conditions.count("mapped") == conditions.count("mean") == 3
    assert [block.label(line) for line in block.lines][:3] == [
        "native",
        "anchored",
        "anchored + native tail",
    ]


def test_seeds_are_pooled_and_variants_of_one_seed_are_not(rows_of: Maker) -> None:
    seeds = rows_of(seed=0, factor=1.0) + rows_of(seed=1, factor=1.2, mapper_hash="other")
    mapped = quality_blocks(seeds)[0].find("mapped")
    assert mapped is not None
    cell = mapped.cells["kl"]
    assert cell.seeds == 2 and cell.n == 96 and cell.value == pytest.approx(0.124 * 1.1)
    singles = [row for row in seeds if row.metric == "kl" and row.condition == "mapped"]
    assert cell.low == min(row.ci_low for row in singles if row.split == "wiki")
    variants = rows_of(seed=0) + rows_of(seed=0, mapper_hash="ffffff999")
    assert quality_blocks(variants)[0].mappers == ("anchored a1b2c3", "anchored ffffff")


def test_other_tasks_get_their_own_block(rows_of: Maker) -> None:
    template = rows_of(latency=False, layers=False)[0]
    extra = dataclasses.replace(
        template, task="squad", metric="accuracy", unit="fraction", value=0.4, condition="mapped"
    )
    blocks = quality_blocks([*rows_of(), extra])
    assert [(block.task, block.metrics) for block in blocks][-1] == ("squad", ("accuracy",))


def test_latency_lines_borrow_the_anchors(grid: list[ResultRow]) -> None:
    blocks = latency_blocks(grid)
    assert len(blocks) == 6
    length, timing = blocks[0].series("native_prefill")[-1]
    assert (length, timing.p50.value) == (8192, 41300.0)
    assert timing.p95 == pytest.approx(41300 * 1.13)
    assert math.isnan(dict(blocks[0].series("speedup"))[512].p95)


def test_profiles_are_ordered_by_layer(rows: list[ResultRow]) -> None:
    shuffled = list(reversed(rows))
    profile = layer_profiles(shuffled, "smollm2_gemma3", "r2_keys")[0]
    assert profile.layers == tuple(range(18)) and profile.values[0] == 1.0
