"""A clock that a test moves: time stands still until told otherwise, and the dice are seeded.

`advance` is time passing; `jump` is an operator setting the wall clock, in either direction, while
the monotonic clock knows nothing of it. Two clocks made with the same seed throw the same dice.
"""

from __future__ import annotations

import random

START_MS = 1_700_000_000_000
"""An arbitrary moment in November 2023: large enough to look like a time, fixed for ever."""


class SimClock:
    """A `Clock` for tests."""

    def __init__(self, *, seed: int = 0, now_ms: int = START_MS) -> None:
        self._dice = random.Random(seed)
        self._wall_ms = now_ms
        self._monotonic_ms = 0

    def advance(self, ms: int) -> None:
        """Let time pass."""
        assert ms >= 0, "time passes forwards; to set the wall clock back, jump"
        self._wall_ms += ms
        self._monotonic_ms += ms

    def jump(self, ms: int) -> None:
        """Set the wall clock forwards, or with a negative number back. No time passes."""
        self._wall_ms += ms

    def now_ms(self) -> int:
        return self._wall_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def monotonic_ns(self) -> int:
        return self._monotonic_ms * 1_000_000

    def random(self) -> float:
        return self._dice.random()

    def token(self, bytes_count: int) -> bytes:
        return self._dice.randbytes(bytes_count)
