"""What each token id of a tokenizer spells, in bytes, read from its own vocabulary and decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from kvferry.errors import KVFerryError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NOT_A_BYTE = "\uffff"

Spell = Callable[[str], "str | bytes"]


class UnsupportedTokenizerError(KVFerryError):
    """The tokenizer's decoder cannot be turned into bytes for each token."""


@dataclass(frozen=True)
class Spelling:
    """The bytes of every token id, and what the decoder removes from the front of a text.

    Attributes:
        pieces: for each id the bytes it spells; special tokens and holes spell nothing.
        leading_spaces: how many leading spaces of a whole text the decoder drops.
        leading_token: the decoder drops every leading space, but of the first piece only.
    """

    pieces: tuple[bytes, ...]
    leading_spaces: int
    leading_token: bool


def read_spelling(backend: Tokenizer) -> Spelling:
    """Spell every id of a fast tokenizer.

    Non-special added tokens spell their content verbatim, except that the decoders of the
    SentencePiece family treat them as ordinary pieces, because the same id may stand for both.

    Raises:
        UnsupportedTokenizerError: the decoder is none of byte-level, SentencePiece or Metaspace.
    """
    steps = _flatten(_decoder_description(backend))
    kinds = [step["type"] for step in steps]
    spell, leading_spaces, leading_token = _compile(steps)
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=False)
    size = 1 + max([*vocabulary.values(), *added.keys()], default=-1)
    pieces = [b""] * size
    for token, index in vocabulary.items():
        pieces[index] = _as_bytes(spell(token))
    for index, extra in added.items():
        if extra.special:
            pieces[index] = b""
        elif "ByteLevel" in kinds:
            pieces[index] = extra.content.encode()
        else:
            pieces[index] = _as_bytes(spell(extra.content))
    return Spelling(tuple(pieces), leading_spaces, leading_token)


def _decoder_description(backend: Tokenizer) -> dict[str, Any] | None:
    # Serialised without its vocabulary, which would take seconds to parse.
    bare = Tokenizer(BPE())
    if backend.decoder is not None:
        bare.decoder = backend.decoder
    description: dict[str, Any] | None = json.loads(bare.to_str())["decoder"]
    return description


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [leaf for step in decoder["decoders"] for leaf in _flatten(step)]
    return [decoder]


def _compile(steps: list[dict[str, Any]]) -> tuple[Spell, int, bool]:
    """Turn decoder steps into one function of a token, plus the two rules for leading spaces."""
    spells: list[Spell] = []
    leading_spaces, leading_token, fused, joins = 0, False, False, False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                spells.append(_byte_level)
                joins = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                spells.append(_replace(old, new))
            case {"type": "ByteFallback"}:
                spells.append(_byte_fallback)
            case {"type": "Fuse"}:
                fused = joins = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                leading_spaces = start
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                spells.append(_replace(mark, " "))
                leading_token = scheme != "never"
                joins = True
            case _:
                raise _unsupported(steps, step)
    if not joins:
        raise _unsupported(steps, None)

    def spell(token: str) -> str | bytes:
        piece: str | bytes = token
        for one in spells:
            if isinstance(piece, bytes):
                break
            piece = one(piece)
        return piece

    return spell, leading_spaces, leading_token


def _unsupported(steps: list[dict[str, Any]], step: object) -> UnsupportedTokenizerError:
    return UnsupportedTokenizerError(
        "This tokenizer's decoder does not say which bytes each token spells.",
        found=[one["type"] for one in steps] if step is None else step,
        expected="ByteLevel; Replace, ByteFallback, Fuse, Strip; or Metaspace",
        fix="Use a model with a byte-level or SentencePiece fast tokenizer.",
    )


def _byte_alphabet() -> dict[int, str]:
    """The characters that stand for bytes in byte-level BPE, each mapped to chr(byte).

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    # A hidden byte's own character is not in the alphabet: it must not pass as that byte.
    table = {byte: _NOT_A_BYTE for byte in hidden}
    table |= {byte: chr(byte) for byte in printable}
    return table | {256 + rank: chr(byte) for rank, byte in enumerate(hidden)}


_BYTE_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_BYTE_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_fallback(token: str) -> str | bytes:
    found = _BYTE_PIECE.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token


def _replace(old: str, new: str) -> Spell:
    return lambda token: token.replace(old, new)


def _as_bytes(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode()
