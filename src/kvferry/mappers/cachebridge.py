"""CacheBridge: each target head from its own source head, rows weighted by attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from kvferry.mappers.affine import FITTED_ROWS, AffineGroup, AffineMapper
from kvferry.mappers.anchors import NativeLayers, OffersAnchors
from kvferry.mappers.attention_weighted import AttentionWeights, weighted_groups
from kvferry.mappers.base import (
    MapperMethod,
    Statistics,
    positive_or_all,
    require,
    split_by_window,
)
from kvferry.mappers.head_support import HeadRule, head_columns, select_heads_and_layers
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock
from kvferry.stats.ridge import RidgeFactor


@dataclass(frozen=True)
class CacheBridge(OffersAnchors, MapperMethod):
    """Head-local ridge from the best source layers, on rows that later queries look at.

    Args:
        source_layers: source layers by single-source R² under the same heads, or "all".
        heads: "index" for the same index, or the same relative one where counts differ;
            "hungarian" for the assignment with the largest single-head R².
        weigh_keys, weigh_values: weigh rows by attention sensitivity; without, moments suffice.
        passages: calibration texts read again for the weights.
        boundaries: log-spaced ends of a context at which the next query is watched.
        floor: effective rows that weighting must leave, as a multiple of a map's inputs.
        sums_gigabytes: memory for the sums of one reading; more layers are read again.
        fused: take weighted sums by the Triton kernel (CUDA): no copy of the rows, but slower.
        ridge: penalty as a share of the inputs' mean variance.
        absolute_ridge: the penalty itself, instead of ``ridge`` (the paper: 0.01).
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`; off as published.

    Source: arXiv 2609.00891.
    """

    source_layers: int | Literal["all"] = 12
    heads: HeadRule = "index"
    weigh_keys: bool = True
    weigh_values: bool = True
    passages: int = 50
    boundaries: int = 32
    floor: float = 2.0
    sums_gigabytes: float = 4.0
    fused: bool = False
    ridge: float = 1e-3
    absolute_ridge: float | None = None
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    pretty_name: ClassVar[str] = "CacheBridge"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2609.00891"

    def __post_init__(self) -> None:
        require(
            {
                "source_layers must be all or at least 1": positive_or_all(self.source_layers),
                "heads must be index or hungarian": self.heads in ("index", "hungarian"),
                "passages must be at least 1": self.passages >= 1,
                "boundaries must be at least 1": self.boundaries >= 1,
                "floor must be positive": self.floor > 0,
                "sums_gigabytes must be positive": self.sums_gigabytes > 0,
                **self._anchors.rules(),
                "ridge must not be negative": self.ridge >= 0,
                "absolute_ridge must not be negative": (self.absolute_ridge or 0) >= 0,
            }
        )

    @property
    def _penalty(self) -> dict[str, float | None]:
        absolute = self.absolute_ridge
        return {"relative": None if absolute is not None else self.ridge, "absolute": absolute}

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Select heads and layers, read texts again for the weights, solve each head."""
        anchors = self._anchors
        native = anchors.native_depth(statistics.target)
        support = select_heads_and_layers(statistics, self.source_layers, self.heads)
        reads = {c: support.reads(statistics, c, anchors) for c in COMPONENTS}
        weighed = {"keys": self.weigh_keys, "values": self.weigh_values}
        groups: list[AffineGroup] = []
        for component in COMPONENTS:
            if not weighed[component]:
                groups += plain_groups(
                    statistics, component, reads[component], native, **self._penalty
                )
        weighted, rows = weighted_groups(
            statistics,
            {c: by_layer for c, by_layer in reads.items() if weighed[c]},
            native,
            AttentionWeights(
                self.passages,
                self.boundaries,
                self.floor,
                int(self.sums_gigabytes * 1e9),
                self.fused,
            ),
            **self._penalty,
        )
        return AffineMapper(
            source=statistics.source,
            target=statistics.target,
            groups=(*groups, *weighted),
            code=statistics.code if self.neighbours else None,
            native_layers=native,
            planted_sinks=self.planted_sinks,
            report={FITTED_ROWS: rows} if weighted else {},
        )


def plain_groups(
    statistics: Statistics,
    component: Component,
    reads: Sequence[Sequence[tuple[FeatureBlock, ...]]],
    native_layers: int,
    *,
    relative: float | None,
    absolute: float | None,
) -> list[AffineGroup]:
    """Ridge of every target head from its own blocks, all rows alike, from the moments.

    Args:
        reads: by target layer and head, native layers included (ignored).

    Heads with the same blocks share one factorisation.
    """
    layout, moments = statistics.layouts[component], statistics.moments[component]
    wanted: dict[tuple[FeatureBlock, ...], dict[int, list[int]]] = {}
    for layer, by_head in enumerate(reads):
        for head, blocks in enumerate(by_head):
            if layer >= native_layers:
                wanted.setdefault(blocks, {}).setdefault(head, []).append(layer)
    groups: list[AffineGroup] = []
    for blocks, by_target_head in wanted.items():
        factor: RidgeFactor | None = None
        for head, layers in by_target_head.items():
            every = torch.arange(moments.y_width)
            columns = [every[head_columns(statistics.target, layer, head)] for layer in layers]
            part = moments.select(layout.columns(blocks), torch.cat(columns))
            factor = factor or RidgeFactor.of(part, relative=relative, absolute=absolute)
            weight = factor.solve(part.c_xy)
            found = split_by_window(statistics.target, component, layers, blocks, part, weight)
            groups += [replace(group, head=head) for group in found]
    return groups
