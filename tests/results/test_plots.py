from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from kvferry.results.plot_style import png_bytes
from kvferry.results.plots import (
    latency_figure,
    layer_figure,
    retention_figure,
    sample_efficiency_figure,
    tradeoff_figure,
)
from kvferry.results.rows import ResultRow

Maker = Callable[..., list[ResultRow]]
FIGURES = [retention_figure, layer_figure, latency_figure, tradeoff_figure]


def clashes(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible texts that cover each other, by pixels."""
    figure.canvas.draw()
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [
        text
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_text().strip() and text.get_visible()
    ]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    return [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 2 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2
    ]


@pytest.mark.parametrize("draw", FIGURES)
@pytest.mark.parametrize("which", ["rows", "grid"])
def test_no_text_covers_another(
    draw: Callable[..., Figure | None], which: str, request: pytest.FixtureRequest
) -> None:
    figure = draw(request.getfixturevalue(which))
    assert figure is not None
    assert clashes(figure) == []


def test_no_text_covers_another_where_lengths_of_text_are_compared(
    samples: list[ResultRow],
) -> None:
    figure = sample_efficiency_figure(samples)
    assert figure is not None and len(figure.axes) == 6
    assert clashes(figure) == []
    ticks = [text.get_text() for text in figure.axes[-1].get_xticklabels()]
    assert ticks == ["2K", "8K", "25K", "50K", "100K", "200K"]


def test_a_map_without_enough_text_is_written_out(samples: list[ResultRow]) -> None:
    figure = sample_efficiency_figure(samples)
    assert figure is not None
    notes = {text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)}
    assert {"-3.1", "-2.4", "-0.9"} <= notes


def test_one_length_of_text_is_no_curve(samples: list[ResultRow], rows: list[ResultRow]) -> None:
    assert sample_efficiency_figure(rows) is None
    one = [row for row in samples if row.mapper_hash.endswith("200000")]
    assert one and sample_efficiency_figure(one) is None


def test_the_clash_check_sees_a_clash() -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, "one"), figure.text(0.5, 0.5, "two")
    assert clashes(figure) == [("one", "two")]


@pytest.mark.parametrize("draw", [*FIGURES, sample_efficiency_figure])
def test_no_rows_no_figure(draw: Callable[..., Figure | None]) -> None:
    assert draw([]) is None


def test_themes_differ_and_global_settings_stay(rows: list[ResultRow]) -> None:
    before = dict(matplotlib.rcParams)
    for theme, bright in (("light", True), ("dark", False)):
        figure = latency_figure(rows, theme=theme)  # type: ignore[arg-type]
        assert figure is not None
        content = png_bytes(figure)
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        (path := pytest.importorskip("io").BytesIO(content)).seek(0)
        assert (float(np.median(imread(path)[..., :3])) > 0.5) is bright
    assert dict(matplotlib.rcParams) == before


def test_missing_pieces_leave_the_rest(rows_of: Maker) -> None:
    thin = rows_of(splits={"wiki": 1}, latency=False, layers=False, conditions=("native", "mapped"))
    assert retention_figure(thin) is not None and tradeoff_figure(thin) is not None
    assert latency_figure(thin) is None and layer_figure(thin) is None
    no_recall = [row for row in rows_of() if row.metric != "recall_kept"]
    assert tradeoff_figure(no_recall) is None
    figure = retention_figure(no_recall)
    assert figure is not None and len(figure.axes) == 3


def test_off_scale_values_are_written_out(rows_of: Maker) -> None:
    figure = retention_figure(rows_of(splits={"wiki": 24}))
    assert figure is not None
    notes = {text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)}
    assert {"-8.3", "-9.1", "-3.9", "-4.4"} <= notes


def test_every_layer_is_drawn_with_its_value(rows_of: Maker) -> None:
    figure = layer_figure(rows_of("gemma3_smollm2", splits={"wiki": 24}))
    assert figure is not None
    grids = [axes.images[0].get_array() for axes in figure.axes]
    assert [grid.shape for grid in grids if grid is not None] == [(1, 30)] * 3
    assert all(len(axes.texts) == 30 for axes in figure.axes)


def test_rounding_of_native_does_not_stretch_the_axis(rows: list[ResultRow]) -> None:
    """A native cache put back has a KL of 1e-8, not zero."""
    rounded = [
        replace(row, value=1e-8, ci_low=0.0, ci_high=2e-8)
        if (row.condition, row.metric) == ("native", "kl")
        else row
        for row in rows
    ]
    for draw in (tradeoff_figure, retention_figure):
        figure = draw(rounded)
        assert figure is not None
        assert figure.axes[0].get_xlim()[0] > 1e-3
