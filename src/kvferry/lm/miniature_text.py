"""A little built-in prose, without end and the same for the same seed, for tests and miniatures."""

from __future__ import annotations

import random

_PEOPLE = (
    "the captain",
    "a young teacher",
    "the old gardener",
    "my neighbour",
    "the engineer",
    "a quiet doctor",
    "the ferryman",
    "her brother",
    "the librarian",
    "an early visitor",
    "the committee",
    "the weaver",
)
_ACTIONS = (
    "carried",
    "repaired",
    "remembered",
    "painted",
    "described",
    "measured",
    "translated",
    "forgot",
    "borrowed",
    "found",
    "watched",
    "followed",
    "sold",
    "collected",
    "compared",
    "explained",
)
_THINGS = (
    "the wooden bridge",
    "a box of letters",
    "the northern harbour",
    "an unfinished map",
    "the river",
    "the question",
    "a silver coin",
    "the long answer",
    "the garden wall",
    "a second language",
    "the key",
    "the value of the house",
    "the winter timetable",
    "a history of the island",
    "the broken clock",
)
_CIRCUMSTANCES = (
    "before the rain",
    "after the second war",
    "in the morning",
    "with great care",
    "near the station",
    "for the first time",
    "without a word",
    "between 1871 and 1904",
    "at the end of the year",
    "because nobody else would",
    "while the others were sleeping",
    "in a small town",
)
_LINKS = ("and", "but", "so", "then", "although", "where", "because")


def miniature_text(sentences: int, seed: int) -> str:
    """`sentences` short English sentences, drawn with their own random generator."""
    draw = random.Random(seed)

    def clause() -> str:
        words = (_PEOPLE, _ACTIONS, _THINGS, _CIRCUMSTANCES)
        return " ".join(draw.choice(kind) for kind in words)

    lines = []
    for _ in range(sentences):
        text = clause()
        if draw.random() < 0.4:
            text = f"{text}, {draw.choice(_LINKS)} {clause()}"
        lines.append(text[0].upper() + text[1:] + ".")
    return " ".join(lines)
