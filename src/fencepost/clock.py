"""The only reader of time and randomness: everything else is handed a `Clock`.

Wall time that jumps is how leases end early and TTLs never end. `SystemClock` therefore reads the
wall once, when it is made, and counts from there with the monotonic clock: a jump of the wall, in
either direction, moves nothing until the next start, and the store keeps even a start from going
back behind what it has already written.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """Where the time and the dice come from."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch; never less than an earlier answer."""
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
        self._anchor_ms = time.time_ns() // 1_000_000 - time.monotonic_ns() // 1_000_000

    def now_ms(self) -> int:
        return self._anchor_ms + time.monotonic_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def random(self) -> float:
        return secrets.SystemRandom().random()

    def token(self, bytes_count: int) -> bytes:
        return os.urandom(bytes_count)
