"""The fitted change of keys brings attention back, and never ends below its start."""

from __future__ import annotations

import torch
from torch import Tensor

from kvferry.lm.attention import RowQueries
from kvferry.stats.attention_fit import AttentionSample, fit_attention

TOKENS, DIM, WIDTH, KV_HEADS = 20, 8, 6, 2
ROWS = torch.tensor([7, 12, 19])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAW = normal(WIDTH, 2, seed=100) @ normal(2, KV_HEADS * DIM, seed=101) / 2


def sample(seed: int, planted: bool = True, window: int | None = None) -> AttentionSample:
    """A text whose mapped keys lack a low-rank part, or else have native keys of noise."""
    angles = torch.arange(TOKENS)[:, None] / 10.0 ** (torch.arange(DIM // 2) / 2)
    both = torch.cat([angles, angles], dim=1)[None]
    queries = 2 * normal(2 * KV_HEADS, len(ROWS), DIM, seed=seed)
    ask = RowQueries(queries, ROWS, both.cos(), both.sin(), DIM**-0.5, None, window)
    code = normal(TOKENS, WIDTH, seed=seed + 1)
    code[:2] = 0
    mapped = normal(KV_HEADS, TOKENS, DIM, seed=seed + 2)
    part = (code @ LAW).view(TOKENS, KV_HEADS, DIM).transpose(0, 1)
    native = mapped + part if planted else normal(KV_HEADS, TOKENS, DIM, seed=seed + 3)
    return AttentionSample(ask, native, mapped, code)


def fit(samples: list[AttentionSample], held: list[AttentionSample], steps: int):  # type: ignore[no-untyped-def]
    return fit_attention(samples, held, rank=3, steps=steps, learning_rate=2e-2)


def test_a_planted_change_is_found() -> None:
    samples = [sample(10 * i, window=9 if i % 2 else None) for i in range(12)]
    change, before, after = fit(samples, [sample(1000), sample(1010, window=9)], 240)
    assert before > 0.1 and after < 0.1 * before
    assert float((change - LAW).norm() / LAW.norm()) < 0.4


def test_without_anything_to_find_nothing_changes() -> None:
    """Keep-best: fitting noise would end below the start on texts it has not seen."""
    samples = [sample(10 * i, planted=False) for i in range(2)]
    held = [sample(1000 + 10 * i, planted=False) for i in range(4)]
    change, before, after = fit(samples, held, 200)
    wanted = [s.attention() for s in held]
    assert after <= before
    now = torch.stack([s.divergence(w, change) for s, w in zip(held, wanted, strict=True)]).mean()
    torch.testing.assert_close(float(now), after)


def test_divergence_is_zero_on_native_keys_and_blind_to_hidden_ones() -> None:
    seen = sample(3)
    wanted = seen.attention()
    native = AttentionSample(seen.ask, seen.native, seen.native.clone(), seen.code)
    assert abs(float(native.divergence(wanted))) < 1e-5
    late = seen.native.clone()
    late[:, 8:] += 5.0
    first = AttentionSample(
        RowQueries(
            seen.ask.queries[:, :1], ROWS[:1], seen.ask.cos, seen.ask.sin, DIM**-0.5, None, None
        ),
        seen.native,
        late,
        seen.code,
    )
    assert abs(float(first.divergence(first.attention()))) < 1e-5
    assert float(AttentionSample(seen.ask, seen.native, late, seen.code).divergence(wanted)) > 0.01
