"""Structure alignment: which source tokens and layers each target token and layer reads."""

from kvferry.align.layers import (
    LayerSupport,
    all_layers,
    relative_depth,
    top_layers_by_r2,
    windows_around,
)
from kvferry.align.matching import monotone_assignment, sinkhorn_coupling
from kvferry.align.spans import TokenText
from kvferry.align.tokens import (
    AlignmentMode,
    TokenAlignment,
    align_tokens,
    context_token_count,
    gather_aligned,
)
from kvferry.align.vocabulary import UnsupportedTokenizerError

__all__ = [
    "AlignmentMode",
    "LayerSupport",
    "TokenAlignment",
    "TokenText",
    "UnsupportedTokenizerError",
    "align_tokens",
    "all_layers",
    "context_token_count",
    "gather_aligned",
    "monotone_assignment",
    "relative_depth",
    "sinkhorn_coupling",
    "top_layers_by_r2",
    "windows_around",
]
