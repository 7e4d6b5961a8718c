"""Checkpoints between two looks at the held-out texts, so that a kill costs a minute."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from kvferry.training.module import RefinerModule

LEAST_SHARE = 20
"""Training takes at least this many times as long as saving it."""


class SaveBetweenLooks(Callback):
    """Saves the state to go on from once ``seconds`` have passed since training began or saved.

    Never just before a look: Lightning would take it for done, and go on without it. The callbacks
    before this one have seen the step; put it last.

    Args:
        path: of the checkpoint, which is replaced as a whole.
        seconds: between two saves; more where saving is slow.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self._due = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The time counts from here."""
        self._due = time.monotonic() + self.seconds

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A look has been saved."""
        self._due = time.monotonic() + self.seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Save where it is due."""
        assert isinstance(pl_module, RefinerModule)
        begun = time.monotonic()
        if begun < self._due or pl_module.looks_after(trainer.global_step):
            return
        trainer.save_checkpoint(self.path)
        ended = time.monotonic()
        self._due = ended + max(self.seconds, LEAST_SHARE * (ended - begun))
