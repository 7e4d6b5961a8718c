from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from kvferry.results.rows import ResultRow
from kvferry.results.verdict import headline, verdicts

Maker = Callable[..., list[ResultRow]]
PAIR = "smollm2_gemma3"


def answers(rows: list[ResultRow]) -> dict[str, str]:
    return {verdict.text.split(":")[0]: verdict.answer for verdict in verdicts(rows, PAIR)}


def altered(rows: list[ResultRow], condition: str, metric: str, value: float) -> list[ResultRow]:
    return [
        dataclasses.replace(row, value=value, ci_low=value - 0.01, ci_high=value + 0.01)
        if (row.condition, row.metric) == (condition, metric)
        else row
        for row in rows
    ]


def test_a_good_run_says_so_in_numbers(rows: list[ResultRow]) -> None:
    text = headline(rows, PAIR)
    for words in ("89% [85, 93]", "83%", "61%", "8,192 tokens takes 1.2 s", "41.3 s", "anchored"):
        assert words in text
    assert set(answers(rows).values()) == {"yes"} and len(answers(rows)) == 4


def test_a_bad_run_is_not_dressed_up(rows: list[ResultRow]) -> None:
    worse = answers(altered(rows, "mapped", "kl", 0.9))
    assert worse["Mapped is WORSE than dropping the context"] == "no"
    assert worse["A control is as good as the mapper"] == "no"
    tie = answers(altered(rows, "mapped", "kl", 0.62))
    assert tie["Mapped cannot be told from no context"] == "open"
    lost = answers(altered(rows, "mapped", "recall_kept", 0.005))
    assert lost["Long-range recall is not shown to survive"] == "no"
    slow = answers(altered(rows, "mapped", "map_ms", 200.0))
    assert slow["The map is faster than native prefill at some lengths only"] == "open"


def test_without_intervals_nothing_is_claimed(rows: list[ResultRow]) -> None:
    bare = [dataclasses.replace(row, ci_low=math.nan, ci_high=math.nan) for row in rows]
    assert answers(bare)["Mapped against zero context"] == "open"


def test_the_best_mapper_speaks_for_a_grid(grid: list[ResultRow]) -> None:
    assert "mapped by anchored" in headline(list(reversed(grid)), PAIR)


def test_thin_rows_give_thin_words(rows_of: Maker) -> None:
    assert headline([], PAIR) == "" and verdicts([], PAIR) == []
    only = rows_of(conditions=("native", "zero"), latency=False, layers=False)
    assert headline(only, PAIR) == "" and verdicts(only, PAIR) == []
    timed = [row for row in rows_of() if row.task == "latency"]
    assert headline(timed, PAIR).startswith("Building its cache for 8,192 tokens")
