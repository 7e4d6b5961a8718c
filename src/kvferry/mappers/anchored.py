"""Anchored mapping, ours: what the target knows for free makes a mapped cache recall."""

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
class Anchored(RecolouredMethod):
    """Ridge from source layers, neighbouring source tokens and the target's own free anchors.

    To copy, a key must say which token stood before it. That cannot be read off one source token,
    but layer-0 keys and values of a token and its predecessors say it, and they are functions of
    the token ids: no forward pass is run for them.

    Args:
        source_layers: how many each target layer reads, "all", or "auto", see :func:`fit_chosen`.
        selector: by what they are chosen, see :class:`LayerSelector`.
        anchor_context, neighbours, native_layers: see :class:`AnchorReads`.
        planted_sinks: tokens of each windowed layer that give way to the target's own prefix, once
            that has left the window. Attention that has no use for the context then rests there, as
            natively it rests on tokens that the target turns into sinks, which nothing in the
            source foretells.
        ridge: penalty as a share of the inputs' mean variance, or "auto".
        recolour_metric, recolour_keys, recolour_values: see :class:`HeteroFold`.
        behavioural_keys, steps, learning_rate, recall, behavioural_values, pointwise, directions:
            see :class:`BehaviouralCalibration`. Keys are remixed on texts with something to recall,
            for a ridge map is fitted to be near its keys, not to have them found.
        key_gain: at last, distance of keys from their mean, times what was fitted: a mapped key is
            uncertain, so attention over it spreads; a little sharper recalls more, at some KL.
        passages, held_out, rows, copies, seed: of its reading, see :class:`Reading`.
    """

    source_layers: LayerCount | Literal["auto"] = "all"
    selector: Selector = "r2"
    anchor_context: int = 3
    neighbours: bool = True
    native_layers: NativeLayers = "auto"
    planted_sinks: int = 1
    ridge: float | Literal["auto"] = 1e-3
    recolour_metric: Metric = "raw"
    recolour_keys: Strength = 0.8
    recolour_values: Strength = 0.0
    behavioural_keys: bool = True
    steps: int = 300
    learning_rate: float = 2e-3
    recall: float = 2.5
    key_gain: float = 1.0
    behavioural_values: bool = False
    pointwise: Pointwise = "auto"
    directions: int = 256
    passages: int = 48
    held_out: int = 8
    rows: int = 256
    copies: bool = True
    seed: int = 0

    pretty_name: ClassVar[str] = "Anchored"
    reference_url: ClassVar[str] = "https://github.com/kvferry/kvferry"

    def __post_init__(self) -> None:
        require({**self._selector.rules("source_layers"), **self._rules()})

    @property
    def _selector(self) -> LayerSelector:
        return LayerSelector.starting(self.selector, self.source_layers)

    @property
    def _reading(self) -> Reading:
        return Reading(self.passages, self.held_out, self.rows, self.seed, self.copies)
