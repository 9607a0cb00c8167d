"""Bound how many requests wait at once: readers of streams and the log, claims and feeds.

Each of them holds a connection and memory, so there is one bound for all together, `waiters_max`,
and a share for each principal below it. A request counts for its principal as long as it lasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fencepost.http.messages import Request, Response
from fencepost.protocol.shares import WAITERS, limit_of
from fencepost.server.handlers.rendering import refused


class Tally:
    """How many of something each principal holds at the moment, up to a share; 0: any number."""

    def __init__(self, share: int) -> None:
        self.share = share
        self.counts: Counter[str] = Counter()

    def take(self, name: str) -> Held | None:
        """One more for a principal, until what is returned is let go; None past its share."""
        if self.share and self.counts[name] >= self.share:
            return None
        return Held(self, name)


class Held:
    """One thing that a tally counts, for as long as this object lives."""

    __slots__ = ("_name", "_tally")

    def __init__(self, tally: Tally, name: str) -> None:
        self._tally, self._name = tally, name
        tally.counts[name] += 1

    def __del__(self) -> None:
        counts = self._tally.counts
        counts[self._name] -= 1
        if not counts[self._name]:
            del counts[self._name]


class WaiterLimit:
    """The bound on all requests that wait."""

    def __init__(self, waiters_max: int, share: int = 0) -> None:
        self._waiters_max = waiters_max
        self._counts: list[Callable[[], int]] = []
        self.tally = Tally(share)

    def include(self, count: Callable[[], int]) -> None:
        """Count these waiters too."""
        self._counts.append(count)

    def refusal(self, request: Request) -> Response | None:
        """Why a request may not wait; None when it may, and counts from now on."""
        if sum(count() for count in self._counts) >= self._waiters_max:
            return _too_many(f"at most {self._waiters_max} wait at once (waiters_max)")
        if request.principal is not None:
            held = self.tally.take(request.principal.name)
            if held is None:
                limit, share = limit_of(WAITERS), self.tally.share
                return _too_many(f"at most {share} of one principal wait at once ({limit})")
            request.waits = held
        return None


def _too_many(detail: str) -> Response:
    title = "Too many waiting requests"
    return refused(503, "too_many_waiters", title, detail, (b"Retry-After", b"1"))
