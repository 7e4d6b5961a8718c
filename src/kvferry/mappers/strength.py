"""How far to recolour each layer, chosen by what attention then computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import Recolouring, Statistics, fit_affine
from kvferry.mappers.behaviour import (
    Reading,
    mapped_after_prefix,
    mapped_layers,
    query_rows,
)
from kvferry.mappers.correction import columns_of, group_of, with_weights
from kvferry.mappers.layout import COMPONENTS, Component, FeatureBlock
from kvferry.mappers.observation import Observation
from kvferry.stats.recolour import Metric

Strength = float | Literal["auto"]

GRID = (0.0, 0.25, 0.5, 0.75, 1.0)


def strength_rules(**strengths: Strength) -> dict[str, bool]:
    """What each strength must be, and whether it is."""
    return {
        f"{name} must be auto or lie in 0..1": value == "auto" or 0 <= value <= 1
        for name, value in strengths.items()
    }


def fit_recoloured(
    statistics: Statistics,
    reads: Mapping[Component, Sequence[tuple[FeatureBlock, ...]]],
    *,
    ridge: float,
    keys: Strength,
    values: Strength,
    metric: Metric,
    native_layers: int,
    reading: Reading,
    planted_sinks: int = 0,
) -> AffineMapper:
    """Ridge and recolouring, each layer at a given strength or at the one that serves it best.

    Args:
        reads, native_layers: see :func:`fit_affine`.
        ridge: penalty as a share of the inputs' mean variance.
        keys, values: strength from 0 to 1; "auto" takes it from `GRID` on held-out texts.
        reading: how many of them, and how many queries each.
        planted_sinks: of the mapper, see :class:`AffineMapper`.
    """

    def fit(recolouring: Recolouring) -> AffineMapper:
        return fit_affine(
            statistics,
            reads,
            relative_ridge=ridge,
            recolouring=recolouring,
            native_layers=native_layers,
            planted_sinks=planted_sinks,
        )

    if keys != "auto" and values != "auto":
        return fit(Recolouring(keys, values, metric))
    plain, full = fit(Recolouring()), fit(Recolouring(1.0, 1.0, metric))
    chosen = choose_strengths(
        plain,
        full,
        reading.judging(statistics),
        keys=GRID if keys == "auto" else (keys,),
        values=GRID if values == "auto" else (values,),
        rows=reading.rows,
        seed=reading.seed,
    )
    report = {
        f"mean_recolour_{component}": sum(by_layer.values()) / max(len(by_layer), 1)
        for component, by_layer in chosen.items()
    }
    return replace(blend(plain, full, chosen), report=report)


def choose_strengths(
    plain: AffineMapper,
    full: AffineMapper,
    texts: Iterable[Observation],
    *,
    keys: Sequence[float],
    values: Sequence[float],
    rows: int,
    seed: int = 0,
) -> dict[Component, dict[int, float]]:
    """By component and mapped layer, the strength at which attention outputs point most natively.

    The mean cosine of native and mapped outputs, over query heads and rows, is compared on every
    pair of a key strength and a value strength; the weaker one wins a tie.

    Args:
        plain, full: mappers of the same inputs and means, without and with all of a change.
        keys, values: strengths to choose from, ascending.
    """
    layers = mapped_layers(plain)
    score = {layer: torch.zeros(len(keys), len(values)) for layer in layers}
    share = torch.tensor(values)
    for seen, chosen in query_rows(texts, rows, seed):
        ends = mapped_after_prefix(plain, seen), mapped_after_prefix(full, seen)
        for layer in layers:
            ask, native = seen.queries[layer], seen.target
            wanted = ask.attend(chosen, native.keys[layer][0], native.values[layer][0])
            first, last = (end.keys[layer][0] for end in ends)
            for place, strength in enumerate(keys):
                content = torch.lerp(first, last, strength)
                weak, strong = (ask.attend(chosen, content, e.values[layer][0]) for e in ends)
                outputs = torch.lerp(
                    weak[None], strong[None], share.to(weak.device)[:, None, None, None]
                )
                cosine = torch.cosine_similarity(outputs, wanted[None], dim=-1)
                score[layer][place] += cosine.mean(dim=(1, 2)).cpu()
    best = {layer: divmod(int(table.argmax()), len(values)) for layer, table in score.items()}
    return {
        "keys": {layer: keys[k] for layer, (k, _) in best.items()},
        "values": {layer: values[v] for layer, (_, v) in best.items()},
    }


def blend(
    plain: AffineMapper, full: AffineMapper, strengths: Mapping[Component, Mapping[int, float]]
) -> AffineMapper:
    """Weights between those of ``plain`` (0) and ``full`` (1), layer by layer."""
    out = plain
    for component in COMPONENTS:
        weights: dict[int, Tensor] = {}
        for layer, strength in strengths[component].items():
            ends = [group_of(mapper, component, layer) for mapper in (plain, full)]
            weak, strong = (g.weight[:, columns_of(plain, g, layer)] for g in ends)
            weights[layer] = torch.lerp(weak, strong, strength)
        out = with_weights(out, component, weights)
    return out
