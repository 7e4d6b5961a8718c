"""A planted fact stands early, once, and its question asks for one word."""

from __future__ import annotations

import pytest

from kvferry.calibration.corpus import load_miniature
from kvferry.evals.planted_facts import NAMES, WORDS, planted_facts
from tests.pairs import reader_of

TOKENS = 200


@pytest.mark.parametrize(("source", "target"), [("llama", "gemma3"), ("gemma3", "llama3")])
def test_a_fact_stands_early_and_its_end_is_asked_for(source: str, target: str) -> None:
    reader = reader_of(source, target)
    texts = [passage.text for passage in load_miniature(5, sentences=24, seed=3)]
    facts = planted_facts(reader, texts, TOKENS)
    for text, fact in zip(texts, facts, strict=True):
        asked = reader.target.text_of([*fact.cue, *fact.tokens]).strip()
        name, word = asked.removeprefix("The password of ").split(" is ")
        assert name in NAMES and word in WORDS
        assert fact.pair.text.count(asked) == 1
        assert 0.05 < fact.pair.text.index(asked) / len(fact.pair.text) < 0.45
        assert fact.pair.text.replace(f" {asked}.", "") in text, "the rest is as it was"
        assert len(fact.pair.source_ids) <= TOKENS + len(reader.source.sink_ids)
        assert fact.context == len(fact.pair.target_ids)
    assert len({fact.cue for fact in facts}) == len(facts)


def test_a_seed_is_a_choice_of_facts() -> None:
    reader = reader_of("llama", "gemma3")
    texts = [passage.text for passage in load_miniature(3, sentences=24, seed=3)]
    once, again, other = (planted_facts(reader, texts, TOKENS, seed) for seed in (1, 1, 2))
    assert [f.pair.text for f in once] == [f.pair.text for f in again]
    assert [f.pair.text for f in once] != [f.pair.text for f in other]
