"""When to carry: planted costs, stated reasons, and a fallback that is native prefill itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ArtefactError, InputError
from kvferry.handoff.costs import CostModel
from kvferry.handoff.handoff import Handoff
from kvferry.handoff.measured import Measured
from kvferry.handoff.policy import Policy
from kvferry.mappers.artefact import MEASURED, Manifest, ModelIdentity
from tests.matrix import METHODS
from tests.pairs import reader_of, statistics_of, traces_of

LENGTHS = (64, 256, 1024, 4096, 8192)
CARRY, PREFILL = CostModel(12.0, 0.11, 0.0), CostModel(3.0, 0.17, 2e-5)
MEASURES = Measured(
    weights_sha256="0" * 64,
    device="cpu",
    quality={
        "wiki": {"kl_retention": 0.9, "recall_kept": 0.8},
        "novel": {"kl_retention": 0.7, "recall_kept": 0.2},
    },
    context_tokens=768,
    carry=CARRY,
    prefill=PREFILL,
    timed_tokens=(64, 8192),
)


def fitted(cost: CostModel) -> CostModel:
    return CostModel.fit(LENGTHS, [cost(tokens) for tokens in LENGTHS])


def carries(policy: Policy, tokens: int, **facts: object) -> bool:
    measured = replace(MEASURES, **facts)  # type: ignore[arg-type]
    return policy.decide(measured, tokens, device="cpu").carry


@pytest.mark.parametrize("margin", [0.0, 5.0])
@pytest.mark.parametrize("ship", [CostModel(), CostModel(2.0, 0.01)])
def test_planted_costs_give_the_exact_crossover(margin: float, ship: CostModel) -> None:
    def pays(tokens: int) -> bool:
        return CARRY(tokens) + ship(tokens) + margin < PREFILL(tokens)

    crossover = next(tokens for tokens in range(1, 10_000) if pays(tokens))
    policy = Policy(margin_ms=margin, ship=ship)
    facts = {"carry": fitted(CARRY), "prefill": fitted(PREFILL)}
    assert not carries(policy, crossover - 1, **facts)
    assert carries(policy, crossover, **facts)
    assert carries(policy, crossover - 1, prefill=PREFILL, carry=CostModel(1.0)), "control"


@settings(deadline=None, max_examples=50)
@given(
    st.tuples(*[st.floats(0, 100)] * 3).filter(lambda planted: sum(planted) > 1e-3),
    st.lists(st.floats(0.5, 2.0), min_size=5, max_size=5),
)
def test_costs_are_non_negative_and_the_best_of_them(
    planted: tuple[float, float, float], noise: list[float]
) -> None:
    cost = CostModel(planted[0], planted[1] / 1e3, planted[2] / 1e6)
    exact = fitted(cost)
    assert all(exact(n) == pytest.approx(cost(n), rel=1e-6) for n in (100, 3000, 20_000))
    times = [cost(tokens) * factor for tokens, factor in zip(LENGTHS, noise, strict=True)]
    found = CostModel.fit(LENGTHS, times)
    assert min(found.coefficients) >= 0
    # Karush-Kuhn-Tucker: no slope where a coefficient is free, none downwards where it is zero.
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    terms = torch.stack([(lengths / 8192) ** p for p in range(3)], 1) / torch.tensor(times)[:, None]
    scaled = [c * 8192.0**p for p, c in enumerate(found.coefficients)]
    slope = terms.T @ (terms @ torch.tensor(scaled, dtype=torch.float64) - 1)
    size = terms.abs().sum(dim=0)
    for value, gradient, scale in zip(scaled, slope.tolist(), size.tolist(), strict=True):
        assert gradient > -1e-6 * scale and (value == 0 or abs(gradient) < 1e-6 * scale)


def test_too_few_or_impossible_timings_are_refused() -> None:
    for tokens, times in (
        ((64, 128), (1.0, 2.0)),
        ((64, 64, 64), (1.0, 1.0, 1.0)),
        ((1, 2, 3), (1.0, 0.0, 2.0)),
        ((1, 2, 3), (1.0, float("nan"), 2.0)),
    ):
        with pytest.raises(InputError, match="how time grows"):
            CostModel.fit(tokens, times)


@pytest.mark.parametrize(
    ("policy", "facts", "tokens", "carry", "said"),
    [
        (Policy(), {}, 2048, True, "carried: 237 ms against 435 ms of native prefill"),
        (Policy(), {}, 2048, True, "kl_retention 0.70 on novel"),
        (Policy(), {}, 20, False, "carrying is not faster, 14 ms against 6 ms"),
        (Policy(), {}, 20, False, "(timed from 64 to 8,192)"),
        (Policy(margin_ms=300), {}, 2048, False, "237 ms and a margin of 300 against 435 ms"),
        (Policy(least_quality=0.8), {}, 2048, False, "kl_retention 0.70 on novel is below 0.80"),
        (Policy(least_quality=0.8, domain="wiki"), {}, 2048, True, "0.90 on wiki"),
        (Policy(metric="recall_kept"), {}, 2048, False, "recall_kept 0.20 on novel is below"),
        (Policy(), {"quality": {}}, 2048, False, "nothing was measured"),
        (Policy(), {"device": "cuda"}, 2048, True, "not timed on cpu"),
        (Policy(), {"carry": None}, 20, True, "not timed on cpu"),
    ],
)
def test_a_decision_says_why(
    policy: Policy, facts: dict[str, object], tokens: int, carry: bool, said: str
) -> None:
    measured = replace(MEASURES, **facts)  # type: ignore[arg-type]
    decision = policy.decide(measured, tokens, device="cpu")
    assert decision.carry is carry and said in decision.reason, decision.reason
    assert decision.reason.startswith("carried: " if carry else "read natively: ")


def test_a_tail_costs_and_what_was_not_measured_is_an_error() -> None:
    plain = Policy().decide(MEASURES, 2048, device="cpu")
    tail = Policy().decide(MEASURES, 2048, device="cpu", native_tail=64)
    assert plain.carry_ms is not None and tail.carry_ms == plain.carry_ms + PREFILL(64)
    for policy in (Policy(domain="law"), Policy(metric="f1")):
        with pytest.raises(InputError, match="was not measured"):
            policy.decide(MEASURES, 2048, device="cpu")


@pytest.mark.parametrize("full_length", [False, True])
def test_the_fallback_is_native_prefill_logit_for_logit(full_length: bool) -> None:
    mapper = METHODS["anchored_sinks"].fit(statistics_of("llama", "gemma3"))
    handoff = Handoff(reader_of("llama", "gemma3"), mapper, measured=MEASURES)
    source, target = handoff.reader.source, handoff.reader.target
    rows = [trace.tokens.source_ids for trace in traces_of("llama", "gemma3", 2)]
    rows[1] = rows[1][: len(rows[1]) // 2]
    prefill = source.prefill(*source.batch(rows))
    suffix, new = " The end of it was", torch.tensor([[8, 9, 10]] * 2)

    def after(policy: Policy | None):  # type: ignore[no-untyped-def]
        got = handoff.transfer(prefill, suffix, full_length=full_length, policy=policy)
        return got, target.extend(got.cache, new, got.mask)

    read, got = after(Policy(least_quality=0.99))
    carried, other = after(Policy(margin_ms=-1e6))
    plain, _ = after(None)
    assert read.ids.equal(carried.ids) and read.suffix_ids == carried.suffix_ids
    native = target.prefill(read.ids, read.mask, full_length=False)
    expected = target.extend(native.cache, new, native.mask)
    assert float((got - expected).abs().max()) <= 1e-4
    assert float((other - expected).abs().max()) > 1e-2, "control: a mapped cache is another one"
    for stamp, ids in zip(read.provenance, read.mask.sum(dim=1).tolist(), strict=True):
        assert stamp.exact and stamp.mapped_tokens == 0 and stamp.native_tokens == ids
        assert "0.70 on novel is below 0.99" in stamp.instead and stamp.mapper == ""
    assert not any(stamp.exact or stamp.instead for stamp in carried.provenance)
    assert carried.decision is not None and carried.decision.carry and plain.decision is None
    if full_length:
        held, _ = handoff.read_on(after(Policy(least_quality=0.99))[0], new)
        assert held.hand_offs == 0 and held.ids.shape[1] == read.ids.shape[1] + 3


Change = Callable[[dict[str, object]], object]


def test_measures_come_back_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    model = ModelIdentity("m", "r", "g", "t", "a", "p")
    manifest = Manifest("p", "m", "", {}, model, model, {}, weights_sha256="0" * 64)
    assert Measured.load(tmp_path, manifest) is None
    MEASURES.save(tmp_path)
    assert Measured.load(tmp_path, manifest) == MEASURES
    bare = replace(MEASURES, carry=None, prefill=None, timed_tokens=None)
    bare.save(tmp_path)
    assert Measured.load(tmp_path, manifest) == bare
    with pytest.raises(ArtefactError, match="measured with weights 0000"):
        Measured.load(tmp_path, replace(manifest, weights_sha256="1" * 64))
    damages: list[Change] = [
        lambda values: values.pop("quality"),
        lambda values: values.update(format_version=99),
        lambda values: values.update(carry={"constant": -1.0, "linear": 0, "quadratic": 0}),
        lambda values: values.update(carry={"constant": 1.0, "cubic": 0}),
        lambda values: values.update(quality={"wiki": {"kl_retention": "nan"}}),
        lambda values: values.update(quality=[1]),
    ]
    for damage in damages:
        values = json.loads(json.dumps({"format_version": 1, **asdict(MEASURES)}))
        damage(values)
        (tmp_path / MEASURED).write_text(json.dumps(values))
        with pytest.raises(ArtefactError, match="cannot be used"):
            Measured.load(tmp_path, manifest)
    (tmp_path / MEASURED).write_text("{")
    with pytest.raises(ArtefactError, match="cannot be used"):
        Measured.load(tmp_path, manifest)
