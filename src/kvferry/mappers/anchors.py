"""What a map may read besides the aligned source token: an option of every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.errors import ConfigurationError
from kvferry.lm.geometry import KVGeometry
from kvferry.mappers.layout import FeatureBlock, FeatureLayout

AUTO_NATIVE_SHARE = 1 / 8

NativeLayers = int | Literal["auto"]


@dataclass(frozen=True)
class AnchorReads:
    """The target's free content, its native prefix, and neighbouring source tokens.

    Args:
        context: predecessors whose layer-0 content is read besides the token's own; -1 reads none.
        neighbours: read the low-rank code of the source tokens before and after, and of the other
            component at the token itself.
        native_layers: target layers taken exactly; layer 0 is free, each further one is run by the
            target. "auto" takes an eighth of its depth.
        planted_sinks: tokens of each windowed layer that give way to the target's own prefix, see
            :class:`AffineMapper`.
    """

    context: int = -1
    neighbours: bool = False
    native_layers: NativeLayers = 0
    planted_sinks: int = 0

    def rules(self) -> dict[str, bool]:
        """What settings must be, and whether they are."""
        return {
            "anchor_context must be at least -1": self.context >= -1,
            "native_layers must be auto or at least 0": self.native_layers == "auto"
            or self.native_layers >= 0,
            "planted_sinks must lie in 0..8": 0 <= self.planted_sinks <= 8,
        }

    def native_depth(self, target: KVGeometry) -> int:
        """How many of the target's layers are exact.

        Raises:
            ConfigurationError: more than the target has.
        """
        if self.native_layers != "auto":
            if self.native_layers > len(target.layers):
                raise ConfigurationError(
                    "More native layers are asked for than the target has.",
                    found=f"native_layers={self.native_layers}",
                    expected=f"at most {len(target.layers)}",
                    fix="set mapper.native_layers=auto",
                )
            return self.native_layers
        return max(1, round(AUTO_NATIVE_SHARE * len(target.layers)))

    def blocks(
        self, layout: FeatureLayout, target: KVGeometry, layer: int
    ) -> tuple[FeatureBlock, ...]:
        """Input blocks of ``layout`` that target ``layer`` reads, in the layout's order.

        Native layers are all exact; maps read those of them that calibration has collected. A
        windowed native layer is read by layers with no longer a window alone: the target then runs
        it over that window, however long the context.

        Raises:
            ConfigurationError: more predecessors than calibration has collected.
        """
        known = max((block.index for block in layout.of_kind("anchor")), default=-1)
        if self.context > known:
            raise ConfigurationError(
                "Calibration does not collect anchors of so many predecessors.",
                found=f"anchor_context={self.context}",
                expected=f"at most {known}",
                fix=f"set mapper.anchor_context={known}",
            )
        return tuple(block for block in layout.blocks if self._reads(block, target, layer))

    def _reads(self, block: FeatureBlock, target: KVGeometry, layer: int) -> bool:
        match block.kind:
            case "source":
                return False
            case "code":
                return self.neighbours
            case "anchor":
                return block.index <= self.context
            case "native":
                native, reader = target.layers[block.index].window, target.layers[layer].window
                reached = native is None or (reader is not None and reader <= native)
                return reached and block.index < self.native_depth(target)


class OffersAnchors:
    """A method whose settings name its anchors."""

    anchor_context: int
    neighbours: bool
    native_layers: NativeLayers
    planted_sinks: int

    def native_depth(self, target: KVGeometry) -> int:
        """See :class:`kvferry.mappers.base.MapperMethod`."""
        return self._anchors.native_depth(target)

    @property
    def _anchors(self) -> AnchorReads:
        return AnchorReads(
            self.anchor_context, self.neighbours, self.native_layers, self.planted_sinks
        )
