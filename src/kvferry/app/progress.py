"""One progress bar for long steps; off a terminal, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_SECONDS = 20.0


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields what to call after each of ``total`` steps."""
    if not sys.stdout.isatty():
        yield _lines(label, total)
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console()) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def _lines(label: str, total: int) -> Callable[[], None]:
    started, last, done = time.monotonic(), [time.monotonic()], [0]

    def step() -> None:
        done[0] += 1
        now = time.monotonic()
        if done[0] == total or now - last[0] > LINE_EVERY_SECONDS:
            last[0] = now
            print(f"{label}: {done[0]}/{total}, {now - started:.0f} s", flush=True)

    return step
