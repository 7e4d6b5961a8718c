"""The average of the weights: judged, kept, and without an influence on how they learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from kvferry.mappers.refined import RefinedMapper
from kvferry.training.averaging import AveragedWeights, averaging_rate
from tests.training.test_learning import SMALL, _StopAt, learnable

DECAY = 0.3
Weights = dict[str, Tensor]


class Recorder(Callback):
    """Copies of the weights after every step."""

    def __init__(self) -> None:
        self.seen: list[Weights] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append(copies(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        self.seen.append(copies(pl_module))


class Kept(Callback):
    """The checkpoint of the best look, which is gone when training is finished."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
        self.saved: dict[str, Any] = torch.load(path, weights_only=True)


def copies(module: LightningModule) -> Weights:
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def fit(folder: Path, *callbacks: Callback, steps: int = 6) -> RefinedMapper:
    statistics = learnable("gemma3", "llama", folder)
    learner: Any = statistics.learn
    options = replace(learner.options, callbacks=lambda steps: callbacks)
    method = replace(SMALL, training_steps=steps)
    mapper: Any = method.fit(replace(statistics, learn=replace(learner, options=options)))
    return mapper  # type: ignore[no-any-return]


def averages(steps: list[Weights]) -> list[Weights]:
    """By step: the recursion, written out."""
    found = [steps[0]]
    for step, weights in enumerate(steps[1:], start=1):
        stays = averaging_rate(step, DECAY)
        found.append({n: stays * found[-1][n] + (1 - stays) * x for n, x in weights.items()})
    return found


def same(one: Weights, other: Weights) -> bool:
    return all(torch.allclose(x, other[name], atol=1e-7) for name, x in one.items())


def test_it_is_judged_and_kept_and_training_does_not_feel_it(tmp_path: Path) -> None:
    plain, beside = Recorder(), Recorder()
    fit(tmp_path / "plain", plain)
    kept = Kept()
    mapper = fit(tmp_path / "averaged", AveragedWeights(DECAY), beside, kept)
    assert all(same(*pair) for pair in zip(plain.seen, beside.seen, strict=True))
    wanted = averages(beside.seen)
    saved = kept.saved["state_dict"]
    step = int(kept.saved["global_step"])
    assert same(wanted[step], saved)
    assert not same(beside.seen[step], saved), "control: not the last weights"
    left = {f"refiner.{name}": x for name, x in mapper.refiner.state_dict().items()}
    better = mapper.report["generation_loss_after"] < mapper.report["generation_loss_before"]
    assert better and same(wanted[step], left)


def test_training_that_goes_on_averages_on(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", AveragedWeights(DECAY))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", AveragedWeights(DECAY), _StopAt(5))
    again = fit(tmp_path / "broken", AveragedWeights(DECAY))
    assert again.report == whole.report
    assert same(dict(whole.refiner.state_dict()), dict(again.refiner.state_dict()))


def test_early_averages_are_short() -> None:
    rates = [averaging_rate(step, 0.99) for step in (1, 10, 100, 10_000)]
    assert rates == sorted(rates) and rates[0] == pytest.approx(2 / 11) and rates[-1] == 0.99
