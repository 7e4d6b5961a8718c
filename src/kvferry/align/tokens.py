"""Which source tokens each target token reads, by the characters that both spell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvferry.errors import InputError

AlignmentMode = Literal["owner", "causal", "overlap", "owner_previous"]


@dataclass(frozen=True)
class TokenAlignment:
    """The source tokens that each target token reads, and how they are combined.

    Attributes:
        indices: source token of each read; unused reads hold some valid index.
        weights: weight of each read. Under "sum" a row adds up to one and unused reads have zero.
        exact: the owner ends exactly where the target token ends, so that both have read the same
            text: the clean rows for calibration. Never true for a token that carries no text, nor
            for one that ends inside a character.
        combine: "sum" adds the weighted reads, "concatenate" puts them side by side as features.
    """

    indices: Int64[Tensor, "targets k"]
    weights: Float[Tensor, "targets k"]
    exact: Bool[Tensor, " targets"]
    combine: Literal["sum", "concatenate"] = "sum"

    @property
    def reads(self) -> int:
        """How many source tokens a target token reads at most."""
        return self.indices.shape[1]

    @property
    def feature_factor(self) -> int:
        """How many times wider the gathered features are than the source's."""
        return self.reads if self.combine == "concatenate" else 1

    def narrow(self, start: int, stop: int) -> TokenAlignment:
        """The alignment of target tokens [start, stop) alone."""
        return replace(
            self,
            indices=self.indices[start:stop],
            weights=self.weights[start:stop],
            exact=self.exact[start:stop],
        )

    def to(self, device: torch.device | str) -> TokenAlignment:
        """The same alignment on another device."""
        return replace(
            self,
            indices=self.indices.to(device),
            weights=self.weights.to(device),
            exact=self.exact.to(device),
        )


def align_tokens(
    source_spans: Int64[Tensor, "source 2"],
    target_spans: Int64[Tensor, "target 2"],
    mode: AlignmentMode = "owner",
) -> TokenAlignment:
    """Align two token sequences over one text by their character spans [start, end).

    A target token that ends at character e reads

    * "owner": the source token that holds character e - 1; of several pieces of that character,
      the last. It may reach beyond e.
    * "causal": the last source token that ends at or before e. Never looks ahead, if the source
      sequence starts with a token that carries no text (its sink). Without one, a target token that
      ends inside the first source token has nothing behind it and reads that token.
    * "overlap": every source token that shares characters with it, weighted by how many.
    * "owner_previous": the owner and the source token before it, side by side.

    A target token that carries no text reads, in every mode, the last source token that ends at or
    before its place. Text beyond the source's end reads the last source token with text.

    Raises:
        InputError: there is no source token to read, an unknown mode, or spans out of order.
    """
    if mode not in get_args(AlignmentMode):
        raise InputError(
            f"There is no token alignment called {mode!r}.",
            expected=", ".join(get_args(AlignmentMode)),
            fix="Choose one of these modes.",
        )
    _check(source_spans, "source")
    _check(target_spans, "target")
    if len(target_spans) and not len(source_spans):
        raise InputError(
            "The source has no tokens that the target could read.",
            fix="Pass a context with at least one token, for instance the sink.",
        )
    ends, source_ends = target_spans[:, 1], source_spans[:, 1].contiguous()
    causal = (_searchsorted(source_ends, ends, right=True) - 1).clamp_min(0)
    owner = _owner(source_spans, target_spans, causal)
    exact = _exact(source_spans, target_spans, owner)
    ones = torch.ones(len(ends), 1, device=ends.device)
    match mode:
        case "owner":
            return TokenAlignment(owner[:, None], ones, exact)
        case "causal":
            return TokenAlignment(causal[:, None], ones, exact)
        case "overlap":
            return TokenAlignment(*_overlap(source_spans, target_spans, owner), exact)
        case "owner_previous":
            both = torch.stack([owner, (owner - 1).clamp_min(0)], dim=1)
            return TokenAlignment(both, ones.expand(-1, 2).contiguous(), exact, "concatenate")


def gather_aligned(
    x: Float[Tensor, "batch heads source dim"], alignment: TokenAlignment
) -> Float[Tensor, "batch heads target features"]:
    """Source features as each target token reads them.

    Returns:
        [batch, heads, targets, dim], or [..., k dim] (read 0 first) where reads are concatenated.
    """
    columns = alignment.indices.unbind(dim=1)
    if alignment.combine == "concatenate":
        return torch.cat([x.index_select(2, column) for column in columns], dim=3)
    if len(columns) == 1:
        return x.index_select(2, columns[0])
    weights = alignment.weights.to(x.dtype)
    out = x.index_select(2, columns[0]) * weights[:, 0, None]
    for column, weight in zip(columns[1:], weights.unbind(dim=1)[1:], strict=True):
        used = weight.nonzero().squeeze(1)  # few target tokens have many reads
        read = x.index_select(2, column[used]) * weight[used, None]
        out.index_add_(2, used, read)
    return out


def context_token_count(target_spans: Int64[Tensor, "target 2"], boundary: int) -> int:
    """How many target tokens belong to a context of `boundary` characters before a suffix.

    Where the boundary falls inside a token, the whole token belongs to the suffix, which the target
    runs itself; the context is the tokens that end at or before the boundary. A character is never
    split: its other pieces follow the one that crosses. Tokens without text at the boundary belong
    to the context.
    """
    _check(target_spans, "target")
    ends = target_spans[:, 1].contiguous()
    count = len(ends)
    limit = boundary
    while True:
        count = int((ends[:count] <= limit).sum())
        if count == len(ends) or int(target_spans[count, 0]) >= limit:
            return count
        limit = int(target_spans[count, 0])


def _owner(
    source_spans: Tensor, target_spans: Tensor, causal: Int64[Tensor, " target"]
) -> Int64[Tensor, " target"]:
    with_text = (source_spans[:, 1] > source_spans[:, 0]).nonzero().squeeze(1)
    if not len(with_text):
        return causal
    starts = source_spans[with_text, 0].contiguous()
    rank = _searchsorted(starts, target_spans[:, 1] - 1, right=True) - 1
    owner = with_text[rank.clamp_min(0)]
    return torch.where(target_spans[:, 1] > target_spans[:, 0], owner, causal)


def _exact(
    source_spans: Tensor, target_spans: Tensor, owner: Int64[Tensor, " target"]
) -> Bool[Tensor, " target"]:
    starts, ends = target_spans.unbind(dim=1)
    if not len(ends):
        return torch.zeros(0, dtype=torch.bool, device=ends.device)
    # The next token with text opens before this one ends: they share a character.
    with_text = ends > starts
    far = torch.where(with_text, starts, torch.iinfo(torch.int64).max)
    following = far.flip(0).cummin(0).values.flip(0).roll(-1)
    following[-1] = torch.iinfo(torch.int64).max
    return with_text & (source_spans[owner, 1] == ends) & (following >= ends)


def _overlap(
    source_spans: Tensor, target_spans: Tensor, owner: Int64[Tensor, " target"]
) -> tuple[Int64[Tensor, "target k"], Float[Tensor, "target k"]]:
    with_text = (source_spans[:, 1] > source_spans[:, 0]).nonzero().squeeze(1)
    if not len(with_text) or not len(owner):
        return owner[:, None], torch.ones(len(owner), 1, device=owner.device)
    starts, ends = (column.contiguous() for column in source_spans[with_text].unbind(dim=1))
    first = _searchsorted(ends, target_spans[:, 0], right=True)
    past = _searchsorted(starts, target_spans[:, 1], right=False)
    reads = max(1, int((past - first).max()))
    rank = first[:, None] + torch.arange(reads, device=owner.device)
    inside = rank < past[:, None]
    rank = rank.clamp_max(len(with_text) - 1)
    shared = torch.minimum(ends[rank], target_spans[:, 1:])
    shared = shared - torch.maximum(starts[rank], target_spans[:, :1])
    weights = torch.where(inside, shared.clamp_min(0), 0).float()
    alone = weights.sum(dim=1) == 0
    indices = torch.where(alone[:, None], owner[:, None], with_text[rank])
    weights[alone, 0] = 1.0
    return indices, weights / weights.sum(dim=1, keepdim=True)


def _searchsorted(ordered: Tensor, values: Tensor, *, right: bool) -> Int64[Tensor, " n"]:
    return torch.searchsorted(ordered, values.contiguous(), right=right)


def _check(spans: Tensor, whose: str) -> None:
    if spans.ndim != 2 or spans.shape[1] != 2:
        raise InputError(
            f"The {whose} spans must be one [start, end) pair a token.",
            found=tuple(spans.shape),
            fix="Pass what TokenText.character_spans returns.",
        )
    starts, ends = spans.unbind(dim=1)
    text_starts = starts[ends > starts]
    backwards = (ends < starts).any() | (ends[1:] < ends[:-1]).any()
    if bool(backwards | (text_starts[1:] < text_starts[:-1]).any()):
        raise InputError(
            f"The {whose} spans are not in reading order.",
            fix="Pass what TokenText.character_spans returns.",
        )
