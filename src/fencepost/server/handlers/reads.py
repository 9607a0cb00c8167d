"""GET and HEAD: catching up, waiting for more, following as events.

All three ways to read see committed state only. Catching up reads one bounded chunk; a long-poll
waits for one; an SSE reader gets one after another until its connection's time is up, then comes
back with the last offset it was told.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Headers, Request, Response, StreamingResponse
from fencepost.protocol import sse
from fencepost.protocol.cursors import next_cursor
from fencepost.protocol.offsets import Offset, parse_offset
from fencepost.protocol.streams import media_type
from fencepost.server.handlers import rendering
from fencepost.server.handlers.fields import bad, query_of, rfc3339
from fencepost.server.handlers.rendering import (
    BROWSER,
    first_offset,
    next_offset,
    refused,
    retention_headers,
    version,
)
from fencepost.server.handlers.waiting import WaiterLimit
from fencepost.server.settings import ServerSettings
from fencepost.server.tails import Following, Tails, control_event, encode_events
from fencepost.store.contract import (
    BadOffset,
    Chunk,
    Failed,
    Missing,
    SoftDeleted,
    Store,
    StreamInfo,
    Truncated,
    Unknown,
)

_UNCHANGING = b"max-age=60, stale-while-revalidate=300"
CACHEABLE: Headers = [
    (b"Cache-Control", b"public, " + _UNCHANGING),
    # An open server answers by the Origin: no page may find in a cache what it would be refused.
    (b"Vary", b"Origin"),
]
CACHEABLE_PRIVATELY: Headers = [(b"Cache-Control", b"private, " + _UNCHANGING)]
AT_TAIL: Headers = [(b"Cache-Control", b"no-cache")]
AT_TAIL_PRIVATELY: Headers = [(b"Cache-Control", b"private, no-cache")]
"""An answer that reaches the tail may be kept, but a cache has to ask each time (with the ETag)
whether it still is the whole: the next append makes it stale."""
NO_STORE = (b"Cache-Control", b"no-store")
UP_TO_DATE = (b"Stream-Up-To-Date", b"true")
CLOSED = (b"Stream-Closed", b"true")


class Reads:
    """The handlers that read."""

    def __init__(
        self,
        store: Store,
        tails: Tails,
        clock: Clock,
        settings: ServerSettings,
        waiters: WaiterLimit,
        *,
        shared: bool = True,
    ) -> None:
        self._waiters = waiters
        waiters.include(lambda: tails.readers_count)
        # What only some may read is not for a cache that serves all.
        self._cacheable = CACHEABLE if shared else CACHEABLE_PRIVATELY
        self._at_tail = AT_TAIL if shared else AT_TAIL_PRIVATELY
        self._store = store
        self._tails = tails
        self._clock = clock
        self._settings = settings
        self._stopping = False

    def stop_waiting(self) -> None:
        """Answer every reader that waits for news: the server is going down."""
        self._stopping = True
        self._tails.wake()

    async def head(self, path: str) -> Response:
        """What there is to know about a stream without reading it. Does not count as a use."""
        info = await self._store.look(path, touch=False)
        if not isinstance(info, StreamInfo):
            return rendering.not_there(path, info)
        headers = [
            (b"Content-Type", info.content_type.encode()),
            next_offset(info.tail),
            version(info.tail),
            first_offset(info.first),
            *retention_headers(info.retention),
            NO_STORE,
            *BROWSER,
        ]
        if info.lifetime.ttl_s is not None:
            headers.append((b"Stream-TTL", b"%d" % info.lifetime.ttl_s))
        if info.lifetime.expires_at_ms is not None:
            headers.append((b"Stream-Expires-At", rfc3339(info.lifetime.expires_at_ms).encode()))
        if info.closed:
            headers.append(CLOSED)
        if info.books_closed:
            headers.append(rendering.BOOKS_CLOSED)
        return Response(200, headers)

    async def get(self, request: Request, path: str) -> Answer:
        """A read in any of the three modes."""
        query = query_of(request)
        live = query.get("live")
        if live not in (None, "long-poll", "sse"):
            raise bad("live_invalid", "live is long-poll or sse")
        resumed = _resumed(request) if live == "sse" else None
        offset = resumed or _offset_of(query, required=live is not None)
        news = self._tails.news
        info = await self._store.look(path, touch=True)
        if not isinstance(info, StreamInfo):
            return rendering.not_there(path, info)
        if isinstance(offset, Offset):
            after = offset
        else:
            # The beginning is where the stream begins by now, not where it once did.
            after = info.tail if offset == "now" else info.first
        if live is None:
            return await self._catch_up(request, info, after, from_now=offset == "now")
        if (too_many := self._waiters.refusal(request)) is not None:
            return too_many
        if live == "long-poll":
            return await self._long_poll(info, after, query.get("cursor"), news)
        return await self._events(info, after, query.get("cursor"), resumes=resumed is not None)

    async def _catch_up(
        self, request: Request, info: StreamInfo, after: Offset, *, from_now: bool
    ) -> Response:
        if from_now:
            headers = self._chunk_headers(Chunk(info, after, after, b""))
            return Response(200, [*headers, NO_STORE], b"[]" if info.is_json else b"")
        chunk = await self._read(info, after)
        if isinstance(chunk, Response):
            return chunk
        tag = etag(chunk)
        if _matches(request.headers.get(b"if-none-match"), tag):
            return Response(304, [(b"ETag", tag), *self._caching(chunk), *BROWSER])
        headers = [*self._chunk_headers(chunk), (b"ETag", tag), *self._caching(chunk)]
        return Response(200, headers, body_of(chunk))

    def _caching(self, chunk: Chunk) -> Headers:
        """How long a cache may keep what catching up is answered with."""
        return self._at_tail if chunk.at_tail and not chunk.info.closed else self._cacheable

    async def _long_poll(
        self, info: StreamInfo, after: Offset, cursor: str | None, news: int
    ) -> Response:
        deadline_ms = self._clock.monotonic_ms() + self._settings.long_poll_ms
        with self._tails.follow(info.id) as tail:
            # Something was committed while the stream was looked at, perhaps to it: look again.
            is_stale = self._tails.news != news
            while after == info.tail and not info.closed:
                if not is_stale:
                    left_ms = deadline_ms - self._clock.monotonic_ms()
                    if left_ms <= 0 or not await self._changed(tail, left_ms / 1000):
                        break
                    fresh = tail.fresh(after)
                    if fresh is not None:
                        return self._live_chunk(fresh.chunk, cursor)
                is_stale = False
                tail.look()
                latest = await self._latest(info)
                if not isinstance(latest, StreamInfo):
                    return rendering.not_there(info.path, latest)
                info = latest
        if after == info.tail:
            headers = self._chunk_headers(Chunk(info, after, after, b""))
            if not info.closed:
                headers.append(self._cursor_header(cursor))
            return Response(204, [*headers, NO_STORE])
        chunk = await self._read(info, after)
        return chunk if isinstance(chunk, Response) else self._live_chunk(chunk, cursor)

    def _live_chunk(self, chunk: Chunk, cursor: str | None) -> Response:
        headers = self._chunk_headers(chunk)
        # A repeated long-poll may get this again: it goes on from the next offset, which is news.
        headers += [self._cursor_header(cursor), (b"ETag", etag(chunk)), *self._cacheable]
        return Response(200, headers, body_of(chunk))

    async def _events(
        self, info: StreamInfo, after: Offset, cursor: str | None, *, resumes: bool
    ) -> Answer:
        # The first chunk is read before the answer begins, while a bad offset can still be a 400.
        first = await self._read(info, after)
        if isinstance(first, Response):
            return first
        if resumes and first.next == first.start and info.closed:
            # An EventSource comes back whenever its connection ends, unless it is told this.
            return Response(204, [*self._chunk_headers(first), NO_STORE])
        headers: Headers = [
            (b"Content-Type", b"text/event-stream"),
            (b"Cache-Control", b"no-cache"),
        ]
        if not sse.is_text(media_type(info.content_type)):
            headers.append((b"Stream-SSE-Data-Encoding", b"base64"))
        return StreamingResponse(200, [*headers, *BROWSER], self._follow(first, cursor))

    async def _follow(self, chunk: Chunk, cursor: str | None) -> AsyncIterator[bytes]:
        """The events of one SSE connection, from `chunk` on."""
        ends_ms = self._clock.monotonic_ms() + self._settings.sse_ms
        info = chunk.info
        with self._tails.follow(info.id) as tail:
            number = self._cursor(cursor)
            yield encode_events(chunk, number) if chunk.data else control_event(chunk, number)
            while not (chunk.at_tail and chunk.info.closed):
                after = chunk.next
                tail.look()
                latest = await self._latest(info)
                if not isinstance(latest, StreamInfo):
                    return
                if latest.tail == after:
                    if latest.closed:
                        yield control_event(Chunk(latest, after, after, b""), 0)
                        return
                    left_ms = ends_ms - self._clock.monotonic_ms()
                    if left_ms <= 0 or not await self._changed(tail, left_ms / 1000):
                        return
                fresh = tail.fresh(after)
                if fresh is not None:
                    chunk = fresh.chunk
                    yield fresh.events(self._cursor(cursor))
                    continue
                latest = await self._latest(info)
                if not isinstance(latest, StreamInfo):
                    return
                if latest.tail == after:
                    continue
                read = await self._read(latest, after)
                if isinstance(read, Response):
                    return
                chunk = read
                yield encode_events(chunk, self._cursor(cursor))

    async def _changed(self, tail: Following, timeout_s: float) -> bool:
        """Wait for the stream to change; false when time is up or the server is going down."""
        return not self._stopping and await tail.changed(timeout_s)

    async def _latest(
        self, info: StreamInfo
    ) -> StreamInfo | Missing | SoftDeleted | Failed | Unknown:
        """The same incarnation as it is now."""
        latest = await self._store.look(info.path, touch=False)
        if isinstance(latest, StreamInfo) and latest.id != info.id:
            return Missing()
        return latest

    async def _read(self, info: StreamInfo, after: Offset) -> Chunk | Response:
        chunk = await self._store.read(
            info, after, bytes_max=self._settings.limits.read_chunk_bytes_max
        )
        match chunk:
            case Chunk():
                return chunk
            case BadOffset():
                detail = (
                    f"no message of {info.path!r} ends at {after}: use an offset that it gave out"
                )
                return refused(400, "offset_invalid", "Bad offset", detail)
            case Truncated(first):
                return refused(
                    410,
                    "offset_truncated",
                    "Offset no longer kept",
                    f"{info.path!r} no longer keeps what came before {first}: read from there",
                    (b"Stream-First-Offset", str(first).encode()),
                )
            case Missing():
                return rendering.missing(info.path)

    def _cursor(self, sent: str | None) -> int:
        return next_cursor(sent, now_ms=self._clock.wall_ms(), dice=self._clock.random())

    def _cursor_header(self, sent: str | None) -> tuple[bytes, bytes]:
        return (b"Stream-Cursor", b"%d" % self._cursor(sent))

    @staticmethod
    def _chunk_headers(chunk: Chunk) -> Headers:
        headers = [
            (b"Content-Type", chunk.info.content_type.encode()),
            next_offset(chunk.next),
            version(chunk.next),
            *BROWSER,
        ]
        if chunk.at_tail:
            headers.append(UP_TO_DATE)
            if chunk.info.closed:
                headers.append(CLOSED)
        return headers


def body_of(chunk: Chunk) -> bytes | tuple[bytes, ...]:
    """A chunk as a response body; parts are not joined, so nothing large is copied."""
    return (b"[", chunk.data, b"]") if chunk.info.is_json else chunk.data


def etag(chunk: Chunk) -> bytes:
    """Names exactly these bytes of this incarnation, and whether they are the last."""
    closed = ":c" if chunk.at_tail and chunk.info.closed else ""
    return f'"{chunk.info.id}:{chunk.start}:{chunk.next}{closed}"'.encode()


def _matches(if_none_match: bytes | None, tag: bytes) -> bool:
    if if_none_match is None:
        return False
    candidates = [candidate.strip() for candidate in if_none_match.split(b",")]
    return b"*" in candidates or any(c.removeprefix(b"W/") == tag for c in candidates)


def _resumed(request: Request) -> Offset | str | None:
    """Where an EventSource goes on that lost its connection: this beats the offset in its URL."""
    value = request.headers.get(b"last-event-id")
    if not value:
        return None
    text = value.decode("latin-1")
    parsed = parse_offset(text)
    if parsed is None or parsed == "now":
        raise bad("offset_invalid", f"Last-Event-ID {text!r} is not the id of an event")
    return parsed


def _offset_of(query: dict[str, str], *, required: bool) -> Offset | str:
    text = query.get("offset")
    if text is None:
        if required:
            raise bad(
                "offset_missing",
                "a live read needs offset=: an offset, -1 for the beginning, or now",
            )
        return "-1"
    parsed = parse_offset(text)
    if parsed is None:
        raise bad("offset_invalid", f"offset={text!r} is not an offset that this server gave out")
    return parsed
