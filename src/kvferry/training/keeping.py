"""Which state of a network is kept: the best one as a whole, or the best one of each layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from kvferry.mappers.learning import LayerJudge
from kvferry.training.module import RefinerModule

MONITOR = "held_out/loss"


class Keeper(Protocol):
    """Watches training, and decides what it leaves behind."""

    @property
    def callbacks(self) -> list[Callback]:
        """What watches."""

    def begin(self) -> None:
        """Take the state before the first step as the best so far; not called after a break."""

    def settle(self) -> dict[str, float]:
        """Put what is kept into the network; what there is to report of it."""


class WholeState:
    """The state of least held-out loss.

    Args:
        module: in the state that it starts from.
        folder: of its checkpoint.
        before: held-out loss of that state.
        patience: looks without progress after which training ends; 0 never ends it early.
    """

    def __init__(self, module: RefinerModule, folder: Path, before: float, patience: int) -> None:
        self.module, self.before = module, before
        self.start = copy.deepcopy(module.refiner.state_dict())
        self.best = ModelCheckpoint(
            folder, "best", monitor=MONITOR, save_weights_only=True, enable_version_counter=False
        )
        self.callbacks: list[Callback] = [self.best]
        if patience:
            self.callbacks.append(EarlyStopping(MONITOR, patience=patience))

    def begin(self) -> None:
        """See :class:`Keeper`."""

    def settle(self) -> dict[str, float]:
        """See :class:`Keeper`."""
        score = self.best.best_model_score
        if score is not None and float(score) < self.before:
            state = torch.load(self.best.best_model_path, weights_only=True, map_location="cpu")
            self.module.load_state_dict(state["state_dict"])
        else:
            self.module.refiner.load_state_dict(self.start)
        return {}


class BestLayers(Callback):
    """Each target layer in the state in which it did best, that of the start among them.

    Args:
        module: in the state that it starts from.
        judge: error by target layer, lower is better.
        patience: looks at which no layer has improved, after which training ends; 0: never.
    """

    def __init__(self, module: RefinerModule, judge: LayerJudge, patience: int) -> None:
        self.module, self.judge, self.patience = module, judge, patience
        self.callbacks: list[Callback] = [self]
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.start = self.best = torch.empty(0)
        self.idle = 0

    def begin(self) -> None:
        """See :class:`Keeper`."""
        self.start = self.best = self._errors()
        self._keep(torch.ones_like(self.best, dtype=torch.bool))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at every layer, and keep those that have improved."""
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        errors = self._errors()
        better = errors < self.best
        self._keep(better)
        self.best = torch.where(better, errors, self.best)
        self.idle = 0 if bool(better.any()) else self.idle + 1
        pl_module.log("held_out/attention_error", float(errors[self._mapped].mean()))
        if self.patience and self.idle >= self.patience:
            trainer.should_stop = True

    def settle(self) -> dict[str, float]:
        """See :class:`Keeper`; names the layers that no state of the network has improved."""
        with torch.no_grad():
            for layer, weights in self.kept.items():
                for name, view in self.module.refiner.weights_of(layer).items():
                    view.copy_(weights[name])
        start, best = self.start[self._mapped], self.best[self._mapped]
        same = [layer for layer in self.kept if bool(self.best[layer] == self.start[layer])]
        return {
            "attention_error_before": float(start.mean()),
            "attention_error_after": float(best.mean()),
            "layers_improved": float(len(self.kept) - len(same)),
            **{f"kept_at_start_layer_{layer}": float(self.start[layer]) for layer in same},
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run must know."""
        kept = {str(layer): weights for layer, weights in self.kept.items()}
        return {"start": self.start, "best": self.best, "idle": self.idle, "kept": kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.start, self.best = state_dict["start"], state_dict["best"]
        self.idle = int(state_dict["idle"])
        kept: Mapping[str, dict[str, Tensor]] = state_dict["kept"]
        self.kept = {int(layer): weights for layer, weights in kept.items()}

    @property
    def _mapped(self) -> slice:
        return slice(self.module.mapper.native_layers, None)

    def _errors(self) -> Float[Tensor, " layers"]:
        with torch.no_grad():
            errors = self.judge(self.module.mapper).float().cpu()
        # A layer that has come to NaN is no better than anything.
        return errors.nan_to_num(nan=torch.inf)

    def _keep(self, better: Bool[Tensor, " layers"]) -> None:
        for layer in better.nonzero()[:, 0].tolist():
            weights = self.module.refiner.weights_of(layer)
            if weights:
                self.kept[layer] = {name: x.detach().cpu().clone() for name, x in weights.items()}
