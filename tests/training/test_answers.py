"""What the target says itself: kept where it is right, kept on disk, the same in any company."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.calibration.questions import Question, is_right, load_questions
from kvferry.errors import DataUnavailableError
from kvferry.lm.cache import copy_cache
from kvferry.lm.model import LanguageModel
from kvferry.training import answers as answers_module
from kvferry.training.answering import answer_nll
from kvferry.training.answers import Answerer, OwnAnswer, first_line, write
from kvferry.training.losses import text_nll
from tests.pairs import reader_of, traces_of

READER = ("llama", "gemma3")


def test_rows_written_together_are_those_written_alone() -> None:
    target = reader_of(*READER).target
    ids = traces_of(*READER, 1)[0].tokens.target_ids
    prompts = [ids[:40], ids[:7], ids[:90]]
    together = write(target, prompts, 12)
    for prompt, row in zip(prompts, together, strict=True):
        read = target.prefill(*target.batch([prompt[:-1]]))
        alone = list(target.generate(read.cache, prompt[-1:], read.mask, 12))
        assert row == alone
    assert any(len(row) > 1 for row in together)
    drawn = [
        write(target, prompts, 12, temperature=0.6, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def spelled(answer: OwnAnswer) -> tuple[object, ...]:
    """What was said to what; tensors of the alignment do not compare."""
    return answer.pair.text, answer.context, answer.cue, answer.tokens, answer.right


def test_right_answers_are_kept_and_wrong_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, calls = reader_of(*READER), []

    def says(
        target: LanguageModel, prompts: Sequence[Sequence[int]], *rest: object, **more: object
    ):  # type: ignore[no-untyped-def]
        calls.append(len(prompts))
        return [target.encode(" It was the Ferry.\nAnd more")] * len(prompts)

    monkeypatch.setattr(answers_module, "write", says)
    gold = ("ferry", "harbour")
    asked = [Question(f"what came on day {i}", (gold[i % 2],), "A boat came.") for i in range(6)]
    answerer = Answerer(reader, tmp_path, tokens=8)
    found = answerer.right_answers(asked, 6)
    assert [answer.pair.text for answer in found] == [q.text for q in asked[::2]]
    for answer in found:
        assert answer.right and answer.context == len(answer.pair.target_ids)
        assert reader.target.text_of(answer.cue) == "\nAnswer:"
        assert reader.target.text_of(answer.tokens) == " It was the Ferry.", "its first line"
    again = answerer.right_answers(asked, 2)
    assert [spelled(answer) for answer in again] == [spelled(answer) for answer in found[:2]]
    assert calls == [6], "said once, then read from disk"
    replace(answerer, tokens=9).right_answers(asked, 6)
    assert calls == [6, 6], "control: other settings ask anew"
    assert replace(answerer, passage_tokens=3).right_answers(asked, 6) == [], "too long to carry"


def test_it_goes_on_after_a_cut_and_the_next_true_token(tmp_path: Path) -> None:
    reader = reader_of(*READER)
    pairs = [trace.tokens for trace in traces_of(*READER, 4)]
    answerer = Answerer(reader, tmp_path, tokens=10)
    found = answerer.continuations(pairs, longest=60)
    assert 0 < len(found) <= 4
    for answer in found:
        assert 1 + 15 <= answer.context <= 1 + 60 and not answer.right
        assert answer.cue == (answer.pair.target_ids[answer.context],)
        assert list(answer.tokens) == write(reader.target, [answer.prompt], 10)[0]
    again = answerer.continuations(pairs, longest=60)
    assert [spelled(answer) for answer in again] == [spelled(answer) for answer in found]
    assert {answer.context for answer in found} != {
        answer.context for answer in replace(answerer, seed=3).continuations(pairs, longest=60)
    }


def test_the_loss_of_an_answer_is_that_of_the_whole_sequence() -> None:
    """On the native cache: the same as one forward pass over context, cue and answer."""
    target = reader_of(*READER).target
    ids = traces_of(*READER, 1)[0].tokens.target_ids
    context, cue, answer = ids[:50], ids[50:53], ids[53:60]
    read = target.prefill(*target.batch([context]))
    with torch.no_grad():
        got = answer_nll(target, read.cache, read.mask, cue, answer)
        again = answer_nll(target, read.cache, read.mask, cue, answer)
        whole = target.model(torch.tensor([[*context, *cue, *answer]])).logits[0]
    wanted = text_nll(whole[52:59], torch.tensor(answer))
    assert torch.allclose(got, wanted, atol=1e-4)
    assert torch.equal(got, again), "the cache stays as it is"
    assert copy_cache(read.cache).layers[0].keys.shape[2] == 50


def test_an_answer_ends_with_its_line() -> None:
    target = reader_of(*READER).target
    for text, line in ((" the river\nand then", " the river"), ("\n the key", "\n the key")):
        assert target.text_of(first_line(target, target.encode(text))) == line


@pytest.mark.parametrize(
    ("said", "gold", "right"),
    [
        ("It is the River, of course.", ["a river"], True),
        ("rivers", ["river"], False),
        ("in 1871", ["1904", "1871"], True),
        ("", ["river"], False),
        ("the", ["the"], False),
    ],
)
def test_rightness_looks_at_words(said: str, gold: list[str], right: bool) -> None:
    assert is_right(said, gold) is right


def test_questions_are_read_in_every_form_and_broken_lines_are_named(tmp_path: Path) -> None:
    rows = [
        {"question": "Who?", "answers": ["me", "I"], "context": "A story."},
        {"query": "Question: What?", "choices": ["this", "that"], "gold": 1},
        {"question": "Where?", "answer": "here"},
    ]
    path = tmp_path / "qa.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    first, second, third = load_questions(path)
    assert first == Question("Who?", ("me", "I"), "A story.")
    assert second == Question("What?", ("that",)) and third.answers == ("here",)
    assert first.text == "A story.\n\nQuestion: Who?" and second.text == "Question: What?"
    for broken in ('{"question": "Who?"}', "{", '{"query": "x", "choices": ["a"], "gold": 3}',
                   '{"question": "x", "answers": "me"}'):  # fmt: skip
        path.write_text(json.dumps(rows[0]) + "\n" + broken)
        with pytest.raises(DataUnavailableError, match="Line 2"):
            load_questions(path)
    path.write_text("\n")
    with pytest.raises(DataUnavailableError, match="no questions"):
        load_questions(path)
    with pytest.raises(DataUnavailableError, match="cannot be read"):
        load_questions(tmp_path / "none.jsonl")
