"""`report.html`: one self-contained page about any number of runs, and its figures as PNG."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from kvferry.results.catalogue import CONDITIONS, METRICS
from kvferry.results.plot_style import Theme, png_bytes, themed
from kvferry.results.plots import (
    latency_figure,
    layer_figure,
    retention_figure,
    tradeoff_figure,
)
from kvferry.results.rows import ResultRow, write_atomically
from kvferry.results.tables import (
    LATENCY_COLUMNS,
    NOTHING,
    block_title,
    format_interval,
    format_value,
    head,
    latency_cells,
    latency_columns,
    latency_title,
    line_n,
)
from kvferry.results.training import TrainingCurves, training_figure, training_verdict
from kvferry.results.turn_plot import turns_figure
from kvferry.results.verdict import Verdict, headline, main_block, verdicts
from kvferry.results.views import Block, latency_blocks, pairs_of, quality_blocks

COMPARED = ("kl", "nll_retention", "top1_agreement", "recall_kept")


@dataclass(frozen=True)
class ContinuationSample:
    """The same continuation decoded from different caches, as text.

    Attributes:
        context_tail: the end of the context that was handed over.
        reference: what the document really says next.
        native, mapped, mapped_tail, zero: what the target wrote; `mapped_tail` None where no
            native tail was run.
        label: which pair, mapper or passage, where there are several.
    """

    context_tail: str
    reference: str
    native: str
    mapped: str
    mapped_tail: str | None
    zero: str
    label: str = ""


@dataclass(frozen=True)
class WrittenReport:
    """Where a report lies."""

    html: Path
    figures: tuple[Path, ...]


@dataclass(frozen=True)
class _TableCell:
    text: str
    detail: str = ""
    best: bool = False


@dataclass(frozen=True)
class _Table:
    title: str
    heads: tuple[str, ...]
    lines: tuple[tuple[str, str, tuple[_TableCell, ...]], ...]  # label, css class, cells


@dataclass(frozen=True)
class _Picture:
    name: str
    caption: str
    images: Mapping[Theme, bytes]

    def source(self, theme: Theme) -> str:
        return f"data:image/png;base64,{base64.b64encode(self.images[theme]).decode()}"


@dataclass(frozen=True)
class _Section:
    title: str
    headline: str
    verdicts: tuple[Verdict, ...]
    quality: tuple[_Table, ...]
    latency: tuple[_Table, ...]
    retention: _Picture | None
    layers: _Picture | None
    timing: _Picture | None
    turns: _Picture | None


@dataclass(frozen=True)
class _Training:
    verdict: Verdict
    picture: _Picture | None


@dataclass(frozen=True)
class _Answer:
    label: str
    same: str
    rest: str


def write_report(
    path: Path,
    rows: Sequence[ResultRow],
    *,
    config_yaml: str,
    versions: Mapping[str, str],
    samples: Sequence[ContinuationSample] = (),
    training: Sequence[TrainingCurves] = (),
    title: str = "kvferry report",
    notes: Sequence[str] = (),
) -> WrittenReport:
    """Write the page to `path` and its figures to `figures/` beside it.

    Missing pieces (no timings, no second split, no samples, no rows at all) are left out and
    said so. All text is escaped; the page loads nothing from anywhere.

    Raises:
        StorageError: the folder cannot be written.
    """
    sections = [_section(rows, pair) for pair in pairs_of(rows)]
    tradeoff = _picture(
        "tradeoff",
        "Next words against long-range recall. A mapper that is good on one only is not good; "
        "the best corner is top left. Controls below the axis carry their value.",
        lambda theme: tradeoff_figure(rows, theme=theme),
    )
    learned = [_training(curves, phase) for phase, curves in enumerate(training, start=1)]
    environment = Environment(
        loader=PackageLoader("kvferry.results"), autoescape=True, undefined=StrictUndefined
    )
    html = environment.get_template("report.html.j2").render(
        title=title,
        notes=notes,
        sections=sections,
        comparison=_comparison(rows),
        tradeoff=tradeoff,
        training=learned,
        samples=[_sample(sample) for sample in samples],
        metrics={name: METRICS[name] for name in METRICS if _used(rows, name)},
        conditions=[CONDITIONS[name] for name in CONDITIONS if _measured(rows, name)],
        facts=_facts(rows),
        config_yaml=config_yaml,
        versions=versions,
    )
    pictures = [tradeoff, *(phase.picture for phase in learned)] + [
        picture
        for section in sections
        for picture in (section.retention, section.layers, section.timing, section.turns)
    ]
    written = []
    for picture in pictures:
        if picture is not None:
            target = path.parent / "figures" / f"{picture.name}.png"
            write_atomically(target, picture.images["light"])
            written.append(target)
    write_atomically(path, html.encode())
    return WrittenReport(path, tuple(written))


def _section(rows: Sequence[ResultRow], pair: str) -> _Section:
    mine = [row for row in rows if row.pair == pair]
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", pair).strip("-") or "pair"
    return _Section(
        title=f"{mine[0].source} to {mine[0].target}",
        headline=headline(mine, pair),
        verdicts=tuple(verdicts(mine, pair)),
        quality=tuple(_quality_table(block) for block in quality_blocks(mine)),
        latency=_latency_tables(mine),
        retention=_picture(
            f"{slug}_retention",
            "Every condition with its 95 % interval. Native is the dashed line, zero context "
            "the solid one; arrows point at values beyond the axis.",
            lambda theme: retention_figure(mine, pair, theme=theme),
        ),
        layers=_picture(
            f"{slug}_layers",
            "Held-out fit of each target layer. Layers that are fixed by the token ids are exact.",
            lambda theme: layer_figure(mine, pair, theme=theme),
        ),
        timing=_picture(
            f"{slug}_latency",
            "Time to build the target's cache, and to the first token after it. The source has "
            "already read the context; its own reading is in the table.",
            lambda theme: latency_figure(mine, pair, theme=theme),
        ),
        turns=_picture(
            f"{slug}_turns",
            "A conversation handed back and forth. Mapped: each hand-off carries what the one "
            "before has mapped. Fresh: the sender has read the same text itself. What lies between "
            "them is drift.",
            lambda theme: turns_figure(mine, pair, theme=theme),
        ),
    )


def _training(curves: TrainingCurves, phase: int) -> _Training:
    picture = _picture(
        "training" if phase == 1 else f"training_{phase}",
        "Every text is learned from once a lap, so single texts scatter; the held-out ones are the "
        f"same at every look. Step {curves.start:,} is the mapper before this training.",
        lambda theme: training_figure(curves, theme=theme),
    )
    return _Training(training_verdict(curves), picture)


def _picture(name: str, caption: str, draw: Callable[[Theme], Figure | None]) -> _Picture | None:
    images: dict[Theme, bytes] = {}
    themes: tuple[Theme, ...] = ("light", "dark")
    for theme in themes:
        figure = draw(theme)
        if figure is None:
            return None
        with themed(theme):
            images[theme] = png_bytes(figure)
    return _Picture(name, caption, images)


def _kind(condition: str) -> str:
    if condition.startswith("mapped"):
        return "mapped"
    return "anchor" if condition in ("native", "zero") else "control"


def _quality_table(block: Block) -> _Table:
    best = {metric: block.best(metric) for metric in block.metrics}
    lines = []
    for index, line in enumerate(block.lines):
        cells = []
        for metric in block.metrics:
            cell = line.cells.get(metric)
            cells.append(
                _TableCell(
                    format_value(metric, cell.value),
                    format_interval(metric, cell),
                    line is best[metric],
                )
                if cell
                else _TableCell(NOTHING)
            )
        count = _TableCell(line_n(block, index))
        lines.append((block.label(line), _kind(line.condition), (*cells, count)))
    heads = ("condition", *(head(metric) for metric in block.metrics), "n")
    return _Table(block_title(block), heads, tuple(lines))


def _latency_tables(rows: Sequence[ResultRow]) -> tuple[_Table, ...]:
    tables = []
    for block in latency_blocks(rows):
        columns = latency_columns(block)
        lines = tuple(
            (
                f"{line.context_tokens:,}",
                "plain",
                tuple(_TableCell(*cell) for cell in latency_cells(line, columns)),
            )
            for line in block.lines
        )
        heads = ("context", *(LATENCY_COLUMNS[name] for name in columns))
        tables.append(_Table(latency_title(block), heads, lines))
    return tuple(tables)


def _comparison(rows: Sequence[ResultRow]) -> _Table | None:
    lines = []
    timed = latency_blocks(rows)
    for pair in pairs_of(rows):
        block = main_block(rows, pair)
        if block is None:
            continue
        for line in block.lines:
            if not line.is_mapped:
                continue
            cells = [
                _TableCell(
                    format_value(metric, line.cells[metric].value),
                    format_interval(metric, line.cells[metric]),
                    line is block.best(metric),
                )
                if metric in line.cells
                else _TableCell(NOTHING)
                for metric in COMPARED
            ]
            speed = next(
                (t.series("speedup") for t in timed if (t.pair, t.mapper) == (pair, line.mapper)),
                [],
            )
            if speed and line.condition == "mapped":
                length, timing = speed[-1]
                gain = format_value("speedup", timing.p50.value)
                cells.append(_TableCell(gain, f"at {length:,}"))
            else:
                cells.append(_TableCell(NOTHING))
            tail = " + native tail" if line.condition == "mapped_tail" else ""
            label = f"{block.source} to {block.target}: {line.mapper}{tail}"
            lines.append((label, "mapped", tuple(cells)))
    if len({(row.pair, row.mapper) for row in rows}) < 2 or not lines:
        return None
    heads = ("pair and mapper", *(head(metric) for metric in COMPARED), "prefill / map")
    return _Table("All pairs and mappers; best of each pair in bold", heads, tuple(lines))


def _sample(sample: ContinuationSample) -> tuple[ContinuationSample, list[_Answer]]:
    answers = [_Answer("what the document says", "", sample.reference.strip())]
    answers.append(_Answer("native prefill", "", sample.native.strip()))
    for label, text in (
        ("mapped", sample.mapped),
        ("mapped + native tail", sample.mapped_tail),
        ("zero context", sample.zero),
    ):
        if text is not None:
            answers.append(_Answer(label, *_agreement(sample.native.strip(), text.strip())))
    return sample, answers


def _agreement(native: str, text: str) -> tuple[str, str]:
    """`text` split where it first leaves `native`, at a word."""
    ours, theirs = re.findall(r"\s*\S+", text), re.findall(r"\s*\S+", native)
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    cut = sum(len(word) for word in ours[:shared])
    return text[:cut], text[cut:]


def _used(rows: Sequence[ResultRow], metric: str) -> bool:
    return any(row.metric == metric for row in rows)


def _measured(rows: Sequence[ResultRow], condition: str) -> bool:
    return any(row.condition == condition for row in rows)


def _facts(rows: Sequence[ResultRow]) -> dict[str, str]:
    def values(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(row, name)) for row in rows))

    if not rows:
        return {}
    return {
        "device": values("device"),
        "dtype": values("dtype"),
        "seed": values("seed"),
        "config": values("config_hash"),
        "commit": values("git_commit"),
        "measured": max(row.created for row in rows),
        "rows": f"{len(rows):,}",
    }
