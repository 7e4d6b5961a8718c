"""Train a mapper's network under a Lightning trainer: resumable, the best state kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from kvferry.calibration.interruption import interruptible
from kvferry.lm.store import new_file
from kvferry.mappers.learning import Aim
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.keeping import MONITOR, BestLayers, Keeper, WholeState
from kvferry.training.lessons import Lesson, Lessons
from kvferry.training.material import Material
from kvferry.training.module import RefinerModule
from kvferry.training.saving import SaveBetweenLooks
from kvferry.training.texts import Draw, DrawnTexts

LAST = "last.ckpt"
LEARNED = "learned.safetensors"
HELD_OUT = MONITOR.partition("/")[0] + "/"


@dataclass(frozen=True)
class TrainerOptions:
    """How Lightning is asked to train.

    Args:
        folder: where checkpoints lie, those of each phase in a folder of their own; training goes
            on from what it finds there.
        options: of the trainer: accelerator, precision, clipping.
        callbacks: beside those that keep checkpoints, for so many steps.
        curves: the logger of a phase, given the steps of earlier ones, the step that it goes on
            after, and what the held-out texts said before its first one; False: none.
        save_seconds: between two checkpoints, beside those of looks at held-out texts.
    """

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[int], Sequence[Callback]] = lambda steps: ()
    curves: Callable[[int, int, Mapping[str, float]], Any] = lambda before, step, held_out: False
    save_seconds: float = 60.0


@dataclass(frozen=True)
class TraceLearner:
    """Trains on traces of texts: see :class:`kvferry.mappers.learning.Learn`.

    Args:
        material: what is learned from.
        options: how Lightning trains.
    """

    material: Material
    options: TrainerOptions

    def __call__(self, mapper: RefinedMapper, aim: Aim) -> RefinedMapper:
        """Train, and leave the refiner in its best held-out state: never worse than it began.

        A phase that is finished is not run again.

        Raises:
            ConfigurationError: there is no text to learn from, or none to choose the state by.
        """
        finished = self.options.folder / aim.name / LEARNED
        if finished.is_file():
            mapper.refiner.load_state_dict(load_file(finished))
            with safe_open(finished, "pt") as stored:
                report = json.loads(stored.metadata()["report"])
        else:
            report = self._learn(mapper, aim)
            state = {n: x.cpu().contiguous() for n, x in mapper.refiner.state_dict().items()}
            with new_file(finished) as temporary:
                save_file(state, temporary, metadata={"report": json.dumps(report)})
            for checkpoint in finished.parent.glob("*.ckpt"):
                checkpoint.unlink()
        named = {f"{aim.name}_{name}": value for name, value in report.items()}
        return replace(mapper, report={**mapper.affine.report, **mapper.report, **named})

    def _learn(self, mapper: RefinedMapper, aim: Aim) -> dict[str, float]:
        folder = self.options.folder / aim.name
        precise = mapper.with_precision(self.material.product_dtype)
        lesson = aim.pursued_by(Lessons(self.material, precise))
        before = self._judge(lesson)
        keeper = _keeper(lesson, folder, before["loss"])
        done = _steps_done(folder)
        if not done:
            keeper.begin()
        self._train(lesson, keeper, folder, done, before)
        kept = keeper.settle()
        after = self._judge(lesson)
        report = {f"{name}_before": value for name, value in before.items()}
        report |= {f"{name}_after": value for name, value in after.items()}
        return {**lesson.report, **report, **kept}

    def _judge(self, lesson: Lesson) -> dict[str, float]:
        """Held-out losses by name."""
        trainer = self._trainer(lesson.module, [], logger=False)
        (found,) = trainer.validate(lesson.module, _loader(lesson.held), verbose=False)
        return {name.removeprefix(HELD_OUT): float(value) for name, value in found.items()}

    def _train(
        self, lesson: Lesson, keeper: Keeper, folder: Path, done: int, before: dict[str, float]
    ) -> None:
        schedule = lesson.module.schedule
        # After the held-out texts and after the keeper, whose record it holds: a checkpoint of the
        # step alone would go on without that look.
        last = ModelCheckpoint(folder, LAST.removesuffix(".ckpt"), enable_version_counter=False)
        between = SaveBetweenLooks(folder / LAST, self.options.save_seconds)
        callbacks = [*keeper.callbacks, last, *self.options.callbacks(schedule.steps), between]
        at_start = {f"{HELD_OUT}{name}": value for name, value in before.items()}
        logger = self.options.curves(schedule.done_before, done, at_start)
        trainer = self._trainer(lesson.module, callbacks, logger=logger)
        with interruptible(trainer):
            trainer.fit(
                lesson.module,
                _loader(lesson.learned(done)),
                _loader(lesson.held),
                ckpt_path=str(folder / LAST) if done else None,
            )

    def _trainer(self, module: RefinerModule, callbacks: list[Callback], **more: Any) -> Trainer:
        return Trainer(
            max_steps=module.schedule.steps,
            val_check_interval=module.schedule.validate_every,
            check_val_every_n_epoch=None,
            callbacks=callbacks,
            enable_checkpointing=bool(callbacks),
            enable_model_summary=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **{**self.options.options, **more},
        )


def _keeper(lesson: Lesson, folder: Path, before: float) -> Keeper:
    module = lesson.module
    patience = module.schedule.patience
    if lesson.judge is None:
        return WholeState(module, folder, before, patience)
    return BestLayers(module, lesson.judge, patience)


def _steps_done(folder: Path) -> int:
    """Steps of the checkpoint of an interrupted phase."""
    path = folder / LAST
    if not path.is_file():
        return 0
    found = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    return int(found["global_step"])


def _loader(texts: DrawnTexts) -> DataLoader[Draw]:
    return DataLoader(texts, batch_size=None)
