"""The contract of a mapper method, and the fit that every closed-form method shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.align.layers import LayerSupport
from kvferry.errors import ConfigurationError, SettingsError
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.affine import AffineGroup, AffineMapper
from kvferry.mappers.anchors import AnchorReads
from kvferry.mappers.inputs import SourceCode
from kvferry.mappers.layout import Component, FeatureBlock, FeatureLayout
from kvferry.mappers.learning import Aim, Learn, Schedule
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.observation import Observation, Replay, ReplaySplit, Watch, unwatched
from kvferry.mappers.refined import RefinedMapper
from kvferry.stats.moments import Moments
from kvferry.stats.recolour import Metric, recolour
from kvferry.stats.ridge import RidgeFactor


@dataclass(frozen=True)
class Statistics:
    """What calibration leaves behind: one all-layer Gram a component, and how to read it.

    Args:
        source, target: geometries of the two models.
        layouts: the input columns of each component's moments; output columns are the target's
            layers in order.
        moments: by component.
        code: the source code that "code" columns were made with.
        replay: reads calibration texts again, with the target's queries; None where there is none.
        watch: shows how far long fits are.
        learn: trains networks; None where there is no trainer.
        load: a mapper of this pair, by the name of its artefact; None where models are not at hand.
    """

    source: KVGeometry
    target: KVGeometry
    layouts: dict[Component, FeatureLayout]
    moments: dict[Component, Moments]
    code: SourceCode | None
    replay: Replay | None = None
    watch: Watch = unwatched
    learn: Learn | None = None
    load: Callable[[str], Mapper] | None = None

    def variance(self, component: Component, layer: int) -> float:
        """Of one feature of target ``layer``, mean over its features, over the calibration rows."""
        return float(self.head_variance(component, layer).mean())

    def head_variance(self, component: Component, layer: int) -> Float[Tensor, " heads"]:
        """As :meth:`variance`, by KV head."""
        features = self.moments[component].c_yy[layer].diagonal()
        return features.view(self.target.layers[layer].kv_heads, -1).mean(dim=1).float()

    def learned(self, mapper: RefinedMapper, aim: Aim) -> RefinedMapper:
        """The mapper with its network trained.

        Raises:
            ConfigurationError: these statistics came without a trainer.
        """
        if self.learn is None:
            raise ConfigurationError(
                "This method learns by gradient, and there is no trainer at hand.",
                fix="fit it through a run, or give Statistics a TraceLearner",
            )
        return self.learn(mapper, aim)

    def saved(self, artefact: str) -> Mapper:
        """The mapper that was saved as ``artefact``, for this pair.

        Raises:
            ArtefactError: damaged, or a mapper of another pair.
            ConfigurationError: these statistics came without their models.
        """
        if self.load is None:
            raise ConfigurationError(
                "A saved mapper belongs to two models, and they are not at hand.",
                fix="fit through a run, or give Statistics a way to load mappers",
            )
        return self.load(artefact)

    def observe(
        self, passages: int, split: ReplaySplit = "calibration", *, copies: bool = False
    ) -> Iterator[Observation]:
        """Observations for a method that weighs attention.

        Raises:
            ConfigurationError: these statistics came without their texts.
        """
        if self.replay is None:
            raise ConfigurationError(
                "This method looks at attention, and the calibration text is not at hand.",
                fix="fit it through a run, or give Statistics a replay",
            )
        return self.replay(passages, split, copies=copies)

    def has(self, split: ReplaySplit) -> bool:
        """Whether ``split`` has texts of its own to read again."""
        return self.replay is not None and self.replay.count(split) > 0

    def held_out(self, *wanted: ReplaySplit) -> ReplaySplit:
        """The first of the ``wanted`` splits that has texts of its own.

        Raises:
            ConfigurationError: none has; settings are never chosen on texts that were fitted on.
        """
        found = [split for split in wanted if self.has(split)]
        if not found:
            raise ConfigurationError(
                "This method chooses settings on text that it is not fitted on: there is none.",
                expected=f"texts for {' or '.join(wanted)}",
                fix="lower data.calibration_passages, add passages to data.out_of_domain beyond "
                "eval.out_of_domain_contexts, or set the values yourself",
            )
        return found[0]


@dataclass(frozen=True)
class Recolouring:
    """How far predictions get the covariance of the target back.

    Args:
        keys, values: strength from 0 (ridge) to 1 (the target's covariance).
        metric: "raw" for least error at that covariance, "whitened" as in HeteroFold.
    """

    keys: float = 0.0
    values: float = 0.0
    metric: Metric = "raw"

    def strength(self, component: Component) -> float:
        """Strength for ``component``."""
        return self.keys if component == "keys" else self.values


def require(checks: Mapping[str, bool]) -> None:
    """Refuse a method's settings.

    Args:
        checks: what each setting must be, and whether it is.

    Raises:
        SettingsError: names all that are not.
    """
    broken = [rule for rule, kept in checks.items() if not kept]
    if broken:
        raise SettingsError(broken, fix="correct them; conf/mapper says what each one trades")


def positive_or_all(count: int | Literal["all"]) -> bool:
    """Whether ``count`` is "all" or at least one."""
    return count == "all" or count >= 1


class MapperMethod(ABC):
    """A way to fit a mapper. Its dataclass fields are its hyper-parameters."""

    pretty_name: ClassVar[str]
    reference_url: ClassVar[str]
    needs_moments: ClassVar[bool] = True

    def native_depth(self, target: KVGeometry) -> int:
        """Target layers that its mapper takes exactly: calibration keeps them for maps to read."""
        return 0

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """How its network is trained, one after the other; empty where nothing learns."""
        return ()

    @abstractmethod
    def fit(self, statistics: Statistics) -> Mapper:
        """Fit to the statistics of a calibration text."""


def layer_reads(
    statistics: Statistics, component: Component, support: LayerSupport, anchors: AnchorReads
) -> list[tuple[FeatureBlock, ...]]:
    """By target layer, the source blocks of its supported layers and those of ``anchors``."""
    layout = statistics.layouts[component]
    blocks = layout.of_kind("source")
    return [
        (*(blocks[source] for source in layers), *anchors.blocks(layout, statistics.target, layer))
        for layer, layers in enumerate(support.layers)
    ]


def fit_affine(
    statistics: Statistics,
    reads: Mapping[Component, Sequence[tuple[FeatureBlock, ...]]],
    *,
    relative_ridge: float | None,
    absolute_ridge: float | None = None,
    recolouring: Recolouring,
    native_layers: int = 0,
    planted_sinks: int = 0,
) -> AffineMapper:
    """Ridge, then recolouring, for every target layer from its own blocks.

    Args:
        reads: by component, the blocks of each target layer, native ones included (ignored);
            see :func:`layer_reads`.
        relative_ridge, absolute_ridge: penalty as a share of the inputs' mean variance, or as is.
        native_layers, planted_sinks: of the mapper.

    Layers with the same blocks share one factorisation; groups are also split by window, so that
    windowed layers can be mapped over fewer tokens.
    """
    groups: list[AffineGroup] = []
    for component, by_layer in reads.items():
        layout, moments = statistics.layouts[component], statistics.moments[component]
        for blocks in dict.fromkeys(by_layer[native_layers:]):
            layers = [i for i, b in enumerate(by_layer) if b == blocks and i >= native_layers]
            part = moments.select(layout.columns(blocks), output_columns(statistics.target, layers))
            factor = RidgeFactor.of(part, relative=relative_ridge, absolute=absolute_ridge)
            weight = factor.solve(part.c_xy)
            del factor
            strength = recolouring.strength(component)
            if strength > 0:
                weight = _recoloured(part, weight, recolouring.metric, strength)
            groups += split_by_window(statistics.target, component, layers, blocks, part, weight)
    return AffineMapper(
        source=statistics.source,
        target=statistics.target,
        groups=tuple(groups),
        code=statistics.code if _reads_code(groups) else None,
        native_layers=native_layers,
        planted_sinks=planted_sinks,
    )


def _recoloured(
    moments: Moments, weight: Float[Tensor, "p q"], metric: Metric, strength: float
) -> Float[Tensor, "p q"]:
    predicted = moments.scatter_xx @ weight / moments.weight
    cross = moments.c_xy
    out = torch.empty_like(weight)
    for block, c_yy in zip(moments.y_blocks, moments.c_yy, strict=True):
        w = weight[:, block]
        turn = recolour(
            w.T @ predicted[:, block], w.T @ cross[:, block], c_yy, metric=metric, strength=strength
        )
        out[:, block] = w @ turn
    return out


def split_by_window(
    target: KVGeometry,
    component: Component,
    layers: Sequence[int],
    blocks: tuple[FeatureBlock, ...],
    moments: Moments,
    weight: Float[Tensor, "p q"],
) -> list[AffineGroup]:
    """Groups of ``layers``, the blocks of y in ``moments``, apart where their windows differ."""
    groups = []
    mean_x, mean_y = moments.mean_x, moments.mean_y
    for window in dict.fromkeys(target.layers[layer].window for layer in layers):
        same = [place for place, i in enumerate(layers) if target.layers[i].window == window]
        columns = torch.cat(
            [torch.arange(moments.y_blocks[p].start, moments.y_blocks[p].stop) for p in same]
        )
        groups.append(
            AffineGroup(
                component=component,
                target_layers=tuple(layers[place] for place in same),
                blocks=blocks,
                weight=weight[:, columns].float().contiguous(),
                input_mean=mean_x.float(),
                output_mean=mean_y[columns].float(),
            )
        )
    return groups


def output_columns(target: KVGeometry, layers: Sequence[int]) -> Int64[Tensor, " columns"]:
    """Columns of some target layers among all of them side by side."""
    starts = [0, *torch.tensor(target.widths).cumsum(0).tolist()]
    return torch.cat([torch.arange(starts[layer], starts[layer + 1]) for layer in layers])


def _reads_code(groups: Sequence[AffineGroup]) -> bool:
    return any(block.kind == "code" for group in groups for block in group.blocks)
