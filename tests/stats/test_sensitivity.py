"""Sensitivities are the norms of the derivatives that they stand for."""

from __future__ import annotations

import pytest
import torch

from kvferry.stats.sensitivity import attention_sensitivity, log_boundaries, relevance


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_they_are_the_squared_norms_of_the_outputs_derivatives(softcap: float | None) -> None:
    """Summed over the queries of a group: largest |do|² for a unit change of one key or value."""
    torch.manual_seed(0)
    heads, group, tokens, dim, scale = 2, 3, 9, 4, 0.6
    keys, values = (torch.randn(heads, tokens, dim, dtype=torch.float64) for _ in range(2))
    boundaries = torch.tensor([3, 7])
    queries = torch.randn(heads * group, 2, dim, dtype=torch.float64)

    def scores(k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hgbd,htd->hgbt", queries.view(heads, group, 2, dim), k) * scale

    def attend(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = scores(k) if softcap is None else softcap * torch.tanh(scores(k) / softcap)
        hidden = torch.arange(tokens) > boundaries[:, None] + 1
        a = s.masked_fill(hidden, -torch.inf).softmax(-1)
        return a, torch.einsum("hgbt,htd->hgbd", a, v)

    attention, _ = attend(keys, values)
    slopes = None
    if softcap is not None:
        slopes = (1 - torch.tanh(scores(keys) / softcap) ** 2).flatten(0, 1)
    found = attention_sensitivity(
        attention.flatten(0, 1), values, queries, boundaries, scale, slopes
    )
    by_key = torch.autograd.functional.jacobian(lambda k: attend(k, values)[1], keys)
    by_value = torch.autograd.functional.jacobian(lambda v: attend(keys, v)[1], values)
    for sensitivity, jacobian in zip(found, (by_key, by_value), strict=True):
        for head in range(heads):
            blocks = jacobian[head, :, :, :, head]  # group, boundary, output, token, input
            norms = torch.linalg.matrix_norm(blocks.transpose(2, 3), ord=2).square().sum(0)
            norms = norms * (torch.arange(tokens) <= boundaries[:, None])
            torch.testing.assert_close(sensitivity[head].double(), norms, rtol=1e-4, atol=1e-6)


def test_each_boundary_has_the_same_say() -> None:
    sensitivity = torch.rand(2, 3, 10)
    sensitivity[:, 1] *= 1e4
    counted = torch.ones(10, dtype=torch.bool)
    counted[:2] = False
    found = relevance(sensitivity, counted)
    torch.testing.assert_close(found.sum(1), torch.full((2,), 3.0))
    assert float(found[:, :2].abs().max()) == 0.0
    sensitivity[:, 2] = 0.0
    torch.testing.assert_close(relevance(sensitivity, counted).sum(1), torch.full((2,), 2.0))


def test_boundaries_are_log_spaced_and_have_a_query_behind_them() -> None:
    places = log_boundaries(1025)
    assert places[0] == 12 and places[-1] == 1023 and len(places) == 32
    ratios = (places[1:] + 1) / (places[:-1] + 1)
    assert float(ratios.max() / ratios.min()) < 1.1
    assert log_boundaries(8).tolist() == [6]
    assert log_boundaries(1).tolist() == []
