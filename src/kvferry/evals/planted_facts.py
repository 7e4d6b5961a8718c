"""Facts planted early in a text, to be asked for at its end: recall that no mapper was taught."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from kvferry.calibration.reader import PairReader
from kvferry.training.answers import OwnAnswer

NAMES = (
    "Adelheid", "Bohdan", "Calixta", "Dagny", "Eskil", "Fiammetta", "Godfrey", "Hjordis",
    "Ignatius", "Jolanta", "Kestrel", "Leocadia", "Mordecai", "Nadezhda", "Oswald", "Philippa",
    "Quirin", "Rosalba", "Sigrid", "Thaddeus", "Ulrika", "Valerian", "Wilhelmina", "Zenobia",
)  # fmt: skip
WORDS = (
    "anchor", "barrel", "candle", "desert", "engine", "feather", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "marble", "needle", "orange", "pepper", "rabbit", "silver",
    "ticket", "violin", "window", "button", "copper", "dragon",
)  # fmt: skip
EARLIEST, LATEST = 0.1, 0.4
"""Shares of the text between which a fact may stand."""


def planted_facts(
    reader: PairReader, texts: Sequence[str], passage_tokens: int, seed: int = 0
) -> list[OwnAnswer]:
    """For each text one with a sentence more, what to ask, and the one word that is right.

    The sentence gives somebody a password. It stands behind another one in the second to fourth
    tenth, and the question is its beginning: only a cache that can be looked up says the
    word, for neither the language nor the text foretells it.

    Args:
        texts: of which the first ``passage_tokens`` source tokens are read.
        seed: of places, names and words; different texts get different ones.
    """
    draw = random.Random(seed)
    answers = []
    for number, text in enumerate(texts):
        name = NAMES[(seed + number) % len(NAMES)]
        word = WORDS[draw.randrange(len(WORDS))]
        # Room for the sentence, so that the end of the text does not move out of the passage.
        kept = reader.tokenize(text, passage_tokens - 24).text
        place = _place(kept, draw)
        question = f" The password of {name} is"
        pair = reader.tokenize(f"{kept[:place]}{question} {word}.{kept[place:]}", passage_tokens)
        cue = reader.target.encode(question)
        answer = reader.target.encode(f"{question} {word}")[len(cue) :]
        answers.append(OwnAnswer(pair, len(pair.target_ids), tuple(cue), tuple(answer), right=True))
    return answers


def _place(text: str, draw: random.Random) -> int:
    """The end of an early sentence, or of a word where no sentence ends there."""
    low, high = int(EARLIEST * len(text)), int(LATEST * len(text))
    for end in (r"\.(?=\s)", r"(?=\s)"):
        places = [match.end() for match in re.compile(end).finditer(text, low, high)]
        if places:
            return draw.choice(places)
    return low
