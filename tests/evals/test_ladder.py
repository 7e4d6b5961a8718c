"""The ladder must tell good caches from bad ones: gates 11 and 13."""

from __future__ import annotations

import math

import pytest
import torch

from kvferry.calibration.corpus import load_miniature
from kvferry.errors import InputError
from kvferry.evals.contexts import ContextShape, EvalContext, read_context
from kvferry.evals.ladder import PER_LAYER, ContextResult, Ladder
from kvferry.evals.latency import LatencyBench, affordable_lengths
from kvferry.evals.rows import ladder_rows, latency_rows, size_rows
from kvferry.evals.scoring import NativeReference, mean_kl, r2_about_mean, token_nll
from kvferry.handoff.handoff import Handoff
from kvferry.mappers.controls import Identity
from kvferry.results.rows import RowStamp
from tests.matrix import METHODS
from tests.pairs import reader_of, statistics_of

SHAPE = ContextShape(
    context_tokens=120,
    continuation_tokens=24,
    recall_start=10,
    recall_tokens=24,
    recall_prompt_tokens=8,
)
CONDITIONS = (
    "mapped",
    "mapped_tail",
    "mean",
    "random",
    "shuffled",
    "wrong_passage",
    "identity",
    "source",
)
STAMP = RowStamp(
    pair="pico",
    source="s",
    target="t",
    mapper="m",
    mapper_hash="0",
    seed=0,
    device="cpu",
    dtype="float32",
    config_hash="0",
    git_commit="0",
)


def scored(source: str, target: str, method: str, count: int = 3) -> list[ContextResult]:
    reader = reader_of(source, target)
    statistics = statistics_of(source, target)
    mapper = (Identity() if method == "identity" else METHODS[method]).fit(statistics)
    ladder = Ladder(Handoff(reader, mapper), SHAPE, native_tail=8, conditions=CONDITIONS, seed=0)
    texts = [p.text for p in load_miniature(count + 1, sentences=24, seed=9)]
    contexts = [read_context(reader, text, SHAPE) for text in texts]
    wrong = ladder.mapped_content(contexts[-1])
    return [ladder.score(context, wrong) for context in contexts[:count]]


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_identity_keeps_everything_and_the_controls_do_not(architecture: str) -> None:
    for result in scored(architecture, architecture, "identity"):
        for condition in ("mapped", "mapped_tail", "identity"):
            assert result.scores[condition].kl < 1e-5
            assert result.scores[condition].top1_agreement == 1.0
            assert result.scores[condition].nll == pytest.approx(
                result.scores["native"].nll, abs=1e-3
            )
        for condition in ("mean", "random", "shuffled", "wrong_passage"):
            assert result.scores[condition].kl > 1e-4
        for metric in PER_LAYER:
            assert result.layers["mapped"][metric] == pytest.approx(
                [1.0] * len(result.layers["mapped"][metric]), abs=1e-4
            )


def test_rows_carry_intervals_controls_and_layers() -> None:
    results = scored("llama", "gemma3", "anchored")
    rows = ladder_rows(STAMP, results, split="miniature", context_tokens=120, draws=200)
    found = {(row.condition, row.metric) for row in rows if row.layer is None}
    for condition in ("native", "zero", "mapped", "mapped_tail", "mean", "random", "shuffled"):
        for metric in ("kl", "nll_retention", "recall_kept", "top1_agreement", "perplexity"):
            assert (condition, metric) in found
    assert ("source", "nll") in found and ("identity", "kl") not in found, "other models"
    layers = [
        row.layer for row in rows if row.metric == "attention_cosine" and row.layer is not None
    ]
    assert layers == list(range(len(reader_of("llama", "gemma3").target.geometry.layers)))
    native = {row.metric: row.value for row in rows if row.condition == "native"}
    assert native["kl"] < 1e-5 and native["nll_retention"] == 1.0 and native["recall_kept"] == 1.0
    mapped = next(row for row in rows if (row.condition, row.metric) == ("mapped", "kl"))
    assert mapped.n == 3 and mapped.ci_low <= mapped.value <= mapped.ci_high


def test_nothing_of_the_continuation_reaches_the_source() -> None:
    reader = reader_of("llama", "gemma3")
    text = load_miniature(1, sentences=24, seed=9)[0].text
    context: EvalContext = read_context(reader, text, SHAPE)
    spelled = reader.source_text.text(context.trace.tokens.source_ids)
    whole = reader.target_text.text(context.trace.tokens.target_ids)
    assert whole.startswith(spelled) and len(whole) - len(spelled) < 12
    assert context.recall == context.trace.tokens.target_ids[1 + 10 : 1 + 34]
    after = reader.target_text.text(context.continuation)
    assert text.startswith(whole + after)


def test_a_short_passage_and_a_span_outside_are_refused() -> None:
    reader = reader_of("llama", "gemma3")
    with pytest.raises(InputError, match="too short"):
        read_context(reader, "only a few words", SHAPE)
    with pytest.raises(InputError, match="outside the context"):
        ContextShape(context_tokens=64, recall_start=32, recall_tokens=64)


def test_scores_agree_with_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    native, other = torch.randn(2, 9, 31, generator=generator).double().unbind()
    ids = torch.randint(0, 31, (9,), generator=generator)
    p, q = native.log_softmax(-1), other.log_softmax(-1)
    reference = NativeReference.of(native.float())
    assert mean_kl(reference, other.float()) == pytest.approx(
        float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4
    )
    expected = -sum(float(q[i, ids[i + 1]]) for i in range(3, 8)) / 5
    assert token_nll(other.float(), ids, 4) == pytest.approx(expected, rel=1e-5)
    wanted = torch.randn(50, 4, generator=generator)
    assert r2_about_mean(wanted, wanted) == 1.0
    assert r2_about_mean(wanted.mean(0).expand(50, 4), wanted) == pytest.approx(0.0, abs=1e-6)


def test_the_source_scores_its_own_continuation_per_target_token() -> None:
    """On one model the source's own number is the native number."""
    for result in scored("llama", "llama", "identity", count=2):
        assert result.source_nll == pytest.approx(result.scores["native"].nll, rel=0.02)


def test_latency_rows_cover_every_step() -> None:
    mapper = METHODS["anchored"].fit(statistics_of("llama", "gemma3"))
    handoff = Handoff(reader_of("llama", "gemma3"), mapper)
    bench = LatencyBench(handoff, load_miniature(1, sentences=24)[0].text)
    rounds: list[None] = []
    sample = bench.measure(64, repeats=3, warmup=1, each=lambda: rounds.append(None))
    assert len(rounds) == 4
    rows = latency_rows(STAMP, [sample], draws=100)
    steps = {(row.condition, row.metric) for row in rows}
    assert steps >= {
        ("source", "prefill_ms"),
        ("mapped", "align_ms"),
        ("mapped", "map_ms"),
        ("native", "prefill_ms"),
        ("mapped", "ttft_ms"),
        ("native", "ttft_ms"),
        ("mapped", "speedup"),
        ("mapped", "peak_bytes"),
    }
    assert all(row.n == 3 for row in rows if row.metric == "map_ms")
    assert all(math.isfinite(row.value) and row.value >= 0 for row in rows)
    limit = handoff.reader.source.geometry.max_positions
    assert affordable_lengths(handoff, [64, 128, limit + 1], 10_000) == [64, 128]
    assert affordable_lengths(handoff, [64, 128], 100) == [64]
    sizes = {row.metric: row.value for row in size_rows(STAMP, mapper.parameters, 7, 9)}
    assert sizes["parameters"] == mapper.parameters
