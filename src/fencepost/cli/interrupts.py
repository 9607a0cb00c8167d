"""Ctrl-C that is taken where nothing is half done.

Python raises KeyboardInterrupt between any two instructions. In a command that has to say
afterwards what was stored, that may be just when an answer is counted, and what it then says is
wrong. Here Ctrl-C is noted, and raised where the command waits or asks for it; pressed a second
time it is raised at once, because the person at the terminal is out of patience.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether Ctrl-C was pressed, and whether it may be raised now."""

    def __init__(self) -> None:
        self._is_pressed = False
        self._is_waiting = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._is_pressed:
            raise KeyboardInterrupt

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that Ctrl-C may end at any moment."""
        self._is_waiting = True
        try:
            self.check()
            yield
        finally:
            self._is_waiting = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_waiting or self._is_pressed:
            raise KeyboardInterrupt
        self._is_pressed = True


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Take Ctrl-C only where it is asked for, until the end of the block."""
    noted = Interrupts()
    before = signal.signal(signal.SIGINT, noted._on_signal)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let a request to end, or a closed terminal, do what Ctrl-C does: what was begun ends too."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    asked = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, interrupt) for one in asked]
    try:
        yield
    finally:
        for one, handler in zip(asked, before, strict=True):
            signal.signal(one, handler)
