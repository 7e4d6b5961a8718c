"""The screen of `kvferry ask`: two answers side by side, streamed, with the time of each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Side = Literal["carried", "native"]

TITLES: dict[Side, str] = {
    "carried": "carried over: the source read, the target answers",
    "native": "native: the target read the document itself",
}


@dataclass
class Column:
    """What one side shows: text so far, and (step, seconds) in the order they were measured."""

    text: str = ""
    times: list[tuple[str, float]] = field(default_factory=list)
    total: float | None = None
    finished: bool = False


class AskScreen:
    """Receives what happens on each side and shows it.

    On a terminal both columns are redrawn as they grow. Elsewhere (a pipe, a file) each side is
    printed once, whole, when it finishes: nothing is drawn over.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._columns: dict[Side, Column] = {"carried": Column(), "native": Column()}
        self._note = ""
        self._live: Live | None = None

    @contextmanager
    def showing(self) -> Iterator[AskScreen]:
        """Draw until the block ends, however it ends; the cursor comes back."""
        if not self._console.is_terminal:
            self._console.print(self._title, markup=False, highlight=False, soft_wrap=True)
            yield self
            return
        self._live = Live(
            self.render(), console=self._console, refresh_per_second=12, vertical_overflow="visible"
        )
        try:
            with self._live:
                yield self
                self._update()
        finally:
            self._live = None

    def note(self, line: str) -> None:
        """One line about both sides."""
        self._note = line
        if self._live is None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._update()

    def step(self, side: Side, name: str, seconds: float) -> None:
        """A step of one side took this long."""
        self._columns[side].times.append((name, seconds))
        self._update()

    def write(self, side: Side, piece: str) -> None:
        """The next piece of one side's answer."""
        self._columns[side].text += piece
        self._update()

    def finish(self, side: Side, first_token: float) -> None:
        """One side has its whole answer.

        Args:
            side: which.
            first_token: seconds from a known context to the first token: the number to compare.
        """
        column = self._columns[side]
        column.total, column.finished = first_token, True
        self._update()
        if self._live is None:
            self._print_plain(side)

    def render(self) -> RenderableType:
        """Both panels, beside each other, or one above the other on a narrow terminal."""
        panels = [self._panel(side) for side in self._columns]
        title = Text(self._title, style="bold")
        if self._note:
            title.append(f"\n{self._note}", style="not bold dim")
        if self._console.width < 72:
            return Group(title, *panels)
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in panels:
            grid.add_column(ratio=1)
        grid.add_row(*panels)
        return Group(title, grid)

    def _panel(self, side: Side) -> Panel:
        column = self._columns[side]
        waiting = Text("..." if not column.finished else "(no answer)", style="dim")
        answer = Text(column.text.strip()) if column.text.strip() else waiting
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, seconds in column.times:
            table.add_row(Text(name, style="dim"), Text(duration(seconds), justify="right"))
        if column.total is not None:
            style = "bold green" if side == "carried" else "bold"
            table.add_row(
                Text("first token after", style=style), Text(duration(column.total), style=style)
            )
        body = Group(answer, Text(), Columns([table]))
        return Panel(body, title=Text(TITLES[side]), title_align="left")

    def _update(self) -> None:
        if self._live is not None:
            self._live.update(self.render())

    def _print_plain(self, side: Side) -> None:
        column = self._columns[side]
        lines = [
            f"\n[{TITLES[side]}]",
            column.text.strip() or "(no answer)",
            *(f"  {name}: {duration(seconds)}" for name, seconds in column.times),
        ]
        if column.total is not None:
            lines.append(f"  first token after: {duration(column.total)}")
        self._console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Milliseconds below ten seconds, else seconds."""
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
