"""How a run trains what learns: the trainer's settings, a progress bar, curves to the logs."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from kvferry.app.calibrate import quiet_lightning
from kvferry.app.corpora import Corpora
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
from kvferry.training.learn import TraceLearner, TrainerOptions
from kvferry.training.material import Material

CHECKPOINTS = "training"
CURVES = "training.jsonl"


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
        "log_every_n_steps": 10,
    }

    def callbacks(steps: int) -> list[Callback]:
        averaged = [EMAWeightAveraging(decay=trainer.ema)] if trainer.ema else []
        return [TrainingProgress(steps), *averaged]

    def curves(done_before: int) -> CurveLogger:
        return CurveLogger(folder / CURVES, log, done_before)

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
    return TraceLearner(
        material, TrainerOptions(folder / CHECKPOINTS, options, callbacks, logger=curves)
    )


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
        """Take the bar away, however training came to its end."""
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None


class CurveLogger(Logger):
    """Sends what Lightning logs to the run's loggers, and to a file for the report.

    Args:
        path: one JSON object a line.
        log: of the run.
        done_before: steps of earlier phases, from which this one counts on.
    """

    def __init__(self, path: Path, log: RunLogger, done_before: int = 0) -> None:
        super().__init__()
        self.path, self.log, self.done_before = path, log, done_before

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
        """One line, and the run's loggers."""
        values = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        step = self.done_before + (step or 0)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, **values}) + "\n")
        self.log.log_metrics(values, step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *rest: Any, **more: Any) -> None:
        """Nothing: the run's settings have been logged."""
