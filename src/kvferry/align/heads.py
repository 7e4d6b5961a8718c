"""Which source head each target head reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InputError


@dataclass(frozen=True)
class HeadSupport:
    """For each target head the one source head that it reads, in every source layer."""

    sources: tuple[int, ...]

    def validate(self, source_heads: int) -> None:
        """Check that every target head reads a head of a source with so many.

        Raises:
            InputError: names the first target head whose support is not usable.
        """
        for target, source in enumerate(self.sources):
            if not 0 <= source < source_heads:
                raise InputError(
                    f"The source head of target head {target} does not exist.",
                    found=source,
                    expected=f"0 to {source_heads - 1}",
                    fix="Choose the support again for these two models.",
                )


def same_relative_head(source_heads: int, target_heads: int) -> HeadSupport:
    """Target head h reads source head `floor(h source_heads / target_heads)`.

    With equal counts that is the same index, the published rule; two heads to four gives 0 0 1 1.
    """
    if source_heads < 1 or target_heads < 1:
        raise InputError(
            "Heads can only be matched between models that have some.",
            found=(source_heads, target_heads),
            fix="Pass the numbers of KV heads of both models.",
        )
    return HeadSupport(tuple(head * source_heads // target_heads for head in range(target_heads)))


def assign_heads(score: Float[Tensor, "target source"]) -> HeadSupport:
    """The assignment with the largest total score, each source head used as evenly as can be.

    With more target heads than source heads, each source head stands in as many copies as it takes
    for every target head to get one (the Hungarian method needs one to one).

    Args:
        score: say, single-head R² averaged over layers; NaN counts as worst.

    Raises:
        InputError: no heads.
    """
    targets, sources = score.shape
    if not targets or not sources:
        raise InputError(
            "Heads can only be matched between models that have some.",
            found=tuple(score.shape),
            fix="Pass one row a target head and one column a source head.",
        )
    known = score.double()
    finite = known[known.isfinite()]
    worst = float(finite.min()) - 1.0 if len(finite) else 0.0
    known = torch.where(known.isfinite(), known, worst)
    copies = -(-targets // sources)
    columns = maximal_assignment(known.repeat(1, copies).tolist())
    return HeadSupport(tuple(column % sources for column in columns))


def maximal_assignment(score: Sequence[Sequence[float]]) -> list[int]:
    """For each row a column of its own, so that their scores add up to the most.

    Rows are added one at a time along the cheapest alternating path, which Dijkstra finds on costs
    kept non-negative by one price a row and a column: O(rows² columns).

    Args:
        score: no more rows than columns, all finite.
    """
    rows, columns = len(score), len(score[0])
    row_price, column_price = [0.0] * rows, [0.0] * columns
    row_of: list[int | None] = [None] * columns
    for added in range(rows):
        distance = [float("inf")] * columns
        previous: list[int | None] = [None] * columns
        settled: list[int] = []
        row, column, reached = added, None, 0.0
        while True:
            for other in range(columns):
                if other in settled:
                    continue
                step = -score[row][other] - row_price[row] - column_price[other]
                if reached + step < distance[other]:
                    distance[other], previous[other] = reached + step, column
            open_columns = [other for other in range(columns) if other not in settled]
            last = min(open_columns, key=lambda other: distance[other])
            reached = distance[last]
            owner = row_of[last]
            if owner is None:
                break
            settled.append(last)
            row, column = owner, last
        row_price[added] += reached
        for other in settled:
            owner = row_of[other]
            assert owner is not None
            row_price[owner] += reached - distance[other]
            column_price[other] -= reached - distance[other]
        path: int | None = last
        while path is not None:
            before = previous[path]
            row_of[path] = added if before is None else row_of[before]
            path = before
    found = {row: column for column, row in enumerate(row_of) if row is not None}
    return [found[row] for row in range(rows)]
