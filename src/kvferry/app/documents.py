"""The user's document: read once, refused with a reason, before anything heavy loads."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import InputError

MAX_BYTES = 64 * 2**20
"""Far beyond any model's context; a larger file is a mistake."""


def read_document(path: Path) -> str:
    """The text of a UTF-8 file, with the line ends of its lines unified.

    Raises:
        InputError: missing, a folder, unreadable, too large, binary, not UTF-8, or without text.
    """
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise InputError(
                f"{path} is too large for a document.",
                found=f"{path.stat().st_size / 2**20:.0f} MiB",
                expected=f"at most {MAX_BYTES // 2**20} MiB of text",
                fix="Cut out the part that the question is about.",
            )
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"The document cannot be read: {path}",
            found=error.strerror,
            fix="Name a text file: kvferry ask --document FILE QUESTION.",
        ) from error
    if b"\0" in content:
        raise _not_text(path, "zero bytes, as in a binary file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(path, f"byte {content[error.start]:#04x} at {error.start}") from error
    if not text.strip():
        raise InputError(
            f"The document is empty: {path}",
            fix="Give a file that holds the text which the question is about.",
        )
    if sum(not (c.isprintable() or c.isspace()) for c in text) > len(text) // 10:
        raise _not_text(path, "mostly control characters")
    return "\n".join(text.splitlines()).strip("\n")


def check_length(tokens: int, *, model: str, limit: int | None, reserve: int) -> None:
    """Refuse a document that is too short to carry over, or too long for a model.

    Args:
        tokens: length of the document in the model's tokens.
        model: its name, for the message.
        limit: positions that the model was made for; None when it states none.
        reserve: positions that the question and the answer need.

    Raises:
        InputError: fewer than two tokens, or more than ``limit - reserve``.
    """
    if tokens < 2:
        raise InputError(
            "The document is a single token: there is no context to carry over."
            if tokens
            else "The document has no tokens.",
            expected="at least two tokens",
            fix="Give a longer document.",
        )
    if limit is not None and tokens + reserve > limit:
        raise InputError(
            f"The document is longer than {model} can read.",
            found=f"{tokens} tokens, and {reserve} for question and answer",
            expected=f"at most {limit} together",
            fix="Cut the document, or choose a pair whose models read longer contexts.",
        )


def check_question(question: str) -> str:
    """The question without surrounding space.

    Raises:
        InputError: it is empty.
    """
    if not question.strip():
        raise InputError(
            "The question is empty.", fix='Ask one: kvferry ask ... "Who is it about?"'
        )
    return question.strip()


def _not_text(path: Path, found: str) -> InputError:
    return InputError(
        f"{path} is not a text file.",
        found=found,
        expected="UTF-8 text",
        fix="Convert it to plain UTF-8 text first.",
    )
