"""What head maps add up over texts: plain sums once, weighted ones for each target layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from kvferry.mappers.base import Statistics
from kvferry.mappers.head_panel import fill_head_panel
from kvferry.mappers.head_support import head_columns
from kvferry.mappers.layout import ALL_HEADS, Component, FeatureBlock
from kvferry.mappers.observation import Observation
from kvferry.stats.effective_sample import squared_variation
from kvferry.stats.head_products import PANEL_ROWS, HeadRows, add_products, aligned_rows, mirror
from kvferry.stats.head_ridge import HeadMoments
from kvferry.stats.kernels import require_fused

Reads = Sequence[tuple[FeatureBlock, ...]]
"""Blocks by target head."""


class _LayerSums:
    """What one target layer's heads add up, each row weighted by its relevance."""

    def __init__(self, reads: Reads, width: int, outputs: int, device: torch.device) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(len(reads), *shape, dtype=torch.float64, device=device)

        self.reads = reads
        self.weighted = HeadMoments(zeros(width, width), zeros(width, outputs))
        self.relevance_squares = zeros()


class HeadSums:
    """Sums of the target layers of one component that are fitted in one reading.

    The plain Gram is that of each source head over all layers read, and the plain cross that of
    each target head in all layers fitted: each layer needs a part of both. Texts are collected in
    a panel, which is gathered and centred once for all layers and multiplied when it is full; its
    rows that do not count are zero. All sums are about the means of the calibration moments; the
    weighted means are taken off exactly at the end.

    Attributes:
        rows: counted so far.
        sources: row of the panel, one for each source head read, that each target head reads.
        mean: of the panel's features.
    """

    def __init__(
        self,
        statistics: Statistics,
        component: Component,
        reads: Mapping[int, Reads],
        *,
        panel_rows: int = PANEL_ROWS,
        fused: bool = False,
    ) -> None:
        """Empty sums.

        Args:
            reads: by target layer.
            panel_rows: multiplied at once.
            fused: see :func:`kvferry.stats.head_products.add_products`.

        Raises:
            ConfigurationError: the fused kernel is asked for and cannot run here.
        """
        moments, layout = statistics.moments[component], statistics.layouts[component]
        self._target, self._component, self._fused = statistics.target, component, fused
        self.rows = 0
        found = {block for by_head in reads.values() for blocks in by_head for block in blocks}
        source_heads = sorted({block.head for block in found if block.head != ALL_HEADS})
        shared = [block for block in layout.blocks if block in found]
        read_layers = sorted({block.index for block in found if block.kind == "source"})
        one_head = next(iter(block for block in found if block.kind == "source"))
        self._panel_reads = [
            (*(replace(one_head, index=i, head=head) for i in read_layers), *shared)
            for head in source_heads
        ]
        mean = moments.mean_x.float()
        self.mean = torch.stack([mean[layout.columns(blocks)] for blocks in self._panel_reads])
        device, width = self.mean.device, self.mean.shape[1] + 1
        if fused:
            require_fused(device)
        self._mean_y = moments.mean_y
        heads = next(iter(reads.values()))
        self.sources = torch.tensor([source_heads.index(blocks[0].head) for blocks in heads])
        self.sources = self.sources.to(device)
        dims = {layer: statistics.target.layers[layer].head_dim for layer in reads}
        self._layers = {
            layer: _LayerSums(
                by_head, sum(block.width for block in by_head[0]) + 1, dims[layer], device
            )
            for layer, by_head in reads.items()
        }
        outputs = sum(dims.values())
        self._plain = HeadMoments(
            torch.zeros(len(source_heads), width, width, dtype=torch.float64, device=device),
            torch.zeros(len(heads), width, outputs, dtype=torch.float64, device=device),
        )
        self._x = aligned_rows(len(source_heads), panel_rows, width, like=self.mean)
        self._y = aligned_rows(len(heads), panel_rows, outputs, like=self.mean)
        self._relevance = torch.empty(len(reads), len(heads), panel_rows, device=device)
        self._filled = 0

    @property
    def layers(self) -> list[int]:
        """The target layers that these are sums of."""
        return list(self._layers)

    def add(
        self, seen: Observation, relevance: Mapping[int, Float[Tensor, "heads tokens"]]
    ) -> None:
        """Add the counted rows of one text.

        Args:
            relevance: by target layer, zero for tokens that are not counted.
        """
        counted = seen.counted
        tokens, done = len(counted), 0
        while done < tokens:
            stop = min(tokens, done + self._x.shape[1] - self._filled)
            self._collect(seen, counted, relevance, done, stop)
            done = stop
            if self._filled == self._x.shape[1]:
                self._multiply()
        self.rows += int(counted.sum())

    def _collect(
        self,
        seen: Observation,
        counted: Bool[Tensor, " tokens"],
        relevance: Mapping[int, Tensor],
        start: int,
        stop: int,
    ) -> None:
        here = slice(self._filled, self._filled + stop - start)
        x, left_out = self._x[:, here], ~counted[start:stop]
        fill_head_panel(seen.inputs, self._panel_reads, start, stop, self.mean, x[:, :, :-1])
        x[:, :, -1] = 1.0
        x[:, left_out] = 0.0
        content: dict[int, Tensor] = getattr(seen.target, self._component)
        for place, layer in enumerate(self._layers):
            y = content[layer][0, :, start:stop].float()
            mean = self.mean_y(layer)[:, None].float()
            torch.sub(y, mean, out=self._y[:, here, self._outputs(layer)])
            self._relevance[place, :, here] = relevance[layer][:, start:stop]
        self._filled = here.stop

    def _multiply(self) -> None:
        """Add the products of the collected rows."""
        count, self._filled = self._filled, 0
        if not count:
            return
        x, y, relevance = self._x[:, :count], self._y[:, :count], self._relevance[:, :, :count]
        every = torch.arange(x.shape[2], device=x.device)
        own, fused = every[: len(x)], self._fused
        add_products(HeadRows(x, own, every), gram=self._plain.xx, fused=fused)
        plain = HeadRows(x, self.sources, every)
        add_products(plain, cross=self._plain.xy, y=y, fused=fused)
        for (layer, sums), weights in zip(self._layers.items(), relevance, strict=True):
            weighted = HeadRows(x, self.sources, self._columns(sums.reads), weights)
            add_products(
                weighted,
                gram=sums.weighted.xx,
                cross=sums.weighted.xy,
                y=y[:, :, self._outputs(layer)],
                fused=fused,
            )
            sums.relevance_squares += weights.double().square().sum(1)

    def finish(self) -> None:
        """Add what is still collected, and complete the Grams: to be called once, before reading.

        Nothing can be added after it.
        """
        self._multiply()
        mirror(self._plain.xx)
        for sums in self._layers.values():
            mirror(sums.weighted.xx)

    def plain(self, layer: int) -> HeadMoments:
        """Unweighted moments of what the heads of a target layer read."""
        columns = self._columns(self._layers[layer].reads)
        gram = self._plain.xx.index_select(0, self.sources)
        if len(columns) < gram.shape[1]:
            gram = gram.index_select(1, columns).index_select(2, columns)
        return HeadMoments(gram, self._plain.xy[:, columns, self._outputs(layer)])

    def weighted(self, layer: int) -> HeadMoments:
        """The same with rows weighted by relevance."""
        return self._layers[layer].weighted

    def variation(self, layer: int) -> Float64[Tensor, " heads"]:
        """CV² of the relevances."""
        sums = self._layers[layer]
        total = sums.weighted.weight.clamp_min(1e-300)
        return squared_variation(total, sums.relevance_squares, self.rows)

    def input_mean(self, layer: int) -> Float[Tensor, "heads p"]:
        """What was taken off the features that the heads of a target layer read."""
        return self.mean[self.sources][:, self._columns(self._layers[layer].reads)[:-1]]

    def mean_y(self, layer: int) -> Float64[Tensor, "heads dim"]:
        """What was taken off the outputs of a target layer."""
        heads = self._target.layers[layer].kv_heads
        places = [head_columns(self._target, layer, head) for head in range(heads)]
        return torch.stack([self._mean_y[place] for place in places])

    def _outputs(self, layer: int) -> slice:
        """Columns of one layer in the outputs of all layers fitted."""
        dims = {i: self._target.layers[i].head_dim for i in self._layers}
        start = sum(dim for i, dim in dims.items() if i < layer)
        return slice(start, start + dims[layer])

    def _columns(self, reads: Reads) -> Int64[Tensor, " p"]:
        """Columns of the panel that the heads read, the constant last."""
        starts, start = {}, 0
        for block in self._panel_reads[0]:
            starts[replace(block, head=ALL_HEADS)] = start
            start += block.width
        places = [(starts[replace(b, head=ALL_HEADS)], b.width) for b in reads[0]]
        columns = [torch.arange(first, first + width) for first, width in places]
        return torch.cat([*columns, torch.tensor([start])]).to(self.mean.device)
