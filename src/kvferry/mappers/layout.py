"""Which features a mapper reads, as an ordered list of blocks: the columns of every Gram."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from kvferry.errors import InputError
from kvferry.lm.geometry import KVGeometry

Component = Literal["keys", "values"]
COMPONENTS: tuple[Component, Component] = ("keys", "values")
BlockKind = Literal["source", "code", "anchor", "native"]
ALL_HEADS = -1


@dataclass(frozen=True, order=True)
class FeatureBlock:
    """One group of adjacent input features.

    Kinds:
        source: content of source layer ``index`` at the aligned token.
        code: the low-rank code of all source layers, at the aligned token plus ``index``.
        anchor: layer-0 content of the target for the token ``-index`` places back.
        native: exact content of target layer ``index``, from a native prefix.

    Of a source layer, one ``head`` alone may be read; the other kinds are read whole.
    """

    kind: BlockKind
    component: Component
    index: int
    width: int
    head: int = ALL_HEADS

    def of_head(self, head: int, heads: int) -> FeatureBlock:
        """One of the ``heads`` heads of a source block; any other block as it is."""
        if self.kind != "source":
            return self
        return replace(self, head=head, width=self.width // heads)


@dataclass(frozen=True)
class FeatureLayout:
    """The input features of one component's map, in column order.

    Args:
        reads: source tokens side by side in each source block; the heads of one follow each other.
    """

    blocks: tuple[FeatureBlock, ...]
    reads: int = 1

    @property
    def width(self) -> int:
        """Number of input features."""
        return sum(block.width for block in self.blocks)

    @cached_property
    def slices(self) -> dict[FeatureBlock, slice]:
        """Columns of each block."""
        found, start = {}, 0
        for block in self.blocks:
            found[block] = slice(start, start + block.width)
            start += block.width
        return found

    def columns(self, blocks: Iterable[FeatureBlock]) -> Int64[Tensor, " columns"]:
        """Column numbers of ``blocks``, or of their heads, in their given order.

        Raises:
            InputError: a block that this layout was not calibrated with.
        """
        wanted = list(blocks)
        missing = [block for block in wanted if self.whole(block) not in self.slices]
        if missing:
            raise InputError(
                "The calibration statistics lack features that this mapper reads.",
                found=f"{len(missing)} missing blocks, first {missing[0]}",
                fix="calibrate again with a larger anchor_context or native_layers",
            )
        return torch.cat(
            [self._columns(block) for block in wanted] or [torch.empty(0, dtype=torch.long)]
        )

    def whole(self, block: FeatureBlock) -> FeatureBlock:
        """The block of all heads that ``block`` is part of."""
        if block.head == ALL_HEADS:
            return block
        return self._sources.get((block.component, block.index), block)

    @cached_property
    def _sources(self) -> dict[tuple[Component, int], FeatureBlock]:
        return {(b.component, b.index): b for b in self.of_kind("source")}

    def _columns(self, block: FeatureBlock) -> Int64[Tensor, " columns"]:
        place = self.slices[self.whole(block)]
        columns = torch.arange(place.start, place.stop)
        if block.head == ALL_HEADS:
            return columns
        by_head = columns.view(self.reads, -1, block.width // self.reads)
        return by_head[:, block.head].flatten()

    def of_kind(self, *kinds: BlockKind) -> tuple[FeatureBlock, ...]:
        """The blocks of some kinds, in order."""
        return tuple(block for block in self.blocks if block.kind in kinds)


def component_layout(
    component: Component,
    source: KVGeometry,
    target: KVGeometry,
    *,
    code_width: int,
    anchor_context: int,
    native_layers: int,
    reads: int = 1,
) -> FeatureLayout:
    """Everything a closed-form map of ``component`` may read, one all-layer Gram's worth.

    Args:
        code_width: features of the source code, of which the other component's at the token itself
            and both components' at its neighbours are read; 0 leaves them out.
        anchor_context: predecessors whose layer-0 content is read besides the token's own;
            -1 leaves anchors out.
        native_layers: target layers 1 to ``native_layers - 1`` that are read exactly.
        reads: source tokens put side by side for each target token.
    """
    blocks = [
        FeatureBlock("source", component, layer, width * reads)
        for layer, width in enumerate(source.widths)
    ]
    if code_width:
        other: Component = "values" if component == "keys" else "keys"
        blocks.append(FeatureBlock("code", other, 0, code_width))
        blocks += [
            FeatureBlock("code", c, step, code_width) for step in (-1, 1) for c in COMPONENTS
        ]
    blocks += [
        FeatureBlock("anchor", c, back, target.layers[0].width)
        for back in range(anchor_context + 1)
        for c in COMPONENTS
    ]
    blocks += [
        FeatureBlock("native", c, layer, target.layers[layer].width)
        for layer in range(1, native_layers)
        for c in COMPONENTS
    ]
    return FeatureLayout(tuple(blocks), reads)


def source_layers_read(blocks: Sequence[FeatureBlock], depth: int) -> dict[Component, list[int]]:
    """Source layers whose content must be stripped and gathered, by component."""
    reads: dict[Component, set[int]] = {"keys": set(), "values": set()}
    for block in blocks:
        if block.kind == "source":
            reads[block.component].add(block.index)
        elif block.kind == "code":
            reads[block.component].update(range(depth))
    return {component: sorted(layers) for component, layers in reads.items()}
