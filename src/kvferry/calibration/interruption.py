"""Ctrl-C and termination while a Lightning trainer works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pytorch_lightning import Trainer


@contextmanager
def interruptible(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C arrives as KeyboardInterrupt: Lightning would exit, with ctrl-C switched off."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as stop:
        if not trainer.interrupted:
            raise
        raise KeyboardInterrupt from stop
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


def die_when_told() -> None:
    """Let SIGTERM end the process at once: Lightning would note it and go on to the end.

    To be called when the trainer has begun, which is when it sets its own handler.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
