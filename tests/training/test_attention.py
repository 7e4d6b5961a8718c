"""Attention of repeated stretches, against a model that copies by one head."""

from __future__ import annotations

import pytest
import torch

from kvferry.lm.attention import AttentionCall
from kvferry.training.attention import copying_attention_kl

CONTEXT, TOKENS, KV_HEADS, GROUP, DIM = 40, 6, 2, 2, 40
STARTS = (4, 20)
SCORED = torch.tensor([[False, True, True, True, True, False]] * 2)
COPIES = 3
"""The query head that finds what came next; its KV head is the last one."""


def call(layer: int = 0, softcap: float | None = None) -> AttentionCall:
    """One layer of a native pass: a row that goes on, then the two stretches."""
    keys = torch.zeros(3, KV_HEADS, CONTEXT + TOKENS, DIM)
    keys[:, :, :CONTEXT] = torch.eye(CONTEXT)
    queries = 0.1 * torch.randn(3, KV_HEADS * GROUP, TOKENS, DIM, generator=generator())
    for row, start in enumerate(STARTS, 1):
        for token in range(TOKENS - 1):
            queries[row, COPIES, token] = 12 * torch.eye(DIM)[start + token + 1]
    output = torch.zeros(3, TOKENS, KV_HEADS * GROUP, DIM)
    return AttentionCall(layer, queries, 1.0, softcap, keys, keys, output, None)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def context_keys(changed: int | None = None) -> torch.Tensor:
    """Native keys; those of one KV head without what queries look for."""
    keys = torch.eye(CONTEXT).repeat(1, KV_HEADS, 1, 1)
    if changed is not None:
        keys[:, changed] = 0.2 * keys[:, changed]
    return keys


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_native_keys_cost_nothing_and_the_head_that_copies_costs_most(
    softcap: float | None,
) -> None:
    native = copying_attention_kl([call(softcap=softcap)], {0: context_keys()}, STARTS, SCORED)
    other, copying = (
        float(copying_attention_kl([call(softcap=softcap)], {0: keys}, STARTS, SCORED))
        for keys in (context_keys(0), context_keys(KV_HEADS - 1))
    )
    assert float(native) == pytest.approx(0, abs=1e-6)
    assert copying > 1 and copying > 100 * other


def test_it_is_the_kl_of_attention_written_out() -> None:
    mapped = context_keys() + 0.1 * torch.randn(
        1, KV_HEADS, CONTEXT, DIM, generator=generator().manual_seed(1)
    )
    found = copying_attention_kl([call()], {0: mapped}, STARTS, SCORED)
    total = mass = 0.0
    asked = call()
    for head in range(KV_HEADS * GROUP):
        weights, divergence = [], []
        for row, start in enumerate(STARTS, 1):
            for token in SCORED[row - 1].nonzero()[:, 0].tolist():
                keys = asked.keys[row, head // GROUP, : CONTEXT + token + 1]
                made = torch.cat((mapped[0, head // GROUP], keys[CONTEXT:]))
                p, q = ((k @ asked.queries[row, head, token]).softmax(0) for k in (keys, made))
                weights.append(float(p[start + token + 1]))
                divergence.append(float((p * (p / q).log()).sum()))
        weight = sum(weights) / len(weights)
        total, mass = total + weight * sum(divergence) / len(divergence), mass + weight
    assert float(found) == pytest.approx(total / mass, rel=1e-4)


def test_layers_that_were_not_mapped_do_not_count() -> None:
    both = [call(0), call(1)]
    alone = copying_attention_kl(both, {1: context_keys(1)}, STARTS, SCORED)
    assert torch.equal(alone, copying_attention_kl(both[1:], {1: context_keys(1)}, STARTS, SCORED))
    assert float(copying_attention_kl(both, {}, STARTS, SCORED)) == 0
