"""Curves from their file, what they say in words, and the figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from kvferry.results.report import write_report
from kvferry.results.training import (
    TrainingCurves,
    read_curves,
    running_mean,
    training_figure,
    training_verdict,
)
from tests.results.test_plots import clashes


def write_curves(
    path: Path, looks: dict[int, float], steps: int = 60, start: int = 0
) -> TrainingCurves:
    """A phase as a run writes it: a line a step, a line a look. Returns the last phase."""
    rng = np.random.default_rng(0)
    lines: list[dict[str, float]] = []
    for step in range(start, steps + 1):
        if step > start:
            loss = float(rng.lognormal(0.0, 0.5))
            parts = {"train/loss": loss, "train/kl": loss / 3, "train/recall_kl": loss / 2}
            lines.append(
                {"step": step, **parts, "train/learning_rate": 1e-3, "train/gradient_norm": loss}
            )
        if step in looks:
            loss = looks[step]
            parts = {"loss": loss, "kl": loss / 3, "recall_kl": loss / 2}
            lines.append({"step": step, **{f"held_out/{n}": x for n, x in parts.items()}})
    phase = {"start": start} if start else {}
    with path.open("a") as file:
        file.writelines(json.dumps({**line, **phase}) + "\n" for line in lines)
    return read_curves(path)[-1]


def test_curves_are_read_by_name_and_step(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    assert read_curves(path) == ()
    curves = write_curves(path, {0: 0.84, 20: 0.7, 40: 0.61, 60: 0.63})
    assert curves.held_out["loss"] == [(0, 0.84), (20, 0.7), (40, 0.61), (60, 0.63)]
    assert len(curves.train["recall_kl"]) == 60 and curves.steps == 60
    with path.open("a") as lines:
        lines.write('{"step": 61, "train/loss"')
    assert read_curves(path) == (curves,), "a line that a kill cut short"


@pytest.mark.parametrize(
    ("looks", "answer", "words"),
    [
        ({0: 0.84, 30: 0.61, 60: 0.7}, "yes", "0.84 -> 0.61 (-27%), best at step 30 of 60"),
        ({0: 0.84, 30: 0.95, 60: 0.9}, "no", "0.84 at the start, 0.9 at its best"),
        ({30: 0.6}, "open", "no start to compare"),
        ({0: 0.84}, "open", "has not been judged"),
        ({0: 0.84, 30: math.nan}, "open", "has not been judged"),
    ],
)
def test_what_they_say(looks: dict[int, float], answer: str, words: str, tmp_path: Path) -> None:
    found = training_verdict(write_curves(tmp_path / "x", looks))
    assert found.answer == answer and words in found.text


def test_phases_are_judged_apart(tmp_path: Path) -> None:
    """Their losses are of two kinds: the second begins where the first one ends."""
    path = tmp_path / "x"
    first = write_curves(path, {0: 0.02, 60: 0.01})
    second = write_curves(path, {60: 0.9, 75: 0.5, 90: 0.6}, steps=90, start=60)
    assert read_curves(path) == (first, second)
    assert "0.02 -> 0.01" in training_verdict(first).text
    assert "0.9 -> 0.5 (-44%), best at step 75 of 90" in training_verdict(second).text
    written = write_report(
        tmp_path / "report.html", [], training=[first, second], config_yaml="", versions={}
    )
    assert [path.name for path in written.figures] == ["training.png", "training_2.png"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_figure_has_a_panel_each(theme: str, tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    curves = write_curves(tmp_path / "x", {0: 0.84, 30: 0.61, 60: 0.7})
    figure = training_figure(curves, theme=theme)  # type: ignore[arg-type]
    assert figure is not None and clashes(figure) == []
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert len(titles) == 5 and titles[0] == "Loss" and "Learning rate" in titles
    assert any("repeated" in title for title in titles)
    loss = figure.axes[0]
    (marked,) = [line for line in loss.get_lines() if line.get_linestyle() == "--"]
    assert np.asarray(marked.get_xdata())[0] == 30
    assert dict(matplotlib.rcParams) == before
    assert training_figure(TrainingCurves({}, {})) is None
    unknown = TrainingCurves({"head_error": [(1, 1.0)]}, {"head_error": [(0, 1.0)]})
    other = training_figure(unknown)
    assert other is not None and other.axes[0].get_title(loc="left") == "head error"


def test_the_mean_follows_its_values() -> None:
    assert running_mean([1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    values = [float(i % 2) for i in range(100)]
    assert running_mean(values)[50] == pytest.approx(5 / 11, abs=0.1)


def test_the_report_says_it_and_shows_it(tmp_path: Path) -> None:
    curves = write_curves(tmp_path / "x", {0: 0.84, 30: 0.61, 60: 0.7})
    settings = {"config_yaml": "", "versions": {}}
    written = write_report(tmp_path / "report.html", [], training=[curves], **settings)  # type: ignore[arg-type]
    page = written.html.read_text()
    assert "best at step 30 of 60" in page and page.count("data:image/png") == 2
    assert [path.name for path in written.figures] == ["training.png"]
    bare = write_report(tmp_path / "bare.html", [], **settings)  # type: ignore[arg-type]
    assert "<h2>Training</h2>" not in bare.html.read_text()
