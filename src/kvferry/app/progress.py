"""One progress bar for long steps; off a terminal, a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

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


class Step(Protocol):
    """Reports progress."""

    def __call__(self, steps: int = 1) -> None:
        """So many more are done."""


@contextmanager
def progress(label: str, total: int) -> Iterator[Step]:
    """Yields what to call when one (or so many) of ``total`` steps are done."""
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
        yield lambda steps=1: bar.advance(task, steps)


def _lines(label: str, total: int) -> Step:
    started, last, done = time.monotonic(), [time.monotonic()], [0]

    def step(steps: int = 1) -> None:
        done[0] += steps
        now = time.monotonic()
        if steps and (done[0] == total or now - last[0] > LINE_EVERY_SECONDS):
            last[0] = now
            print(f"{label}: {done[0]}/{total}, {now - started:.0f} s", flush=True)

    return step
