"""Chunks that are asked for again, kept in memory so that the rows are not joined anew.

What is committed of a stream never changes, and the number of an incarnation never comes back. So
the bytes of a chunk follow from the incarnation, from where the chunk begins and from how far it
may reach: these are a `Place`, and what is kept for one is right for as long as it is kept. Whether
a reader may have it is decided before this module is asked: a stream that is deleted, expired or
truncated, or that a token may not read, gives no reader here.

A chunk is kept when its place is asked for a second time. So a stream that is read once, however
long, puts nothing out; of those kept the one goes first that was used least recently.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Segment
from fencepost.store.read.chunks import ConnectionT, Piece, Readers

T = TypeVar("T")

ASKED_MAX = 4_096
"""Places of which it is known that they were asked for once."""
ENTRY_BYTES = 512
"""What a kept chunk takes beside its data, about."""
LARGE_PART = 8
"""No chunk may take more than this part of the memory, or a few would be all that is kept."""


class Place(NamedTuple):
    """What the bytes of a chunk follow from."""

    stream_id: int
    after: Offset
    bytes_max: int
    end_bytes: int
    """Where it ends at the latest."""
    is_json: bool


def place_of(
    segments: tuple[Segment, ...], after: Offset, *, bytes_max: int, is_json: bool
) -> Place:
    """The place that a read of some segments asks for; forks share those of their source."""
    reach = after.bytes + bytes_max
    own, tail = segments[-1]
    for stream_id, end in segments[:-1]:
        if after.bytes < end.bytes:
            if reach < end.bytes:
                return Place(stream_id, after, bytes_max, reach, is_json)
            break
    return Place(own, after, bytes_max, min(reach, tail.bytes), is_json)


class ChunkCache(Generic[ConnectionT]):
    """Reads through the reader threads, each place once at a time. Used on the event loop only."""

    def __init__(self, readers: Readers[ConnectionT], *, bytes_max: int) -> None:
        """With `bytes_max` of 0 every read goes to a thread of its own accord."""
        self._readers = readers
        self._bytes_max = bytes_max
        self._kept: OrderedDict[Place, Piece] = OrderedDict()
        self._bytes = 0
        self._asked: OrderedDict[Place, int] = OrderedDict()
        self._under_way: dict[Place, asyncio.Future[Any]] = {}
        self._hits = self._misses = 0

    def stats(self) -> dict[str, float]:
        """Numbers for the metrics, by name."""
        return {
            "chunk_cache_hits_total": self._hits,
            "chunk_cache_misses_total": self._misses,
            "chunk_cache_bytes": self._bytes,
        }

    async def read(self, place: Place, work: Callable[[ConnectionT], T]) -> Piece | T:
        """What `work` reads at `place`, from memory if it is there; only a `Piece` is kept."""
        if not self._bytes_max:
            return await self._readers.run(work)
        kept = self._kept.get(place)
        if kept is not None:
            self._hits += 1
            self._kept.move_to_end(place)
            return kept
        self._count(place)
        reading = self._under_way.get(place)
        if reading is not None:
            piece = await _piece_of(reading)
            if piece is not None:
                self._hits += 1
                return piece
            # Why there is none may be the other reader's affair: a fork that is gone, of this one.
        self._misses += 1
        own = self._readers.submit(work)
        self._under_way[place] = own
        own.add_done_callback(partial(self._ended, place))
        result: Piece | T = await asyncio.shield(own)  # others may wait for it when this one leaves
        return result

    def _count(self, place: Place) -> None:
        self._asked[place] = self._asked.pop(place, 0) + 1
        if len(self._asked) > ASKED_MAX:
            self._asked.popitem(last=False)

    def _ended(self, place: Place, reading: asyncio.Future[Any]) -> None:
        # Asked also for the loop's sake, which reports an error of which no reader hears.
        failed = reading.cancelled() or reading.exception() is not None
        if self._under_way.get(place) is not reading:
            return  # forgotten meanwhile
        del self._under_way[place]
        if not failed and self._asked.get(place, 0) > 1 and isinstance(reading.result(), Piece):
            self._keep(place, reading.result())

    def _keep(self, place: Place, piece: Piece) -> None:
        size = _size(piece)
        if size > self._bytes_max // LARGE_PART:
            return
        del self._asked[place]
        self._kept[place] = piece
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)

    def clear(self) -> None:
        """Keep nothing of what was read so far, nor of what is being read."""
        self._kept.clear()
        self._asked.clear()
        self._under_way.clear()
        self._bytes = 0


async def _piece_of(reading: asyncio.Future[Any]) -> Piece | None:
    """What another reader has asked for, unless that is no piece."""
    try:
        result = await asyncio.shield(reading)
    except Exception:
        return None
    return result if isinstance(result, Piece) else None


def _size(piece: Piece) -> int:
    return len(piece.data) + ENTRY_BYTES
