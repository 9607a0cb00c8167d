"""What large commits hold, and the requests that wait until it is released.

A large commit is decided and carried out a slice at a time, with other requests in between. What it
names must not change meanwhile: a request that touches any of it, and came later, waits here, in
the order of arrival, and is decided when the commit is over. Readers do not wait: they are shown
what was there before, until all of it changes at once. One such commit is under way at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from fencepost.protocol.commits import Commit, Part
from fencepost.store.contract import Missing, SoftDeleted, StreamInfo

T = TypeVar("T")
Retry = Callable[[], None]

REPLAYS_PER_TURN = 64
"""Requests that are decided in one turn of the loop after they waited."""


class Held:
    """What one large commit holds."""

    def __init__(self, request: Commit, number: int) -> None:
        self.number = number
        """Its place among all that came since there is anything held."""
        self.paths, self.parts = request.names()
        self.writer = None if request.writer is None else request.writer.name
        self.key = None if request.key is None else (request.principal, request.key)
        self.views: dict[str, StreamInfo | Missing | SoftDeleted] = {}
        """What readers see of these streams until the commit is over."""
        self.carrying = False
        """Whether the tables have begun to change."""
        self.was_shown = False
        self.is_over = False
        self.appended_meanwhile: dict[int, StreamInfo] = {}
        """Streams that were appended to meanwhile, behind what readers of the log may see."""

    def touches(self, request: Commit) -> bool:
        """Whether another commit names something that is held."""
        if request.writer is not None and request.writer.name == self.writer:
            return True
        if request.key is not None and (request.principal, request.key) == self.key:
            return True
        return any(
            item.append.path in self.paths or any(part in self.parts for part in item.parts)
            for item in request.items
        )


class Holds:
    """Everything that is held in one store."""

    def __init__(self) -> None:
        self.held: Held | None = None
        """What the commit that is under way holds."""
        self.all: list[Held] = []
        """What every large commit holds that has come; a request asks only if there is any."""
        self._waiting: deque[tuple[int, Retry]] = deque()
        self._arrivals = 0
        self._replayed: int | None = None
        self._still_waiting: list[tuple[int, Retry]] = []
        self._releases = 0
        self._released: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        """Whether a request has to ask if it must wait."""
        return bool(self.all)

    def take(self, request: Commit) -> Held:
        """Let a large commit hold what it names, from its arrival on."""
        self._arrivals += 1
        held = Held(request, self._arrivals)
        self.all.append(held)
        return held

    def begin(self, held: Held) -> None:
        """The commit's turn has come."""
        assert self.held is None, "one large commit at a time"
        self.held = held

    # Who waits

    def keeps_path(self, path: str, retry: Retry) -> bool:
        """Whether a stream is held: then `retry` is called when it no longer is."""
        return self._keeps(lambda held: path in held.paths, retry)

    def keeps_part(self, part: Part, retry: Retry) -> bool:
        """Whether a part is held."""
        return self._keeps(lambda held: part in held.parts, retry)

    def keeps_parts(self, parts: set[Part], retry: Retry) -> bool:
        """Whether one of several parts is held."""
        return self._keeps(lambda held: not parts.isdisjoint(held.parts), retry)

    def keeps_writer(self, name: str, retry: Retry) -> bool:
        """Whether a writer is held."""
        return self._keeps(lambda held: name == held.writer, retry)

    def keeps_commit(self, request: Commit, retry: Retry) -> bool:
        """Whether anything that a commit names is held."""
        return self._keeps(lambda held: held.touches(request), retry)

    def keeps_all(self, retry: Retry) -> bool:
        """Whether anything is held, for work that may touch whatever there is."""
        return self._keeps(lambda _: True, retry)

    def _keeps(self, touches: Callable[[Held], bool], retry: Retry) -> bool:
        if self._replayed is not None:
            # What came after this request cannot hold it up.
            number = self._replayed
            before = (held for held in self.all if held.number < number and not held.is_over)
            if any(map(touches, before)):
                self._still_waiting.append((number, retry))
                return True
            return False
        if any(map(touches, self.all)):
            self._arrivals += 1
            self._waiting.append((self._arrivals, retry))
            return True
        return False

    # The end of it

    async def release(self, held: Held) -> None:
        """Let go of what a commit holds, and decide those who waited for it, in their order."""
        # Until all of them were decided, a new request for the same things waits behind them.
        held.is_over = True
        while self._waiting:
            for _ in range(min(REPLAYS_PER_TURN, len(self._waiting))):
                self._replay(*self._waiting.popleft())
            await asyncio.sleep(0)
        self._waiting.extend(self._still_waiting)
        self._still_waiting.clear()
        self.all.remove(held)
        if self.held is held:
            self.held = None

    def _replay(self, number: int, retry: Retry) -> None:
        self._replayed = number
        try:
            retry()
        finally:
            self._replayed = None

    def shown(self) -> None:
        """From here on readers see what the commit did."""
        self._releases += 1
        if self.held is not None:
            self.held.carrying = False
            self.held.was_shown = True
        if self._released is not None:
            self._released.set_result(None)
            self._released = None

    # Readers of whole tables

    async def whole(
        self, read: Callable[[], Awaitable[T]], paths_of: Callable[[T], Iterable[str | None]]
    ) -> T:
        """What `read` gives, once it has nothing of a commit that is half carried out.

        A page that shows none of the streams in question need not wait.
        """
        while True:
            releases = self._releases
            found = await read()
            if releases != self._releases:
                continue
            held = self.held
            if held is None or not held.carrying or held.paths.isdisjoint(paths_of(found)):
                return found
            if self._released is None:
                self._released = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._released)
