"""Documents: every file that cannot be carried over is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.app.documents import check_length, check_question, read_document
from kvferry.errors import InputError

CASES = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\t\n", "is empty"),
    "zeros": (b"ab\0cd", "not a text file"),
    "latin": ("caf\u00e9".encode("latin-1"), "not a text file"),
    "control": (bytes(range(1, 9)) * 9, "not a text file"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_no_text_is_refused(case: str, tmp_path: Path) -> None:
    content, expected = CASES[case]
    path = tmp_path / "document"
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected):
        read_document(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_document(path)


def test_text_survives(tmp_path: Path) -> None:
    path = tmp_path / "document"
    text = "Ünïcode \U0001f600 नमस्ते\n\n  indented"
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n")
    assert read_document(path) == text


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, "no tokens"), (1, "single token"), (991, "longer than M can read")],
)
def test_lengths_that_cannot_work(tokens: int, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        check_length(tokens, model="M", limit=1000, reserve=10)


def test_lengths_that_work() -> None:
    check_length(2, model="M", limit=1000, reserve=10)
    check_length(990, model="M", limit=1000, reserve=10)
    check_length(10**6, model="M", limit=None, reserve=10)


def test_a_question_says_something() -> None:
    assert check_question(" who? ") == "who?"
    with pytest.raises(InputError, match="question is empty"):
        check_question(" \n")
