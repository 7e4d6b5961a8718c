"""The trained miniature recalls from its cache; take the cache away and it does not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kvferry.lm.induction import induction_batch, induction_language_model, induction_nll
from kvferry.lm.model import LanguageModel


def test_batches_repeat_distinct_symbols(copier: LanguageModel) -> None:
    context, spans = induction_batch(copier, 5, 20, 3, torch.Generator().manual_seed(0))
    assert context.shape == (5, 21) and spans.shape == (5, 18)
    for row, repeated in zip(context.tolist(), spans.tolist(), strict=True):
        assert row[0] == copier.sink_ids[0] and len(set(row)) == 21
        for at in range(0, 18, 6):
            start = row.index(repeated[at])
            assert row[start : start + 6] == repeated[at : at + 6]


@pytest.mark.parametrize("length", [8, 24, 48])
def test_training_teaches_recall(copier: LanguageModel, length: int) -> None:
    untrained = induction_language_model(seed=0, steps=0)
    assert induction_nll(untrained, length=length) > math.log(length)
    assert induction_nll(copier, length=length) < min(1.0, math.log(length) / 3)


def test_recall_comes_from_the_cache(copier: LanguageModel) -> None:
    context, span = induction_batch(copier, 32, 24, 1, torch.Generator().manual_seed(7))

    def nll(read: torch.Tensor) -> float:
        prefill = copier.prefill(read)
        logits = copier.extend(prefill.cache, span, prefill.mask)
        return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), span[:, 1:].flatten()))

    # The same symbols in another order carry the same words but not what followed what.
    shuffled = torch.cat((context[:, :1], context[:, 1:].flip(1)), dim=1)
    assert nll(context) < 1.0
    assert nll(shuffled) > 3.0
    assert nll(context[:, :1]) > 3.0


def test_training_leaves_a_frozen_model_of_its_own_revision(copier: LanguageModel) -> None:
    assert not copier.model.training
    assert not any(p.requires_grad for p in copier.model.parameters())
    assert copier.revision.endswith("-induction-400-0")
