"""Who reads which passages: rounds of them, each divided among the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.calibration.reader import TokenPair


@dataclass(frozen=True)
class Share:
    """What one rank reads at once.

    Args:
        pairs: tokenised passages; none where the others have more to read.
        closes: how many passages of all ranks are complete after it, zero inside a round.
        last: nothing follows.
    """

    pairs: tuple[TokenPair, ...]
    closes: int = 0
    last: bool = False


def shares(
    pairs: Sequence[TokenPair], *, rank: int, ranks: int, batch_size: int, round_size: int
) -> Iterator[Share]:
    """The shares of one rank. Every rank closes the same rounds, so that they can meet there.

    Args:
        pairs: all passages that are to be read; may be none.
        round_size: passages between two meetings.
    """
    starts = range(0, len(pairs), round_size) or [0]
    for start in starts:
        whole = pairs[start : start + round_size]
        mine = whole[rank::ranks]
        batches = [tuple(mine[i : i + batch_size]) for i in range(0, len(mine), batch_size)]
        *before, final = batches or [()]
        yield from (Share(batch) for batch in before)
        yield Share(final, closes=len(whole), last=start == starts[-1])
