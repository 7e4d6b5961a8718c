"""The one form that every closed-form method folds to, and the hot path of a hand-off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.lm.content import ContentKV
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.head_products import head_batches, head_rows
from kvferry.mappers.inputs import MapperInputs, SourceCode, longest_panel, token_panels
from kvferry.mappers.layout import (
    ALL_HEADS,
    COMPONENTS,
    Component,
    FeatureBlock,
    source_layers_read,
)

FITTED_ROWS = "fitted_rows"
"""In a mapper's report: target tokens it was fitted on, where they are not all that calibrate."""


@dataclass(frozen=True)
class AffineGroup:
    """Target layers that read the same features and attend over the same window.

    ``y = (x - input_mean) @ weight + output_mean``: centred inputs keep low-precision products
    accurate.

    Args:
        component: keys or values.
        target_layers: whose features lie side by side in the output.
        blocks: the input features, in column order.
        weight: ``[inputs, outputs]``.
        input_mean: equal in all groups of the same blocks.
        head: the one target head that this is for, of every layer; all heads by default.
    """

    component: Component
    target_layers: tuple[int, ...]
    blocks: tuple[FeatureBlock, ...]
    weight: Float[Tensor, "inputs outputs"]
    input_mean: Float[Tensor, " inputs"]
    output_mean: Float[Tensor, " outputs"]
    head: int = ALL_HEADS


@dataclass(frozen=True)
class AffineMapper:
    """Maps source content and anchors to target content by one matrix product a group.

    Args:
        source, target: geometries of the two models.
        groups: the affine maps; together they cover every target layer that is not native.
        code: projections behind "code" blocks, or None.
        native_layers: target layers ``0 .. native_layers - 1`` are the target's own: layer 0 from
            the anchors, exact; the others from a native prefix run in ``product_dtype``.
        planted_sinks: tokens of each windowed layer that the target's own prefix takes the place of
            once it has left the window; see :func:`sink_places`.
        product_dtype: number format of the matrix products; sums stay in fp32 registers.
        report: what the fit chose and measured, by name, for manifest and log.
    """

    source: KVGeometry
    target: KVGeometry
    groups: tuple[AffineGroup, ...]
    code: SourceCode | None = None
    native_layers: int = 0
    planted_sinks: int = 0
    product_dtype: torch.dtype = torch.float32
    report: Mapping[str, float] = field(default_factory=dict, compare=False)

    def with_precision(self, dtype: torch.dtype) -> AffineMapper:
        """The same mapper with weights and products in ``dtype``."""
        groups = tuple(replace(g, weight=g.weight.to(dtype)) for g in self.groups)
        code = None if self.code is None else self.code.to(dtype)
        return replace(self, groups=groups, code=code, product_dtype=dtype)

    @property
    def affine(self) -> AffineMapper:
        """Itself."""
        return self

    @property
    def refiner(self) -> None:
        """None: there is no network behind it."""

    @property
    def blocks(self) -> tuple[FeatureBlock, ...]:
        """Every input block that some group reads."""
        return tuple(sorted({block for group in self.groups for block in group.blocks}))

    @property
    def source_layers(self) -> dict[Component, list[int]]:
        """Source layers that must be stripped, by component: nothing else is touched."""
        return source_layers_read(self.blocks, len(self.source.layers))

    @property
    def parameters(self) -> int:
        """Coefficients of the maps and of the code, means included."""
        count = sum(
            g.weight.numel() + g.input_mean.numel() + g.output_mean.numel() for g in self.groups
        )
        code = self.code.projection.values() if self.code is not None else ()
        return count + sum(projection.numel() for projection in code)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the coefficients in their present number formats."""
        tensors = [t for g in self.groups for t in (g.weight, g.input_mean, g.output_mean)]
        if self.code is not None:
            tensors += list(self.code.projection.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    def first_tokens(self, tokens: int) -> list[int]:
        """By target layer, the first of ``tokens`` that a windowed layer still attends to."""
        return [
            0 if layer.window is None else max(0, tokens - (layer.window - 1))
            for layer in self.target.layers
        ]

    def native_tokens(self, tokens: int) -> int:
        """How many of the last of ``tokens`` the target must run for its native prefix.

        Enough that each native layer is exact wherever it is read: windowed layers need no more
        than their windows, one behind the other.
        """
        first = self.first_tokens(tokens)
        wanted = [tokens - first[layer] for layer in range(self.native_layers)]
        for group in self.groups:
            rows = tokens - min(first[layer] for layer in group.target_layers)
            for block in group.blocks:
                if block.kind == "native":
                    wanted[block.index] = max(wanted[block.index], rows)
        needed = 0
        for layer in range(self.native_layers - 1, 0, -1):
            window = self.target.layers[layer - 1].window
            needed = tokens if window is None else max(needed, wanted[layer]) + window - 1
        return min(needed, tokens)

    def planted_places(self, layer: int, tokens: int) -> list[int]:
        """Among the tokens that a mapped layer holds of ``tokens``, those that give way to the
        target's prefix: none while it is still in view, or where the layer is native."""
        first = self.first_tokens(tokens)[layer]
        if not first or layer < self.native_layers:
            return []
        return sink_places(self.planted_sinks, tokens - first)

    def reading(self, inputs: MapperInputs) -> MapperInputs:
        """The same inputs, seen through this mapper's source code; what is coded is kept there."""
        return inputs if inputs.code is self.code else replace(inputs, code=self.code, _codes={})

    def map(self, inputs: MapperInputs, first_tokens: Sequence[int]) -> ContentKV:
        """Target content of one context.

        Args:
            inputs: source content, alignment and anchors of one row.
            first_tokens: by target layer, the first token that the layer still needs; windowed
                layers come out shorter.
        """
        inputs = self.reading(inputs)
        out: dict[Component, dict[int, Tensor]] = {"keys": {}, "values": {}}
        for _, same_inputs in groupby(self._ordered(), key=lambda g: (g.component, g.blocks)):
            for group, product in self._products(inputs, list(same_inputs), first_tokens):
                out[group.component].update(self._by_layer(group, product))
        for batch in head_batches(self.groups, first_tokens):
            batch.add_to(out, inputs, self.target, self.product_dtype)
        for layer in range(self.native_layers):
            exact = inputs.anchors if layer == 0 else inputs.native
            assert exact is not None, "the hand-off must run the native prefix of this mapper"
            for component in COMPONENTS:
                last = getattr(exact, component)[layer]
                missing = inputs.tokens - last.shape[2]
                out[component][layer] = last[:, :, first_tokens[layer] - missing :]
        return ContentKV(
            keys=out["keys"],
            values=out["values"],
            positions=inputs.anchors.positions,
            mask=inputs.anchors.mask,
        )

    def mean_content(self, like: ContentKV) -> ContentKV:
        """One mean at every token of ``like``: a control that knows no token.

        Mapped layers take the calibration's mean, native ones that of ``like`` itself.
        """
        out: dict[Component, dict[int, Tensor]] = {
            component: {
                layer: x.mean(dim=2, keepdim=True).expand_as(x).clone()
                for layer, x in getattr(like, component).items()
            }
            for component in COMPONENTS
        }
        for group in self.groups:
            place = out[group.component]
            if group.head != ALL_HEADS:
                for layer, row in head_rows(group, group.output_mean[None]).items():
                    place[layer][:, group.head] = row
                continue
            for layer, row in self._by_layer(group, group.output_mean[None]).items():
                place[layer] = row.expand_as(place[layer]).clone()
        return replace(like, keys=out["keys"], values=out["values"])

    def _ordered(self) -> list[AffineGroup]:
        whole = (group for group in self.groups if group.head == ALL_HEADS)
        return sorted(whole, key=lambda g: (g.component, g.blocks))

    def _products(
        self, inputs: MapperInputs, groups: Sequence[AffineGroup], first_tokens: Sequence[int]
    ) -> Iterator[tuple[AffineGroup, Float[Tensor, "tokens outputs"]]]:
        """Build each panel of features once for all groups that read it."""
        starts = [min(first_tokens[layer] for layer in g.target_layers) for g in groups]
        device = groups[0].weight.device
        results = [
            torch.empty(inputs.tokens - start, g.output_mean.numel(), device=device)
            for g, start in zip(groups, starts, strict=True)
        ]
        panels = token_panels(min(starts), inputs.tokens)
        mean = groups[0].input_mean
        # One buffer for all panels: fresh pages would cost as much as filling them.
        panel = torch.empty(
            longest_panel(panels), mean.numel(), dtype=self.product_dtype, device=device
        )
        for low, high in panels:
            buffer = panel[: high - low]
            rows = inputs.rows(groups[0].blocks, low, high, mean=mean, out=buffer)
            for group, start, result in zip(groups, starts, results, strict=True):
                skip = max(start - low, 0)
                if skip < high - low:
                    product = rows[skip:] @ group.weight
                    place = result[low + skip - start : high - start]
                    torch.add(product, group.output_mean, out=place)
        yield from zip(groups, results, strict=True)

    def _by_layer(self, group: AffineGroup, flat: Tensor) -> dict[int, Tensor]:
        widths = [self.target.layers[layer].width for layer in group.target_layers]
        parts = torch.split(flat, widths, dim=1)
        return {
            layer: _heads(part, self.target.layers[layer].kv_heads)
            for layer, part in zip(group.target_layers, parts, strict=True)
        }


def sink_places(count: int, tokens: int) -> list[int]:
    """Where ``count`` planted sinks stand among the ``tokens`` that a windowed layer holds.

    Evenly apart: the oldest one leaves the window first, after as many new tokens as lie before it.
    """
    return [tokens * (i + 1) // (count + 1) for i in range(count)]


def _heads(
    flat: Float[Tensor, "tokens features"], heads: int
) -> Float[Tensor, "1 heads tokens dim"]:
    return flat.view(flat.shape[0], heads, -1).transpose(0, 1)[None]
