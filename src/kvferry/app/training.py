"""How a run trains what learns: the trainer's settings, a progress bar, curves to the logs."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from kvferry.app.calibrate import quiet_lightning
from kvferry.app.corpora import Corpora
from kvferry.app.folder import CHECKPOINTS, CURVES
from kvferry.app.loggers import RunLogger
from kvferry.app.models import cache_folder, product_dtype
from kvferry.app.progress import Step, progress
from kvferry.app.schema import RunConfig
from kvferry.calibration.questions import load_questions
from kvferry.calibration.reader import PairReader
from kvferry.calibration.trace_store import TraceStore
from kvferry.lm.store import cache_root
from kvferry.mappers.base import Statistics
from kvferry.mappers.layout import COMPONENTS
from kvferry.results.rows import write_atomically
from kvferry.results.training import START
from kvferry.training.averaging import AveragedWeights
from kvferry.training.learn import TraceLearner, TrainerOptions
from kvferry.training.material import Material


def learner(
    cfg: RunConfig,
    folder: Path,
    reader: PairReader,
    corpora: Corpora,
    statistics: Statistics,
    log: RunLogger,
) -> TraceLearner:
    """Trains the networks of a run; its checkpoints and curves lie in the run folder."""
    quiet_lightning()
    if cfg.force:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    layers = range(len(reader.target.geometry.layers))
    variance = {
        c: {layer: statistics.head_variance(c, layer) for layer in layers}
        for c in COMPONENTS
        if c in statistics.moments
    }
    trainer = cfg.trainer
    options = {
        "accelerator": trainer.accelerator,
        "devices": 1,
        "precision": _precision(cfg),
        "gradient_clip_val": trainer.gradient_clip or None,
        "log_every_n_steps": 1,
    }

    def callbacks(steps: int) -> list[Callback]:
        averaged = [AveragedWeights(trainer.ema)] if trainer.ema else []
        return [TrainingProgress(steps), *averaged]

    def curves(done_before: int, step: int, held_out: Mapping[str, float]) -> CurveLogger:
        logger = CurveLogger(folder / CURVES, log, done_before)
        logger.begin(step, held_out)
        return logger

    material = Material(
        reader=reader,
        texts=corpora.replayed(cfg.eval),
        passage_tokens=cfg.data.passage_tokens,
        store=TraceStore(cache_root(cache_folder(cfg)) / "traces", reader, torch.bfloat16),
        variance=variance,
        product_dtype=product_dtype(cfg),
        gradient_checkpointing=trainer.gradient_checkpointing,
        questions=load_questions(cfg.data.questions) if cfg.data.questions else (),
        answers=cache_root(cache_folder(cfg)) / "answers",
    )
    return TraceLearner(material, TrainerOptions(folder / CHECKPOINTS, options, callbacks, curves))


def _precision(cfg: RunConfig) -> Any:
    if cfg.trainer.training_precision != "auto":
        return cfg.trainer.training_precision
    coarse = product_dtype(cfg) == torch.bfloat16 and cfg.trainer.model_dtype == "float32"
    return "bf16-mixed" if coarse else "32-true"


class TrainingProgress(Callback):
    """A progress bar over steps.

    Args:
        steps: that there will be.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._bar: AbstractContextManager[Step] | None = None
        self._step: Step = lambda steps=1: None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar, as far as a checkpoint has come."""
        self._bar = progress("train", self.steps)
        self._step = self._bar.__enter__()
        self._step(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """One more step."""
        self._step()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the bar away."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Take the bar away: Lightning tears nothing down then."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


class CurveLogger(Logger):
    """Sends what Lightning logs to the run's loggers, and to a file for the report.

    ``step`` counts the optimiser's steps: a training value was found on the way to it, a held-out
    one after it, 0 stands for the mapper before training.

    Args:
        path: one JSON object a line.
        log: of the run.
        done_before: steps of earlier phases, from which this one counts on.
    """

    def __init__(self, path: Path, log: RunLogger, done_before: int = 0) -> None:
        super().__init__()
        self.path, self.log, self.done_before = path, log, done_before

    def begin(self, step: int, held_out: Mapping[str, float]) -> None:
        """Keep the lines up to ``step`` of this phase, which goes on after it: others come again.

        Args:
            held_out: what the held-out texts say before the first step.
        """
        if step:
            print(f"training goes on after step {step}", flush=True)
        write_atomically(self.path, "".join(self._lines_up_to(step)).encode())
        if not step:
            self._write(held_out, 0)

    @property
    def name(self) -> str:
        """Of no folder: nothing is written by Lightning itself."""
        return "kvferry"

    @property
    def version(self) -> str:
        """See ``name``."""
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """One line, and the run's loggers; Lightning counts steps from zero."""
        self._write(metrics, 0 if step is None else step + 1)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *rest: Any, **more: Any) -> None:
        """Nothing: the run's settings have been logged."""

    def _write(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        step += self.done_before
        with self.path.open("a", encoding="utf-8") as lines:
            phase = {START: self.done_before} if self.done_before else {}
            lines.write(json.dumps({"step": step, **phase, **values}) + "\n")
        self.log.log_metrics(values, step)

    def _lines_up_to(self, step: int) -> Iterator[str]:
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                values = json.loads(line)
            except ValueError:
                return  # a kill cut it short; nothing follows
            phase = values.get(START, 0)
            # Before the first step even the look at the start comes again.
            mine = step > 0 and phase == self.done_before and values["step"] <= phase + step
            if phase < self.done_before or mine:
                yield line
