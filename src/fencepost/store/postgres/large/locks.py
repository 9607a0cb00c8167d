"""Locks of a large commit: what it holds, and the requests that wait until it is over.

Requests and large commits name streams, parts, writers and keys. To compare them, every name
becomes a number, its mark. Two names may have the same mark; a request that waits because of that
merely waits without need. A large commit holds its marks in a table that all nodes read, by a
session of its own (`LargeSession`). A node that finds one of them held keeps the request back, in
its order, until the commit is over (`HeldRequests`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

from fencepost.protocol.commits import Commit, Part
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.sql import Row

T = TypeVar("T")

LARGE_COMMITS = 0x6C617267
"""The class of the advisory locks by which large commits show that they are alive; the number of
the lock is that of the commit."""
ROWS_MAX = 2_000
"""Marks, paths or parts that go to the database in one statement."""


# Marks


def _mark(kind: bytes, *names: str) -> int:
    hashed = blake2b(kind, digest_size=8)
    for name in names:
        hashed.update(b"\0" + name.encode())
    return int.from_bytes(hashed.digest(), "big", signed=True)


def mark_of_path(path: str) -> int:
    """The mark of a stream."""
    return _mark(b"stream", path)


def mark_of_part(part: Part) -> int:
    """The mark of a staged part."""
    return _mark(b"part", *part)


def mark_of_writer(name: str) -> int:
    """The mark of a writer."""
    return _mark(b"writer", name)


def mark_of_key(principal: str, key: str) -> int:
    """The mark of the key of a whole commit."""
    return _mark(b"key", principal, key)


def mark_of_lane(name: str) -> int:
    """The mark of requests that must keep their order, whatever they name."""
    return _mark(b"lane", name)


def marks_of_commit(request: Commit) -> Iterator[int]:
    """The marks of everything that a commit names."""
    paths, parts = request.names()
    yield from map(mark_of_path, paths)
    yield from map(mark_of_part, parts)
    if request.writer is not None:
        yield mark_of_writer(request.writer.name)
    if request.key is not None:
        yield mark_of_key(request.principal, request.key)


class HeldRequests(Generic[T]):
    """Requests of one node that a large commit of any node holds up."""

    def __init__(self) -> None:
        self.large: int | None = None
        """The commit that they wait for."""
        self._waiting: list[T] = []
        self._marks: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, large: int, request: T, marks: Iterable[int]) -> None:
        """Keep a request back."""
        self.large = large
        self._waiting.append(request)
        self._marks.update(marks)

    def has_any(self, marks: Iterable[int]) -> bool:
        """Whether a request waits that must be decided before one with these marks."""
        return bool(self._waiting) and any(mark in self._marks for mark in marks)

    def take(self) -> list[T]:
        """All of them, in order; none waits any more."""
        waiting, self._waiting = self._waiting, []
        self._marks.clear()
        self.large = None
        return waiting


class LargeSession(WritingConnection):
    """The session of a large commit: its sign of life, what it holds, and its transaction."""

    number = 0
    """The number of the commit, by which all nodes know it."""

    async def live(self, idle_ms_max: int) -> None:
        """Give the commit its number and the lock that shows that it is alive."""
        [(self.number, *_)] = await self.fetch("live_as_large", (LARGE_COMMITS, str(idle_ms_max)))

    async def hold(self, marks: Sequence[int]) -> None:
        """Hold some marks; other nodes see that once this is the large commit under way."""
        await self.write([("hold", [(self.number, mark) for mark in marks])])

    async def open(self) -> None:
        """Begin the transaction that no other session sees until its end."""
        await self.fetch("begin")

    async def begin(self) -> Row:
        """Wait for the turn, in the transaction that is open."""
        [counters] = await self.fetch("take_turn")
        return counters

    async def release(self) -> None:
        """Release all marks: the commit is over."""
        await self.fetch("release_all", (self.number,))
