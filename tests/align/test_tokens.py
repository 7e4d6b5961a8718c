"""Token alignment against brute force, for every mode, and its promises at the edges."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvferry.align.spans import TokenText
from kvferry.align.tokens import TokenAlignment, align_tokens, context_token_count, gather_aligned
from kvferry.align.vocabulary import Spelling
from kvferry.errors import InputError

MODES = ("owner", "causal", "overlap", "owner_previous")


def spans(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def cut(text: bytes, cuts: list[int]) -> Tensor:
    """Spans of the pieces of `text` between byte cuts; equal cuts make tokens without text."""
    edges = [0, *sorted(cuts), len(text)]
    pieces = tuple(text[a:b] for a, b in pairwise(edges))
    return TokenText(Spelling(pieces, 0, False)).character_spans(range(len(pieces)))[1]


@st.composite
def token_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two tokenizations of one text, at byte granularity, some tokens without text."""
    text = draw(st.text(st.sampled_from("ab é漢😀"), max_size=12)).encode()
    cuts = st.lists(st.integers(0, len(text)), max_size=14)
    return cut(text, draw(cuts)), cut(text, draw(cuts))


def brute_owner(source: list[list[int]], start: int, end: int) -> int:
    held = [i for i, (a, b) in enumerate(source) if a <= end - 1 < b]
    return max(held) if end > start else brute_causal(source, end)


def brute_causal(source: list[list[int]], end: int) -> int:
    return max([i for i, (_, b) in enumerate(source) if b <= end], default=0)


@settings(max_examples=200, deadline=None)
@given(pair=token_pairs())
def test_every_mode_equals_brute_force(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    table, rows = source.tolist(), target.tolist()
    owner = [brute_owner(table, *row) for row in rows]
    causal = [brute_causal(table, end) for _, end in rows]
    assert align_tokens(source, target, "owner").indices[:, 0].tolist() == owner
    assert align_tokens(source, target, "causal").indices[:, 0].tolist() == causal
    both = align_tokens(source, target, "owner_previous")
    assert both.indices.tolist() == [[i, max(i - 1, 0)] for i in owner]
    overlap = align_tokens(source, target, "overlap")
    dense = torch.zeros(len(target), len(source))
    dense.scatter_add_(1, overlap.indices, overlap.weights)
    for j, (start, end) in enumerate(rows):
        shared = torch.tensor([max(0, min(b, end) - max(a, start)) for a, b in table]).float()
        if shared.sum() == 0:
            shared[owner[j]] = 1.0
        torch.testing.assert_close(dense[j], shared / shared.sum())


@settings(max_examples=100, deadline=None)
@given(pair=token_pairs())
def test_exact_means_the_same_byte_boundary(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    alignment = align_tokens(source, target)
    later = target.tolist()[1:]
    for j, (start, end) in enumerate(target.tolist()):
        split = any(a < end and b > a for a, b in later[j:])
        ends_there = source[alignment.indices[j, 0], 1] == end
        assert bool(alignment.exact[j]) == bool(end > start and ends_there and not split)


@settings(max_examples=100, deadline=None)
@given(pair=token_pairs())
def test_causal_never_looks_ahead_of_a_sink(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    with_sink = torch.cat([spans((0, 0)), source])
    alignment = align_tokens(with_sink, target, "causal")
    assert bool((with_sink[alignment.indices[:, 0], 1] <= target[:, 1]).all())


def test_the_owner_looks_ahead_where_causal_does_not() -> None:
    source, target = spans((0, 0), (0, 5), (5, 9)), spans((0, 2), (2, 6), (6, 9))
    assert align_tokens(source, target, "owner").indices[:, 0].tolist() == [1, 2, 2]
    assert align_tokens(source, target, "causal").indices[:, 0].tolist() == [0, 1, 2]
    assert align_tokens(source[1:], target, "causal").indices[0, 0] == 0


def test_the_last_piece_of_a_character_owns_it() -> None:
    source = cut("a漢b".encode(), [1, 2, 3])
    assert align_tokens(source, spans((0, 1), (1, 2), (2, 3))).indices[:, 0].tolist() == [0, 3, 3]


@pytest.mark.parametrize("mode", MODES)
def test_edges(mode: str) -> None:
    some, none = spans((0, 3)), spans()
    assert align_tokens(some, none, mode).indices.shape[0] == 0
    assert align_tokens(none, none, mode).exact.shape == (0,)
    with pytest.raises(InputError, match="no tokens"):
        align_tokens(none, some, mode)
    only_sink = align_tokens(spans((0, 0)), spans((0, 0), (0, 4)), mode)
    assert only_sink.indices.max() == 0 and not bool(only_sink.exact.any())
    # A source text that stops early still gives every target token something to read.
    assert align_tokens(some, spans((0, 3), (3, 9)), mode).indices[1, 0] == 0
    with pytest.raises(InputError, match="reading order"):
        align_tokens(spans((3, 5), (0, 3)), some, mode)
    with pytest.raises(InputError, match="no token alignment"):
        align_tokens(some, some, "nearest")  # type: ignore[arg-type]


def dense_gather(x: Tensor, alignment: TokenAlignment) -> Tensor:
    reads = x[:, :, alignment.indices] * alignment.weights[..., None]
    return reads.flatten(3) if alignment.combine == "concatenate" else reads.sum(3)


@settings(max_examples=40, deadline=None)
@given(pair=token_pairs(), mode=st.sampled_from(MODES))
def test_gather_equals_the_dense_formula(pair: tuple[Tensor, Tensor], mode: str) -> None:
    source, target = pair
    alignment = align_tokens(source, target, mode)
    x = torch.randn(2, 3, len(source), 4, generator=torch.Generator().manual_seed(0))
    gathered = gather_aligned(x, alignment)
    assert gathered.shape == (2, 3, len(target), 4 * alignment.feature_factor)
    torch.testing.assert_close(gathered, dense_gather(x, alignment))
    half = alignment.narrow(1, 3)
    torch.testing.assert_close(gather_aligned(x, half), gathered[:, :, 1:3])


def test_one_read_is_a_plain_copy() -> None:
    x = torch.tensor([1.0, float("inf"), 3.0]).reshape(1, 1, 3, 1)
    alignment = align_tokens(spans((0, 1), (1, 2), (2, 3)), spans((0, 1), (1, 3)))
    assert gather_aligned(x, alignment).flatten().tolist() == [1.0, 3.0]


def test_a_boundary_inside_a_token_leaves_it_to_the_suffix() -> None:
    target = spans((0, 0), (0, 3), (3, 6), (6, 6), (6, 8))
    assert [context_token_count(target, at) for at in (0, 2, 3, 5, 6, 7, 8, 99)] == [
        1, 1, 2, 2, 4, 4, 5, 5,
    ]  # fmt: skip
    assert context_token_count(spans(), 0) == 0


def test_a_boundary_never_splits_a_character() -> None:
    # The last piece of the character also holds the next letter, so it crosses the boundary.
    target = cut("a漢bc".encode(), [1, 2, 3, 5])
    assert target.tolist() == [[0, 1], [1, 2], [1, 2], [1, 3], [3, 4]]
    assert context_token_count(target, 2) == 1
    assert context_token_count(target, 3) == 4
    # Two characters in a chain: the piece between them belongs to both.
    chained = cut("漢字c".encode(), [1, 4])
    assert chained.tolist() == [[0, 1], [0, 2], [1, 3]]
    assert context_token_count(chained, 2) == 0


def test_a_hundred_thousand_tokens_are_aligned_at_once() -> None:
    """No token-by-token matrix is formed: that would not fit. Rows agree with a short window."""
    text = b"abcdefgh " * 40_000
    generator = torch.Generator().manual_seed(0)
    source, target = (
        cut(text, torch.randint(0, len(text), (100_000,), generator=generator).tolist())
        for _ in range(2)
    )
    for mode in MODES:
        whole, part = align_tokens(source, target, mode), align_tokens(source, target[:50], mode)
        assert len(whole.indices) == len(target)
        assert torch.equal(whole.indices[:50, : part.reads], part.indices)
