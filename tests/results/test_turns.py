"""Conversations in tables, figure, verdict and report."""

from __future__ import annotations

from pathlib import Path

from matplotlib.text import Text

from kvferry.results.report import write_report
from kvferry.results.rows import ResultRow, RowStamp
from kvferry.results.statistics import Interval
from kvferry.results.tables import markdown_table
from kvferry.results.turn_plot import turns_figure
from kvferry.results.verdict import verdicts
from kvferry.results.views import turn_blocks
from tests.results.test_plots import clashes

PAIR = "smollm2_gemma3"


def turn_rows(drift: float = 0.03, half: float = 0.01) -> list[ResultRow]:
    """Three hand-offs, each losing ``drift`` more than one would."""
    names = ["SmolLM2-135M-Instruct", "Gemma-3-270M"]
    rows = []
    for turn in (3, 1, 2):
        source, target = names if turn % 2 else names[::-1]
        stamp = RowStamp(PAIR, source, target, "anchored", "a+b", 0, "cpu", "f", "c", "g")
        values = {
            ("native", "kl"): 0.0,
            ("zero", "kl"): 0.65,
            ("fresh", "kl"): 0.09,
            ("mapped", "kl"): 0.09 + drift * (turn - 1),
            ("mapped", "kl_drift"): drift * (turn - 1),
            ("native", "recall_kept"): 1.0,
            ("zero", "recall_kept"): 0.0,
            ("fresh", "recall_kept"): 0.75,
            ("mapped", "recall_kept"): 0.8 - 0.1 * turn,
        }
        for (condition, metric), value in values.items():
            rows.append(
                stamp.row(
                    task="multi_turn",
                    split="wiki",
                    turn=turn,
                    condition=condition,
                    metric=metric,
                    value=Interval(value, value - half, value + half, 12),
                    context_tokens=512 + 96 * (turn - 1),
                )
            )
    return rows


def test_turns_come_in_order_and_keep_out_of_the_other_tables(rows: list[ResultRow]) -> None:
    blocks = turn_blocks([*rows, *turn_rows()])
    assert [block.turn for block in blocks] == [1, 2, 3]
    assert [block.target[:5] for block in blocks] == ["Gemma", "SmolL", "Gemma"]
    assert blocks[0].metrics == ("kl", "kl_drift", "recall_kept")
    assert turn_blocks(rows) == [] and turn_blocks([]) == []
    text = markdown_table(turn_rows())
    assert "hand-off 2 · 608 context tokens" in text and "| fresh hand-off |" in text
    assert "**0.060** [0.050, 0.070]" in text


def test_the_verdict_tells_drift_from_none() -> None:
    def said(rows: list[ResultRow]) -> dict[str, str]:
        return {verdict.text: verdict.answer for verdict in verdicts(rows, PAIR)}

    ((text, answer),) = said(turn_rows()).items()
    assert answer == "no" and "KL 0.150 after hand-off 3, 0.090 after a fresh one" in text
    ((text, answer),) = said(turn_rows(drift=0.002)).items()
    assert answer == "yes" and "not shown to add up" in text
    assert said([row for row in turn_rows() if row.turn == 1]) == {}, "one hand-off has no drift"


def test_the_figure_shows_every_turn_and_no_text_covers_another() -> None:
    figure = turns_figure(turn_rows())
    assert figure is not None and clashes(figure) == []
    words = {text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)}
    assert {"mapped", "fresh hand-off", "zero context"} <= words
    assert any("even: to SmolLM2-135M-Instruct" in word for word in words)
    assert turns_figure([]) is None


def test_the_report_has_its_place_for_turns(tmp_path: Path, rows: list[ResultRow]) -> None:
    written = write_report(
        tmp_path / "report.html", [*rows, *turn_rows()], config_yaml="a: 1\n", versions={}
    )
    assert f"{PAIR}_turns.png" in {path.name for path in written.figures}
    page = written.html.read_text()
    assert "back and forth" in page and "KL drift" in page and "fresh hand-off" in page
    plain = write_report(tmp_path / "plain.html", rows, config_yaml="", versions={})
    assert "back and forth" not in plain.html.read_text()
