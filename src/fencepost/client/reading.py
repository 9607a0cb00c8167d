"""Reads that take several answers, without I/O: a stream, its news, the pages of a list.

Each class here remembers how far it came, and its `next` is an operation that fetches what follows.
A follower that loses its connection goes on from the last offset it gave out: nothing is lost and
nothing comes twice.
"""

from __future__ import annotations

import base64
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from fencepost.client.decoding import TextDecoder, json_messages, log_entries
from fencepost.client.effects import Channel, Next, Open, Operation, Shut, Sleep
from fencepost.client.errors import (
    ConnectionFailedError,
    FencepostError,
    ProtocolError,
    ResponseError,
    UnavailableError,
    require,
)
from fencepost.client.errors.answers import error_of
from fencepost.client.http import Request, Response, redirected, target_of
from fencepost.client.operations import is_json, media_type, stream_target
from fencepost.client.results import Batch, LogPage
from fencepost.client.retry import (
    REDIRECTS_MAX,
    REPEATED,
    Kind,
    asked_user,
    dressed,
    exchange,
    is_redirect,
    retry_after,
)
from fencepost.client.settings import WARNED_ATTEMPT, ClientSettings
from fencepost.client.sse import EVENT_BYTES_MAX, EventParser

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
log = logging.getLogger(__name__)

START = "-1"
NOW = "now"
EVENT_STREAM = "text/event-stream"
Live = Literal["auto", "sse", "long-poll"]
SHORT_LIVED_MS = 250
"""A wait for news that ends sooner, and brings none, makes the next one come later."""
NO_EVENTS = frozenset((400, 405, 406, 501))
"""Refusals of an SSE read by servers that may still know long-polls."""


class Pace:
    """Asks for news again and again, and never hammers a server that answers at once with none.

    The delay before the next request grows with every one that was short and brought nothing.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._began_ms: int | None = None
        self._short = 0

    def progress(self) -> None:
        """Something came: the next wait begins at once."""
        self._short = 0
        self._began_ms = None

    def wait(self) -> Operation[None]:
        """Let time pass if the last wait was a short one; the next wait begins now."""
        clock = self._settings.clock
        if self._began_ms is not None:
            if clock.monotonic_ms() - self._began_ms < SHORT_LIVED_MS:
                delay = self._settings.retries.delay(self._short, clock.random())
                self._short += 1
                yield Sleep(delay)
            else:
                self._short = 0
        self._began_ms = clock.monotonic_ms()


class Cursor(Generic[T]):
    """A place in a stream, and the way to what follows it."""

    def __init__(self, settings: ClientSettings, path: str, offset: str | None, kind: Any) -> None:
        told = offset is None or (offset != "" and isinstance(offset, str))
        require(told, f"offset is a text that the server gave, or now, not {offset!r}")
        self._settings = settings
        self._path = path
        self._kind = kind
        self._decode: Callable[[bytes], list[T]] | None = None
        self._undecoded = False
        self.offset = offset or START
        self.content_type: str | None = None
        self.ended = False
        self.up_to_date = False
        """Whether the last answer reached the tail."""
        self.closed = False
        """Whether the last answer reached the end of a closed stream."""
        self.stopped: Callable[[], bool] = lambda: False
        """Asked before each request: whether the user wants no more of them."""

    def leave_undecoded(self) -> None:
        """From here on only the bytes of batches are wanted: their messages are not looked into."""
        self._undecoded = True
        self._decode = None

    def _learn(self, content_type: str) -> None:
        if self._decode is None:
            self.content_type = content_type
            self._decode = whole if self._undecoded else decoder(content_type, self._kind)

    def _batch(self, data: bytes, next_offset: str, *, up_to_date: bool, closed: bool) -> Batch[T]:
        messages: list[T] = []
        if data:
            assert self._decode is not None
            messages = self._decode(data)
        # An offset that leads nowhere, or back, would bring the same messages again and again. The
        # protocol has offsets sort as texts; `-1` comes before all of them.
        onward = self.offset == NOW or next_offset > self.offset
        if next_offset in ("", NOW) or (messages and not onward):
            raise ProtocolError(f"the server names {next_offset!r} as what follows {self.offset!r}")
        batch = Batch(
            messages=messages,
            data=data,
            offset=self.offset,
            next_offset=next_offset,
            up_to_date=up_to_date,
            closed=closed,
        )
        self.offset = next_offset
        self.ended = self.closed = closed
        self.up_to_date = up_to_date or closed
        return batch

    @property
    def place(self) -> str:
        """The offset behind the last batch that was given out."""
        return self.offset

    def _answered(self, response: Response) -> Batch[T]:
        next_offset = response.headers.get("stream-next-offset")
        if next_offset is None:
            raise ProtocolError("the answer to a read has no Stream-Next-Offset")
        if response.status == 204:
            response.body = b""  # which has no type either
        elif response.status in (200, 203):
            self._learn(response.headers.get("content-type", "application/octet-stream"))
        else:
            raise ProtocolError(f"the server answers a read with {response.status}")
        return self._batch(
            response.body,
            next_offset,
            up_to_date=response.is_true("stream-up-to-date"),
            closed=response.is_true("stream-closed"),
        )

    def _fetch(self, query: tuple[tuple[str, str], ...] = ()) -> Operation[Response]:
        target = stream_target(self._path, (("offset", self.offset), *query))
        request = Request("GET", target, live=bool(query))
        return (yield from exchange(self._settings, request, Kind.READ)).response


def stands_still(batch: Batch[Any]) -> bool:
    """Whether a batch brought no message and leads to no other offset."""
    return not batch.messages and batch.next_offset == batch.offset


def whole(data: bytes) -> list[Any]:
    """A body as it came, as if it were one message."""
    return [data]


def decoder(content_type: str, kind: Any) -> Callable[[bytes], list[Any]]:
    """How a body of this type becomes messages."""
    if is_json(content_type):
        return json_messages(kind)
    if media_type(content_type).startswith("text/"):
        return TextDecoder()
    return whole


class Reader(Cursor[T]):
    """What is in a stream now, from an offset to the tail."""

    def next(self) -> Operation[Batch[T] | None]:
        """The next batch that holds something; None at the tail."""
        pace = Pace(self._settings)
        while not (self.ended or self.stopped()):
            yield from pace.wait()
            try:
                batch = self._answered((yield from self._fetch()))
            except ConnectionFailedError:
                if self.stopped():
                    break
                raise
            # A closed stream and the tail are the end, and so is an answer that leads nowhere; an
            # empty chunk before it is only a pause.
            self.ended = batch.up_to_date or batch.closed or stands_still(batch)
            if batch.messages:
                return batch
        return None


class Follower(Cursor[T]):
    """What is in a stream and what will be: catching up first, then live, until it is closed."""

    def __init__(
        self,
        settings: ClientSettings,
        path: str,
        offset: str | None,
        kind: Any,
        *,
        live: Live = "auto",
        patience: float | None = None,
    ) -> None:
        super().__init__(settings, path, offset, kind)
        require(live in ("auto", "sse", "long-poll"), "live is auto, sse or long-poll")
        require(patience is None or patience >= 0, "patience is not negative")
        self._live = live
        self._patience_ms = None if patience is None else patience * 1000
        self._cursor: str | None = None
        self._caught_up = False
        self._channel: Channel | None = None
        self._events = EventParser()
        self._data: list[bytes] = []
        self._data_size = 0
        self._ready: deque[Batch[T]] = deque()
        self._failures = 0
        self._lost_ms: int | None = None
        self._renewed = False
        self._pace = Pace(settings)

    def next(self) -> Operation[Batch[T] | None]:
        """The next batch, waiting for it as long as it takes; None when the stream is closed."""
        while self._ready or not (self.ended or self.stopped()):
            try:
                batch = self._ready.popleft() if self._ready else (yield from self._advance())
            except (ConnectionFailedError, ResponseError) as failure:
                yield from self.shut()
                if not self.stopped():
                    yield from self._wait(failure)
                continue
            except FencepostError:
                yield from self.shut()
                raise
            self._failures = 0
            self._lost_ms = None
            self._renewed = False
            if batch is not None and batch.messages:
                self._pace.progress()
                return batch
        yield from self.shut()
        return None

    @property
    def place(self) -> str:
        """The offset behind the last batch that was given out."""
        return self._ready[0].offset if self._ready else self.offset

    def shut(self) -> Operation[None]:
        """Give the connection up; `next` opens another one."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            yield Shut(channel)

    def _advance(self) -> Operation[Batch[T] | None]:
        if not self._caught_up:
            # `now` is asked for by itself first, so that a lost answer later cannot skip anything.
            yield from self._pace.wait()
            batch = self._answered((yield from self._fetch()))
            self._caught_up = batch.up_to_date or batch.closed or stands_still(batch)
            if self._caught_up:
                self._pace.progress()
            return batch
        if self._by_events():
            return (yield from self._next_event())
        yield from self._pace.wait()
        query = [("live", "long-poll")]
        if self._cursor is not None:
            query.append(("cursor", self._cursor))
        response = yield from self._fetch(tuple(query))
        self._cursor = response.headers.get("stream-cursor")
        return self._answered(response)

    def _by_events(self) -> bool:
        if self._live != "auto":
            return self._live == "sse"
        # Events keep JSON and bytes as they are, but not which line ends a text has.
        return not media_type(self.content_type or "").startswith("text/")

    def _next_event(self) -> Operation[Batch[T] | None]:
        if self._channel is None:
            yield from self._pace.wait()
            yield from self._open()
        while self._channel is not None:
            piece: bytes | None = yield Next(self._channel)
            if piece is None:
                # The server ends each connection after a minute; that is no failure.
                yield from self.shut()
                return None
            self._take(piece)
            if self._ready:
                return self._ready.popleft()
        return None

    def _open(self) -> Operation[None]:
        query = [("offset", self.offset), ("live", "sse")]
        if self._cursor is not None:
            query.append(("cursor", self._cursor))
        request = Request("GET", stream_target(self._path, query), live=True)
        channel = yield from self._answered_open(request)
        response = channel.response
        is_stream = media_type(response.headers.get("content-type", "")) == EVENT_STREAM
        if response.status == 200 and is_stream:
            self._channel = channel
            self._events = EventParser()
            self._data = []
            self._data_size = 0
            return
        yield Shut(channel)
        if self._live != "auto":
            raise ProtocolError("the answer to an SSE read is not an event stream")
        log.info("%s has no events here, so it is followed by long-polls", self._path)
        self._live = "long-poll"
        self._pace.progress()

    def _answered_open(self, request: Request) -> Operation[Channel]:
        """The answer to an SSE read, unless it is a refusal that stands after `on_error` was asked.

        The refusals of servers that know no events are answers as well.
        """
        retries, attempt = self._settings.retries, 0
        failure: ConnectionFailedError | ResponseError
        while True:
            try:
                channel = yield from self._channel_of(request)
            except ConnectionFailedError as error:
                failure = error
            else:
                status = channel.response.status
                if status == 200 or (self._live == "auto" and status in NO_EVENTS):
                    return channel
                yield Shut(channel)
                failure = error_of(status, channel.response.headers, channel.response.body)
            if failure.final or attempt >= retries.attempts_max:
                raise failure
            again = yield from asked_user(self._settings, failure, request)
            if again is None:
                raise failure
            if isinstance(failure, ConnectionFailedError):
                yield Sleep(retries.delay(attempt, self._settings.clock.random()))
            request = again
            attempt += 1

    def _channel_of(self, request: Request) -> Operation[Channel]:
        """The answer to one SSE read, behind the redirects that may be followed."""
        sent = yield from dressed(self._settings, request)
        channel: Channel = yield Open(sent)
        for _hop in range(REDIRECTS_MAX):
            following = redirected(self._settings.address, sent, channel.response)
            if following is None or not is_redirect(channel.response):
                break
            yield Shut(channel)
            channel, sent = (yield Open(following)), following
        return channel

    def _take(self, piece: bytes) -> None:
        """The batches that a piece completes."""
        assert self._channel is not None
        encoded = self._channel.response.headers.get("stream-sse-data-encoding") == "base64"
        for event in self._events.feed(piece):
            if event.name == "data":
                self._data_size += len(event.data)
                if self._data_size > EVENT_BYTES_MAX:
                    raise ProtocolError("the server never says where its events lead")
                self._data.append(_unbased(event.data) if encoded else event.data)
            elif event.name == "control":
                control = _control(event.data)
                self._cursor = control.streamCursor
                self._ready.append(
                    self._batch(
                        b"".join(self._data),
                        control.streamNextOffset,
                        up_to_date=control.upToDate or control.streamClosed,
                        closed=control.streamClosed,
                    )
                )
                self._data = []
                self._data_size = 0

    def _wait(self, failure: ConnectionFailedError | ResponseError) -> Operation[None]:
        """Let time pass after a failure that may pass, or raise it."""
        if failure.final:
            raise failure
        refused = isinstance(failure, ResponseError) and failure.status not in REPEATED
        if refused and failure.status == 401 and self._settings.changes and not self._renewed:
            self._renewed = True  # the token function is asked again
            return
        if refused:
            raise failure
        clock = self._settings.clock
        now_ms = clock.monotonic_ms()
        self._lost_ms = now_ms if self._lost_ms is None else self._lost_ms
        if self._patience_ms is not None and now_ms - self._lost_ms > self._patience_ms:
            raise failure
        delay = self._settings.retries.delay(self._failures, clock.random(), retry_after(failure))
        self._failures += 1
        log.log(
            logging.WARNING if self._failures == WARNED_ATTEMPT else logging.DEBUG,
            "following %s was interrupted, going on from %s in %.2f s: %s",
            *(self._path, self.offset, delay, failure),
        )
        yield Sleep(delay)


def _unbased(data: bytes) -> bytes:
    try:
        return base64.b64decode(data.replace(b"\n", b""), validate=True)
    except ValueError as error:
        raise ProtocolError(f"the data of an event is not base64: {error}") from None


def _control(data: bytes) -> _Control:
    try:
        return msgspec.json.decode(data, type=_Control)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a control event is not what it should be: {error}") from None


class _Control(msgspec.Struct):
    streamNextOffset: str  # noqa: N815  (the wire's name)
    streamCursor: str | None = None  # noqa: N815
    upToDate: bool = False  # noqa: N815
    streamClosed: bool = False  # noqa: N815


class Paged(Protocol[T_co]):
    """A list that the server answers page by page."""

    def next(self) -> Operation[Sequence[T_co] | None]:
        """The entries of the next page that has any; None at the end."""
        ...


class Pages(Generic[T]):
    """A list that comes in pages."""

    def __init__(
        self,
        settings: ClientSettings,
        path: str,
        name: str,
        kind: type[T],
        query: list[tuple[str, str]],
    ) -> None:
        self._settings = settings
        self._path = path
        self._name = name
        self._decoder = msgspec.json.Decoder(dict[str, list[kind] | str | None])  # type: ignore[valid-type]
        self._query = query
        self._after: str | None = None
        self.ended = False

    def next(self) -> Operation[list[T] | None]:
        """The entries of the next page that has any; None at the end."""
        while not self.ended:
            query = list(self._query)
            if self._after is not None:
                query = [pair for pair in query if pair[0] != "after"] + [("after", self._after)]
            request = Request("GET", target_of(self._path, query))
            answer = yield from exchange(self._settings, request, Kind.READ)
            try:
                page = self._decoder.decode(answer.response.body)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ProtocolError(f"the list is not what it should be: {error}") from None
            following: Any = page.get("next")
            if following is not None and following == self._after:
                raise ProtocolError(f"the list goes on after {following!r} for ever")
            self._after = following
            self.ended = following is None
            entries: Any = page.get(self._name)
            if entries:
                found: list[T] = entries
                return found
        return None


class LogReader:
    """The log of all streams, in the order of positions, or newest first."""

    def __init__(
        self,
        settings: ClientSettings,
        query: list[tuple[str, str]],
        *,
        after: int | Literal["now"],
        until: int | None,
        live: bool,
        descending: bool = False,
    ) -> None:
        require(after == "now" or after >= -1, "after is a position, -1 or now")
        require(until is None or after == "now" or until >= after, "until is not before after")
        require(not (live and descending), "what is read newest first cannot be followed")
        self._settings = settings
        self._query = query
        self._until = until
        self._live = live
        self._lowest = after if descending else None
        self.after: int | Literal["now"] = after
        self.ended = False
        self.stopped: Callable[[], bool] = lambda: False
        """Asked before each request: whether the user wants no more of them."""
        self.tells_idle = False
        """Whether a long-poll that ends with nothing is a page too."""
        self._failures = 0
        self._pace = Pace(settings)

    def next(self) -> Operation[LogPage | None]:
        """The next page that has entries; None when there is no more to come."""
        waiting = False
        while not (self.ended or self.stopped()):
            if waiting:
                yield from self._pace.wait()
            try:
                response = yield from self._fetch(waiting)
            except (ConnectionFailedError, UnavailableError) as failure:
                if self.stopped():
                    break
                if failure.final or not self._live:
                    raise
                clock, retries = self._settings.clock, self._settings.retries
                yield Sleep(retries.delay(self._failures, clock.random(), retry_after(failure)))
                self._failures += 1
                continue
            self._failures = 0
            page = self._page(response)
            self._check(page)
            self._advance(page)
            idle = waiting and self.tells_idle
            waiting = page.up_to_date
            if page.entries:
                self._pace.progress()
            if page.entries or idle:
                return page
        return None

    def _check(self, page: LogPage) -> None:
        """See that the next request does not bring the same again."""
        before = self.after if self._lowest is None else self._until
        if not isinstance(before, int):
            return
        moved = page.next - before if self._lowest is None else before - page.next
        is_end = page.up_to_date or page.next in (self._until, self._lowest)
        if moved < 0 or (moved == 0 and (page.entries or not is_end)):
            raise ProtocolError(f"the server names {page.next} as what follows {before} in the log")

    def _advance(self, page: LogPage) -> None:
        self.after = page.next
        if self._lowest is not None:
            self._until = page.next
            self.ended = self._lowest == "now" or page.next <= self._lowest
            return
        at_end = self._until is not None and page.next >= self._until
        self.ended = at_end or (page.up_to_date and not self._live)

    def _fetch(self, waiting: bool) -> Operation[Response]:
        after = self.after if self._lowest is None else self._lowest
        query = [*self._query, ("after", str(after))]
        if self._until is not None:
            query.append(("until", str(self._until)))
        if waiting and self._live:
            query.append(("live", "long-poll"))
        request = Request("GET", target_of("/v1/log", query), live=waiting)
        return (yield from exchange(self._settings, request, Kind.READ)).response

    @staticmethod
    def _page(response: Response) -> LogPage:
        following, head = response.integer("log-next"), response.integer("log-head")
        if following is None or head is None:
            raise ProtocolError("the answer has no Log-Next: this server may have no log")
        return LogPage(
            entries=log_entries(response.body),
            next=following,
            head=head,
            up_to_date=response.is_true("log-up-to-date"),
        )
