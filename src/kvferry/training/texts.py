"""Texts under both models as training draws them: read once, kept on disk, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from kvferry.calibration.reader import PairTrace, TokenPair
from kvferry.calibration.trace_store import TraceStore
from kvferry.training.answers import OwnAnswer


@dataclass(frozen=True)
class Draw:
    """One text at one step.

    Args:
        trace: position-free caches of both models.
        seed: of what is asked of it.
        answer: what the target itself says to it, for those who learn that.
    """

    trace: PairTrace
    seed: int
    answer: OwnAnswer | None = None


class DrawnTexts(Dataset[Draw]):
    """As many draws as there are steps: text after text, in a new order each time round.

    What a step draws is a function of the step and the seed: training that goes on from a
    checkpoint draws what it would have drawn.

    Args:
        store: where traces are kept.
        pairs: the texts.
        steps: draws.
        first: step that item 0 stands for.
        seed: of orders and draws.
        answers: of the texts, in their order, where there are some.
    """

    def __init__(
        self,
        store: TraceStore,
        pairs: Sequence[TokenPair],
        steps: int,
        *,
        first: int = 0,
        seed: int = 0,
        answers: Sequence[OwnAnswer] = (),
    ) -> None:
        self.store, self.pairs, self.steps, self.first, self.seed = store, pairs, steps, first, seed
        self.answers = answers

    def __len__(self) -> int:
        # Lightning counts the steps of a checkpoint as fetched, and stops that much earlier.
        return self.steps

    def __getitem__(self, index: int) -> Draw:
        step = self.first + index
        lap, place = divmod(step, len(self.pairs))
        order = torch.randperm(
            len(self.pairs), generator=torch.Generator().manual_seed(self.seed * 7919 + lap)
        )
        text = int(order[place])
        trace = self.store.read(self.pairs[text])
        answer = self.answers[text] if self.answers else None
        return Draw(trace, self.seed * 1_000_003 + step, answer)
