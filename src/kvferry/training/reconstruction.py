"""Learn a mapper by the target's own content: no language model runs while it learns."""

from __future__ import annotations

import torch

from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.learning import Reconstruction
from kvferry.mappers.observation import counted_alone
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.carrying import context_inputs
from kvferry.training.losses import pointwise_error
from kvferry.training.material import Variance
from kvferry.training.module import Losses, RefinerModule
from kvferry.training.texts import Draw


class ReconstructionModule(RefinerModule):
    """Squared error of keys and values as a share of their variance, a mean over KV heads.

    Args:
        mapper: whose refiner learns.
        aim: how much of a text one step takes.
        prefix: first target tokens, which stay native.
        variance: of native content, by layer that is mapped; see :func:`pointwise_error`.
    """

    def __init__(
        self, mapper: RefinedMapper, aim: Reconstruction, prefix: int, variance: Variance
    ) -> None:
        super().__init__(mapper, aim.schedule)
        self.aim, self.prefix, self.variance = aim, prefix, variance

    def losses(self, draw: Draw) -> Losses:
        """See :class:`RefinerModule`."""
        trace, layers = draw.trace, self.mapper.target.layers
        first, last = stretch(self.prefix + 1, trace.target.tokens, self.aim.tokens, draw.seed)
        inputs, _ = context_inputs(trace, last)
        content = self.mapper.map(inputs, [first] * len(layers))
        counted = counted_alone(
            trace.target,
            trace.tokens.alignment.exact.to(trace.target.mask.device),
            prefix=self.prefix,
            windowed=any(layer.window is not None for layer in layers),
        )
        native = trace.target.slice_tokens(first, last)
        parts: Losses = {
            c: pointwise_error(content, native, {c: self.variance[c]}, counted[first:last])
            for c in COMPONENTS
        }
        return {"loss": (parts["keys"] + parts["values"]) / 2, **parts}


def stretch(first: int, last: int, tokens: int, seed: int) -> tuple[int, int]:
    """So many ``tokens`` between ``first`` and ``last``, at random; all where there are no more."""
    if tokens == 0 or last - first <= tokens:
        return min(first, last - 1), last
    generator = torch.Generator().manual_seed(seed)
    start = int(torch.randint(first, last - tokens + 1, (), generator=generator))
    return start, start + tokens
