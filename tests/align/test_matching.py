"""Matching layers as a whole, against every possible matching."""

from __future__ import annotations

from itertools import combinations_with_replacement, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.align.layers import windows_around
from kvferry.align.matching import monotone_assignment, sinkhorn_coupling
from kvferry.errors import InputError


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10_000))
def test_the_best_monotone_path_of_all(targets: int, sources: int, seed: int) -> None:
    scores = torch.rand(targets, sources, generator=torch.Generator().manual_seed(seed))
    found = monotone_assignment(scores)

    def total(path: tuple[int, ...]) -> float:
        return float(sum(scores[row, column] for row, column in enumerate(path)))

    best = max(total(path) for path in combinations_with_replacement(range(sources), targets))
    assert list(found) == sorted(found) and total(found) == pytest.approx(best)


def test_one_misleading_layer_does_not_break_the_order() -> None:
    """Control: layer by layer the best choice would fall back."""
    scores = torch.tensor([[0.9, 0.1, 0.1], [0.6, 0.5, 0.1], [0.1, 0.1, float("nan")]])
    scores[0, 2] = 0.95
    assert scores[0].argmax() > scores[1].argmax()
    assert monotone_assignment(scores) == (0, 0, 0)
    scores[2, 2] = 0.9
    assert monotone_assignment(scores) == (0, 0, 2)


def test_a_cold_coupling_is_the_best_permutation() -> None:
    scores = torch.rand(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores[:, 2] += 1.0  # everyone's favourite: taken row by row, all would choose it
    coupling = sinkhorn_coupling(scores, temperature=0.01, iterations=5000)
    places = torch.arange(5)
    best = max(permutations(range(5)), key=lambda p: float(scores[places, list(p)].sum()))
    assert tuple(coupling.argmax(dim=1).tolist()) == best
    assert scores.argmax(dim=1).tolist() == [2] * 5


def test_mass_is_shared_out_evenly() -> None:
    scores = torch.rand(3, 7, generator=torch.Generator().manual_seed(2))
    scores[1, 3] = float("nan")
    coupling = sinkhorn_coupling(scores)
    assert torch.allclose(coupling.sum(dim=1), torch.full((3,), 1 / 3, dtype=torch.float64))
    assert torch.allclose(coupling.sum(dim=0), torch.full((7,), 1 / 7).double(), atol=1e-4)
    assert float(coupling[1, 3]) < 1e-9
    with pytest.raises(InputError, match="positive temperature"):
        sinkhorn_coupling(scores, temperature=0.0)


def test_windows_follow_their_centres_and_stay_inside() -> None:
    assert windows_around([0, 2, 6], 7, 3).layers == ((0, 1, 2), (1, 2, 3), (4, 5, 6))
    assert windows_around([5], 7, 9).layers == (tuple(range(7)),)
