"""For each kind of aim: the module that pursues it, the texts to learn from and to judge by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.errors import ConfigurationError
from kvferry.mappers.learning import Answering, Generation, LayerJudge, Reconstruction, Schedule
from kvferry.mappers.observation import ReplaySplit
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.answering import AnsweringModule
from kvferry.training.answers import OwnAnswer
from kvferry.training.generation import GenerationModule
from kvferry.training.material import Material
from kvferry.training.module import RefinerModule
from kvferry.training.reconstruction import ReconstructionModule
from kvferry.training.texts import DrawnTexts

HELD_QUESTION = 8
"""Of so many questions one chooses the best state; the others are learned from."""


@dataclass(frozen=True)
class Lesson:
    """One phase of training, ready to run.

    Args:
        module: what is optimised.
        learned: the texts to learn from, from a step on.
        held: the texts that choose the best state.
        judge: chooses it layer by layer, see :class:`Reconstruction`.
        report: what was found while the lesson was prepared.
    """

    module: RefinerModule
    learned: Callable[[int], DrawnTexts]
    held: DrawnTexts
    judge: LayerJudge | None = None
    report: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Lessons:
    """Lessons for one mapper, see :class:`kvferry.mappers.learning.ForEachAim`.

    Args:
        mapper: with products in the format of the hand-off.
    """

    material: Material
    mapper: RefinedMapper

    def generation(self, aim: Generation) -> Lesson:
        """Continuation and recall over the training texts."""
        module = GenerationModule(self.mapper, aim, self.material)
        return Lesson(module, self._training(aim.schedule), self._selection(aim.schedule))

    def reconstruction(self, aim: Reconstruction) -> Lesson:
        """Content of the training texts."""
        variance = self.material.mapped_variance(self.mapper)
        prefix = self.material.prefix.tokens
        module = ReconstructionModule(self.mapper, aim, prefix, variance)
        held = self._selection(aim.schedule)
        return Lesson(module, self._training(aim.schedule), held, aim.judge)

    def answering(self, aim: Answering) -> Lesson:
        """The target's right answers to questions; where they are too few, how it goes on.

        Raises:
            ConfigurationError: it says nothing at all.
        """
        schedule = aim.schedule
        module = AnsweringModule(self.mapper, aim, self.material)
        answers = self._answers(aim, "training", aim.answers)
        held = self._answers(aim, "selection", schedule.held_out)
        right = sum(answer.right for answer in answers)
        return Lesson(
            module,
            lambda first: self._answered(answers, schedule.steps, first, schedule.seed),
            self._answered(held, len(held)),
            report={"right_answers": right, "continuations": len(answers) - right},
        )

    def _answers(self, aim: Answering, split: ReplaySplit, wanted: int) -> list[OwnAnswer]:
        material = self.material
        answerer = material.answerer(aim.answer_tokens, aim.temperature, aim.schedule.seed)
        every = list(material.questions)
        held = every[::HELD_QUESTION]
        learned = [q for place, q in enumerate(every) if place % HELD_QUESTION]
        questions = learned if split == "training" else held
        answers = answerer.right_answers(questions, wanted)
        if len(answers) < wanted:
            pairs = material.pairs(split, wanted - len(answers))
            answers += answerer.continuations(pairs, aim.context_tokens)
        if not answers:
            raise ConfigurationError(
                "The target says nothing that could be learned from.",
                found=f"no right answer to {len(questions)} questions, no token after any text",
                fix="give data.questions that it can answer, or set mapper.answer_steps=0",
            )
        return answers

    def _answered(
        self, answers: Sequence[OwnAnswer], steps: int, first: int = 0, seed: int = 0
    ) -> DrawnTexts:
        pairs = [answer.pair for answer in answers]
        store = self.material.store
        return DrawnTexts(store, pairs, steps, first=first, seed=seed, answers=answers)

    def _training(self, schedule: Schedule) -> Callable[[int], DrawnTexts]:
        pairs = self.material.pairs("training", schedule.passages)
        store, steps, seed = self.material.store, schedule.steps, schedule.seed
        return lambda first: DrawnTexts(store, pairs, steps, first=first, seed=seed)

    def _selection(self, schedule: Schedule) -> DrawnTexts:
        pairs = self.material.pairs("selection", schedule.held_out)
        return DrawnTexts(self.material.store, pairs, schedule.held_out)
