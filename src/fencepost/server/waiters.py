"""Live readers of the log, and claims of groups that wait, and which of them a commit wakes.

A commit must not cost more because readers wait. Readers of one principal that select the same
streams are one audience, and an index tells which audiences want a stream. A pair of a stream and
an audience is compared once and remembered. A commit compares only a bounded number of pairs
itself; the rest is done in bounded steps on the event loop afterwards, the principals taking turns,
so that the patterns of one principal do not delay the news of another. Where too much is waiting to
be compared, the readers of that principal are woken without comparing: a reader that is woken for
nothing reads, finds nothing and waits again.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from fencepost.protocol.logs import Selection
from fencepost.store.contract import Published

STEP_COMPARISONS = 1_000
"""Comparisons of a path with a pattern that one step makes before other work gets a turn."""
UNCOMPARED_MAX = 1_000
"""Streams of one principal that may wait to be compared before its readers are simply woken."""
STREAMS_MAX = 16_384
"""Streams that the index of one principal holds; past it the index is begun anew."""
AUDIENCES_KEPT = 1_024
"""Audiences of one principal past which those without a reader are forgotten."""
PRINCIPALS_KEPT = 256
"""Principals past which those without a reader are forgotten."""


class Reader(Protocol):
    """What waits for commits to the streams that it selects."""

    @property
    def selection(self) -> Selection: ...
    def wake(self) -> None: ...


class Waiting:
    """One live reader of the log: woken by the commits that touch streams it selects."""

    __slots__ = ("_audience", "_key", "_waiters", "news", "selection")

    def __init__(self, waiters: Waiters, selection: Selection, principal: str) -> None:
        self._waiters = waiters
        self._key = principal
        self._audience: Audience | None = None
        self.selection = selection
        self.news = asyncio.Event()

    def __enter__(self) -> Waiting:
        self._audience = self._waiters.join(self._key, self)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._audience is not None
        self._waiters.leave(self._key, self._audience, self)

    def wake(self) -> None:
        """There is news."""
        self.news.set()

    def look(self) -> None:
        """Whatever is committed from now on is news. Call it before reading, not after."""
        self.news.clear()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for news; false when time is up or the server is going down."""
        if self._waiters.stopping or timeout_s <= 0:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        except TimeoutError:
            return False
        return not self._waiters.stopping


class Audience:
    """The readers of one principal that select the same streams."""

    __slots__ = ("is_kept", "number", "readers", "selection")

    def __init__(self, number: int, selection: Selection) -> None:
        self.number = number
        self.selection = selection
        self.readers: set[Reader] = set()
        self.is_kept = True

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake()


class _Known:
    """What is known of a stream: the audiences that want it, of those up to number `compared`."""

    __slots__ = ("compared", "path", "takers")

    def __init__(self, path: str) -> None:
        self.path = path
        self.compared = 0
        self.takers: list[Audience] = []


class _Lane:
    """The readers of one principal."""

    def __init__(self) -> None:
        self.readers = 0
        self._newest = 0
        self._audiences: dict[tuple[object, ...], Audience] = {}
        self._in_order: list[Audience] = []
        self._index: dict[int, _Known] = {}
        self.uncompared: dict[int, _Known] = {}

    def join(self, reader: Reader) -> Audience:
        audience = self._audiences.get(reader.selection.key)
        if audience is None:
            if len(self._audiences) >= AUDIENCES_KEPT:
                self._forget_empty()
            self._newest += 1
            audience = Audience(self._newest, reader.selection)
            self._audiences[reader.selection.key] = audience
            self._in_order.append(audience)
        audience.readers.add(reader)
        self.readers += 1
        return audience

    def _forget_empty(self) -> None:
        for key, audience in list(self._audiences.items()):
            if not audience.readers:
                audience.is_kept = False
                del self._audiences[key]
        self._in_order = [audience for audience in self._in_order if audience.is_kept]

    def published(self, changes: Sequence[Published]) -> None:
        """Wake the audiences that are known to want these streams; note what is not known."""
        for change in changes:
            stream = change.info.id
            known = self._index.get(stream)
            if known is None:
                known = self._index[stream] = _Known(change.info.path)
            takers = known.takers
            for audience in takers:
                audience.wake()
            if len(takers) > AUDIENCES_KEPT and not all(one.is_kept for one in takers):
                known.takers = [audience for audience in takers if audience.is_kept]
            if known.compared < self._newest:
                self.uncompared[stream] = known
        if len(self.uncompared) > UNCOMPARED_MAX or len(self._index) > STREAMS_MAX:
            if len(self._index) > STREAMS_MAX:
                self._index.clear()
            if self.uncompared:
                self.uncompared.clear()
                self.wake()

    def step(self, comparisons: int) -> None:
        """Compare some pairs that are not known yet, and wake the readers that want the stream."""
        while self.uncompared and comparisons > 0:
            stream, known = next(iter(self.uncompared.items()))
            at = bisect_right(self._in_order, known.compared, key=lambda one: one.number)
            for audience in self._in_order[at:]:
                if comparisons <= 0:
                    return
                known.compared = audience.number
                comparisons -= audience.selection.comparisons_max
                if audience.selection.takes(stream, known.path):
                    known.takers.append(audience)
                    audience.wake()
            known.compared = self._newest
            del self.uncompared[stream]

    def wake(self) -> None:
        for audience in self._in_order:
            audience.wake()


class Waiters:
    """All live readers of the log, or all groups at which claims wait."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._working = False
        self.count = 0
        self.stopping = False

    @property
    def uncompared_count(self) -> int:
        """Streams that were written to and not compared with all selections yet."""
        return sum(len(lane.uncompared) for lane in self._lanes.values())

    def join(self, principal: str, reader: Reader) -> Audience:
        lane = self._lanes.get(principal)
        if lane is None:
            if len(self._lanes) >= PRINCIPALS_KEPT:
                self._lanes = {name: one for name, one in self._lanes.items() if one.readers}
            lane = self._lanes[principal] = _Lane()
        self.count += 1
        return lane.join(reader)

    def leave(self, principal: str, audience: Audience, reader: Reader) -> None:
        audience.readers.discard(reader)
        self._lanes[principal].readers -= 1
        self.count -= 1

    def published(self, changes: Sequence[Published]) -> None:
        """A commit is on disk."""
        if not self.count:
            return
        for lane in self._lanes.values():
            if lane.readers:
                lane.published(changes)
        if not self._working:
            self._step()

    def _step(self) -> None:
        """Compare for the principal whose turn it is, and go on later when there is more to do."""
        self._working = False
        for name, lane in self._lanes.items():
            if lane.uncompared:
                lane.step(STEP_COMPARISONS)
                if self.uncompared_count:
                    del self._lanes[name]
                    self._lanes[name] = lane  # at the end: the others come first
                    self._working = True
                    asyncio.get_running_loop().call_soon(self._step)
                return

    def stop(self) -> None:
        """Wake every reader: the server is going down."""
        self.stopping = True
        for lane in self._lanes.values():
            lane.wake()
