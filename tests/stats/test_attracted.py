"""Attention received beyond an even share, by token."""

from __future__ import annotations

import torch

from kvferry.stats.attracted import (
    TokenShare,
    fair_mass,
    merge_shares,
    most_attracting,
    received_mass,
    share_by_token,
)


def test_masses_are_what_queries_give_and_would_give_evenly() -> None:
    rows, window, tokens = torch.tensor([3, 5]), 3, 6
    behind = rows[:, None] - torch.arange(tokens)
    visible = (behind >= 0) & (behind < window)
    assert fair_mass(visible).tolist() == torch.tensor([0, 1, 1, 2, 1, 1]).div(6).tolist()
    weights = torch.zeros(2, 2, tokens)
    weights[:, 0, 1] = weights[:, 1, 4] = 1.0
    assert received_mass(weights).tolist() == [0, 0.5, 0, 0, 0.5, 0]


def test_a_frequent_token_is_no_sink() -> None:
    """Control: by mass alone the frequent id 7 would win; the sink is id 9."""
    ids = torch.tensor([7, 7, 7, 7, 7, 7, 9, 5])
    received = torch.tensor([0.09, 0.09, 0.09, 0.09, 0.09, 0.1, 0.4, 0.05])
    shares = share_by_token(ids, received, torch.full((8,), 0.125))
    assert shares[7].received > shares[9].received
    assert shares[7].count == 6 and shares[9].count == 1
    both = merge_shares([shares, shares])
    assert both[9] == shares[9] + shares[9] and both[9].count == 2
    assert most_attracting(both, 3) == (9,), "no other token has more than its share"
    assert most_attracting(both, 3, least_seen=3) == ()
    ranked = {1: TokenShare(5, 0.3, 0.1), 2: TokenShare(5, 0.5, 0.1), 3: TokenShare(5, 0.3, 0.1)}
    assert most_attracting(ranked, 2) == (2, 1)
