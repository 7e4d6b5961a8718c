"""Anchored mapping, ours: what the target knows for free makes a mapped cache recall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.mappers.affine import AffineMapper
from kvferry.mappers.base import (
    MapperMethod,
    Recolouring,
    Statistics,
    fit_affine,
    positive_or_all,
    require,
    source_reads,
)
from kvferry.mappers.full_head_ridge import select_layers
from kvferry.mappers.layout import COMPONENTS, FeatureBlock
from kvferry.stats.recolour import Metric

AUTO_NATIVE_SHARE = 0.1


@dataclass(frozen=True)
class Anchored(MapperMethod):
    """Ridge from source layers, neighbouring source tokens and the target's own free anchors.

    To copy, a key must say which token stood before it. That cannot be read off one source token,
    but layer-0 keys and values of a token and its predecessors say it, and they are functions of
    the token ids: no forward pass is run for them.

    Args:
        source_layers: source layers by single-source R², or "all".
        anchor_context: predecessors whose layer-0 content is read; -1 reads no anchors.
        neighbours: read the low-rank code of the source tokens before and after, and of the other
            component at the token itself.
        native_layers: target layers taken exactly; layer 0 is free, each further one is run by the
            target. "auto" takes a tenth of its depth.
        ridge: penalty as a share of the inputs' mean variance.
        recolour_metric, recolour_keys, recolour_values: see :class:`HeteroFold`.
    """

    source_layers: int | Literal["all"] = "all"
    anchor_context: int = 3
    neighbours: bool = True
    native_layers: int | Literal["auto"] = "auto"
    ridge: float = 1e-3
    recolour_metric: Metric = "raw"
    recolour_keys: float = 0.8
    recolour_values: float = 0.0

    pretty_name: ClassVar[str] = "Anchored"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"

    def __post_init__(self) -> None:
        require(
            {
                "source_layers must be all or at least 1": positive_or_all(self.source_layers),
                "anchor_context must be at least -1": self.anchor_context >= -1,
                "native_layers must be auto or at least 0": self.native_layers == "auto"
                or self.native_layers >= 0,
                "ridge must not be negative": self.ridge >= 0,
                "recolour_keys must lie in 0..1": 0 <= self.recolour_keys <= 1,
                "recolour_values must lie in 0..1": 0 <= self.recolour_values <= 1,
            }
        )

    def fit(self, statistics: Statistics) -> AffineMapper:
        """One factorisation a component when all source layers are read."""
        support = select_layers(statistics, self.source_layers)
        native = self.native_depth(len(statistics.target.layers))
        reads = {}
        for component in COMPONENTS:
            extra = tuple(b for b in statistics.layouts[component].blocks if self._reads(b, native))
            reads[component] = [
                (*blocks, *extra) for blocks in source_reads(statistics, component, support)
            ]
        return fit_affine(
            statistics,
            reads,
            relative_ridge=self.ridge,
            recolouring=Recolouring(self.recolour_keys, self.recolour_values, self.recolour_metric),
            native_layers=native,
        )

    def native_depth(self, layers: int) -> int:
        """How many of a target's layers are exact."""
        if self.native_layers != "auto":
            return self.native_layers
        return max(1, int(AUTO_NATIVE_SHARE * layers))

    def _reads(self, block: FeatureBlock, native: int) -> bool:
        match block.kind:
            case "source":
                return False
            case "code":
                return self.neighbours
            case "anchor":
                return block.index <= self.anchor_context
            case "native":
                return block.index < native
