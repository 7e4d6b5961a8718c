"""A running average of the weights that learn: smoother than the last ones, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor


def averaging_rate(step: int, decay: float) -> float:
    """Share of the average that stays at ``step``, counted from one: short averages come first.

    Without it the average would hold on to the weights that training began with.
    """
    return min(decay, (1 + step) / (10 + step))


class AveragedWeights(Callback):
    """Held-out texts judge an exponential average of the weights, and checkpoints hold it.

    The average stands in the module's place from the start of a look at the held-out texts until
    the next step, so that whatever is saved then is what was judged. (Lightning's own callback
    averages a copy of the whole module, the frozen model with it, and is not asked when weights
    alone are saved.)

    Args:
        decay: share of the average that stays at each step, in the long run.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._other: dict[str, Tensor] = {}
        self._exchanged = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the weights as they are, unless a checkpoint has brought an average."""
        own = _trained(pl_module)
        self._other = {
            name: self._other.get(name, x).detach().to(x.device, copy=True)
            for name, x in own.items()
        }

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *rest: Any
    ) -> None:
        """Go on with the weights that learn."""
        if self._exchanged:
            self._exchange(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Take the new weights into the average."""
        stays = averaging_rate(trainer.global_step, self.decay)
        for name, x in _trained(pl_module).items():
            self._other[name].lerp_(x.detach(), 1 - stays)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the average be judged."""
        if not self._exchanged:
            self._exchange(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The weights that are not the module's at the moment."""
        return {"other": self._other, "exchanged": self._exchanged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``state_dict``."""
        self._other, self._exchanged = dict(state_dict["other"]), state_dict["exchanged"]

    @torch.no_grad()
    def _exchange(self, module: LightningModule) -> None:
        for name, x in _trained(module).items():
            own = x.clone()
            x.copy_(self._other[name])
            self._other[name] = own
        self._exchanged = not self._exchanged


def _trained(module: LightningModule) -> Mapping[str, Tensor]:
    return {name: x for name, x in module.named_parameters() if x.requires_grad}
