"""The unanswered requests of one connection, and whose turn it is.

Each request becomes an `Exchange`, which waits for its turn (`Turns.waiting`) or is handed to the
application at once (`Turns.started`). The connection writes the answers in the order of `started`.

Turns: POSTs that follow each other are handed over as they arrive, so that the appends of one
connection can share a commit. Any other method waits until all before it is answered, and what
comes after it waits for it: a read sees the writes that were sent before it.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import msgspec

from fencepost.http.front import Front
from fencepost.http.messages import Answer, Cancellable, Request
from fencepost.http.problems import failure

log = logging.getLogger("fencepost.http")

SHARED_BODY_BYTES_MAX = 256 * 1024
"""A POST with a larger body has its turn alone."""


class Owner(Protocol):
    """A connection, as its exchanges see it."""

    front: Front
    gone: bool
    closing: bool
    writing_paused: bool

    def advance(self) -> None:
        """Write the answers whose turn has come."""
        ...

    def last_came(self, request: Request) -> None:
        """This request is the connection's last."""
        ...

    def work_began(self) -> None:
        """The application works on a request whose client may have left already."""
        ...


class Exchange(msgspec.Struct, eq=False):
    """A request and, once there is one, its answer, in its place in the connection's order."""

    turns: Turns
    request: Request | None  # None when the front end answers by itself
    keep_alive: bool
    version: str
    shares: bool  # whether those after it may start before it is answered
    answer: Answer | None = None
    work: Cancellable | None = None

    def respond(self, answer: Answer) -> None:
        """Take the application's answer, once. An answer that comes too late is dropped."""
        turns = self.turns
        owner = turns.owner
        if self.answer is not None or owner.gone:
            owner.front.discard(answer)
            return
        self.answer = answer
        self.work = None
        if turns.started[0] is self:
            owner.advance()


class Turns:
    """The order of one connection's exchanges."""

    __slots__ = ("_alone", "_starting", "owner", "queued_bytes", "started", "waiting")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.started: deque[Exchange] = deque()
        self.waiting: deque[Exchange] = deque()
        self.queued_bytes = 0
        """The bodies of everything unanswered."""
        self._alone = False  # the newest started exchange shares its turn with no other
        self._starting = False

    def __bool__(self) -> bool:
        return bool(self.started or self.waiting)

    def __len__(self) -> int:
        return len(self.started) + len(self.waiting)

    def take(self, request: Request, keep_alive: bool, version: str) -> None:
        """Start a request, or let it wait for its turn."""
        size = len(request.body)
        self.queued_bytes += size
        if not keep_alive:
            self.owner.last_came(request)
        # The application may look at a large body beside the loop, and then nothing overtakes it.
        shares = size <= SHARED_BODY_BYTES_MAX and request.method == "POST"
        self._enqueue(Exchange(self, request, keep_alive, version, shares))

    def small_bytes(self) -> int:
        """The bodies of everything unanswered, without the large ones, which have places."""
        if not self.queued_bytes:
            return 0
        large = self.owner.front.settings.open_body_bytes_max
        sizes = (len(one.request.body) for one in (*self.started, *self.waiting) if one.request)
        return sum(size for size in sizes if size <= large)

    def refuse(self, answer: Answer) -> None:
        """Put an answer of the front end itself in the place of the next request."""
        self._enqueue(Exchange(self, None, False, "1.1", shares=True, answer=answer))

    def _enqueue(self, exchange: Exchange) -> None:
        if (
            not self.waiting
            and (not self.started or (exchange.shares and not self._alone))
            and not self.owner.writing_paused
        ):
            self._start(exchange)
        else:
            self.waiting.append(exchange)

    def _start(self, exchange: Exchange) -> None:
        self.started.append(exchange)
        self._alone = not exchange.shares
        request = exchange.request
        owner = self.owner
        if request is None:
            if self.started[0] is exchange:
                owner.advance()
            return
        try:
            work = owner.front.app.handle(request, exchange.respond)
        except Exception:
            log.exception("the application raised on a %s request", request.method)
            exchange.respond(failure())
            return
        if work is not None and exchange.answer is None:
            exchange.work = work
            owner.work_began()

    def start_waiting(self) -> None:
        """Start the requests whose turn has come."""
        # A request answered from inside `_start` comes back here through `advance`; the flag lets
        # the loop below go on instead, so the stack does not grow with the pipeline.
        if self._starting:
            return
        self._starting = True
        owner = self.owner
        try:
            while self.waiting and not (owner.closing or owner.writing_paused):
                if self.started and (self._alone or not self.waiting[0].shares):
                    return
                self._start(self.waiting.popleft())
        finally:
            self._starting = False

    def is_cancellable(self) -> bool:
        """Whether the application works on something that a disconnect ends."""
        return any(exchange.work is not None for exchange in self.started)

    def cancel(self) -> None:
        """Drop everything: the client is gone."""
        for exchange in (*self.started, *self.waiting):
            if exchange.work is not None:
                exchange.work.cancel()
            if exchange.answer is not None:
                self.owner.front.discard(exchange.answer)
        self.started.clear()
        self.waiting.clear()
