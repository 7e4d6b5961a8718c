"""Head maps fitted on rows that count as much as later queries look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.errors import InputError
from kvferry.mappers.affine import AffineGroup
from kvferry.mappers.base import Statistics
from kvferry.mappers.head_sums import HeadSums, Reads
from kvferry.mappers.layout import COMPONENTS, Component
from kvferry.mappers.observation import Observation
from kvferry.stats.effective_sample import largest_alpha
from kvferry.stats.head_ridge import ridge_heads
from kvferry.stats.sensitivity import attention_sensitivity, log_boundaries, relevance


@dataclass(frozen=True)
class AttentionWeights:
    """How rows are weighted.

    Args:
        passages: texts read for them.
        boundaries: contexts watched in each text.
        floor: effective rows that must remain, as a multiple of a map's inputs.
        sums_bytes: memory for the sums of one reading.
        fused: multiply by the Triton kernel, see :func:`kvferry.stats.head_products.add_products`.
    """

    passages: int = 50
    boundaries: int = 32
    floor: float = 2.0
    sums_bytes: int = 4_000_000_000
    fused: bool = False


def weighted_groups(
    statistics: Statistics,
    reads: Mapping[Component, Sequence[Reads]],
    native_layers: int,
    weights: AttentionWeights,
    *,
    relative: float | None,
    absolute: float | None,
) -> tuple[list[AffineGroup], int]:
    """Ridge of every target head from its own blocks, rows weighted by attention.

    The weight of a row is `1 + alpha (r - 1)`. Neither the mean of r nor alpha is known before the
    last row, but the weighted Gram is linear in both: the plain and the r-weighted sums are taken
    in one reading and mixed after it, which equals a first pass for means and weights and a second
    one for the products.

    Args:
        reads: by component, target layer and head; native layers included (ignored).

    Returns:
        the maps, and how many rows they were fitted on.

    Raises:
        InputError: the texts have no rows to fit on.
        ConfigurationError: the fused kernel is asked for and cannot run here.
    """
    jobs = [(c, layer) for c, by_layer in reads.items() for layer in range(len(by_layer))]
    jobs = [job for job in jobs if job[1] >= native_layers]
    groups: list[AffineGroup] = []
    rows = 0
    for part in _readings(reads, jobs, weights.sums_bytes):
        found, rows = _fit_together(
            statistics, reads, part, weights, relative=relative, absolute=absolute
        )
        groups += found
    return groups, rows


def _fit_together(
    statistics: Statistics,
    reads: Mapping[Component, Sequence[Reads]],
    part: Sequence[tuple[Component, int]],
    weights: AttentionWeights,
    *,
    relative: float | None,
    absolute: float | None,
) -> tuple[list[AffineGroup], int]:
    """The layers of one reading; its sums are gone before those of the next one are made."""
    sums = {
        component: HeadSums(
            statistics, component, {i: reads[component][i] for i in here}, fused=weights.fused
        )
        for component in COMPONENTS
        if (here := [layer for c, layer in part if c == component])
    }
    for seen in statistics.observe(weights.passages):
        _add(sums, seen, weights.boundaries)
    groups: list[AffineGroup] = []
    for component, one in sums.items():
        groups += _solve(one, component, reads[component], weights.floor, relative, absolute)
    return groups, one.rows


def _readings(
    reads: Mapping[Component, Sequence[Reads]], jobs: Sequence[tuple[Component, int]], limit: int
) -> Iterator[list[tuple[Component, int]]]:
    """Layers whose sums fit together, at least one each time."""
    part: list[tuple[Component, int]] = []
    size = 0
    for component, layer in jobs:
        by_head = reads[component][layer]
        inputs = sum(block.width for block in by_head[0])
        more = 8 * len(by_head) * inputs**2
        if part and size + more > limit:
            yield part
            part, size = [], 0
        part.append((component, layer))
        size += more
    if part:
        yield part


@torch.no_grad()
def _add(sums: Mapping[Component, HeadSums], seen: Observation, boundaries: int) -> None:
    """Count the rows of one text."""
    if not bool(seen.counted.any()):
        return
    layers = sorted({layer for one in sums.values() for layer in one.layers})
    relevant = {layer: row_relevance(seen, layer, boundaries) for layer in layers}
    for component, one in sums.items():
        one.add(seen, {layer: relevant[layer][component] for layer in one.layers})


def _solve(
    sums: HeadSums,
    component: Component,
    reads: Sequence[Reads],
    floor: float,
    relative: float | None,
    absolute: float | None,
) -> list[AffineGroup]:
    """Mix plain and weighted sums as far as the effective sample allows, and solve.

    Raises:
        InputError: no rows were counted.
    """
    if not sums.rows:
        raise InputError(
            "The texts that were read again have no tokens to fit on.",
            fix="raise passages, or check the alignment of the pair",
        )
    sums.finish()
    groups: list[AffineGroup] = []
    for layer in sums.layers:
        plain, weighted, mean_x = sums.plain(layer), sums.weighted(layer), sums.input_mean(layer)
        alpha = largest_alpha(sums.variation(layer), sums.rows, floor * mean_x.shape[1])
        # A head that nobody looks at has no relevance to weigh by.
        mixed = plain.mixed(weighted, torch.where(weighted.weight > 0, alpha, 0.0))
        weight = ridge_heads(mixed.c_xx, mixed.c_xy, relative=relative, absolute=absolute)
        offset = mixed.mean_y - torch.einsum("hp,hpq->hq", mixed.mean_x, weight)
        mean_y = sums.mean_y(layer) + offset
        groups += [
            AffineGroup(
                component=component,
                target_layers=(layer,),
                blocks=blocks,
                weight=weight[head].float().contiguous(),
                input_mean=mean_x[head],
                output_mean=mean_y[head].float(),
                head=head,
            )
            for head, blocks in enumerate(reads[layer])
        ]
    return groups


def row_relevance(
    seen: Observation, layer: int, boundaries: int
) -> dict[Component, Float[Tensor, "heads tokens"]]:
    """How much the first queries behind log-spaced boundaries depend on each counted token."""
    keys, values = seen.target.keys[layer][0], seen.target.values[layer][0]
    trace = seen.queries[layer]
    last = log_boundaries(values.shape[1], boundaries).to(values.device)
    rows = last + 1
    of_keys, of_values = attention_sensitivity(
        trace.weights(rows, keys),
        values,
        trace.queries[:, rows],
        last,
        trace.scale,
        trace.score_slopes(rows, keys),
    )
    counted = seen.counted
    return {"keys": relevance(of_keys, counted), "values": relevance(of_values, counted)}
