from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from kvferry.results.rows import ResultRow
from kvferry.results.tables import format_value, markdown_table, print_tables

Maker = Callable[..., list[ResultRow]]


def printed(rows: list[ResultRow], width: int = 100, *, styles: bool = False) -> str:
    stream = io.StringIO()
    color = "standard" if styles else None
    console = Console(file=stream, width=width, force_terminal=styles, color_system=color)
    print_tables(rows, console)
    return stream.getvalue()


@pytest.mark.parametrize("which", ["rows", "grid"])
def test_tables_fit_a_hundred_columns_uncut(which: str, request: pytest.FixtureRequest) -> None:
    text = printed(request.getfixturevalue(which))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    for wanted in ("8,192", "33.3x", "46.7 s", ".582\N{EN DASH}.642", "zero context", "n = 48"):
        assert wanted in text


def test_best_mapped_value_is_bold_and_native_is_not(rows_of: Maker) -> None:
    text = printed(rows_of(splits={"wiki": 48}, latency=False), styles=True)
    bold = re.findall(r"\x1b\[1m\s*(-?[\d.]+)\x1b", text)
    assert bold == ["0.612", "0.741", "0.044", "0.987", "0.894"]


def test_nothing_to_show_prints_nothing() -> None:
    assert printed([]).strip() == "" and markdown_table([]) == ""


def test_markdown_has_one_width_and_escapes_pipes(rows_of: Maker) -> None:
    text = markdown_table(rows_of(mapper="a|b") + rows_of(mapper="c"))
    assert "a\\|b + native tail" in text
    for table in text.split("\n\n"):
        if table.startswith("|"):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1
    assert "**0.044** [0.034, 0.054]" in text


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("kl", 0.12345, "0.123"),
        ("map_ms", 3.14159, "3.1"),
        ("map_ms", 1234.5, "1,234"),
        ("map_ms", 41300.0, "41.3 s"),
        ("speedup", 33.31, "33.3x"),
        ("speedup", 1234.0, "1,234x"),
        ("storage_bytes", 0, "0 B"),
        ("storage_bytes", 3 * 1024**3, "3.0 GiB"),
        ("parameters", 201.3e6, "201.3 M"),
        ("perplexity", 12345.6, "12,345.6"),
        ("nll", float("nan"), "-"),
        ("nll", float("inf"), "inf"),
    ],
)
def test_numbers_read_well(metric: str, value: float, expected: str) -> None:
    assert format_value(metric, value) == expected
