"""HeteroFold: structural alignment, a map to the receiver's covariance, then to its behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvferry.mappers.anchors import NativeLayers
from kvferry.mappers.base import require
from kvferry.mappers.behaviour import Reading
from kvferry.mappers.behavioural_fit import Pointwise
from kvferry.mappers.recoloured import RecolouredMethod
from kvferry.mappers.selection import LayerCount, LayerSelector, Selector
from kvferry.mappers.strength import Strength
from kvferry.stats.recolour import Metric


@dataclass(frozen=True)
class HeteroFold(RecolouredMethod):
    """Source layers at the same relative depth, ridge, recolouring, behavioural calibration.

    All heads are mapped to all heads, and every step folds into one affine map a layer.

    Args:
        window: source layers that each target layer reads (the paper: 3), or "all".
        selector: which ones, see :class:`LayerSelector`; by relative depth as published.
        ridge: penalty as a share of the inputs' mean variance, or "auto", see :func:`fit_chosen`.
        recolour_metric: "whitened" as published, "raw" for least error at that covariance.
        recolour_keys, recolour_values: strength; 1 restores the receiver's covariance, "auto"
            takes for each layer what brings held-out attention outputs nearest to native ones.
        behavioural_keys: remix the keys of each layer until attention goes where it goes natively.
        steps, learning_rate, recall: of that, see :func:`fit_attention`.
        key_gain: at last, distance of keys from their mean, times what was fitted; 1 as published.
        behavioural_values: correct values so that attention outputs come out right.
        pointwise: weight of the values themselves, see :class:`BehaviouralCalibration`.
        directions: leading directions of their inputs that corrections of values read.
        passages, held_out, rows, copies, seed: see :class:`Reading`.
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`; off as published.
        planted_sinks: see :class:`AffineMapper`; off as published.

    Source: arXiv 2609.32259; it names the behavioural calibration, how it is done here is ours.
    """

    window: LayerCount = 3
    selector: Selector = "relative_depth"
    ridge: float | Literal["auto"] = 1e-3
    recolour_metric: Metric = "whitened"
    recolour_keys: Strength = 1.0
    recolour_values: Strength = 1.0
    behavioural_keys: bool = False
    steps: int = 300
    learning_rate: float = 2e-3
    recall: float = 0.0
    key_gain: float = 1.0
    behavioural_values: bool = False
    pointwise: Pointwise = "auto"
    directions: int = 256
    passages: int = 24
    held_out: int = 8
    rows: int = 64
    copies: bool = False
    seed: int = 0
    anchor_context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    pretty_name: ClassVar[str] = "HeteroFold"
    reference_url: ClassVar[str] = "https://arxiv.org/abs/2609.32259"

    def __post_init__(self) -> None:
        require({**self._selector.rules("window"), **self._rules()})

    @property
    def _selector(self) -> LayerSelector:
        return LayerSelector(self.selector, self.window)

    @property
    def _reading(self) -> Reading:
        return Reading(self.passages, self.held_out, self.rows, self.seed, self.copies)
