"""The Lightning module that every learned mapper is trained by."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from kvferry.calibration.interruption import die_when_told
from kvferry.mappers.learning import Schedule
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.texts import Draw

Losses = dict[str, Tensor]
"""Named parts of a loss; "loss" is what is minimised."""


class RefinerModule(LightningModule):
    """Optimises a mapper's refiner; the affine map and both language models stay as they are.

    Args:
        mapper: whose refiner learns, in place.
        schedule: of the optimiser.
    """

    def __init__(self, mapper: RefinedMapper, schedule: Schedule) -> None:
        super().__init__()
        self.mapper, self.schedule = mapper, schedule
        self.refiner = mapper.refiner

    @abstractmethod
    def losses(self, draw: Draw) -> Losses:
        """What one text says about the mapper."""

    def on_train_start(self) -> None:
        """A run that is told to end goes on from its last checkpoint."""
        die_when_told()

    def training_step(self, batch: Draw, batch_idx: int) -> Tensor:
        """Learn from one text."""
        losses = self.losses(batch)
        for name, value in losses.items():
            self.log(f"train/{name}", value.detach(), batch_size=1)
        self.log(
            "train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=1
        )
        return losses["loss"]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradient's norm, before it is clipped."""
        found = [p.grad for p in self.refiner.parameters() if p.grad is not None]
        self.log("train/gradient_norm", torch.nn.utils.get_total_norm(found), batch_size=1)

    def looks_after(self, step: int) -> bool:
        """Whether the held-out texts are looked at once ``step`` is done."""
        return step % self.schedule.validate_every == 0 or step >= self.schedule.steps

    def on_train_batch_end(self, *rest: Any) -> None:
        """Look at the held-out texts after the last step too, wherever their interval stands."""
        if self.global_step >= self.schedule.steps:
            self.trainer.should_stop = True

    def validation_step(self, batch: Draw, batch_idx: int) -> None:
        """Judge one held-out text."""
        for name, value in self.losses(batch).items():
            self.log(f"held_out/{name}", value.detach(), batch_size=1, on_epoch=True)

    def configure_optimizers(self) -> Any:
        """AdamW, linear warm-up, cosine to zero."""
        schedule = self.schedule
        optimizer = torch.optim.AdamW(
            [p for p in self.refiner.parameters() if p.requires_grad],
            lr=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            betas=(0.9, 0.98),
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_factor(step, schedule)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """By norm. Lightning itself refuses to clip for a fused optimiser, which might scale its
        gradients; nothing here is scaled."""
        if gradient_clip_val:
            torch.nn.utils.clip_grad_norm_(self.refiner.parameters(), gradient_clip_val)

    def transfer_batch_to_device(
        self, batch: Draw, device: torch.device, dataloader_idx: int
    ) -> Draw:
        """Traces come from the store on the target's device."""
        return batch


def learning_rate_factor(step: int, schedule: Schedule) -> float:
    """Share of the highest learning rate at ``step``, counted from zero."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(schedule.steps - schedule.warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
