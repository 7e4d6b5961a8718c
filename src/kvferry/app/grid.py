"""What a grid of runs came to: one table of verdicts, one of results, and how much text it took."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.app.folder import FIGURES, ROWS, RunFolder
from kvferry.app.plot import draw
from kvferry.app.schema import RunConfig
from kvferry.results.rows import merge_rows, read_rows
from kvferry.results.tables import print_tables


def summarise(configs: Sequence[RunConfig], console: Console) -> int:
    """Print one line a job and the comparison of all rows; draw what only several runs show.

    Returns:
        Exit code: 0 when every job is done.
    """
    table = Table(title="Grid", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for head in ("pair", "mapper", "seed", "verdict", "folder"):
        table.add_column(head, overflow="fold")
    folders = [RunFolder.of(cfg) for cfg in configs]
    for cfg, folder in zip(configs, folders, strict=True):
        table.add_row(
            cfg.pair.name, cfg.mapper.name, str(cfg.seed), folder.status, escape(str(folder.path))
        )
    console.print(table)
    files = [folder.path / ROWS for folder in folders if folder.status == "done"]
    rows = [row for file in files if file.exists() for row in read_rows(file)]
    if rows:
        merged = merge_rows([], rows)
        print_tables(merged, console)
        for picture in draw("sample-efficiency", merged, folders[0].path.parent / FIGURES):
            console.print(f"figure: {picture}", soft_wrap=True)
    return 0 if all(folder.status == "done" for folder in folders) else 1
