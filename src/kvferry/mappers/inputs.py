"""From a source cache and anchors to rows of input features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvferry.align.tokens import TokenAlignment
from kvferry.lm.content import ContentKV
from kvferry.mappers.layout import ALL_HEADS, Component, FeatureBlock

PANEL_TOKENS = 1024


@dataclass(frozen=True)
class SourceCode:
    """A low-rank view of all source layers, for the reads that would be too wide otherwise.

    Args:
        projection: by component, ``[all source features, code]``.
    """

    projection: dict[Component, Float[Tensor, "features code"]]

    def to(self, dtype: torch.dtype) -> SourceCode:
        """The same code with projections, and their products, in ``dtype``."""
        return SourceCode({c: p.to(dtype) for c, p in self.projection.items()})

    def on(self, device: torch.device | str) -> SourceCode:
        """The same code on another device."""
        return SourceCode({c: p.to(device) for c, p in self.projection.items()})

    @property
    def width(self) -> int:
        """Features of one component's code."""
        return self.projection["keys"].shape[1]


@dataclass(frozen=True)
class MapperInputs:
    """What a mapper may read of one context, all of it without positions.

    Args:
        source: content of the source at its own tokens, at least of the layers that are read.
        alignment: source tokens of each target token of the context, prefix included.
        anchors: the target's layer-0 content of the same target tokens: free, and exact.
        native: exact content of the target's first layers, where it ran them; of the last tokens
            alone, where no more is read.
        code: projections of the source code, if the mapper has one.
    """

    source: ContentKV
    alignment: TokenAlignment
    anchors: ContentKV
    native: ContentKV | None = None
    code: SourceCode | None = None
    _codes: dict[Component, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """Target tokens of the context."""
        return self.anchors.tokens

    def rows(
        self,
        blocks: Sequence[FeatureBlock],
        start: int,
        stop: int,
        *,
        mean: Float[Tensor, " features"] | None = None,
        out: Float[Tensor, "rows features"] | None = None,
    ) -> Float[Tensor, "rows features"]:
        """Input features of target tokens ``start`` to ``stop``, columns as ``blocks``.

        Args:
            mean: taken off in fp32, before anything is rounded.
            out: written into, in its own number format; fp32 by default.
        """
        width = sum(block.width for block in blocks)
        if out is None:
            out = torch.empty(stop - start, width, device=self.source.mask.device)
        column = 0
        for block in blocks:
            here = slice(column, column + block.width)
            features = self._block(block, start, stop)
            place = out[:, here].view_as(features)
            if mean is None:
                place.copy_(features)
            else:
                centre = mean[here].view(features.shape[1:])
                torch.sub(features.float(), centre, out=place)
            column += block.width
        return out

    def coded(
        self,
        blocks: Sequence[FeatureBlock],
        start: int,
        mean: Float[Tensor, " features"],
        basis: Float[Tensor, "features directions"],
    ) -> Float[Tensor, "rows directions"]:
        """Centred input features of target tokens ``start`` on times a fixed ``basis``.

        A panel of tokens at a time; products are in the number format of autocast, where it is on.
        """
        device = basis.device.type
        dtype = basis.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        basis = basis.to(dtype)
        panels = token_panels(start, self.tokens)
        panel = basis.new_empty(longest_panel(panels), len(basis))
        out = mean.new_empty(self.tokens - start, basis.shape[1])
        for low, high in panels:
            rows = self.rows(blocks, low, high, mean=mean, out=panel[: high - low])
            out[low - start : high - start] = rows @ basis
        return out

    def _block(self, block: FeatureBlock, start: int, stop: int) -> Tensor:
        """``[rows, features]``, or ``[rows, heads, dim]`` without having moved them together."""
        match block.kind:
            case "source":
                return self._aligned(_component(self.source, block), start, stop)
            case "code":
                return self._code(block.component)[self._neighbour(block.index, start, stop)]
            case "anchor":
                back = torch.arange(start, stop, device=self.source.mask.device) - block.index
                anchors = _component(self.anchors, block, layer=0)
                return _token_rows(anchors[:, :, back.clamp(min=0)])
            case "native":
                assert self.native is not None, "layout asks for a native prefix that nobody ran"
                native = _component(self.native, block)
                missing = self.tokens - native.shape[2]
                return _token_rows(native[:, :, start - missing : stop - missing])

    def _aligned(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Read at the aligned source tokens without first copying the whole source."""
        alignment = self.alignment
        index = alignment.indices[start:stop]
        if alignment.reads == 1:
            return _token_rows(x[:, :, index[:, 0]])
        read = [_token_rows(x[:, :, column]).flatten(1) for column in index.T]
        gathered = torch.stack(read, dim=1)
        if alignment.combine == "concatenate":
            return gathered.flatten(1)
        return (gathered * alignment.weights[start:stop, :, None]).sum(dim=1)

    def _neighbour(self, step: int, start: int, stop: int) -> Int64[Tensor, " rows"]:
        last = self.source.tokens - 1
        return (self.alignment.indices[start:stop, 0] + step).clamp(0, last)

    def _code(self, component: Component) -> Float[Tensor, "source code"]:
        if component not in self._codes:
            assert self.code is not None, "layout asks for a code that the mapper lacks"
            content: dict[int, Tensor] = getattr(self.source, component)
            layers = [content[layer] for layer in sorted(content)]
            self._codes[component] = _project(layers, self.code.projection[component])
        return self._codes[component]


def token_panels(start: int, stop: int) -> list[tuple[int, int]]:
    """Ranges of at most ``PANEL_TOKENS``, all about as long: a short last one costs a whole read
    of the weights."""
    count = max(1, -(-(stop - start) // PANEL_TOKENS))
    edges = [start + (stop - start) * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def longest_panel(panels: Sequence[tuple[int, int]]) -> int:
    """Rows of a buffer that serves every panel."""
    return max(stop - start for start, stop in panels)


def _project(
    layers: Sequence[Float[Tensor, "1 heads tokens dim"]],
    projection: Float[Tensor, "features code"],
) -> Float[Tensor, "tokens code"]:
    """All layers side by side times ``projection``, a panel of tokens at a time."""
    tokens = layers[0].shape[2]
    out = torch.empty(tokens, projection.shape[1], device=projection.device)
    panels = token_panels(0, tokens)
    panel = projection.new_empty(longest_panel(panels), projection.shape[0])
    edges = [0, *accumulate(x.shape[1] * x.shape[3] for x in layers)]
    for low, high in panels:
        rows = panel[: high - low]
        for x, (start, stop) in zip(layers, pairwise(edges), strict=True):
            here = _token_rows(x[:, :, low:high])
            rows[:, start:stop].view_as(here).copy_(here)
        out[low:high] = rows @ projection
    return out


def _component(content: ContentKV, block: FeatureBlock, layer: int | None = None) -> Tensor:
    by_layer: dict[int, Tensor] = getattr(content, block.component)
    whole = by_layer[block.index if layer is None else layer]
    return whole if block.head == ALL_HEADS else whole[:, block.head : block.head + 1]


def _token_rows(
    x: Float[Tensor, "1 heads tokens dim"],
) -> Float[Tensor, "tokens heads dim"]:
    """The heads of each token beside each other: a view."""
    return x[0].transpose(0, 1)
