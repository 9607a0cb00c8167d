"""The claims of a group that wait for work, and which of them looks again when there may be some.

Work that comes up wakes one claim, not all: one that finds something wakes the next before it
leaves, because there may be more. So an event costs as many looks as it has takers, and one more,
however many workers wait. Claims that may take the same targets stand in one line: when one of them
finds nothing, the others need not look. A claim that was woken and leaves without having looked,
because its client is gone or its time is up, wakes the next one too, so that no wake is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


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

    @property
    def count(self) -> int:
        """Claims that wait."""
        return sum(map(len, self._lines.values()))

    @contextmanager
    def join(self, takes: Hashable) -> Iterator[Place]:
        """Stand in the line of those that may take the same, as long as the context lasts."""
        line, place = self._lines.setdefault(takes, {}), Place()
        line[place] = None
        try:
            yield place
        finally:
            del line[place]
            if not line:
                del self._lines[takes]
            elif place.has_wake or place.is_called:
                _wake_first(line)
            if not self._lines and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def wake(self) -> None:
        """There may be work: one claim of each line looks."""
        for line in self._lines.values():
            _wake_first(line)

    def wake_all(self) -> None:
        """Every claim looks: the group is gone, or the server is going down."""
        for line in self._lines.values():
            for place in line:
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


def _wake_first(line: dict[Place, None]) -> None:
    """Call the first of a line. One that is called already has yet to look."""
    next(iter(line)).call()
