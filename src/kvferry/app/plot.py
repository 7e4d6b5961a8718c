"""`kvferry plot`: one figure of many runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from kvferry.app.folder import ROWS, labelled
from kvferry.errors import InputError
from kvferry.results.plot_style import png_bytes, themed
from kvferry.results.plots import sample_efficiency_figure, tradeoff_figure
from kvferry.results.rows import ResultRow, merge_rows, read_rows, write_atomically
from kvferry.results.views import pairs_of

KINDS: dict[str, Callable[[Sequence[ResultRow]], Figure | None]] = {
    "sample-efficiency": sample_efficiency_figure,
    "tradeoff": tradeoff_figure,
}


def gather(runs: Sequence[str]) -> list[ResultRow]:
    """The rows of all run folders that have some.

    Args:
        runs: folders, each alone or as ``LABEL=FOLDER``: its mapper is then called so.

    Raises:
        InputError: none has.
        RowsError: a file of rows is damaged or of another schema.
    """
    found = [(label, folder / ROWS) for label, folder in map(labelled, runs)]
    files = [(label, file) for label, file in found if file.is_file()]
    if not files:
        raise InputError(
            "There is nothing to draw.",
            found=f"no {ROWS} in {', '.join(runs[:3])}",
            fix="name folders of finished runs, for instance outputs/*",
        )
    return merge_rows(
        [],
        [
            replace(row, mapper=label) if label and row.mapper else row
            for label, file in files
            for row in read_rows(file)
        ],
    )


def draw(kind: str, rows: Sequence[ResultRow], folder: Path) -> list[Path]:
    """Write the figures of one of ``KINDS`` as PNG, one a pair, and say where they are.

    Returns:
        Nothing where the rows do not have what the figure shows.

    Raises:
        StorageError: the folder cannot be written.
    """
    written = []
    for pair in pairs_of(rows):
        figure = KINDS[kind]([row for row in rows if row.pair == pair])
        if figure is not None:
            path = folder / f"{pair}_{kind.replace('-', '_')}.png"
            with themed("light"):
                write_atomically(path, png_bytes(figure))
            written.append(path)
    return written


def plot(kind: str, runs: Sequence[str], folder: Path) -> list[Path]:
    """Draw several runs together.

    Raises:
        InputError: no such kind, no rows, or not the rows that the figure shows.
        RowsError, StorageError: as `gather` and `draw`.
    """
    if kind not in KINDS:
        raise InputError(
            f"There is no figure called {kind!r}.",
            expected=", ".join(KINDS),
            fix="draw one of them",
        )
    rows = gather(runs)
    written = draw(kind, rows, folder)
    if not written:
        raise InputError(
            f"These runs do not make a {kind} figure.",
            found=", ".join(sorted({f"{row.pair} with {row.mapper}" for row in rows})),
            expected="mapped caches"
            + (", fitted on several numbers of tokens" if kind == "sample-efficiency" else ""),
            fix="name more runs, for instance outputs/*",
        )
    return written
