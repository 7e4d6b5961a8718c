"""What mappers learn from: both models, texts by split, and how much native content varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from kvferry.calibration.questions import Question
from kvferry.calibration.reader import PairReader, TokenPair
from kvferry.calibration.trace_store import TraceStore
from kvferry.errors import ConfigurationError
from kvferry.lm.content import ContentKV
from kvferry.mappers.layout import Component
from kvferry.mappers.mapper import Mapper
from kvferry.mappers.observation import ReplaySplit
from kvferry.training.answers import Answerer
from kvferry.training.carrying import inference_free

Variance = Mapping[Component, Mapping[int, Float[Tensor, " heads"]]]
"""By component, layer and KV head: of one feature of native content."""


@dataclass(frozen=True)
class Material:
    """Everything that training reads.

    Args:
        reader: both models.
        texts: by split.
        passage_tokens: source tokens that each text is cut to.
        store: keeps what the models have read.
        variance: of every target layer.
        product_dtype: number format of the affine map's products while the network learns: that of
            the hand-off.
        gradient_checkpointing: see :func:`kvferry.training.carrying.ask`.
        questions: that the target may answer.
        answers: folder of what it has said; by default beside the traces.
    """

    reader: PairReader
    texts: Mapping[ReplaySplit, Sequence[str]]
    passage_tokens: int
    store: TraceStore
    variance: Variance
    product_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    questions: Sequence[Question] = ()
    answers: Path | None = None

    @cached_property
    def prefix(self) -> ContentKV:
        """The target's own prefix, fit to meet gradients."""
        target = self.reader.target
        ids, mask = target.batch([target.sink_ids])
        return inference_free(target.content(target.prefill(ids, mask)))

    def mapped_variance(self, mapper: Mapper) -> Variance:
        """The variance of those layers that ``mapper`` maps."""
        layers = range(mapper.native_layers, len(mapper.target.layers))
        return {c: {i: by_layer[i] for i in layers} for c, by_layer in self.variance.items()}

    def pairs(self, split: ReplaySplit, count: int) -> list[TokenPair]:
        """Up to ``count`` texts of ``split``, spread evenly over them.

        Raises:
            ConfigurationError: the split has none.
        """
        texts = self.texts.get(split, ())
        if not texts:
            raise ConfigurationError(
                f"A mapper that learns needs {split.replace('_', ' ')} texts: there are none.",
                fix="lower data.calibration_passages, data.training_passages or "
                "data.held_out_passages, or give more text",
            )
        count = min(count, len(texts))
        chosen = [texts[place * len(texts) // count] for place in range(count)]
        return [self.reader.tokenize(text, self.passage_tokens) for text in chosen]

    def answerer(self, tokens: int, temperature: float, seed: int) -> Answerer:
        """Lets the target answer in up to so many ``tokens``."""
        folder = self.answers or self.store.folder.parent.parent / "answers"
        return Answerer(self.reader, folder, tokens, self.passage_tokens, temperature, seed)
