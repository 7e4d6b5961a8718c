"""Answers without the text: native knows its own, an empty cache does not, a map lies between."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.calibration.trace_store import TraceStore
from kvferry.evals.answering import CONDITIONS, score_answers
from kvferry.handoff.handoff import Handoff
from kvferry.mappers.controls import Identity
from kvferry.training.answers import Answerer
from tests.matrix import fitted
from tests.pairs import reader_of, statistics_of, traces_of


@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("gemma3", "gemma3")])
def test_native_says_its_own_answer_and_the_prefix_alone_does_not(
    source: str, target: str, tmp_path: Path
) -> None:
    reader, same = reader_of(source, target), source == target
    identity = Identity().fit(statistics_of("gemma3", "gemma3"))
    mapper = identity if same else fitted("anchored", source, target)
    pairs = [trace.tokens for trace in traces_of(source, target, 4)]
    answers = Answerer(reader, tmp_path / "answers", tokens=8).continuations(pairs, 60)
    seen: list[None] = []
    store = TraceStore(tmp_path / "traces", reader)
    scores = score_answers(Handoff(reader, mapper), answers, store, lambda: seen.append(None))
    assert set(scores) == set(CONDITIONS) and len(seen) == len(answers) >= 2
    nll = {name: sum(s.nll for s in found) / len(found) for name, found in scores.items()}
    assert all(score.exact for score in scores["native"])
    assert nll["native"] < nll["zero"]
    if same:
        assert abs(nll["mapped"] - nll["native"]) < 1e-4
    else:
        assert nll["native"] < nll["mapped"]
