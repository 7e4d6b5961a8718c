"""Train a mapper's network under a Lightning trainer: resumable, the best state kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

from kvferry.calibration.interruption import interruptible
from kvferry.calibration.reader import PairReader
from kvferry.calibration.trace_store import TraceStore
from kvferry.errors import ConfigurationError
from kvferry.mappers.layout import Component
from kvferry.mappers.learning import Generation
from kvferry.mappers.observation import ReplaySplit
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.carrying import inference_free
from kvferry.training.generation import GenerationModule
from kvferry.training.module import RefinerModule
from kvferry.training.texts import Draw, DrawnTexts

MONITOR = "held_out/loss"
LAST = "last.ckpt"


@dataclass(frozen=True)
class TrainerOptions:
    """How Lightning is asked to train.

    Args:
        folder: where checkpoints lie; training goes on from what it finds there.
        options: of the trainer: accelerator, precision, clipping, loggers.
        callbacks: beside those that keep checkpoints, for so many steps.
        begun: told the step that training goes on after, and what the held-out texts said before
            the first one.
    """

    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[int], Sequence[Callback]] = lambda steps: ()
    begun: Callable[[int, Mapping[str, float]], None] = lambda step, held_out: None


@dataclass(frozen=True)
class TraceLearner:
    """Trains on traces of texts: see :class:`kvferry.mappers.learning.Learn`.

    Args:
        reader: both models.
        texts: by split.
        passage_tokens: source tokens that each text is cut to.
        store: keeps what the models have read.
        variance: of native content by component and layer.
        product_dtype: number format of the affine map's products while the network learns: that of
            the hand-off.
        gradient_checkpointing: see :class:`GenerationModule`.
        options: how Lightning trains.
    """

    reader: PairReader
    texts: Mapping[ReplaySplit, Sequence[str]]
    passage_tokens: int
    store: TraceStore
    variance: Mapping[Component, Mapping[int, float]]
    options: TrainerOptions
    product_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False

    def __call__(self, mapper: RefinedMapper, aim: Generation) -> RefinedMapper:
        """Train, and leave the refiner in its best held-out state: never worse than it began.

        Raises:
            ConfigurationError: there is no text to learn from, or none to choose the state by.
        """
        schedule, target = aim.schedule, self.reader.target
        ids, mask = target.batch([target.sink_ids])
        prefix = inference_free(target.content(target.prefill(ids, mask)))
        mapped = range(mapper.native_layers, len(mapper.target.layers))
        variance = {c: {i: v[i] for i in mapped} for c, v in self.variance.items()}
        module = GenerationModule(
            mapper.with_precision(self.product_dtype),
            aim,
            target,
            prefix,
            variance,
            self.gradient_checkpointing,
        )
        held = self._draws("selection", schedule.held_out, schedule.held_out)
        start = copy.deepcopy(mapper.refiner.state_dict())
        at_start = self._judge(module, held)
        before = at_start[MONITOR]
        done = self._steps_done()
        learned = self._draws(
            "calibration", schedule.passages, schedule.steps, first=done, seed=schedule.seed
        )
        self.options.begun(done, at_start)
        best = self._train(module, learned, held, resume=done > 0)
        after = float(best.best_model_score) if best.best_model_score is not None else before
        if after < before:
            state = torch.load(best.best_model_path, weights_only=True, map_location="cpu")
            module.load_state_dict(state["state_dict"])
        else:
            mapper.refiner.load_state_dict(start)
        report = {"held_out_loss_before": before, "held_out_loss_after": min(after, before)}
        return replace(mapper, report={**mapper.affine.report, **report})

    def _draws(
        self, split: ReplaySplit, passages: int, steps: int, *, first: int = 0, seed: int = 0
    ) -> DrawnTexts:
        texts = self.texts.get(split, ())
        if not texts:
            raise ConfigurationError(
                f"A mapper that learns needs {split.replace('_', ' ')} texts: there are none.",
                fix="lower data.calibration_passages or data.held_out_passages, or give more text",
            )
        count = min(passages, len(texts))
        chosen = [texts[place * len(texts) // count] for place in range(count)]
        pairs = [self.reader.tokenize(text, self.passage_tokens) for text in chosen]
        return DrawnTexts(self.store, pairs, steps, first=first, seed=seed)

    def _steps_done(self) -> int:
        path = self.options.folder / LAST
        if not path.is_file():
            return 0
        return int(
            torch.load(path, weights_only=True, map_location="cpu", mmap=True)["global_step"]
        )

    def _judge(self, module: RefinerModule, held: DrawnTexts) -> dict[str, float]:
        trainer = self._trainer(module, [], logger=False)
        (found,) = trainer.validate(module, _loader(held), verbose=False)
        return {name: float(value) for name, value in found.items()}

    def _train(
        self, module: RefinerModule, learned: DrawnTexts, held: DrawnTexts, *, resume: bool
    ) -> ModelCheckpoint:
        schedule, folder = module.schedule, self.options.folder
        best = ModelCheckpoint(
            folder, "best", monitor=MONITOR, save_weights_only=True, enable_version_counter=False
        )
        # After the held-out texts and after ``best``, whose record it holds: a checkpoint of the
        # step alone would go on without that look.
        last = ModelCheckpoint(folder, LAST.removesuffix(".ckpt"), enable_version_counter=False)
        callbacks: list[Callback] = [best, last, *self.options.callbacks(schedule.steps)]
        if schedule.patience:
            callbacks.append(EarlyStopping(MONITOR, patience=schedule.patience))
        trainer = self._trainer(module, callbacks)
        found = str(folder / LAST) if resume else None
        with interruptible(trainer):
            trainer.fit(module, _loader(learned), _loader(held), ckpt_path=found)
        return best

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


def _loader(texts: DrawnTexts) -> DataLoader[Draw]:
    return DataLoader(texts, batch_size=None)
