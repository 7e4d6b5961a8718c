"""The side-by-side screen: on a terminal, on a narrow one, and into a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvferry.app.screen import AskScreen, duration


def play(screen: AskScreen) -> None:
    with screen.showing():
        screen.step("carried", "source prefill", 0.5)
        screen.step("carried", "map", 0.0123)
        for piece in ("The ", "answer ", "is ", "[42]."):
            screen.write("carried", piece)
        screen.finish("carried", 0.02)
        screen.step("native", "target prefill", 1.25)
        screen.write("native", "It is 42.")
        screen.finish("native", 1.25)


def test_a_pipe_gets_each_side_once_and_whole() -> None:
    out = io.StringIO()
    play(AskScreen(Console(file=out, width=80), "A -> B   why?"))
    text = out.getvalue()
    assert "\x1b" not in text
    assert text.count("The answer is [42].") == text.count("It is 42.") == 1
    for part in ("source prefill: 500 ms", "map: 12 ms", "first token after: 1,250 ms", "A -> B"):
        assert part in text
    assert text.index("[42]") < text.index("It is 42.")


def test_a_terminal_shows_both_and_gets_its_cursor_back() -> None:
    out = io.StringIO()
    play(AskScreen(Console(file=out, width=120, force_terminal=True), "A -> B"))
    text = out.getvalue()
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_cursor_comes_back_when_the_model_fails() -> None:
    out = io.StringIO()
    screen = AskScreen(Console(file=out, width=120, force_terminal=True), "A -> B")
    with pytest.raises(KeyboardInterrupt), screen.showing():
        raise KeyboardInterrupt
    text = out.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize(("width", "beside"), [(120, True), (60, False)])
def test_panels_stand_beside_each_other_where_there_is_room(width: int, beside: bool) -> None:
    out = io.StringIO()
    screen = AskScreen(Console(file=io.StringIO(), width=width), "A -> B")
    play(screen)
    Console(file=out, width=width).print(screen.render())
    tops = [line for line in out.getvalue().splitlines() if "╭" in line]
    assert len(tops) == (1 if beside else 2)


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.0021, 9.9, 12.34)] == ["2 ms", "9,900 ms", "12.3 s"]
