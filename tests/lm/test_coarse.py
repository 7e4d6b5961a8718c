"""Frozen weights in autocast's format: the same answers and gradients, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvferry.lm.cache import copy_cache
from kvferry.lm.coarse import CoarseLinears
from kvferry.lm.model import LanguageModel
from kvferry.training.carrying import inference_free
from tests.pairs import reader_of


def answers(model: LanguageModel, copies: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of some tokens on top of a cache, under autocast, and the gradient of its keys."""
    ids, mask = model.batch([model.encode("The river rises in the hills and runs to the sea.")])
    content = inference_free(model.content(model.prefill(ids, mask)))
    keys = content.keys[0].requires_grad_(True)
    cache = model.cache_from(content)
    with torch.autocast("cpu", torch.bfloat16):
        if not copies:
            model._coarse_linears = CoarseLinears(nn.Module())
        logits = model.differentiable_extend(copy_cache(cache), ids[:, -6:], mask)
        logits.float().logsumexp(dim=-1).sum().backward()
    model._coarse_linears = CoarseLinears(model.model)
    assert keys.grad is not None
    return logits.detach(), keys.grad


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_answers_and_gradients_are_those_of_autocast(architecture: str) -> None:
    model = reader_of("llama", architecture).target
    with_copies, without = (answers(model, copies) for copies in (True, False))
    for ours, theirs in zip(with_copies, without, strict=True):
        assert torch.equal(ours, theirs) and float(ours.abs().max()) > 0


def test_copies_that_a_look_has_made_meet_gradients() -> None:
    """Lightning looks at held-out texts in inference mode before the first step."""
    layer = nn.Linear(4, 4).requires_grad_(False)
    coarse, x = CoarseLinears(nn.ModuleList([layer])), torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode(), coarse.under_autocast("cpu"):
            layer(x)
        with coarse.under_autocast("cpu"):
            layer(x).sum().backward()
    assert x.grad is not None


class Seen(nn.Linear):
    """Not exactly nn.Linear: it is left alone."""


def test_weights_are_coarse_inside_and_back_outside() -> None:
    frozen, learns, other = nn.Linear(4, 4), nn.Linear(4, 4), Seen(4, 4)
    frozen.requires_grad_(False), other.requires_grad_(False)
    model = nn.ModuleList([frozen, learns, other])
    coarse, before = CoarseLinears(model), [layer.weight for layer in model]
    with coarse.under_autocast("cpu"):
        assert frozen.weight is before[0], "autocast is off"
    with (
        pytest.raises(KeyError),
        torch.autocast("cpu", torch.bfloat16),
        coarse.under_autocast("cpu"),
    ):
        assert [x.weight.dtype for x in model] == [torch.bfloat16, torch.float32, torch.float32]
        raise KeyError
    assert all(layer.weight is weight for layer, weight in zip(model, before, strict=True))


def test_copies_follow_a_weight_that_changes_and_ties_stay_tied() -> None:
    one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    two.weight = one.weight
    model = nn.ModuleList([one, two]).requires_grad_(False)
    coarse = CoarseLinears(model)
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            with coarse.under_autocast("cpu"):
                assert one.weight is two.weight, "no second copy of it"
                seen.append(one.weight)
            if len(seen) == 2:
                with torch.no_grad():
                    one.weight.add_(1.0)
    assert seen[0] is seen[1], "cast once"
    assert torch.equal(seen[2], one.weight.bfloat16()) and not torch.equal(seen[2], seen[1])
