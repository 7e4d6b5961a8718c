"""What a method asks for when its mapper has to learn: who runs it is not its business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.mappers.refined import RefinedMapper


@dataclass(frozen=True)
class Schedule:
    """How a network is optimised: AdamW, linear warm-up, cosine to zero.

    Args:
        steps: of the optimiser, one text each.
        learning_rate: at its highest.
        warmup: steps until then.
        weight_decay: of AdamW.
        passages: calibration texts that are learned from, in turn.
        held_out: texts of the selection split that choose the best state.
        validate_every: steps between two looks at them.
        patience: looks without progress after which training ends; 0 never ends it early.
        seed: of the order of texts and of what is asked of each.
    """

    steps: int = 600
    learning_rate: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.0
    passages: int = 128
    held_out: int = 8
    validate_every: int = 100
    patience: int = 0
    seed: int = 0

    def rules(self) -> dict[str, bool]:
        """What settings must be, and whether they are."""
        return {
            "training_steps, passages, held_out and validate_every must be at least 1": min(
                self.steps, self.passages, self.held_out, self.validate_every
            )
            >= 1,
            "learning_rate must be positive": self.learning_rate > 0,
            "warmup, weight_decay and patience must not be negative": min(
                self.warmup, self.weight_decay, self.patience
            )
            >= 0,
        }


@dataclass(frozen=True)
class Generation:
    """Learn what the target says: its next tokens on top of the mapped cache.

    A text is cut at random; the target continues it, and repeats early stretches of it.

    Args:
        schedule: of the optimiser.
        shortest_context: target tokens that are carried over at least.
        continuation_tokens: scored after the cut.
        recall_spans: early stretches that are repeated after the cut.
        recall_tokens, recall_prompt_tokens: length of one, and how much of it is given.
        continuation, recall: weights of the KL from native to mapped, nats a token.
        text: weight of the cross-entropy of the text's own tokens.
        pointwise: weight of the mapped content's error, as a share of its variance.
    """

    schedule: Schedule
    shortest_context: int = 256
    continuation_tokens: int = 64
    recall_spans: int = 2
    recall_tokens: int = 64
    recall_prompt_tokens: int = 16
    continuation: float = 1.0
    recall: float = 1.0
    text: float = 0.0
    pointwise: float = 0.0


class Learn(Protocol):
    """Trains the network of a mapper."""

    def __call__(self, mapper: RefinedMapper, aim: Generation) -> RefinedMapper:
        """The mapper with its best held-out state, and how training went in its report."""
