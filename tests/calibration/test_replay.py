"""Observed queries explain what the target's attention did, over native and any other keys."""

from __future__ import annotations

import pytest
import torch

from kvferry.calibration.replay import TextReplay, observe, with_copy
from kvferry.lm.attention import record_attention
from tests.matrix import PAIRS
from tests.pairs import TOKENS, reader_of, traces_of


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_queries_over_native_content_give_the_models_own_output(source: str, target: str) -> None:
    reader = reader_of(source, target)
    pair = traces_of(source, target, 1)[0].tokens
    seen = observe(reader, pair, None)
    ids, mask = reader.target.batch([pair.target_ids])
    with record_attention(reader.target.model) as calls:
        reader.target.prefill(ids, mask)
    rows = torch.tensor([0, 1, 7, ids.shape[1] // 2, ids.shape[1] - 1])
    for layer, call in enumerate(calls):
        keys, values = seen.target.keys[layer][0], seen.target.values[layer][0]
        output = seen.queries[layer].attend(rows, keys, values)
        torch.testing.assert_close(
            output.transpose(0, 1), call.output[0, rows], atol=2e-5, rtol=1e-4
        )
        other = seen.queries[layer].attend(rows, keys.roll(1, dims=1), values)
        assert not torch.allclose(other, output, atol=1e-3)


@pytest.mark.parametrize("target", ["gemma3", "ministral3"])
def test_content_queries_meet_position_free_keys(target: str) -> None:
    reader = reader_of("llama", target)
    trace = observe(reader, traces_of("llama", target, 1)[0].tokens, None)
    rows, keys_at = torch.tensor([40, 50, 60]), torch.tensor([3, 50, 11])
    for layer, queries in enumerate(trace.queries):
        content = trace.target.keys[layer][0]
        groups = queries.queries.shape[0] // content.shape[0]
        rotated = queries.rotate(content)[:, keys_at].repeat_interleave(groups, dim=0)
        free = content[:, keys_at].repeat_interleave(groups, dim=0)
        wanted = (queries.queries[:, rows] * rotated).sum(-1)
        found = (queries.content_queries(rows, keys_at) * free).sum(-1)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_passages_are_spread_and_no_split_lends_to_another() -> None:
    reader = reader_of("llama", "gemma3")
    texts = [trace.tokens.text for trace in traces_of("llama", "gemma3", 6)]
    replay = TextReplay(reader, {"calibration": texts, "other_domain": texts[:1]}, TOKENS, None)
    assert len(list(replay(3))) == 3
    assert list(replay(2, "selection")) == []
    assert len(list(replay(2, "other_domain"))) == 1
    first, second = replay(2)
    assert not torch.equal(first.target.keys[1][:, :, :20], second.target.keys[1][:, :, :20])


def test_a_copy_repeats_an_early_stretch() -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(120))
    assert with_copy(text) == f"{text[:80]} {text[10:50]}"
    reader = reader_of("llama", "gemma3")
    texts = [trace.tokens.text for trace in traces_of("llama", "gemma3", 2)]
    replay = TextReplay(reader, {"calibration": texts}, TOKENS, None)
    plain, copied = list(replay(1)), list(replay(1, copies=True))
    assert plain[0].target.tokens != copied[0].target.tokens or not torch.equal(
        plain[0].target.keys[1], copied[0].target.keys[1]
    )
    recalled = copied[0].recalled
    late = torch.arange(len(recalled)) > 3 * len(recalled) // 4
    assert float((recalled[late] >= 0).float().mean()) > 0.5
    # Layer 0 says which token stands where: the one that follows is the one that is recalled.
    first = copied[0].target.keys[0][0]
    rows = (recalled >= 0).nonzero()[:, 0]
    torch.testing.assert_close(first[:, recalled[rows]], first[:, rows + 1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(first[:, recalled[rows] - 1], first[:, rows + 1], atol=1e-3)
