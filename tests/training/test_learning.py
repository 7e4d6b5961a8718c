"""A mapper that learns: what is asked, what the gradient reaches, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback, Trainer

from kvferry.errors import ConfigurationError
from kvferry.handoff.handoff import Handoff
from kvferry.lm.content import ContentKV
from kvferry.mappers.anchored import Anchored
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.cachebridge import CacheBridge
from kvferry.mappers.controls import Identity
from kvferry.mappers.gated_residual import GatedResidual
from kvferry.mappers.layout import COMPONENTS
from kvferry.mappers.learning import Generation, Schedule
from kvferry.mappers.mlp import MLP
from kvferry.mappers.mobility import Mobility
from kvferry.mappers.refined import RefinedMapper
from kvferry.training.carrying import (
    ask,
    context_inputs,
    draw_questions,
    inference_free,
    mapped_context,
    native_context,
)
from kvferry.training.learn import TraceLearner
from kvferry.training.losses import kl_from_native, pointwise_error, text_nll
from kvferry.training.module import learning_rate_factor
from kvferry.training.reconstruction import stretch
from tests.pairs import learnable, reader_of, statistics_of, traces_of

SMALL = Mobility(
    start=Anchored(native_layers=1, planted_sinks=0, behavioural_keys=False),
    rank=4,
    directions=16,
    width=16,
    kernel=3,
    training_steps=8,
    passages=4,
    held_out=2,
    validate_every=4,
    shortest_context=32,
    warmup=2,
    learning_rate=3e-3,
)
BY_HEAD = CacheBridge(source_layers=2, passages=6, boundaries=8)


def untrained(source: str, target: str, start: MapperMethod = SMALL.start) -> RefinedMapper:
    """The residual as it is before the first step."""
    statistics = replace(statistics_of(source, target), learn=lambda mapper, aim: mapper)
    fitted = replace(SMALL, start=start).fit(statistics)
    assert isinstance(fitted, RefinedMapper)
    return fitted


@pytest.mark.parametrize("start", [SMALL.start, BY_HEAD], ids=["all heads", "head by head"])
@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("ministral3", "llama3")])
def test_training_begins_at_the_affine_map(source: str, target: str, start: MapperMethod) -> None:
    mapper, trace = untrained(source, target, start), traces_of(source, target, 2)[0]
    tokens = trace.target.tokens - 8
    inputs, _ = context_inputs(trace, tokens)
    first = mapper.first_tokens(tokens)
    refined, affine = mapper.map(inputs, first), mapper.affine.map(inputs, first)
    for component in COMPONENTS:
        for layer, x in getattr(affine, component).items():
            assert torch.equal(x, getattr(refined, component)[layer])
    with torch.no_grad():
        for up in mapper.refiner.up:  # type: ignore[union-attr]
            up.normal_()
    changed = mapper.map(inputs, first)
    last = len(mapper.target.layers) - 1
    assert not torch.equal(changed.keys[last], affine.keys[last]), "control: it can change them"
    native = torch.equal(changed.keys[0], affine.keys[0])
    assert native == (mapper.native_layers == 1), "native layers stay"


def test_the_gradient_of_the_answers_is_that_of_small_changes() -> None:
    """Through rotation, cache, attention and windows: against finite differences."""
    reader, mapper = reader_of("llama", "gemma3"), untrained("llama", "gemma3")
    trace = traces_of("llama", "gemma3", 2)[1]
    prefix = inference_free(Handoff(reader, mapper).prefix)
    generator = torch.Generator().manual_seed(0)
    questions = draw_questions(trace.tokens.target_ids, prefix.tokens, SMALL._generation, generator)
    inputs, native = context_inputs(trace, questions.context)
    with torch.no_grad():
        wanted = ask(reader.target, native_context(mapper, native), questions)

    def loss(checkpointed: bool = False) -> torch.Tensor:
        content = mapped_context(mapper, inputs, prefix)
        got = ask(reader.target, content, questions, checkpointed=checkpointed)
        return kl_from_native(wanted, got).mean()

    refiner = mapper.refiner
    assert isinstance(refiner, GatedResidual)
    weights = refiner.up[-1]
    loss().backward()
    gradient = weights.grad.clone()  # type: ignore[union-attr]
    assert float(gradient.abs().max()) > 0
    weights.grad = None
    loss(checkpointed=True).backward()
    assert torch.allclose(weights.grad, gradient, atol=1e-7), "run again, not kept"  # type: ignore[arg-type]
    step = 1e-2 * gradient / gradient.norm()
    with torch.no_grad():
        weights += step
        more = float(loss())
        weights -= 2 * step
        less = float(loss())
    slope = float((gradient * step).sum())
    assert (more - less) / 2 == pytest.approx(slope, rel=0.05)


def test_native_content_is_answered_as_the_target_answers_it() -> None:
    """A mapped cache that were native would leave no loss; a wrong one leaves some."""
    reader = reader_of("gemma3", "gemma3")
    mapper = Identity().fit(statistics_of("gemma3", "gemma3"))
    trace = traces_of("gemma3", "gemma3", 1)[0]
    prefix = inference_free(Handoff(reader, mapper).prefix)
    aim = Generation(Schedule(), shortest_context=64)
    generator = torch.Generator().manual_seed(1)
    questions = draw_questions(trace.tokens.target_ids, prefix.tokens, aim, generator)
    inputs, native = context_inputs(trace, questions.context)
    content = mapped_context(mapper, inputs, prefix)
    wanted = ask(reader.target, native_context(mapper, native), questions)
    assert float(kl_from_native(wanted, ask(reader.target, content, questions)).max()) < 1e-5
    flat = content.map_layers(torch.zeros_like)
    assert float(kl_from_native(wanted, ask(reader.target, flat, questions)).mean()) > 1e-3
    row = [*trace.tokens.target_ids[: questions.context], *questions.ids[0].tolist()]
    whole = reader.target.model(torch.tensor([row])).logits[0, questions.context :]
    scored = questions.scored[0]
    assert torch.allclose(wanted[: int(scored.sum())], whole[scored], atol=1e-3)


def test_questions_repeat_what_was_early_and_go_on_where_the_cut_is() -> None:
    ids = list(range(1000, 1400))
    aim = Generation(Schedule(), shortest_context=128, recall_spans=3)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        asked = draw_questions(ids, 1, aim, generator)
        rows = asked.ids.tolist()
        assert 129 <= asked.context <= 400 - 64 and len(rows) == 4
        assert rows[0] == ids[asked.context : asked.context + 64]
        for row, scored in zip(rows[1:], asked.scored[1:], strict=True):
            place = ids.index(row[0])
            assert row == ids[place : place + 64] and place + 128 <= asked.context + 1
            assert scored.tolist() == [15 <= i < 63 for i in range(64)]
    short = draw_questions(ids[:40], 1, aim, torch.Generator())
    assert short.context < 40 and short.ids.shape[1] >= 2, "a short text is asked less"


def test_losses_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    native = torch.randn(5, 11, generator=generator)
    mapped = torch.randn(5, 11, generator=generator)
    p, q = native.softmax(-1), mapped.softmax(-1)
    assert torch.allclose(kl_from_native(native, mapped), (p * (p / q).log()).sum(-1), atol=1e-5)
    ids = torch.tensor([3, 1, 4, 1, 5])
    assert torch.allclose(text_nll(mapped, ids), -q.log()[torch.arange(5), ids], atol=1e-5)


def test_it_learns_and_keeps_nothing_but_the_mapper(tmp_path: Path) -> None:
    method = replace(SMALL, training_steps=24, validate_every=8)
    statistics = learnable("gemma3", "llama", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        method.fit(_stopped(statistics, 16))
    kept = tmp_path / "checkpoints" / "generation"
    own = untrained("gemma3", "llama").refiner.state_dict()  # type: ignore[union-attr]
    saved = torch.load(kept / "best.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == {f"refiner.{name}" for name in own}
    size = sum(x.numel() * x.element_size() for x in own.values())
    assert (kept / "best.ckpt").stat().st_size < size + 100_000
    trained = sum(x.numel() * 4 for name, x in own.items() if not name.endswith(("mean", "basis")))
    whole = (kept / "last.ckpt").stat().st_size
    assert whole < size + 2 * trained + 200_000, "weights and the optimiser's two moments"
    mapper = method.fit(statistics)
    assert mapper.report["generation_loss_after"] < mapper.report["generation_loss_before"]
    assert [path.name for path in kept.iterdir()] == ["learned.safetensors"]
    assert (kept / "learned.safetensors").stat().st_size < size + 20_000
    done = replace(statistics, learn=_stopped(statistics, 0).learn)
    again = method.fit(done)
    assert again.report == mapper.report, "a finished phase is not run again"


MLPS = MLP(
    source_layers=2,
    hidden=16,
    tokens=64,
    rows=8,
    training_steps=8,
    learning_rate=1e-2,
    warmup=2,
    passages=4,
    held_out=2,
    validate_every=4,
)


def test_an_mlp_learns_through_the_target_too(tmp_path: Path) -> None:
    """From its start, and the start's loss is what it is judged by, not its own first steps'."""
    through = replace(MLPS, aim="generation", start=SMALL.start, shortest_context=32)
    through = replace(through, training_steps=24, validate_every=8, learning_rate=3e-3)
    report = through.fit(learnable("gemma3", "llama", tmp_path / "mlp")).report
    residual = replace(SMALL, training_steps=1, passages=1, validate_every=1)
    other = residual.fit(learnable("gemma3", "llama", tmp_path / "mobility")).report
    assert report["generation_loss_before"] == pytest.approx(other["generation_loss_before"])
    assert report["generation_loss_after"] < report["generation_loss_before"]
    assert not any(name.startswith("reconstruction") for name in report)


@pytest.mark.parametrize("method", [SMALL, MLPS], ids=["the state as a whole", "layer by layer"])
def test_training_that_goes_on_ends_where_it_would_have(
    method: Mobility | MLP, tmp_path: Path
) -> None:
    """A checkpoint of step 4, then the rest: the same weights as without the break."""
    whole = method.fit(learnable("gemma3", "llama", tmp_path / "whole"))
    broken = learnable("gemma3", "llama", tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        method.fit(_stopped(broken, 4))
    again = method.fit(broken)
    assert whole.refiner is not None and again.refiner is not None
    own = whole.refiner.state_dict()
    for name, x in own.items():
        assert torch.allclose(x, again.refiner.state_dict()[name], atol=1e-6), name
    assert again.report == pytest.approx(whole.report, rel=1e-4)
    other = replace(method, seed=1).fit(learnable("gemma3", "llama", tmp_path / "other"))
    assert other.refiner is not None
    assert any(not torch.equal(x, other.refiner.state_dict()[name]) for name, x in own.items())


def test_content_is_judged_by_head_over_the_tokens_that_count() -> None:
    """Written out, for two layers of which one holds its last tokens alone."""
    generator = torch.Generator().manual_seed(0)

    def content(tokens: tuple[int, int]) -> ContentKV:
        layers = [torch.randn(1, 3, count, 4, generator=generator) for count in tokens]
        places = torch.arange(6)[None]
        return ContentKV(dict(enumerate(layers)), {}, places, torch.ones(1, 6, dtype=torch.bool))

    mapped, native = content((6, 4)), content((6, 4))
    variance = {i: torch.rand(3, generator=generator) + 0.5 for i in range(2)}
    counted = torch.tensor([False, False, True, False, True, True])
    total = 0.0
    for layer, first in ((0, 0), (1, 2)):
        for head in range(3):
            gap = (mapped.keys[layer] - native.keys[layer])[0, head]
            error = gap[counted[first:]].square().mean()
            total += float(error / variance[layer][head]) / 6
    got = pointwise_error(mapped, native, {"keys": variance}, counted)
    assert float(got) == pytest.approx(total, rel=1e-5)
    assert float(pointwise_error(mapped, native, {"keys": variance})) != pytest.approx(total)


def test_stretches_lie_inside_the_text_and_reach_both_ends() -> None:
    found = {stretch(2, 12, 4, seed) for seed in range(200)}
    assert found == {(start, start + 4) for start in range(2, 9)}
    assert stretch(2, 12, 0, 0) == stretch(2, 12, 99, 0) == (2, 12)
    assert stretch(2, 2, 4, 0) == (1, 2), "a text of the prefix alone still has a token"


def _stopped(statistics: Statistics, step: int) -> Statistics:
    """Training ends there, and not because it is finished."""
    learner = statistics.learn
    assert isinstance(learner, TraceLearner)
    options = replace(learner.options, callbacks=lambda steps: [_StopAt(step)])
    return replace(statistics, learn=replace(learner, options=options))


class _StopAt(Callback):
    """Ends the process, as ctrl-C would, right after a step whose checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *rest: object) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


def test_the_learning_rate_rises_and_falls() -> None:
    schedule = Schedule(steps=100, warmup=10)
    factors = [learning_rate_factor(step, schedule) for step in range(101)]
    assert factors[0] == pytest.approx(0.1) and factors[10] == pytest.approx(1.0)
    assert factors[100] == pytest.approx(0.0) and factors[55] == pytest.approx(0.5)


def test_without_a_trainer_or_text_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no trainer"):
        SMALL.fit(statistics_of("llama", "gemma3"))
    statistics = learnable("llama", "gemma3", tmp_path)
    learner = statistics.learn
    assert isinstance(learner, TraceLearner)
    bare = replace(learner.material, texts={"training": ["some text here"]})
    with pytest.raises(ConfigurationError, match="selection"):
        SMALL.fit(replace(statistics, learn=replace(learner, material=bare)))
    with pytest.raises(ConfigurationError, match=r"rank.*recall_spans"):
        Mobility(rank=0, recall_spans=-1)
