"""The fair queue in front of the threads that scan the log.

A scan is cut into slices, each a bounded piece of work and a read transaction of its own. Every
slice waits for its turn here: the principals take turns, and the scans of one principal take turns
among themselves. One thread is always left for another principal: so a principal that asks for a
hundred scans slows down its own, and the one scan of another finds a thread at once, or waits for
one slice of each principal at most where several ask for much. A reader that leaves between two
slices has asked for nothing more; the slice that is under way keeps its thread until it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fencepost.store.read.chunks import Readers

T = TypeVar("T")


class Scans:
    """Runs slices on the threads of `readers`, at most `threads` at once, in fair order."""

    def __init__(self, readers: Readers[Any], *, threads: int) -> None:
        self._readers = readers
        self._free = threads
        self._own_max = max(1, threads - 1)
        """Slices of one principal that run at once."""
        self._running: Counter[str] = Counter()
        # The principals that wait, the next one first; each with its slices in their order.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self.slices = 0
        """Slices that were begun."""

    @property
    def waiting_count(self) -> int:
        """Slices that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    def stats(self) -> dict[str, float]:
        """Numbers for the metrics, by name."""
        return {"scan_slices_total": self.slices, "scans_waiting": self.waiting_count}

    async def run(self, principal: str, work: Callable[[Any], T]) -> T:
        """The result of a slice of this principal, done in a thread when it is its turn."""
        if self._may_begin(principal):
            self._begin(principal)
        else:
            await self._turn(principal)
        self.slices += 1
        slice_ = asyncio.ensure_future(self._readers.run(work))
        slice_.add_done_callback(partial(self._ended, principal))
        # A task that is cancelled leaves, but its thread is free only when the slice has ended.
        return await asyncio.shield(slice_)

    def _may_begin(self, principal: str) -> bool:
        return self._free > 0 and self._running[principal] < self._own_max

    def _begin(self, principal: str) -> None:
        self._free -= 1
        self._running[principal] += 1

    def _end(self, principal: str) -> None:
        self._free += 1
        self._running[principal] -= 1
        if not self._running[principal]:
            del self._running[principal]
        self._next()

    async def _turn(self, principal: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(principal)  # the turn came as the reader left
            else:
                self._leave(principal, turn)
            raise

    def _leave(self, principal: str, turn: asyncio.Future[None]) -> None:
        own = self._waiting.get(principal)
        if own is not None and turn in own:
            own.remove(turn)
            if not own:
                del self._waiting[principal]

    def _ended(self, principal: str, slice_: asyncio.Future[Any]) -> None:
        if not slice_.cancelled():
            slice_.exception()  # so that the loop does not report it for a reader that left
        self._end(principal)

    def _next(self) -> None:
        """Give the threads that are free to the next slices, of the principals whose turn it is."""
        for principal in list(self._waiting):
            if self._may_begin(principal):
                own = self._waiting.pop(principal)
                # A reader that is cancelled takes its turn out of the line when it runs next.
                turn = next((turn for turn in own if not turn.cancelled()), None)
                if turn is not None:
                    own.remove(turn)
                    self._begin(principal)
                    turn.set_result(None)
                if own:
                    self._waiting[principal] = own  # at the end: the others come first
