"""Head maps fitted on rows that count as much as later queries look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvferry.errors import InputError
from kvferry.mappers.affine import AffineGroup
from kvferry.mappers.base import Statistics
from kvferry.mappers.head_panel import fill_head_panel
from kvferry.mappers.head_support import head_columns
from kvferry.mappers.layout import ALL_HEADS, COMPONENTS, Component, FeatureBlock
from kvferry.mappers.observation import Observation
from kvferry.stats.effective_sample import largest_alpha, squared_variation
from kvferry.stats.head_products import HeadRows, add_products, mirror
from kvferry.stats.head_ridge import HeadMoments, ridge_heads
from kvferry.stats.sensitivity import attention_sensitivity, log_boundaries, relevance

Reads = Sequence[tuple[FeatureBlock, ...]]
"""Blocks by target head."""


@dataclass(frozen=True)
class AttentionWeights:
    """How rows are weighted.

    Args:
        passages: texts read for them.
        boundaries: contexts watched in each text.
        floor: effective rows that must remain, as a multiple of a map's inputs.
        sums_bytes: memory for the sums of one reading.
    """

    passages: int = 50
    boundaries: int = 32
    floor: float = 2.0
    sums_bytes: int = 4_000_000_000


def weighted_groups(
    statistics: Statistics,
    reads: Mapping[Component, Sequence[Reads]],
    native_layers: int,
    weights: AttentionWeights,
    *,
    relative: float | None,
    absolute: float | None,
) -> list[AffineGroup]:
    """Ridge of every target head from its own blocks, rows weighted by attention.

    The weight of a row is `1 + alpha (r - 1)`. Neither the mean of r nor alpha is known before the
    last row, but the weighted Gram is linear in both: the plain and the r-weighted sums are taken
    in one reading and mixed after it, which equals a first pass for means and weights and a second
    one for the products.

    Args:
        reads: by component, target layer and head; native layers included (ignored).

    Raises:
        InputError: the texts have no rows to fit on.
    """
    jobs = [(c, layer) for c, by_layer in reads.items() for layer in range(len(by_layer))]
    jobs = [job for job in jobs if job[1] >= native_layers]
    groups: list[AffineGroup] = []
    for part in _readings(reads, jobs, weights.sums_bytes):
        sums = {
            component: _ComponentSums(statistics, component, {i: reads[component][i] for i in here})
            for component in COMPONENTS
            if (here := [layer for c, layer in part if c == component])
        }
        for seen in statistics.observe(weights.passages):
            _add(sums, seen, weights.boundaries)
        for one in sums.values():
            groups += one.solve(weights.floor, relative, absolute)
    return groups


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
def _add(sums: Mapping[Component, _ComponentSums], seen: Observation, boundaries: int) -> None:
    """Count the rows of one text."""
    counted = seen.counted
    if not bool(counted.any()):
        return
    for one in sums.values():
        one.open(seen)
    for layer in sorted({layer for one in sums.values() for layer in one.layers}):
        relevant = row_relevance(seen, layer, boundaries)
        for component, one in sums.items():
            if layer in one.layers:
                one.add(layer, relevant[component][:, counted])


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


class _LayerSums:
    """What one target layer's heads add up, each row weighted by its relevance."""

    def __init__(self, reads: Reads, width: int, outputs: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(len(reads), *shape, dtype=torch.float64, device=device)

        self.reads = reads
        self.weighted = HeadMoments(zeros(width, width), zeros(width, outputs))
        self.relevance_squares = zeros()


class _ComponentSums:
    """Sums of the target layers of one component that are fitted in one reading.

    The plain Gram is that of each source head over all layers read, and the plain cross that of
    each target head in all layers fitted: each layer needs a part of both. All sums are about the
    means of the calibration moments, so that inputs are centred once for all layers; the weighted
    means are taken off exactly at the end.
    """

    def __init__(
        self, statistics: Statistics, component: Component, reads: Mapping[int, Reads]
    ) -> None:
        moments, layout = statistics.moments[component], statistics.layouts[component]
        self.statistics, self.component, self.rows = statistics, component, 0
        found = {block for by_head in reads.values() for blocks in by_head for block in blocks}
        self.source_heads = sorted({block.head for block in found if block.head != ALL_HEADS})
        shared = [block for block in layout.blocks if block in found]
        read_layers = sorted({block.index for block in found if block.kind == "source"})
        one_head = next(iter(block for block in found if block.kind == "source"))
        self.panel_reads = [
            (*(replace(one_head, index=i, head=head) for i in read_layers), *shared)
            for head in self.source_heads
        ]
        mean = moments.mean_x.float()
        self.mean = torch.stack([mean[layout.columns(blocks)] for blocks in self.panel_reads])
        self.mean_y = moments.mean_y
        self.width = self.mean.shape[1] + 1
        device = self.mean.device
        self.layers = {
            layer: _LayerSums(
                by_head,
                sum(block.width for block in by_head[0]) + 1,
                statistics.target.layers[layer].head_dim,
                device,
            )
            for layer, by_head in reads.items()
        }
        shape = len(self.source_heads), self.width, self.width
        self.plain = torch.zeros(shape, dtype=torch.float64, device=device)
        heads, outputs = next(iter(reads.values())), [statistics.target.layers[i] for i in reads]
        self.sources = self._sources(heads)
        shape = len(heads), self.width, sum(layer.head_dim for layer in outputs)
        self.plain_cross = torch.zeros(shape, dtype=torch.float64, device=device)
        self._panel = self._y = torch.empty(0, device=device)

    def open(self, seen: Observation) -> None:
        """Gather and centre one text, and add its plain products."""
        counted = seen.counted
        tokens = len(counted)
        panel = torch.empty(len(self.source_heads), tokens, self.width, device=self.mean.device)
        fill_head_panel(seen.inputs, self.panel_reads, 0, tokens, self.mean, panel[:, :, :-1])
        panel[:, :, -1] = 1.0
        self._panel = panel[:, counted]
        self.rows += self._panel.shape[1]
        every = torch.arange(self.width, device=panel.device)
        content: dict[int, Tensor] = getattr(seen.target, self.component)
        self._y = torch.cat(
            [
                content[i][0][:, counted].float() - self._mean_y(i)[:, None].float()
                for i in self.layers
            ],
            dim=-1,
        )
        own = every[: len(self.source_heads)]
        add_products(HeadRows(self._panel, own, every), gram=self.plain)
        add_products(HeadRows(self._panel, self.sources, every), cross=self.plain_cross, y=self._y)

    def add(self, layer: int, relevant: Float[Tensor, "heads rows"]) -> None:
        """Add the rows of the opened text for one target layer."""
        sums = self.layers[layer]
        rows = HeadRows(self._panel, self.sources, self._columns(sums.reads), relevant)
        y = self._y[:, :, self._outputs(layer)]
        add_products(rows, gram=sums.weighted.xx, cross=sums.weighted.xy, y=y)
        sums.relevance_squares += relevant.double().square().sum(1)

    def solve(
        self, floor: float, relative: float | None, absolute: float | None
    ) -> list[AffineGroup]:
        """Mix plain and weighted sums as far as the effective sample allows, and solve.

        Raises:
            InputError: no rows were counted.
        """
        if not self.rows:
            raise InputError(
                "The texts that were read again have no tokens to fit on.",
                fix="raise passages, or check the alignment of the pair",
            )
        mirror(self.plain)
        return [
            group
            for layer in self.layers
            for group in self._groups(layer, floor, relative, absolute)
        ]

    def _groups(
        self, layer: int, floor: float, relative: float | None, absolute: float | None
    ) -> list[AffineGroup]:
        sums = self.layers[layer]
        mirror(sums.weighted.xx)
        columns, sources = self._columns(sums.reads), self.sources
        plain = HeadMoments(
            self.plain[sources][:, columns][:, :, columns],
            self.plain_cross[:, columns, self._outputs(layer)],
        )
        total = sums.weighted.weight
        variation = squared_variation(total.clamp_min(1e-300), sums.relevance_squares, self.rows)
        inputs = len(columns) - 1
        alpha = largest_alpha(variation, self.rows, floor * inputs)
        # A head that nobody looks at has no relevance to weigh by.
        mixed = plain.mixed(sums.weighted, torch.where(total > 0, alpha, 0.0))
        weight = ridge_heads(mixed.c_xx, mixed.c_xy, relative=relative, absolute=absolute)
        offset = mixed.mean_y - torch.einsum("hp,hpq->hq", mixed.mean_x, weight)
        mean_y = self._mean_y(layer) + offset
        return [
            AffineGroup(
                component=self.component,
                target_layers=(layer,),
                blocks=blocks,
                weight=weight[head].float().contiguous(),
                input_mean=self.mean[source, columns[:-1]],
                output_mean=mean_y[head].float(),
                head=head,
            )
            for head, (blocks, source) in enumerate(zip(sums.reads, sources.tolist(), strict=True))
        ]

    def _mean_y(self, layer: int) -> Float64[Tensor, "heads dim"]:
        heads = self.statistics.target.layers[layer].kv_heads
        places = [head_columns(self.statistics.target, layer, head) for head in range(heads)]
        return torch.stack([self.mean_y[place] for place in places])

    def _outputs(self, layer: int) -> slice:
        """Columns of one layer in the outputs of all layers fitted."""
        dims = {i: self.statistics.target.layers[i].head_dim for i in self.layers}
        start = sum(dim for i, dim in dims.items() if i < layer)
        return slice(start, start + dims[layer])

    def _sources(self, reads: Reads) -> Tensor:
        """Row of the panel that each target head reads."""
        heads = [blocks[0].head for blocks in reads]
        return torch.tensor([self.source_heads.index(head) for head in heads]).to(self.mean.device)

    def _columns(self, reads: Reads) -> Tensor:
        """Columns of the panel that the heads read, the constant last."""
        starts, start = {}, 0
        for block in self.panel_reads[0]:
            starts[replace(block, head=ALL_HEADS)] = start
            start += block.width
        places = [(starts[replace(b, head=ALL_HEADS)], b.width) for b in reads[0]]
        columns = [torch.arange(first, first + width) for first, width in places]
        return torch.cat([*columns, torch.tensor([self.width - 1])]).to(self.mean.device)
