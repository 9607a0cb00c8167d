"""The event feed of the daemon: what came in and what happened, in order and from any point.

There are two sources, each in the file in which it is stored together with what it is about: the
events of outbox.db, and the messages of inbox.db. A place in the feed is a number in each, written
`12.34`; it is the id of each event, and a reader who sends it back (`Last-Event-ID`) goes on there.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from fencepost.http.messages import StreamingResponse
from fencepost.outbox.daemon.database import Writer
from fencepost.outbox.daemon.inbox import Inbox

BATCH_MAX = 100
PULSE_SECONDS = 15.0
_PLACE = re.compile(rb"(\d{1,18})\.(\d{1,18})")


class Place(NamedTuple):
    """How far a reader is in both sources."""

    happened: int
    arrived: int

    def __str__(self) -> str:
        return f"{self.happened}.{self.arrived}"


class FeedEvent(NamedTuple):
    """One event; `place` is where a reader stands after it."""

    place: Place
    kind: str
    mesh: str
    at_ms: int
    data: bytes


class BadPlaceError(ValueError):
    """`Last-Event-ID` is not an id of this feed."""


class TooManyReadersError(Exception):
    """The feed has as many readers as the settings allow."""


def parse_place(text: bytes) -> Place:
    found = _PLACE.fullmatch(text.strip())
    if found is None:
        raise BadPlaceError("Last-Event-ID is the id of an event, such as 12.34")
    return Place(int(found[1]), int(found[2]))


class Feed:
    """Reads both sources, and wakes readers when something is added to one of them."""

    def __init__(self, writer: Writer, inbox: Inbox | None, readers_max: int) -> None:
        self._writer = writer
        self._inbox = inbox
        self._readers_max = readers_max
        self._changed = asyncio.Event()
        self.readers = 0

    def wake(self) -> None:
        """Something happened, or arrived, and is on disk."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def last(self) -> Place:
        """The place behind everything that there is."""
        happened: int = await self._writer.read(lambda file: file.fetch("events_last")[0][0])
        return Place(happened, 0 if self._inbox is None else await self._inbox.last())

    async def read(self, place: Place) -> list[FeedEvent]:
        """The next events behind a place."""
        found = await self._writer.read(
            lambda file: file.fetch("events_list", place.happened, BATCH_MAX)
        )
        events = []
        for seq, kind, mesh, at, data in found:
            place = Place(seq, place.arrived)
            events.append(FeedEvent(place, kind, mesh, at, data))
        if self._inbox is not None:
            page = await self._inbox.listed(None, place.arrived, BATCH_MAX)
            for message in page.messages:
                place = Place(place.happened, message["seq"])
                data = bytes(message["message"])
                events.append(
                    FeedEvent(place, "message", message["mesh"], message["received_ms"], data)
                )
        return events

    async def follow(self, place: Place) -> AsyncIterator[list[FeedEvent]]:
        """Batches of events, for as long as it is asked; an empty one after a silence."""
        while True:
            changed = self._changed
            events = await self.read(place)
            if events:
                place = events[-1].place
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PULSE_SECONDS):
                        await changed.wait()
                        continue
            yield events

    async def stream(self, last_id: bytes | None, mesh: str | None) -> StreamingResponse:
        """The feed as server-sent events, from an id on, or from now."""
        if self.readers >= self._readers_max:
            raise TooManyReadersError(f"{self._readers_max} readers listen already")
        place = await self.last() if last_id is None else parse_place(last_id)
        headers = [(b"Content-Type", b"text/event-stream"), (b"Cache-Control", b"no-store")]
        return StreamingResponse(200, headers, _Reader(self, place, mesh))


class _Reader:
    """One reader, counted from its first chunk to its close."""

    def __init__(self, feed: Feed, place: Place, mesh: str | None) -> None:
        self._feed = feed
        self._chunks = self._rendered(place, mesh)
        self._open = True
        feed.readers += 1

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        if self._open:
            self._open = False
            self._feed.readers -= 1
        await self._chunks.aclose()

    async def _rendered(self, place: Place, mesh: str | None):  # type: ignore[no-untyped-def]
        yield b"retry: 1000\nid: %b\n\n" % str(place).encode()
        async for events in self._feed.follow(place):
            shown = [rendered(event) for event in events if mesh in (None, event.mesh)]
            yield b"".join(shown) or b": still here\n\n"


def rendered(event: FeedEvent) -> bytes:
    """An event as it goes over the wire. Its data has no line ends."""
    head = msgspec.json.encode({"mesh": event.mesh, "at_ms": event.at_ms})
    body = head[:-1] + (b',"message":' if event.kind == "message" else b',"data":') + event.data
    text = b"event: %b\nid: %b\ndata: %b}\n\n"
    return text % (event.kind.encode(), str(event.place).encode(), body)
