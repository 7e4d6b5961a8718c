"""Which source layers each target layer reads: one choice, offered to every method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.align.layers import (
    LayerSupport,
    all_layers,
    relative_depth,
    top_layers_by_r2,
    windows_around,
)
from kvferry.align.matching import monotone_assignment, sinkhorn_coupling
from kvferry.mappers.base import Statistics, positive_or_all
from kvferry.mappers.layout import COMPONENTS
from kvferry.stats.cka import linear_cka
from kvferry.stats.moments import Moments
from kvferry.stats.ridge import single_source_r2

Selector = Literal["r2", "relative_depth", "cka", "sinkhorn"]
LayerCount = int | Literal["all"]
LayerScore = Callable[[Moments, Sequence[slice]], Float[Tensor, "targets sources"]]


@dataclass(frozen=True)
class LayerSelector:
    """How the source layers of each target layer are found.

    Selectors:
        r2: the layers that alone explain it best, each for itself.
        relative_depth: neighbours around the same relative depth; looks at no data.
        cka: neighbours around the layer that a monotone assignment by CKA gives it.
        sinkhorn: those of the largest share in an optimal transport by R², so that no source layer
            is everyone's choice.

    Args:
        count: source layers a target layer reads, or "all", which leaves nothing to select.
    """

    selector: Selector = "r2"
    count: LayerCount = "all"

    @classmethod
    def starting(cls, selector: Selector, count: LayerCount | Literal["auto"]) -> LayerSelector:
        """The selector of a count that may be "auto": which is best only fits with several tell."""
        return cls(selector, "all" if count == "auto" else count)

    def rules(self, field: str = "source_layers") -> dict[str, bool]:
        """What settings must be, and whether they are; ``field`` is the count's public name."""
        known = get_args(Selector)
        return {
            f"{field} must be all or at least 1": positive_or_all(self.count),
            f"selector must be one of {', '.join(known)}": self.selector in known,
        }

    def support(self, statistics: Statistics) -> LayerSupport:
        """Choose by the calibration moments, keys and values together."""
        depth, targets = len(statistics.source.layers), len(statistics.target.layers)
        if self.count == "all" or self.count >= depth:
            return all_layers(depth, targets)
        match self.selector:
            case "r2":
                return top_layers_by_r2(layer_scores(statistics, single_source_r2), self.count)
            case "relative_depth":
                return relative_depth(depth, targets, self.count)
            case "cka":
                path = monotone_assignment(layer_scores(statistics, linear_cka))
                return windows_around(path, depth, self.count)
            case "sinkhorn":
                coupling = sinkhorn_coupling(layer_scores(statistics, single_source_r2))
                return top_layers_by_r2(coupling, self.count)


def layer_scores(statistics: Statistics, score: LayerScore) -> Float[Tensor, "targets sources"]:
    """``score`` of each source layer for each target layer, mean of keys and values.

    A further selector is a further score: any function of moments and of the columns of each
    source layer.
    """
    scores = []
    for component in COMPONENTS:
        layout = statistics.layouts[component]
        sources = [layout.slices[block] for block in layout.of_kind("source")]
        scores.append(score(statistics.moments[component], sources))
    return torch.stack(scores).mean(dim=0)
