"""Errors of a chain of hand-offs are told from those of one: exactly, where they are planted."""

from __future__ import annotations

import math

import pytest
import torch

from kvferry.calibration.corpus import load_miniature
from kvferry.calibration.reader import PairReader
from kvferry.calibration.statistics import CalibrationPlan
from kvferry.errors import ArtefactError, InputError
from kvferry.evals.multi_turn import ConversationShape, MultiTurn, cut_conversation
from kvferry.evals.rows import multi_turn_rows
from kvferry.evals.scoring import Scores
from kvferry.handoff.handoff import Handoff
from kvferry.lm.induction import SYMBOLS
from kvferry.lm.model import LanguageModel
from kvferry.mappers.base import MapperMethod, Statistics
from kvferry.mappers.controls import Identity, Random
from kvferry.results.rows import ResultRow, RowStamp
from tests.matrix import METHODS
from tests.pairs import reader_of, statistics_of

SHAPE = ConversationShape(
    turns=3,
    first_tokens=90,
    turn_tokens=20,
    recall_start=10,
    recall_tokens=24,
    recall_prompt_tokens=8,
)
TEXT = load_miniature(1, sentences=24, seed=9)[0].text
STAMP = RowStamp("a_b", "A", "B", "m", "0+1", 0, "cpu", "float32", "0", "0")


def handoff_of(source: str, target: str, method: MapperMethod) -> Handoff:
    return Handoff(reader_of(source, target), method.fit(statistics_of(source, target)))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_identity_does_not_drift_and_what_is_planted_does(architecture: str) -> None:
    """A ruined way back is a bad hand-off at turn 2, and drift from turn 3 on."""
    there = handoff_of(architecture, architecture, Identity())
    for turn in MultiTurn(there, there, SHAPE).score(TEXT):
        assert set(turn) == {"native", "zero", "mapped", "fresh"}
        for condition in ("native", "mapped", "fresh"):
            assert turn[condition].kl < 1e-5 and turn[condition].top1_agreement == 1.0
            assert turn[condition].nll == pytest.approx(turn["native"].nll, abs=1e-3)
        assert turn["mapped"].recall_nll == pytest.approx(turn["native"].recall_nll, abs=1e-3)
        assert turn["zero"].kl > 1e-4, "control: without the context something is lost"
    ruined = MultiTurn(there, handoff_of(architecture, architecture, Random()), SHAPE).score(TEXT)
    drift = [turn["mapped"].kl - turn["fresh"].kl for turn in ruined]
    assert abs(drift[0]) < 1e-6 and abs(drift[1]) < 1e-4
    assert ruined[1]["fresh"].kl > 1e-3
    assert ruined[2]["fresh"].kl < 1e-5 and drift[2] > 1e-3


def test_a_chain_recalls_what_its_hand_offs_carry(copier: LanguageModel) -> None:
    """What was read first is repeated after three hand-offs; one random way back loses it."""
    reader = PairReader(copier, copier)
    layouts = CalibrationPlan(code_width=0).layouts(reader)
    shapes = Statistics(copier.geometry, copier.geometry, layouts, {}, None)
    identity, random = (Handoff(reader, m.fit(shapes)) for m in (Identity(), Random()))
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(len(SYMBOLS), generator=generator)
    text = "".join(SYMBOLS[i] for i in order)
    shape = ConversationShape(
        turns=3,
        first_tokens=24,
        turn_tokens=8,
        recall_start=8,
        recall_tokens=8,
        recall_prompt_tokens=2,
    )
    assert len(copier.encode(text)) == len(SYMBOLS), "control: a token a symbol"
    kept = MultiTurn(identity, identity, shape).score(text)
    lost = MultiTurn(identity, random, shape).score(text)
    chance = math.log(24)
    for turn in kept:
        assert turn["native"].recall_nll < 0.6 * chance < turn["zero"].recall_nll
        assert turn["mapped"].recall_nll == pytest.approx(turn["native"].recall_nll, abs=1e-3)
    assert lost[2]["mapped"].recall_nll > 0.8 * chance
    assert lost[2]["fresh"].recall_nll == pytest.approx(lost[2]["native"].recall_nll, abs=1e-3)


@pytest.mark.parametrize("method", ["anchored", "anchored_sinks", "anchored_native"])
def test_two_models_take_turns(method: str) -> None:
    there = handoff_of("llama", "gemma3", METHODS[method])
    back = handoff_of("gemma3", "llama", METHODS[method])
    done: list[None] = []
    turns = MultiTurn(there, back, SHAPE).score(TEXT, lambda: done.append(None))
    assert len(done) == len(turns) == 3
    assert turns[0]["mapped"] == turns[0]["fresh"], "nothing has been handed over before"
    for turn in turns:
        assert turn["native"].kl < 1e-5
        assert all(math.isfinite(scores.nll) for scores in turn.values())
    assert turns[2]["mapped"].kl != turns[2]["fresh"].kl


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mistral"])
def test_pieces_make_up_the_text_and_split_no_character(architecture: str) -> None:
    reader = reader_of(architecture, architecture)
    text = TEXT[:200] + "\u20ac\U0001f600\u6f22\u5b57" * 20 + TEXT[200:]
    for first in range(40, 70):
        shape = ConversationShape(3, first, 8, 0, 8, 2)
        cut = cut_conversation(reader.source, reader.source_text, text, shape)
        start = reader.source_text.text(cut.first_ids)
        assert text.startswith(start + "".join(cut.pieces))
        assert "\ufffd" not in start and all(cut.pieces)


def test_what_cannot_be_measured_is_refused() -> None:
    there = handoff_of("llama", "gemma3", METHODS["anchored"])
    with pytest.raises(ArtefactError, match="not the way back"):
        MultiTurn(there, there, SHAPE)
    same = handoff_of("llama", "llama", Identity())
    with pytest.raises(InputError, match="too short"):
        MultiTurn(same, same, SHAPE).score(TEXT[:200])
    with pytest.raises(InputError, match="outside what is read first"):
        ConversationShape(first_tokens=64)
    with pytest.raises(InputError, match="something to score"):
        ConversationShape(turns=0)
    tight = ConversationShape(1, 40, 8, 15, 25, 2)
    back = handoff_of("gemma3", "llama", METHODS["anchored"])
    with pytest.raises(InputError, match="in tokens of pico-"):
        MultiTurn(there, back, tight).score(TEXT)


def scores(kl: float, recall: float = 1.0) -> Scores:
    return Scores(nll=2.0 + kl, kl=kl, top1_agreement=0.9, recall_nll=recall)


def test_rows_tell_the_turn_its_direction_and_its_drift() -> None:
    conversation = [
        {
            "native": scores(0.0, 0.5),
            "zero": scores(0.6, 2.5),
            "mapped": scores(0.1 + 0.05 * turn, 1.0),
            "fresh": scores(0.1, 0.9),
        }
        for turn in range(3)
    ]
    rows = multi_turn_rows(STAMP, [conversation] * 4, SHAPE, split="wiki", draws=100)
    assert len({row.key for row in rows}) == len(rows)

    def found(turn: int, condition: str, metric: str) -> ResultRow:
        wanted = (turn, condition, metric)
        return next(r for r in rows if (r.turn, r.condition, r.metric) == wanted)

    drift = [found(turn, "mapped", "kl_drift").value for turn in (1, 2, 3)]
    assert drift == pytest.approx([0, 0.05, 0.1])
    assert found(3, "mapped", "recall_kept").value == pytest.approx(0.75)
    assert found(3, "fresh", "nll_retention").value == pytest.approx(5 / 6)
    assert [found(t, "zero", "kl").source for t in (1, 2, 3)] == ["A", "B", "A"]
    assert [found(t, "zero", "kl").target for t in (1, 2, 3)] == ["B", "A", "B"]
    assert [found(t, "zero", "kl").context_tokens for t in (1, 2, 3)] == [90, 110, 130]
    assert {row.task for row in rows} == {"multi_turn"}
