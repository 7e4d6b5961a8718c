"""Moments: streamed = batch, in any panel, order and weighting; bounded memory; no cancellation."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvferry.errors import InputError
from kvferry.stats import moments as moments_module
from kvferry.stats.errors import NumericalError
from kvferry.stats.moments import Moments

P, Q = 7, 5
BLOCKS = (slice(0, 2), slice(2, 5))


def rows(n: int, seed: int = 0, offset: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(P + Q, P + Q, generator=generator)
    both = torch.randn(n, P + Q, generator=generator) @ mix + offset
    weights = torch.rand(n, generator=generator) + 0.1
    return both[:, :P].contiguous(), both[:, P:].contiguous(), weights


def make(panel: int = 4096) -> Moments:
    return Moments(P, Q, y_blocks=BLOCKS, panel=panel)


def assert_is_batch(m: Moments, x: Tensor, y: Tensor, weights: Tensor, rtol: float = 1e-5) -> None:
    """Against two-pass weighted moments in fp64."""
    x, y, weights = x.double(), y.double(), weights.double() / weights.double().sum()
    mean_x, mean_y = weights @ x, weights @ y
    x, y = (x - mean_x) * weights.sqrt()[:, None], (y - mean_y) * weights.sqrt()[:, None]
    pairs = [(m.mean_x, mean_x), (m.mean_y, mean_y), (m.c_xx, x.T @ x), (m.c_xy, x.T @ y)]
    pairs += [(m.c_yy[i], y[:, b].T @ y[:, b]) for i, b in enumerate(BLOCKS)]
    for got, expected in pairs:
        torch.testing.assert_close(got, expected, rtol=0, atol=rtol * float(expected.abs().max()))


def assert_same(a: Moments, b: Moments, rtol: float = 1e-5) -> None:
    assert a.rows == b.rows
    assert a.weight == pytest.approx(b.weight)
    pairs = [(getattr(a, k), getattr(b, k)) for k in ("mean_x", "mean_y", "c_xx", "c_xy")]
    for got, expected in [*pairs, *zip(a.c_yy, b.c_yy, strict=True)]:
        torch.testing.assert_close(got, expected, rtol=0, atol=rtol * float(expected.abs().max()))


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(2, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    panel=st.integers(1, 70),
    weighted=st.booleans(),
    block=st.sampled_from([2, 3, 1024]),
)
def test_streamed_is_batch(n: int, cuts: list[int], panel: int, weighted: bool, block: int) -> None:
    x, y, weights = rows(n)
    original, moments_module._BLOCK = moments_module._BLOCK, block
    try:
        m = make(panel)
        for start, stop in pairwise([0, *sorted(min(c, n) for c in cuts), n]):
            part = slice(start, stop)
            m.update(x[part], y[part], weights[part] if weighted else None)
        assert m.rows == n
        assert_is_batch(m, x, y, weights if weighted else torch.ones(n))
        assert torch.equal(m.c_xx, m.c_xx.T)
    finally:
        moments_module._BLOCK = original


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(4)), pairing=st.booleans())
def test_any_merge_order_is_batch(order: list[int], pairing: bool) -> None:
    x, y, weights = rows(200)
    edges = [0, 1, 40, 130, 200]
    parts = [make(16).update(x[a:b], y[a:b], weights[a:b]) for a, b in pairwise(edges)]
    a, b, c, d = (parts[i] for i in order)
    merged = a.merge(b).merge(c.merge(d)) if pairing else a.merge(b).merge(c).merge(d)
    assert merged.rows == 200
    assert_is_batch(merged.merge(make()), x, y, weights)
    assert_same(make().merge(merged), merged)


def test_weights_of_one_are_no_weights_and_two_is_twice() -> None:
    x, y, _ = rows(50)
    plain = make(16).update(x, y)
    assert_same(make(16).update(x, y, torch.ones(50)), plain, rtol=0)
    twice = make(16).update(x, y, torch.ones(50).index_fill(0, torch.tensor(3), 2.0))
    repeated = make(16).update(x, y).update(x[3:4], y[3:4])
    torch.testing.assert_close(twice.c_xx, repeated.c_xx, rtol=1e-5, atol=1e-5)
    dropped = make(16).update(x, y, torch.arange(50).ge(9).float())
    torch.testing.assert_close(dropped.c_xx, make().update(x[9:], y[9:]).c_xx, rtol=1e-5, atol=1e-5)


def test_a_large_mean_costs_no_accuracy_but_would_if_not_centred() -> None:
    x, y, _ = rows(3000, offset=0.0)
    # The offset is a power of two so that the shifted input itself is exact to 1e-4.
    x, y = x + 1024.0, y + 1024.0
    assert_is_batch(make(256).update(x, y), x, y, torch.ones(3000), rtol=1e-5)
    truth = torch.cov(x.double().T, correction=0)
    naive = (x.T @ x) / 3000 - torch.outer(x.mean(0), x.mean(0))
    assert float((naive.double() - truth).abs().max() / truth.abs().max()) > 1e-4


def test_drifting_means_are_merged() -> None:
    x, y, weights = rows(400)
    x[200:] += 500.0
    y[200:] -= 300.0
    assert_is_batch(make(64).update(x, y, weights), x, y, weights)


def test_memory_is_that_of_the_panel_not_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []
    original = Moments._add_products

    def record(self: Moments, part: Tensor) -> None:
        shapes.append(tuple(part.shape))
        original(self, part)

    monkeypatch.setattr(Moments, "_add_products", record)
    x, y, _ = rows(1000)
    m = make(32)
    buffers = set()
    for _ in range(5):
        m.update(x, y)
        assert m._panel is not None
        buffers.add(m._panel._rows.data_ptr())
    assert set(shapes) == {(33, P + Q)} and len(shapes) == 5000 // 32
    assert len(buffers) == 1
    assert m.weight == 5000


def test_half_precision_input_is_multiplied_in_fp32() -> None:
    x, y, _ = rows(300)
    x, y = x.bfloat16(), y.bfloat16()
    assert_is_batch(make(64).update(x, y), x, y, torch.ones(300))


@settings(max_examples=15, deadline=None)
@given(
    columns_x=st.lists(st.integers(0, P - 1), min_size=1, unique=True),
    columns_y=st.lists(st.integers(0, Q - 1), min_size=1, unique=True),
)
def test_a_selection_is_a_fit_on_those_columns(columns_x: list[int], columns_y: list[int]) -> None:
    x, y, _ = rows(60)
    columns_y = sorted(columns_y)
    part = make(16).update(x, y).select(columns_x, columns_y)
    sizes = [sum(b.start <= c < b.stop for c in columns_y) for b in BLOCKS]
    kept = [size for size in sizes if size]
    starts = [sum(kept[:i]) for i in range(len(kept))]
    blocks = [slice(a, a + size) for a, size in zip(starts, kept, strict=True)]
    assert part.y_blocks == tuple(blocks)
    direct = Moments(len(columns_x), len(columns_y), y_blocks=blocks, panel=16)
    assert_same(part, direct.update(x[:, columns_x], y[:, columns_y]))
    # A selection goes on like any other moments.
    more_x, more_y, _ = rows(20, seed=1)
    for m in (part, direct):
        m.update(more_x[:, columns_x], more_y[:, columns_y])
    assert_same(part, direct)


def test_selections_by_slice_and_their_mistakes() -> None:
    x, y, _ = rows(60)
    m = make().update(x, y)
    assert_same(m.select(slice(None)), m, rtol=0)
    assert torch.equal(m.select(slice(2, 4), slice(2, 5)).c_yy[0], m.c_yy[1])
    for bad in (([], None), ([0], []), ([0], [1, 0])):
        with pytest.raises(InputError, match="selection"):
            m.select(*bad)


def test_state_survives_a_file(tmp_path: Path) -> None:
    x, y, weights = rows(100)
    m = make(32).update(x[:70], y[:70], weights[:70])
    save_file(m.state_dict(), tmp_path / "moments.safetensors")
    state = load_file(tmp_path / "moments.safetensors")
    again = Moments.from_state_dict(state, panel=32)
    assert_same(again, m, rtol=0)
    assert_is_batch(again.update(x[70:], y[70:], weights[70:]), x, y, weights)
    del state["xx"]
    with pytest.raises(InputError, match="incomplete"):
        Moments.from_state_dict(state)


def test_mistakes_are_typed() -> None:
    x, y, weights = rows(10)
    for bad in ((x, y[:5], None), (y, x, None), (x, y, -weights), (x, y, weights[:3])):
        with pytest.raises(InputError):
            make().update(*bad)
    with pytest.raises(NumericalError, match="no rows"):
        _ = make().c_xx
    with pytest.raises(NumericalError, match="no rows"):
        _ = make().update(x, y, torch.zeros(10)).mean_x
    with pytest.raises(NumericalError, match="not finite"):
        _ = make().update(x.index_fill(0, torch.tensor(2), float("nan")), y).c_xx
    with pytest.raises(InputError, match="blocks"):
        Moments(3, 4, y_blocks=[slice(0, 2), slice(3, 4)])
    with pytest.raises(InputError, match="same columns"):
        make().merge(Moments(P, Q))


@pytest.mark.parametrize("empty", [False, True])
def test_reduced_over_ranks_is_merged(empty: bool) -> None:
    """Ranks as threads that meet at a barrier: each ends with what one `merge` gives."""
    counts = (30, 0 if empty else 17, 5)
    parts = [rows(n, seed=n, offset=1e3) for n in counts]
    expected = make()
    for x, y, weights in parts:
        expected.merge(make(panel=8).update(x, y, weights))
    ranks = [make(panel=8).update(x, y, weights) for x, y, weights in parts]
    meeting = threading.Barrier(len(ranks))
    given: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        def add_up(tensor: Tensor) -> Tensor:
            given[rank] = tensor.clone()
            meeting.wait(60)
            total = sum(given.values())
            meeting.wait(60)
            assert isinstance(total, Tensor)
            return total

        ranks[rank].reduce(add_up)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for mine in ranks:
        assert_same(mine, expected, rtol=1e-10)
    cleared = ranks[0].clear()
    assert cleared.rows == 0 and cleared.weight == 0
    assert_same(cleared.merge(expected), expected, rtol=1e-12)
