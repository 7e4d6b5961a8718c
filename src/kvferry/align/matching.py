"""Layers matched with layers as a whole, not one by one: in order, or with shared room."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvferry.errors import InputError

_WORST = -1e6  # of a similarity that is NaN: finite, so that a path through it still adds up


def monotone_assignment(similarity: Float[Tensor, "target source"]) -> tuple[int, ...]:
    """One source layer for each target layer, never falling back, of the largest total similarity.

    Dynamic programme over ``D[l, j] = S[l, j] + max over j' <= j of D[l - 1, j']``; several target
    layers may share a source layer, and source layers may be passed over. NaN counts as worst.
    """
    scores = torch.nan_to_num(similarity.double(), nan=_WORST)
    best, came_from = scores[0], []
    for row in scores[1:]:
        reached, place = best.cummax(dim=0)
        came_from.append(place)
        best = row + reached
    path = [int(best.argmax())]
    for place in reversed(came_from):
        path.append(int(place[path[-1]]))
    return tuple(reversed(path))


def sinkhorn_coupling(
    similarity: Float[Tensor, "target source"],
    *,
    temperature: float = 0.05,
    iterations: int = 500,
) -> Float64[Tensor, "target source"]:
    """Entropic optimal transport between target and source layers of equal weight each.

    Maximises ``sum P S + temperature * entropy(P)`` with rows that sum to 1 / targets and, at
    convergence, columns that sum to 1 / sources: a source layer that explains everything a little
    is not everyone's choice. NaN counts as worst.

    Args:
        similarity: for example R², at most 1.
        temperature: in units of similarity; towards 0 the coupling becomes an assignment.
        iterations: of row and column scaling.

    Raises:
        InputError: temperature or iterations are not positive.
    """
    if not temperature > 0 or iterations < 1:
        raise InputError(
            "The coupling needs a positive temperature and at least one iteration.",
            found=f"temperature={temperature}, iterations={iterations}",
            fix="set, for instance, temperature=0.05",
        )
    targets, sources = similarity.shape
    kernel = torch.nan_to_num(similarity.double(), nan=_WORST) / temperature
    rows, columns = kernel.new_zeros(targets, 1), kernel.new_zeros(1, sources)
    for _ in range(iterations):
        columns = -math.log(sources) - (kernel + rows).logsumexp(dim=0, keepdim=True)
        rows = -math.log(targets) - (kernel + columns).logsumexp(dim=1, keepdim=True)
    return (kernel + rows + columns).exp()
