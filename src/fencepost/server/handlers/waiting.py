"""How many requests wait at once: readers of streams and of the log, claims and feeds of groups.

Each of them holds a connection and memory, so there is one bound for all together, `waiters_max`.
Each handler counts its own waiters, and asks here before it lets one more wait.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost.http.messages import Response
from fencepost.server.handlers.rendering import refused


class WaiterLimit:
    """The bound on all requests that wait."""

    def __init__(self, waiters_max: int) -> None:
        self._waiters_max = waiters_max
        self._counts: list[Callable[[], int]] = []

    def include(self, count: Callable[[], int]) -> None:
        """Count these waiters too."""
        self._counts.append(count)

    def refusal(self) -> Response | None:
        """Why one more request may not wait; None when it may."""
        if sum(count() for count in self._counts) < self._waiters_max:
            return None
        return refused(
            503,
            "too_many_waiters",
            "Too many waiting requests",
            f"at most {self._waiters_max} wait at once (waiters_max)",
            (b"Retry-After", b"1"),
        )
