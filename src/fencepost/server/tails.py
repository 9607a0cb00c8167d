"""Tails: readers who wait for the next append, and the buffers that they share.

After each commit the store tells what was appended. For a stream with live readers, the new data
is kept here for a while as one `Fresh` buffer, encoded at most once for each form it goes out in,
however many readers take it. A reader that falls behind the buffers reads from the store like
anyone else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from fencepost.protocol import sse
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import media_type
from fencepost.store.contract import Chunk, Published, Store

FRESH_BYTES_MAX = 1 << 20
"""Recent data kept for each stream that has tails."""


class Fresh:
    """New data of one stream, and its encodings once a reader has asked for them."""

    __slots__ = ("_events", "chunk")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._events: dict[int | None, bytes] = {}

    def events(self, cursor: int) -> bytes:
        """A data event and its control event, the same bytes for every reader with this cursor."""
        encoded = self._events.get(cursor)
        if encoded is None:
            encoded = self._events[cursor] = encode_events(self.chunk, cursor)
        return encoded


def encode_events(chunk: Chunk, cursor: int) -> bytes:
    """A chunk as a data event followed by its control event."""
    data = sse.data_event(chunk.data, media_type(chunk.info.content_type), chunk.next)
    return data + control_event(chunk, cursor)


def control_event(chunk: Chunk, cursor: int) -> bytes:
    """The control event that says where a reader stands after `chunk`."""
    return sse.control_event(
        chunk.next,
        cursor=cursor,
        up_to_date=chunk.at_tail,
        closed=chunk.at_tail and chunk.info.closed,
    )


class _Tail:
    """One stream with readers at its end."""

    __slots__ = ("fresh", "fresh_bytes", "news", "readers", "waiters")

    def __init__(self) -> None:
        self.readers = 0
        self.news = 0
        self.waiters: list[asyncio.Future[None]] = []
        self.fresh: deque[Fresh] = deque()
        self.fresh_bytes = 0

    def keep(self, fresh: Fresh) -> None:
        self.fresh.append(fresh)
        self.fresh_bytes += len(fresh.chunk.data)
        while self.fresh_bytes > FRESH_BYTES_MAX and len(self.fresh) > 1:
            self.fresh_bytes -= len(self.fresh.popleft().chunk.data)

    def wake(self) -> None:
        self.news += 1
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Tails:
    """All streams that have readers at their end."""

    def __init__(self, store: Store) -> None:
        self._tails: dict[int, _Tail] = {}
        self.readers_count = 0
        self.news = 0
        """Counts commits: who has looked at a stream before joining it sees whether one came."""
        store.listen(self._published)

    def follow(self, stream_id: int) -> Following:
        """Begin to tail a stream; leave with the context manager."""
        return Following(self, stream_id)

    def join(self, stream_id: int) -> _Tail:
        tail = self._tails.get(stream_id)
        if tail is None:
            tail = self._tails[stream_id] = _Tail()
        tail.readers += 1
        self.readers_count += 1
        return tail

    def leave(self, stream_id: int, tail: _Tail) -> None:
        tail.readers -= 1
        self.readers_count -= 1
        if tail.readers == 0:
            del self._tails[stream_id]

    def _published(self, changes: Sequence[Published]) -> None:
        self.news += 1
        if not self._tails:
            return
        for change in changes:
            tail = self._tails.get(change.info.id)
            if tail is None:
                continue
            if change.parts:
                separator = b"," if change.info.is_json else b""
                data = separator.join(change.parts)
                tail.keep(Fresh(Chunk(change.info, change.start, change.info.tail, data)))
            tail.wake()

    def wake(self) -> None:
        """Let everyone who waits look again."""
        for tail in self._tails.values():
            tail.wake()


class Following:
    """A reader's place among the tails of one stream."""

    def __init__(self, tails: Tails, stream_id: int) -> None:
        self._tails = tails
        self._stream_id = stream_id
        self._tail: _Tail | None = None
        self._seen = 0

    def __enter__(self) -> Following:
        self._tail = self._tails.join(self._stream_id)
        self._seen = self._tail.news
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._tail is not None
        self._tails.leave(self._stream_id, self._tail)

    def fresh(self, after: Offset) -> Fresh | None:
        """The buffer that starts at `after`, if it is still here."""
        assert self._tail is not None
        for fresh in reversed(self._tail.fresh):
            if fresh.chunk.start == after:
                return fresh
        return None

    def look(self) -> None:
        """Whatever is committed from now on is news. Call it before looking at the stream."""
        assert self._tail is not None
        self._seen = self._tail.news

    async def changed(self, timeout_s: float) -> bool:
        """Wait for a commit that touches the stream since `look`; false when time ran out first."""
        assert self._tail is not None
        if self._tail.news != self._seen:
            # It came while the stream was being looked at: that may have shown it or not.
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            if not waiter.done() or waiter.cancelled():
                self._forget(waiter)
        return True

    def _forget(self, waiter: asyncio.Future[None]) -> None:
        assert self._tail is not None
        if waiter in self._tail.waiters:
            self._tail.waiters.remove(waiter)
