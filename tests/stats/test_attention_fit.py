"""The fitted remix of keys brings attention back, and never ends below its start."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvferry.lm.attention import RowQueries
from kvferry.stats.attention_fit import AttentionSample, fit_attention

TOKENS, DIM, KV_HEADS = 20, 8, 2
ROWS = torch.tensor([7, 12, 19])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FEATURES = KV_HEADS * DIM
LAW = normal(FEATURES, 2, seed=100) @ normal(2, FEATURES, seed=101) / 8
MEAN = normal(FEATURES, seed=102)
FIXED = torch.arange(TOKENS) < 2
NONE = torch.zeros(TOKENS, dtype=torch.bool)
NOTHING = torch.full((len(ROWS),), -1)


def sample(seed: int, planted: bool = True, window: int | None = None) -> AttentionSample:
    """A text whose native keys are mixed from the mapped ones, or else are noise."""
    angles = torch.arange(TOKENS)[:, None] / 10.0 ** (torch.arange(DIM // 2) / 2)
    both = torch.cat([angles, angles], dim=1)[None]
    queries = 2 * normal(2 * KV_HEADS, len(ROWS), DIM, seed=seed)
    ask = RowQueries(queries, ROWS, both.cos(), both.sin(), DIM**-0.5, None, window)
    deviation = normal(TOKENS, FEATURES, seed=seed + 2)
    heads = (KV_HEADS, DIM)
    mapped = (MEAN + deviation).unflatten(1, heads).transpose(0, 1)
    part = (deviation.masked_fill(FIXED[:, None], 0) @ LAW).unflatten(1, heads).transpose(0, 1)
    native = mapped + part if planted else normal(KV_HEADS, TOKENS, DIM, seed=seed + 3)
    return AttentionSample(ask, native, mapped, MEAN, FIXED, NONE, NOTHING)


def fit(samples: list[AttentionSample], held: list[AttentionSample], steps: int):  # type: ignore[no-untyped-def]
    return fit_attention(samples, held, steps=steps, learning_rate=2e-2)


def test_a_planted_remix_is_found() -> None:
    samples = [sample(10 * i, window=9 if i % 2 else None) for i in range(40)]
    remix, before, after = fit(samples, [sample(1000), sample(1010, window=9)], 400)
    assert before > 0.1 and after < 0.1 * before
    assert float((remix - LAW).norm() / LAW.norm()) < 0.4


def test_without_anything_to_find_nothing_changes() -> None:
    """Keep-best: fitting noise would end below the start on texts it has not seen."""
    samples = [sample(10 * i, planted=False) for i in range(2)]
    held = [sample(1000 + 10 * i, planted=False) for i in range(4)]
    remix, before, after = fit(samples, held, 200)
    wanted = [s.attention() for s in held]
    assert after <= before
    now = torch.stack([s.divergence(w, remix) for s, w in zip(held, wanted, strict=True)]).mean()
    torch.testing.assert_close(float(now), after)


def test_divergence_is_zero_on_native_keys_and_blind_to_hidden_ones() -> None:
    seen = sample(3)
    wanted = seen.attention()
    native = AttentionSample(seen.ask, seen.native, seen.native.clone(), MEAN, FIXED, NONE, NOTHING)
    assert abs(float(native.divergence(wanted))) < 1e-5
    late = seen.native.clone()
    late[:, 8:] += 5.0
    first = AttentionSample(
        RowQueries(
            seen.ask.queries[:, :1], ROWS[:1], seen.ask.cos, seen.ask.sin, DIM**-0.5, None, None
        ),
        seen.native,
        late,
        MEAN,
        FIXED,
        NONE,
        NOTHING[:1],
    )
    assert abs(float(first.divergence(first.attention()))) < 1e-5
    moved = AttentionSample(seen.ask, seen.native, late, MEAN, FIXED, NONE, NOTHING)
    assert float(moved.divergence(wanted)) > 0.01


def test_native_keys_and_the_mean_stay_where_they_are() -> None:
    seen = sample(3)
    moved = (seen.remixed(LAW) - seen.mapped).abs().sum(dim=(0, 2))
    assert not bool(moved[FIXED].any()) and bool((moved[~FIXED] > 0.1).all())
    at_mean = MEAN.expand(TOKENS, -1).unflatten(1, (KV_HEADS, DIM)).transpose(0, 1)
    still = AttentionSample(seen.ask, seen.native, at_mean, MEAN, FIXED, NONE, NOTHING)
    torch.testing.assert_close(still.remixed(LAW), at_mean)


def test_tokens_left_out_count_for_nothing() -> None:
    """Whatever their keys; queries then count by what they have for the others."""
    seen = sample(3)
    out = torch.arange(TOKENS) == 5
    alone = replace(seen, left_out=out)
    elsewhere = replace(alone, mapped=torch.where(out[None, :, None], 9.0, seen.mapped))
    wanted = alone.attention()
    assert float(seen.divergence(seen.attention())) > 0.01
    torch.testing.assert_close(alone.divergence(wanted), elsewhere.divergence(wanted))
    assert float(replace(alone, mapped=seen.native).divergence(wanted).abs()) < 1e-5
    given = alone.ask.scores(alone.mapped).masked_fill(out, -torch.inf).softmax(dim=-1)
    mass = wanted.sum(dim=-1, keepdim=True)
    by_hand = wanted * ((wanted / mass) / given).log()
    expected = torch.where(wanted > 0, by_hand, 0.0).sum(dim=-1).mean()
    torch.testing.assert_close(alone.divergence(wanted), expected)


def test_translated_attention_has_the_native_mass_of_the_tokens_that_count() -> None:
    seen = sample(3)
    out = torch.arange(TOKENS) == 5
    alone = replace(seen, left_out=out)
    given, native = alone.translated(None), alone.attention()
    assert float(native.sum(dim=-1).mean()) < 0.99, "control: some rests on what is left out"
    torch.testing.assert_close(given.sum(dim=-1), native.sum(dim=-1))
    assert not bool(given[..., out].any()) and not torch.allclose(given, native, atol=1e-2)
    torch.testing.assert_close(alone.translated(LAW), native, msg="LAW makes keys native")
    whole = seen.ask.scores(seen.mapped).softmax(dim=-1)
    torch.testing.assert_close(seen.translated(None), whole)


def uncertain(seed: int) -> AttentionSample:
    """Each query looks for the key of one token, and mapped keys are native ones and noise."""
    rows = torch.arange(4, TOKENS)
    places = 2 + (normal(len(rows), seed=seed).abs() * 1000).long() % (rows - 1)
    native = normal(KV_HEADS, TOKENS, DIM, seed=seed + 1)
    mapped = native + 0.8 * normal(KV_HEADS, TOKENS, DIM, seed=seed + 2)
    still = torch.zeros(1, TOKENS, DIM)
    ask = RowQueries(native[:, places], rows, still + 1, still, DIM**-0.5, None, None)
    return AttentionSample(ask, native, mapped, 0 * MEAN, FIXED, NONE, places)


def found_mass(samples: list[AttentionSample], remix: Tensor) -> float:
    rows = torch.arange(TOKENS - 4)
    return float(torch.stack([s.translated(remix)[:, rows, s.recalled] for s in samples]).mean())


def test_recall_counted_again_is_found_more() -> None:
    samples = [uncertain(10 * i) for i in range(40)]
    held = [uncertain(1000 + 10 * i) for i in range(8)]

    def fitted(samples: list[AttentionSample], recall: float) -> Tensor:
        return fit_attention(samples, held, steps=400, learning_rate=2e-2, recall=recall)[0]

    plain, again = fitted(samples, 0.0), fitted(samples, 4.0)
    assert found_mass(held, again) > 1.1 * found_mass(held, plain)
    held = [replace(s, recalled=torch.full_like(s.recalled, -1)) for s in held]
    nothing = [replace(s, recalled=torch.full_like(s.recalled, -1)) for s in samples]
    assert torch.equal(fitted(nothing, 4.0), plain), "control: nothing is to be counted again"


def test_what_is_recalled_counts_again_and_nothing_else() -> None:
    seen = replace(sample(3), recalled=torch.tensor([3, -1, 11]))
    ratio = seen.wanted(1.5) / seen.attention()
    expected = torch.ones(len(ROWS), TOKENS)
    expected[0, 3] = expected[2, 11] = 2.5
    visible = seen.attention() > 0
    torch.testing.assert_close(ratio[visible], expected.expand_as(ratio)[visible])
