"""Heads are matched by rule, or by the best total score, which a brute force confirms."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.align.heads import HeadSupport, assign_heads, maximal_assignment, same_relative_head
from kvferry.errors import InputError


def test_the_rule_keeps_equal_counts_and_spreads_unequal_ones() -> None:
    assert same_relative_head(4, 4).sources == (0, 1, 2, 3)
    assert same_relative_head(2, 4).sources == (0, 0, 1, 1)
    assert same_relative_head(8, 2).sources == (0, 4)
    assert same_relative_head(2, 3).sources == (0, 0, 1)
    with pytest.raises(InputError, match="models that have some"):
        same_relative_head(0, 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(0, 2), st.integers(0, 10_000))
def test_the_assignment_is_the_best_of_all(rows: int, spare: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(rows, rows + spare, generator=generator, dtype=torch.float64)
    found = maximal_assignment(score.tolist())
    assert len(set(found)) == rows
    total = sum(float(score[row, column]) for row, column in enumerate(found))
    best = max(
        sum(float(score[row, column]) for row, column in enumerate(order))
        for order in permutations(range(rows + spare), rows)
    )
    assert total == pytest.approx(best)


def test_a_planted_permutation_is_found_where_the_greedy_choice_fails() -> None:
    # Row by row, the first target head would take the second's only good source.
    score = torch.tensor([[0.9, 1.0, 0.0], [0.0, 0.9, 0.1], [0.1, 0.2, 0.8]])
    assert assign_heads(score).sources == (0, 1, 2)
    order = torch.tensor([3, 1, 0, 2])
    planted = torch.eye(4)[order] * 0.5 + 0.2 * torch.rand(4, 4)
    assert assign_heads(planted).sources == tuple(order.tolist())


def test_more_target_heads_share_source_heads_evenly() -> None:
    score = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.2, 0.9], [0.8, 0.1]])
    assert assign_heads(score).sources == (1, 0, 1, 0)
    crowd = torch.tensor([[0.9, 0.0]] * 4)
    assert sorted(assign_heads(crowd).sources) == [0, 0, 1, 1]
    assert assign_heads(torch.tensor([[float("nan"), 0.1]])).sources == (1,)


def test_a_head_that_does_not_exist_is_named() -> None:
    HeadSupport((0, 1)).validate(2)
    with pytest.raises(InputError, match="target head 1"):
        HeadSupport((0, 2)).validate(2)
