"""What Lightning is asked for happens: clipping, checkpointing, looks at the held-out texts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.autograd.graph import saved_tensors_hooks

from kvferry.mappers.base import Statistics
from kvferry.training.averaging import AveragedWeights
from kvferry.training.generation import GenerationModule
from kvferry.training.learn import TraceLearner
from kvferry.training.texts import Draw
from tests.pairs import traces_of
from tests.training.test_learning import SMALL, _StopAt, learnable, untrained


class Looks(Callback):
    """What was logged at every look, and the gradient that every step took."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.looks: list[tuple[int, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        taken = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(taken)))
        self.steps.append((trainer.global_step, values_of(trainer, "train/")))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.looks.append((trainer.global_step, values_of(trainer, "held_out/")))


def values_of(trainer: Trainer, prefix: str) -> dict[str, float]:
    return {n: float(x) for n, x in trainer.callback_metrics.items() if n.startswith(prefix)}


def asking(
    statistics: Statistics,
    *callbacks: Callback,
    begun: Any = None,
    save_seconds: float = 60.0,
    **options: Any,
) -> Statistics:
    learner: Any = statistics.learn

    def curves(before: int, step: int, held_out: Mapping[str, float]) -> bool:
        if begun is not None:
            begun(step, held_out)
        return False

    changed = replace(
        learner.options,
        options={**learner.options.options, **options},
        callbacks=lambda steps: callbacks,
        curves=curves,
        save_seconds=save_seconds,
    )
    return replace(statistics, learn=replace(learner, options=changed))


def test_gradients_are_clipped_and_their_norm_is_logged(tmp_path: Path) -> None:
    method = replace(SMALL, training_steps=3)
    free, clipped = Looks(), Looks()
    method.fit(asking(learnable("gemma3", "llama", tmp_path / "a"), free))
    method.fit(
        asking(learnable("gemma3", "llama", tmp_path / "b"), clipped, gradient_clip_val=1e-3)
    )
    assert max(clipped.norms) < 1.01e-3 < min(free.norms)
    assert clipped.steps[0][1]["train/gradient_norm"] == pytest.approx(free.norms[0], rel=1e-4), (
        "before clipping"
    )
    rates = [found["train/learning_rate"] for _, found in free.steps]
    assert rates[:2] == pytest.approx([SMALL.learning_rate / 2, SMALL.learning_rate])


def test_checkpointing_keeps_less_of_the_forward_pass(tmp_path: Path) -> None:
    """Bytes that autograd holds between forward and backward pass; the gradient is the same."""
    trace = traces_of("llama", "gemma3", 2)[1]
    learner = learnable("llama", "gemma3", tmp_path).learn
    assert isinstance(learner, TraceLearner)
    draw, held, gradients = Draw(trace, 0), [], []
    for checkpointed in (False, True):
        mapper = untrained("llama", "gemma3")
        material = replace(learner.material, gradient_checkpointing=checkpointed)
        module = GenerationModule(mapper, SMALL._generation, material)
        size = [0]

        def pack(x: torch.Tensor, size: list[int] = size) -> torch.Tensor:
            size[0] += x.numel() * x.element_size()
            return x

        with saved_tensors_hooks(pack, lambda x: x):
            loss = module.losses(draw)["loss"]
        held.append(size[0])
        loss.backward()
        gradients.append(mapper.refiner.up[-1].grad)  # type: ignore[union-attr, index]
    assert held[1] < held[0] / 2
    assert torch.allclose(*gradients, atol=1e-7)


def test_the_last_step_is_looked_at_and_a_stop_forgets_no_look(tmp_path: Path) -> None:
    """Six steps, a look every four: the second one comes at the end."""
    method = replace(SMALL, training_steps=6)
    whole, first, rest = Looks(), Looks(), Looks()
    told: list[tuple[int, Mapping[str, float]]] = []

    def begun(step: int, held_out: Mapping[str, float]) -> None:
        told.append((step, held_out))

    method.fit(asking(learnable("gemma3", "llama", tmp_path / "a"), whole, begun=begun))
    assert [step for step, _ in whole.looks] == [4, 6]
    broken = learnable("gemma3", "llama", tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        method.fit(asking(broken, first, _StopAt(5), begun=begun))
    saved = torch.load(
        tmp_path / "b" / "checkpoints" / "generation" / "last.ckpt", weights_only=True
    )
    (score,) = [
        state["best_model_score"] for state in saved["callbacks"].values() if state.get("monitor")
    ]
    assert score == whole.looks[0][1]["held_out/loss"], "the look belongs to the checkpoint"
    method.fit(asking(broken, rest, begun=begun))
    assert [step for step, _ in told] == [0, 0, 4]
    assert told[2][1] == told[0][1] and "held_out/recall_kl" in told[0][1]
    assert first.looks + rest.looks == whole.looks
    assert first.steps[:4] + rest.steps == whole.steps


SIX_STEPS = replace(SMALL, training_steps=6)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Looks:
    """What six steps have seen that nothing stopped."""
    seen = Looks()
    statistics = learnable("gemma3", "llama", tmp_path_factory.mktemp("unbroken"))
    SIX_STEPS.fit(asking(statistics, AveragedWeights(0.9), seen))
    return seen


@pytest.mark.parametrize("reached", [1, 4, 5])
def test_a_stop_between_two_looks_costs_no_step(
    reached: int, unbroken: Looks, tmp_path: Path
) -> None:
    """Saved after each step, a run that is stopped takes the steps that are left.

    Step 4 is followed by a look, which saves on its own.
    """
    broken, first, rest = learnable("gemma3", "llama", tmp_path), Looks(), Looks()
    began: list[int] = []

    def begun(step: int, held_out: Mapping[str, float]) -> None:
        began.append(step)

    for seen, stop in ((first, [_StopAt(reached)]), (rest, [])):
        asked = asking(broken, AveragedWeights(0.9), seen, *stop, begun=begun, save_seconds=0.0)
        with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
            SIX_STEPS.fit(asked)
    assert began == [0, reached]
    assert first.looks + rest.looks == unbroken.looks
    assert first.steps + rest.steps == unbroken.steps
