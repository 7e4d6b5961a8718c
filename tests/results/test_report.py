from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvferry.errors import StorageError
from kvferry.results.report import ContinuationSample, write_report
from kvferry.results.rows import ResultRow

Maker = Callable[..., list[ResultRow]]
HOSTILE = "<script>alert('x')</script> & \"quoted\" $_{$"
SAMPLE = ContinuationSample(
    context_tail=f"the keeper wrote {HOSTILE}",
    reference=HOSTILE,
    native="The diary is in the town museum.",
    mapped="The diary is in the national library.",
    mapped_tail=None,
    zero=f"He was {HOSTILE}",
    label=HOSTILE,
)


class Page(HTMLParser):
    """Tags, links and balance of a page."""

    VOID = frozenset({"meta", "source", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(folder: Path, rows: list[ResultRow], **options: object) -> tuple[str, list[str]]:
    settings: dict[str, object] = {"config_yaml": "mapper: anchored\n", "versions": {"torch": "2"}}
    written = write_report(folder / "report.html", rows, **{**settings, **options})  # type: ignore[arg-type]
    for path in written.figures:
        assert path.read_bytes()[:4] == b"\x89PNG"
    return written.html.read_text(), [path.name for path in written.figures]


def test_a_full_run_makes_one_self_contained_page(tmp_path: Path, rows: list[ResultRow]) -> None:
    text, figures = report(tmp_path, rows, samples=[SAMPLE], notes=["eval=quick"])
    page = Page(text)
    assert page.open == []
    assert page.links and all(link.startswith("data:image/png;base64,") for link in page.links)
    assert not re.search(r"https?://|@import|url\(", text)
    assert len(figures) == 4 and page.tags.count("img") == 4
    for words in ("prefers-color-scheme: dark", "@media print", "33.3x", "<b>0.612</b>", "n = 48"):
        assert words in text
    assert "<mark>The diary is in the</mark> national library." in text


def test_everything_from_outside_is_escaped(tmp_path: Path, rows_of: Maker) -> None:
    rows = rows_of(mapper=HOSTILE, splits={HOSTILE: 8}, latency=False)
    text, _ = report(
        tmp_path,
        rows,
        samples=[SAMPLE],
        title=HOSTILE,
        notes=[HOSTILE],
        config_yaml=HOSTILE,
        versions={HOSTILE: HOSTILE},
    )
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 8
    assert "script" not in Page(text).tags


def test_a_grid_gets_a_comparison(tmp_path: Path, grid: list[ResultRow]) -> None:
    grid = [row for row in grid if row.split in ("wiki", "p50")]
    text, figures = report(tmp_path, grid)
    assert "All pairs and mappers" in text and len(figures) == 1 + 2 * 3
    assert text.count("mapped by anchored") == 2
    single, _ = report(tmp_path, [row for row in grid if row.mapper == "anchored"][:50])
    assert "All pairs and mappers" not in single


def test_missing_pieces_are_said_to_be_missing(tmp_path: Path, rows_of: Maker) -> None:
    thin = rows_of(splits={"wiki": 1}, latency=False, layers=False, conditions=("native", "mapped"))
    text, figures = report(tmp_path, thin)
    assert "Latency was not measured" in text and "No per-layer numbers" in text
    assert "same continuation" not in text
    assert figures == ["tradeoff.png", "smollm2_gemma3_retention.png"]
    timed = [row for row in rows_of() if row.task == "latency"]
    assert "Quality was not measured" in report(tmp_path, timed)[0]
    assert "No measurement yet" in report(tmp_path, [])[0]


def test_pair_names_cannot_leave_the_folder(tmp_path: Path, rows_of: Maker) -> None:
    rows = [dataclasses.replace(row, pair="../../evil pair") for row in rows_of(layers=False)]
    _, figures = report(tmp_path / "run", rows)
    assert all("/" not in name and not name.startswith(".") for name in figures)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, rows_of: Maker) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        report(tmp_path / "file", rows_of(layers=False, latency=False))
