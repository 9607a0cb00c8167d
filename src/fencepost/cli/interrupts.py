"""Let Ctrl-C end a command only at points where no step of it is half done.

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
        """Let Ctrl-C end the wait in this block at any moment."""
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
    """Note Ctrl-C until the end of the block, and raise it only where the block waits or asks."""
    noted = Interrupts()
    before = signal.signal(signal.SIGINT, noted._on_signal)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that what was begun is ended."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    asked = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, interrupt) for one in asked]
    try:
        yield
    finally:
        for one, handler in zip(asked, before, strict=True):
            signal.signal(one, handler)
