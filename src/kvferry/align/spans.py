"""Token ids -> text and character spans, without tokenizing anything again.

The ids in a cache may be no tokenizer's canonical choice for their text (a model generates what it
likes), so spans come from what each id spells, never from encoding the text a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int64
from torch import Tensor

from kvferry.align.vocabulary import Spelling, UnsupportedTokenizerError, read_spelling
from kvferry.errors import InputError

_SPACE = 0x20


@dataclass(frozen=True)
class TokenText:
    """What the ids of one tokenizer spell.

    Build it once for a tokenizer (`from_tokenizer`) and keep it; each query is linear in the
    number of ids.
    """

    spelling: Spelling
    _bytes: npt.NDArray[np.uint8] = field(init=False, repr=False, compare=False)
    _starts: npt.NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        pieces = self.spelling.pieces
        # One more, empty piece at the end: ids beyond the vocabulary spell nothing.
        lengths = np.fromiter((len(piece) for piece in pieces), np.int64, len(pieces))
        starts = np.concatenate([[0], np.cumsum(lengths), [lengths.sum()]])
        joined = np.frombuffer(b"".join(pieces), np.uint8)
        object.__setattr__(self, "_bytes", joined)
        object.__setattr__(self, "_starts", starts)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TokenText:
        """Read the spelling of a transformers fast tokenizer.

        Raises:
            UnsupportedTokenizerError: a slow tokenizer, or a decoder that is not understood.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedTokenizerError(
                "This tokenizer has no tokenizer.json behind it.",
                found=type(tokenizer).__name__,
                expected="a fast tokenizer of the `tokenizers` library",
                fix="Load the model with AutoTokenizer and use_fast=True.",
            )
        return cls(read_spelling(backend))

    def character_spans(self, ids: Sequence[int] | Tensor) -> tuple[str, Int64[Tensor, "n 2"]]:
        """The text that `ids` spell and the characters [start, end) of each id in it.

        Pieces of one character all get that character as their span. Special tokens and ids
        outside the vocabulary carry no text: their span is empty and lies at the end of what came
        before. Ends never decrease. Bytes that are not UTF-8 become U+FFFD, one for each maximal
        invalid run, as `bytes.decode(errors="replace")` has it.

        Raises:
            InputError: an id is negative or `ids` is not one-dimensional.
        """
        index = np.asarray(torch.as_tensor(ids, dtype=torch.int64).cpu())
        if index.ndim != 1 or (index.size and index.min() < 0):
            raise InputError(
                "Token ids must be one sequence of non-negative integers.",
                found=f"shape {index.shape}, smallest {index.min() if index.size else None}",
                fix="Pass the ids of one sequence, without padding marks such as -100.",
            )
        raw, ends = self._spell(np.minimum(index, len(self.spelling.pieces)))
        text, opens = _decode(raw)
        before = np.concatenate([[0], np.cumsum(opens)])  # characters opened before each byte
        begins = np.concatenate([[0], ends[:-1]])
        has_text = ends > begins
        # An id with text starts in the character of its first byte, which may be open already.
        first = np.where(has_text, before[np.minimum(begins + 1, len(raw))] - 1, before[begins])
        spans = np.stack([first, before[ends]], axis=1).reshape(-1, 2)
        return text, torch.from_numpy(spans)

    def text(self, ids: Sequence[int] | Tensor) -> str:
        """The text that `ids` spell, special tokens left out."""
        return self.character_spans(ids)[0]

    def _spell(
        self, index: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """All bytes in a row, and where each id's bytes end among them."""
        starts = self._starts[index]
        lengths = self._starts[index + 1] - starts
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if ends.size else 0
        raw = self._bytes[np.repeat(starts - ends + lengths, lengths) + np.arange(total)]
        limit = self.spelling.leading_spaces
        if self.spelling.leading_token and total:
            limit = int(lengths[lengths > 0][0])
        head = raw[:limit]
        cut = int(np.argmax(head != _SPACE)) if (head != _SPACE).any() else len(head)
        return raw[cut:], np.maximum(ends - cut, 0)


def _decode(raw: npt.NDArray[np.uint8]) -> tuple[str, npt.NDArray[np.bool_]]:
    """The text of UTF-8 bytes, and for each byte whether it opens a character of that text."""
    data = raw.tobytes()
    try:
        return data.decode(), (raw & 0xC0) != 0x80
    except UnicodeDecodeError:
        return data.decode(errors="replace"), _opens_with_replacement(raw)


def _opens_with_replacement(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Where characters open once each maximal invalid run of bytes has become U+FFFD.

    `surrogateescape` gives every invalid byte a character of its own; a start byte and the
    continuation bytes that it could have had then fall back into one run.
    """
    escaped = raw.tobytes().decode(errors="surrogateescape")
    points = np.frombuffer(escaped.encode("utf-32-le", "surrogatepass"), np.uint32)
    invalid_point = (points >= 0xDC80) & (points <= 0xDCFF)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    widths[invalid_point] = 1
    at = np.cumsum(widths) - widths
    opens = np.zeros(len(raw), np.bool_)
    opens[at] = True
    invalid = np.zeros(len(raw) + 2, np.bool_)
    invalid[at] = invalid_point
    byte = np.concatenate([raw, np.zeros(2, np.uint8)])
    lead, second, third = byte[:-2], byte[1:-1], byte[2:]
    # The second byte's range is narrower after E0, ED, F0 and F4 (overlong forms, surrogates).
    low = np.select([lead == 0xE0, lead == 0xF0], [0xA0, 0x90], 0x80)
    high = np.select([lead == 0xED, lead == 0xF4], [0x9F, 0x8F], 0xBF)
    starts_long = (lead >= 0xE0) & (lead <= 0xF4) & invalid[:-2]
    joins_second = starts_long & invalid[1:-1] & (second >= low) & (second <= high)
    joins_third = joins_second & (lead >= 0xF0) & invalid[2:] & ((third & 0xC0) == 0x80)
    opens[1:] &= ~joins_second[:-1]
    opens[2:] &= ~joins_third[:-2]
    return opens
