"""CacheLink, ours after its title: fit the function that a cache computes, not its entries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.anchors import NativeLayers, OffersAnchors
from kvferry.mappers.base import (
    MapperMethod,
    Recolouring,
    Statistics,
    fit_affine,
    layer_reads,
    output_columns,
    require,
)
from kvferry.mappers.behaviour import Reading, mapped_layers, query_rows
from kvferry.mappers.behavioural_fit import Attention, BehaviouralCalibration, Pointwise
from kvferry.mappers.correction import with_weights
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.observation import Observation
from kvferry.mappers.selection import LayerCount, LayerSelector, Selector
from kvferry.stats.key_metric import QueryMetric, metric_ridge


@dataclass(frozen=True)
class CacheLink(OffersAnchors, MapperMethod):
    """Keys in the metric of the queries that read them, values by the outputs of attention.

    Only the title "Functional KV Transport" is known; the method is ours.

    Args:
        source_layers: how many each target layer reads, or "all".
        selector: by what they are chosen, see :class:`LayerSelector`.
        ridge: penalty as a share of the inputs' mean variance.
        key_metric: weigh errors of keys by what queries read; off keeps the ridge keys.
        metric_floor: least share of attention that a coordinate of a key is taken to have.
        behavioural_keys: then remix them by gradient, as in :class:`HeteroFold`; off stays with
            closed forms.
        steps, learning_rate, recall: of that, see :func:`fit_attention`.
        directions: leading directions of their inputs that corrections of values read.
        functional_values: regress attention outputs; off keeps the ridge values.
        pointwise: weight of the values themselves beside the outputs they make (mu), or "auto".
        attention: "translated" fits values to the mapped keys' attention, "native" to the target's.
        passages, held_out, rows, copies, seed: see :class:`Reading`.
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`.
        planted_sinks: see :class:`AffineMapper`.
    """

    source_layers: LayerCount = "all"
    selector: Selector = "r2"
    ridge: float = 1e-3
    key_metric: bool = True
    metric_floor: float = 1e-3
    behavioural_keys: bool = False
    steps: int = 300
    learning_rate: float = 2e-3
    recall: float = 0.0
    functional_values: bool = True
    directions: int = 384
    pointwise: Pointwise = "auto"
    attention: Attention = "translated"
    passages: int = 32
    held_out: int = 8
    rows: int = 64
    copies: bool = False
    seed: int = 0
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    pretty_name: ClassVar[str] = "CacheLink (ours)"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"

    def __post_init__(self) -> None:
        require(
            {
                **self._selector.rules("source_layers"),
                **self._anchors.rules(),
                "ridge must not be negative": self.ridge >= 0,
                "metric_floor must lie in 0..1, 0 excluded": 0 < self.metric_floor <= 1,
                **self._behaviour.rules(),
                "attention must be native or translated": self.attention
                in ("native", "translated"),
            }
        )

    @property
    def _selector(self) -> LayerSelector:
        return LayerSelector(self.selector, self.source_layers)

    @property
    def _behaviour(self) -> BehaviouralCalibration:
        return BehaviouralCalibration(
            keys=self.behavioural_keys,
            steps=self.steps,
            learning_rate=self.learning_rate,
            recall=self.recall,
            values=self.functional_values,
            pointwise=self.pointwise,
            directions=self.directions,
            reading=Reading(self.passages, self.held_out, self.rows, self.seed, self.copies),
            attention=self.attention,
        )

    def fit(self, statistics: Statistics) -> AffineMapper:
        """Ridge, then keys from one reading of the passages, then values from another.

        A remix of keys by gradient shares the reading of the values.
        """
        support = self._selector.support(statistics)
        anchors = self._anchors
        mapper = fit_affine(
            statistics,
            {c: layer_reads(statistics, c, support, anchors) for c in COMPONENTS},
            relative_ridge=self.ridge,
            recolouring=Recolouring(),
            native_layers=anchors.native_depth(statistics.target),
            planted_sinks=self.planted_sinks,
        )
        if self.key_metric:
            texts = statistics.observe(self.passages)
            metrics = query_metrics(mapper, texts, self.rows, self.seed)
            mapper = metric_keys(
                statistics, mapper, metrics, ridge=self.ridge, floor=self.metric_floor
            )
        return self._behaviour.apply(statistics, mapper, self.ridge)


def query_metrics(
    mapper: AffineMapper, texts: Iterable[Observation], rows: int, seed: int
) -> dict[int, Tensor]:
    """By mapped layer, ``[kv_heads, dim, dim]``: what native queries read of native keys."""
    layers = {layer: mapper.target.layers[layer] for layer in mapped_layers(mapper)}
    found = {
        layer: QueryMetric(shape.kv_heads, shape.head_dim, seed=seed)
        for layer, shape in layers.items()
    }
    for seen, chosen in query_rows(texts, rows, seed):
        for layer, metric in found.items():
            keys, values = seen.target.keys[layer][0], seen.target.values[layer][0]
            metric.update(seen.queries[layer], chosen, keys, values, counted=seen.counted)
    return {layer: metric.metric for layer, metric in found.items()}


def metric_keys(
    statistics: Statistics,
    mapper: AffineMapper,
    metrics: dict[int, Tensor],
    *,
    ridge: float,
    floor: float,
) -> AffineMapper:
    """The mapper with its keys fitted again, in each layer's metric."""
    layout, moments = statistics.layouts["keys"], statistics.moments["keys"]
    weights: dict[int, Tensor] = {}
    for blocks in dict.fromkeys(g.blocks for g in mapper.groups if g.component == "keys"):
        same = [g for g in mapper.groups if (g.component, g.blocks) == ("keys", blocks)]
        layers = sorted(layer for group in same for layer in group.target_layers)
        part = moments.select(layout.columns(blocks), output_columns(mapper.target, layers))
        solved = metric_ridge(part, [metrics[i] for i in layers], relative=ridge, floor=floor)
        widths = [mapper.target.layers[layer].width for layer in layers]
        weights |= dict(zip(layers, torch.split(solved, widths, dim=1), strict=True))
    return with_weights(mapper, "keys", weights)
