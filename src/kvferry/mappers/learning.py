"""What a method asks for when its mapper has to learn: who runs it is not its business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from jaxtyping import Float
from torch import Tensor

from kvferry.mappers.refined import RefinedMapper

Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)

LayerJudge = Callable[[RefinedMapper], Float[Tensor, " layers"]]
"""An error of each target layer under a mapper; native layers may have any."""


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
        done_before: steps of earlier phases, from which the curves go on.
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
    done_before: int = 0

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


class OffersSchedule:
    """A method whose settings name how its network is optimised."""

    training_steps: int
    learning_rate: float
    warmup: int
    weight_decay: float
    passages: int
    held_out: int
    validate_every: int
    patience: int
    seed: int

    @property
    def _schedule(self) -> Schedule:
        return Schedule(
            steps=self.training_steps,
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            weight_decay=self.weight_decay,
            passages=self.passages,
            held_out=self.held_out,
            validate_every=self.validate_every,
            patience=self.patience,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Aim(ABC):
    """What a network learns. A method may follow several, one of a kind, one after the other."""

    schedule: Schedule

    name: ClassVar[str]

    @abstractmethod
    def pursued_by(self, makers: ForEachAim[Made]) -> Made:
        """What ``makers`` have for this kind of aim."""


@dataclass(frozen=True)
class Generation(Aim):
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
        attention: weight of the KL of the attention that repeated stretches pay; see
            :func:`kvferry.training.attention.copying_attention_kl`.
    """

    shortest_context: int = 256
    continuation_tokens: int = 64
    recall_spans: int = 2
    recall_tokens: int = 64
    recall_prompt_tokens: int = 16
    continuation: float = 1.0
    recall: float = 1.0
    text: float = 0.0
    pointwise: float = 0.0
    attention: float = 0.0

    name: ClassVar[str] = "generation"

    def pursued_by(self, makers: ForEachAim[Made]) -> Made:
        """See :class:`Aim`."""
        return makers.generation(self)


class OffersGeneration(OffersSchedule):
    """A method whose settings also weigh what its network learns from what the target says."""

    continuation: float
    recall: float
    text: float
    pointwise: float
    attention: float
    recall_spans: int
    shortest_context: int

    @property
    def _generation(self) -> Generation:
        return Generation(
            self._schedule,
            shortest_context=self.shortest_context,
            recall_spans=self.recall_spans,
            continuation=self.continuation,
            recall=self.recall,
            text=self.text,
            pointwise=self.pointwise,
            attention=self.attention,
        )

    def _generation_rules(self) -> dict[str, bool]:
        """What these settings must be, and whether they are."""
        weights = self.continuation, self.recall, self.text, self.pointwise, self.attention
        return {
            "recall_spans must not be negative": self.recall_spans >= 0,
            "continuation, recall, text, pointwise and attention must not be negative, "
            "nor all be zero": min(weights) >= 0 < max(weights),
            "shortest_context must be at least 2": self.shortest_context >= 2,
        }


@dataclass(frozen=True)
class Reconstruction(Aim):
    """Learn the target's own content: squared error as a share of each KV head's variance.

    Tokens count as in calibration: without the native prefix and the sinks of windowed models.

    Args:
        schedule: of the optimiser.
        tokens: length of the stretch of a text that one step learns from; 0 takes the whole text.
        judge: what tells by target layer whether a state is better than the best one so far. Each
            layer then ends in its own best state, the start among them; without it the state of
            least held-out loss is taken whole.
    """

    tokens: int = 0
    judge: LayerJudge | None = field(default=None, compare=False)

    name: ClassVar[str] = "reconstruction"

    def pursued_by(self, makers: ForEachAim[Made]) -> Made:
        """See :class:`Aim`."""
        return makers.reconstruction(self)


@dataclass(frozen=True)
class Answering(Aim):
    """Learn to make the target say what it says when it has read a text itself.

    Where questions are at hand, what it says is its right answers; else how it goes on after a
    text that is cut at random.

    Args:
        schedule: of the optimiser; its passages do not matter here.
        answers: to learn from.
        answer_tokens: longest answer.
        context_tokens: longest text that the target goes on after, in target tokens.
        temperature: of its answers; 0 takes the likeliest token.
        aware: weight of the answer's cross-entropy where the target reads the text again first.
        unaware: of the same where it has the mapped cache and a cue alone.
        pointwise: weight of the mapped content's error, as a share of its variance.
    """

    answers: int = 64
    answer_tokens: int = 48
    context_tokens: int = 384
    temperature: float = 0.0
    aware: float = 0.5
    unaware: float = 0.5
    pointwise: float = 0.1

    name: ClassVar[str] = "answering"

    def pursued_by(self, makers: ForEachAim[Made]) -> Made:
        """See :class:`Aim`."""
        return makers.answering(self)


class ForEachAim(Protocol[Made_co]):
    """Something for every kind of aim."""

    def generation(self, aim: Generation) -> Made_co:
        """For :class:`Generation`."""

    def reconstruction(self, aim: Reconstruction) -> Made_co:
        """For :class:`Reconstruction`."""

    def answering(self, aim: Answering) -> Made_co:
        """For :class:`Answering`."""


class Learn(Protocol):
    """Trains the network of a mapper."""

    def __call__(self, mapper: RefinedMapper, aim: Aim) -> RefinedMapper:
        """The mapper with its best held-out state, and how training went in its report."""
