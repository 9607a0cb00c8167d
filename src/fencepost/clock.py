"""The only reader of time and randomness: everything else is handed a `Clock`.

There are three times. Dates and the ends of tokens are those of the machine's wall clock, as it is
set at this moment: a clock that was corrected, or a virtual machine that was suspended, must not
let an expired token in. Durations are measured by the monotonic clock, which nothing sets. The
decisions of a store follow the wall clock forwards, and never go back: when the wall clock was set
back, their time goes on at half its speed until the wall clock has caught up, so that leases and
lifetimes still end. The store also keeps a start from going back behind what it has written.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Where the time and the dice come from."""

    def now_ms(self) -> int:
        """The time of decisions, in milliseconds since the Unix epoch; it never goes back."""
        ...

    def wall_ms(self) -> int:
        """The time that this machine's clock shows, for dates and tokens; it may be set back."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds since some fixed point; for measuring durations only."""
        ...

    def monotonic_ns(self) -> int:
        """The same in nanoseconds; for measuring what takes less than a millisecond."""
        ...

    def random(self) -> float:
        """A number in [0, 1), for jitter."""
        ...

    def token(self, bytes_count: int) -> bytes:
        """Unguessable bytes, for secrets and ids."""
        ...


class SystemClock:
    """The real clock and the operating system's randomness."""

    def __init__(self) -> None:
        self._last_ms = 0
        self._ahead: tuple[int, int] | None = None
        """While the wall clock is behind: where decisions stood, and since when (monotonic)."""

    def now_ms(self) -> int:
        wall_ms = time.time_ns() // 1_000_000
        if wall_ms < self._last_ms:
            return self._ahead_ms()
        self._last_ms = wall_ms
        self._ahead = None
        return wall_ms

    def _ahead_ms(self) -> int:
        """The time of decisions while the wall clock is behind them."""
        monotonic_ms = self.monotonic_ms()
        stood_ms, since_ms = self._ahead = self._ahead or (self._last_ms, monotonic_ms)
        self._last_ms = max(self._last_ms, stood_ms + (monotonic_ms - since_ms) // 2)
        return self._last_ms

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def random(self) -> float:
        return secrets.SystemRandom().random()

    def token(self, bytes_count: int) -> bytes:
        return os.urandom(bytes_count)
