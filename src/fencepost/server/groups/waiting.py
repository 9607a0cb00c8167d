"""The claims of a group that wait for work, and which of them looks again when there may be some.

Work that comes up wakes one claim, not all: one that finds something wakes the next before it
leaves, because there may be more. So an event costs as many looks as it has takers, and one more,
however many workers wait. Claims that may take the same targets stand in one line: when one of them
finds nothing, the others need not look. A claim that was woken and leaves without having looked,
because its client is gone or its time is up, wakes the next one too, so that no wake is lost.

An event on the log is no work before it is correlated. So a commit wakes one claim of a group,
whichever it is: that one has the event correlated, and what comes of it wakes the lines. A `Watch`
says which commits those are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from fencepost.protocol.logs import Selection
from fencepost.server.waiters import Audience


class Place:
    """A claim's place in a line."""

    def __init__(self) -> None:
        self.has_wake = False
        """Whether it was woken, and has not found out yet that there is nothing."""
        self._called = asyncio.Event()

    @property
    def is_called(self) -> bool:
        """Whether it was woken since it began to look."""
        return self._called.is_set()

    def call(self) -> None:
        """Look again."""
        self._called.set()

    def begin(self) -> None:
        """Begin to look: what calls from now on is told of something else."""
        self.has_wake = self.has_wake or self.is_called
        self._called.clear()

    def found_nothing(self) -> None:
        """There was nothing to take, so none of the line needs to look for it."""
        self.has_wake = False

    async def wait(self, until: float) -> None:
        """Wait to be called, up to a time of the loop."""
        try:
            async with asyncio.timeout_at(until):
                await self._called.wait()
        except TimeoutError:
            pass


class Lines:
    """The lines of one group."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, dict[Place, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.count = 0
        """Claims that wait."""

    @property
    def lines_count(self) -> int:
        """Lines in which claims wait: each of them looks by itself."""
        return len(self._lines)

    @contextmanager
    def join(self, takes: Hashable) -> Iterator[Place]:
        """Stand in the line of those that may take the same, as long as the context lasts."""
        line, place = self._lines.setdefault(takes, {}), Place()
        line[place] = None
        self.count += 1
        try:
            yield place
        finally:
            self.count -= 1
            del line[place]
            if not line:
                del self._lines[takes]
            if place.has_wake or place.is_called:
                if line:
                    _wake_first(line)
                else:
                    self.wake_one()
            if not self._lines and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def wake(self) -> None:
        """There may be work: one claim of each line looks."""
        for line in self._lines.values():
            _wake_first(line)

    def wake_one(self) -> None:
        """There may be something to correlate: one claim looks."""
        for line in self._lines.values():
            _wake_first(line)
            return

    def wake_all(self) -> None:
        """Every claim looks: the group is gone, or the server is going down."""
        for takes in self._lines:
            self.wake_line(takes)

    def wake_line(self, takes: Hashable) -> None:
        """Every claim of a line looks."""
        for place in self._lines.get(takes, ()):
            place.call()

    def wake_at(self, when: float) -> None:
        """Wake at a time of the loop, or sooner if a sooner time was given before."""
        if self._timer is not None:
            if self._due_at <= when:
                return
            self._timer.cancel()
        self._due_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._come_due)

    def _come_due(self) -> None:
        self._timer = None
        self.wake()


class Watch:
    """The claims of one principal that wait at one group, as `Waiters` wakes them."""

    __slots__ = ("_lines", "audience", "claims", "selection")

    def __init__(self, lines: Lines, selection: Selection) -> None:
        self._lines = lines
        self.selection = selection
        """Sources of the group, narrowed to what the principal may read."""
        self.audience: Audience | None = None
        self.claims = 0

    def wake(self) -> None:
        """A commit has something for the group."""
        self._lines.wake_one()


def _wake_first(line: dict[Place, None]) -> None:
    """Call the first of a line. One that is called already has yet to look."""
    next(iter(line)).call()
