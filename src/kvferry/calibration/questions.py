"""Questions with their answers, from JSON lines."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.errors import DataUnavailableError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        question: without "Question:" before it.
        answers: any of them is right.
        context: what it is about; empty where it is about nothing given.
    """

    question: str
    answers: tuple[str, ...]
    context: str = ""

    @property
    def text(self) -> str:
        """Context and question, as a model reads them."""
        asked = f"Question: {self.question}"
        return f"{self.context}\n\n{asked}" if self.context else asked


def load_questions(path: Path | str) -> list[Question]:
    """One JSON object a line: "question" or "query"; "answers" (a list), "answer", or "choices"
    with the number of the right one in "gold"; and perhaps "context".

    Raises:
        DataUnavailableError: no such file, or a line that is none of this, by number.
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataUnavailableError(
            f"The questions cannot be read: {file}",
            found=str(error),
            fix="Correct the path (data.questions=FILE): UTF-8, one JSON object a line.",
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataUnavailableError(
                f"Line {number} of {file} is no question with an answer.",
                found=f"{type(error).__name__}: {error}",
                expected='{"question": ..., "answers": [...], "context": ...}',
                fix="Correct the line; question, answer, query, choices and gold do as well.",
            ) from error
    if not found:
        raise DataUnavailableError(f"There are no questions in {file}.", fix="Give at least one.")
    return found


def is_right(answer: str, wanted: Sequence[str]) -> bool:
    """Whether ``answer`` is or contains one of those ``wanted``, word by word.

    Case, punctuation, articles and white space do not count.
    """
    said = f" {normalised(answer)} "
    return any(f" {gold} " in said for gold in map(normalised, wanted) if gold)


def normalised(answer: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _question(row: Mapping[str, Any]) -> Question:
    asked = str(row["question"] if "question" in row else row["query"]).strip()
    answers: Sequence[Any]
    if "choices" in row:
        answers = [row["choices"][int(row["gold"])]]
    elif "answers" in row:
        answers = row["answers"]
    else:
        answers = [row["answer"]]
    if isinstance(answers, str) or not answers:
        raise ValueError("answers must be a list with at least one entry")
    question = asked.removeprefix("Question:").strip()
    return Question(question, tuple(str(a) for a in answers), str(row.get("context") or "").strip())
