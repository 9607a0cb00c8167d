"""The loop of a worker: claim, handle targets side by side and each in order, renew, ack.

What has ended by the time that the loop looks is acked together, and the same request claims the
next leases. So a worker whose handlers are quick asks the server once for each round of targets.

The loop itself is written twice: `async_work_leases` in `group_tasks`, `work_leases` in
`group_threads`. They hand over whole leases: what handles one returns its ack, or None when it has
ended the lease by itself, as a commit that acks does. `async_work` and `work` put a handler of
single events on top. What that handler raises is the failure of its event: the progress before
counts, and the group decides about another attempt. `PermanentError` says that another attempt
would fail as well.

Leases are renewed until the last handler has ended, during shutdown too. A worker that is to
outlive its server has a `Breaker`: while the server fails, nothing is claimed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from fencepost.client.errors import ConnectionFailedError, OutcomeUnknownError, UnavailableError
from fencepost.client.groups import (
    Acked,
    EventFailure,
    GroupEvent,
    Lease,
    LeaseAck,
    ReplayedEvent,
)
from fencepost.client.results import AckedItem

Handler = Callable[[GroupEvent, Lease], Any]
AsyncHandler = Handler | Callable[[GroupEvent, Lease], Awaitable[Any]]
AsyncLeaseHandler = Callable[[Lease], Awaitable[LeaseAck | None]]
LeaseHandler = Callable[[Lease, Callable[[], bool]], LeaseAck | None]
"""Handles a lease; the function tells whether the lease was lost meanwhile."""
OnAcked = Callable[[Lease, LeaseAck, AckedItem], None]
Finished = tuple[Lease, LeaseAck]

log = logging.getLogger(__name__)

WAIT_MS = 20_000
STOPPABLE_WAIT_MS = 1_000
"""How long a claim waits for work where the worker may be asked to stop."""
LOOK_SECONDS = 0.2
"""How often a thread with free hands looks for more work while handlers run."""
ERROR_CHARACTERS_MAX = 1_000
AWAY = (ConnectionFailedError, UnavailableError, OutcomeUnknownError)
"""The server does not answer, or cannot store."""


HANDLED = ("event", "lease")
"""What a handler of single events is called with."""


class PermanentError(Exception):
    """Raise it in a handler: this event cannot be handled, and another attempt would not help."""


class Working(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker: its name, what it claims, and how much at once."""

    worker: str
    streams: int = 10
    """Targets that are handled at once."""
    events: int = 10
    """Events of one target that come with its lease."""
    lane: str | None = None
    lease_ms: int | None = None
    until_idle: bool = False
    """Return when there is nothing to claim."""
    idle_wait_ms: int = 0
    """With `until_idle`: how long to wait for work that comes due."""


class Breaker:
    """Keeps a worker from a server that fails: after each failure in a row it waits longer.

    It is closed at first. A failure opens it for a while; then one attempt is let through, and its
    outcome closes it or opens it for longer.
    """

    def __init__(self, first_s: float = 0.2, longest_s: float = 10.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0

    @property
    def is_open(self) -> bool:
        """Whether the newest attempt failed."""
        return self._failures > 0

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt."""
        if not self._failures:
            return 0.0
        return min(self._first_s * 2.0 ** min(self._failures - 1, 30), self._longest_s)

    def failed(self, error: Exception) -> None:
        """The server did not answer, or could not do it."""
        self._failures += 1
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        log.log(level, "the server fails, the worker waits %.1f s: %s", self.pause_s, error)

    def succeeded(self) -> None:
        """The server answered."""
        if self._failures:
            log.info("the server answers again")
        self._failures = 0


class Progress:
    """How far a worker is with the events of a lease, to be sent as its ack."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._at: int | None = None
        self._failure: EventFailure | None = None
        self._replayed: list[ReplayedEvent] = []

    def done(self, event: GroupEvent) -> None:
        if event.replayed:
            self._replayed.append(ReplayedEvent(position=event.position))
        else:
            self._at = event.position

    def failed(self, event: GroupEvent, error: Exception) -> bool:
        """Note a failure; whether the lease goes on behind it."""
        text = text_of(error)
        where = f"{self._lease.target} at position {event.position}"
        log.warning("the handler failed for %s: %s", where, text, exc_info=error)
        if event.replayed:
            self._replayed.append(ReplayedEvent(position=event.position, error=text))
            return True
        permanent = isinstance(error, PermanentError)
        self._failure = EventFailure(position=event.position, error=text, permanent=permanent)
        return False

    def ack(self) -> LeaseAck:
        at = self._at if self._failure is not None else self._lease.read_to
        return LeaseAck(
            token=self._lease.token, at=at, failure=self._failure, replayed=self._replayed
        )


def text_of(error: Exception) -> str:
    """Type and message of an exception, without characters that cannot be stored as text."""
    try:
        said = str(error)
    except Exception:
        said = "what it says cannot be shown"
    text = f"{type(error).__name__}: {said}".replace("\0", "")[:ERROR_CHARACTERS_MAX]
    return text.encode("utf-8", "replace").decode()


def tell(on_acked: OnAcked | None, ended: list[Finished], acked: Acked) -> None:
    """Hand on what became of leases, one by one."""
    if on_acked is not None:
        for (lease, ack), item in zip(ended, acked.items, strict=True):
            on_acked(lease, ack, item)
