"""One HTTP/1.1 connection: it reads requests, and writes their answers in the order they came.

`parser.py` makes requests out of bytes, and `exchanges.py` says whose turn it is. An answer is
written when every earlier one has been. When an answer turns the connection into a WebSocket,
`websocket_connection.py` takes the socket over.

A client that closes its sending side (EOF) counts as gone for everything that can be cancelled,
long-polls and streams, because a disconnect looks no different. Requests that cannot be cancelled,
such as appends, are still answered, and then the connection is closed.

The connection sets no timer per request: the sweep of `Front` looks at it a few times a second.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from fencepost.http.exchanges import Exchange, Turns
from fencepost.http.front import Front, StallWatch
from fencepost.http.messages import (
    Request,
    Response,
    StreamingResponse,
    UpgradeResponse,
)
from fencepost.http.parser import RequestReader, Stopped, Upgraded
from fencepost.http.problems import failure, problem
from fencepost.http.streaming import JOIN_BYTES_MAX, OutgoingStream
from fencepost.http.wire import Refusal, render_head
from fencepost.protocol.grants import Principal

if TYPE_CHECKING:
    from fencepost.http.websocket import WebSocket

log = logging.getLogger("fencepost.http")

_FEED_BYTES_MAX = 16 * 1024
"""Heads are parsed in slices, so that one segment cannot queue thousands of tiny requests."""

_EARLY_BYTES_MAX = 64 * 1024
"""Bytes that may come before the answer to a request for a WebSocket."""

_BODILESS = (204, 304)
_NO_BODY = b"Content-Length: 0\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(asyncio.Protocol):
    """The protocol object of one accepted socket."""

    __slots__ = (
        "_early",
        "_ended",
        "_eof",
        "_feeding",
        "_held",
        "_idle_after_bytes",
        "_idle_since_seconds",
        "_linger_bytes",
        "_linger_until_seconds",
        "_lingering",
        "_reader",
        "_reading_paused",
        "_refused",
        "_settings",
        "_stall",
        "_stream",
        "_transport",
        "_turned_away",
        "_turns",
        "_websocket",
        "_written_bytes",
        "closing",
        "counted",
        "front",
        "gone",
        "principal",
        "writing_paused",
    )

    def __init__(self, front: Front) -> None:
        self.front = front
        self.gone = False
        self.principal: Principal | None = None
        self.counted: object = None
        self._settings = front.settings
        self._turns = Turns(self)
        # Reading.
        self._held = b""  # read from the socket, not yet parsed: the pipeline is full
        self._feeding = False
        self._reading_paused = False
        self._ended = False  # no further request is taken
        self._eof = False
        # Writing.
        self.writing_paused = False
        self._written_bytes = 0
        self._stall = StallWatch(front.now_seconds, self._settings.write_stall_seconds)
        self._stream: OutgoingStream | None = None
        # The WebSocket that this may become, and what came before it did.
        self._websocket: WebSocket | None = None
        self._early: bytes | None = None
        # The end.
        self._idle_after_bytes = -1
        self._idle_since_seconds = front.now_seconds
        self.closing = False
        self._refused = False
        self._turned_away = False
        self._lingering = False
        self._linger_until_seconds = 0.0
        self._linger_bytes = 0

    # The socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, though they have all its methods.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(
            high=self._settings.write_buffer_bytes_high, low=self._settings.write_buffer_bytes_low
        )
        peername = transport.get_extra_info("peername")
        peer = str(peername[0]) if peername else ""
        self._reader = RequestReader(self.front, peer, self._turns.take, self)
        front = self.front
        crowded = len(front.connections) - front.refusing >= self._settings.connections_max
        front.joined(self)
        if crowded or front.draining:
            self._turn_away()

    def _turn_away(self) -> None:
        front = self.front
        front.refusing += 1
        front.counters.connections_refused += 1
        self._turned_away = True
        if front.refusing > self._settings.refusals_open_max or front.draining:
            self.closing = True
            self._transport.abort()
            return
        detail = "the server serves as many connections as it may; retry later"
        self._refuse(Refusal(503, "too_many_connections", detail))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.gone = self.closing = True
        self.counted = None
        front = self.front
        front.left(self)
        front.refusing -= self._turned_away
        if self._stream is not None:
            self._stream.cancel()
        self._turns.cancel()
        self._held = b""
        self._reader.close()

    def eof_received(self) -> bool:
        self._ended = self._eof = True
        if self._lingering or not self._turns:
            return False
        return self._stream is None and not self._turns.is_cancellable()

    def abort(self) -> None:
        """Cut the connection now, whatever is under way."""
        self.front.counters.connections_aborted += 1
        self._transport.abort()

    def begin_drain(self) -> None:
        """Take no new request; close when idle, else with the answer of the last one under way."""
        if self._stream is not None:
            if self._stream.is_live:
                self._stream.cancel()
        elif self._reader.between_requests and not (self._turns or self._lingering):
            self._close()

    # Reading.

    def data_received(self, data: bytes) -> None:
        front = self.front
        front.counters.bytes_in += len(data)
        if front.counters.bytes_in >= front.count_at_bytes:
            front.count_bodies()
        if self._ended:
            self._take_late(data)
        elif self._reading_paused:
            self._held += data
        else:
            self._feed(data)
            if self._turns.started and self._is_full():
                self._pause_reading()

    def _feed(self, data: bytes) -> None:
        reader = self._reader
        at = 0
        self._feeding = True
        try:
            while at < len(data) and not self.closing:
                if at and self._is_full():
                    self._held = data[at:]
                    break
                begun = at
                at = reader.take_repeats(data, at, at + _FEED_BYTES_MAX)
                if at == begun:
                    part = self._slice(data, at)
                    at += len(part)
                    reader.feed(part)
        except Refusal as refusal:
            self._refuse(refusal)
        except Stopped:
            self._ended = True
            self._linger_bytes += 1
        except Upgraded as upgraded:
            self._take_late(upgraded.rest + data[at:])
        finally:
            self._feeding = False
        if reader.continue_owed:
            self._send_continue()

    def _slice(self, data: bytes, at: int) -> memoryview:
        """What the reader gets next. A request that has begun ends with it if that can be told, so
        that the reader sees at once whether the next one repeats its head."""
        if self._reader.between_requests:
            # It does not repeat a head: a view goes to the parser without another look at that.
            return memoryview(data)[at : at + _FEED_BYTES_MAX]
        left = self._reader.body_bytes_left
        if not left:  # in a head, or in a body in chunks, which may hold any number of empty lines
            in_head = self._reader.in_head
            head_end = data.find(b"\r\n\r\n", at, at + _FEED_BYTES_MAX) if in_head else -1
            left = _FEED_BYTES_MAX if head_end < 0 else head_end + 4 - at
        return memoryview(data)[at : at + left]

    def _is_full(self) -> bool:
        turns, settings, bodies = self._turns, self._settings, self.front.bodies
        return (
            len(turns.started) + len(turns.waiting) >= settings.pipeline_depth_max
            or turns.queued_bytes >= settings.pipeline_bytes_max
            or self.writing_paused
            or (
                bodies.is_crowded
                and turns.queued_bytes > 0
                and not bodies.reads_ahead(self._sender())
            )
        )

    def _sender(self) -> str | None:
        """The principal whose requests came last; None when there was none yet."""
        return None if self.principal is None else self.principal.name

    def _pause_reading(self) -> None:
        # After the last request reading goes on: it is how a disconnect is noticed.
        if not (self._reading_paused or self.closing or self._ended):
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Go on reading, held bytes first, when there is room again."""
        while self._reading_paused and not (self._feeding or self._is_full() or self.closing):
            held, self._held = self._held, b""
            if held and not self._ended:
                self._feed(held)
                continue
            self._reading_paused = False
            # The time the server made the client wait is not the client's slowness.
            self._reader.rest(now_seconds=self.front.now_seconds)
            self._transport.resume_reading()

    def _take_late(self, data: bytes) -> None:
        """Bytes behind the last request: frames of its WebSocket, or nothing that counts."""
        if self._websocket is not None:
            self._websocket.data_received(data)
        elif self._early is None:
            self._swallow(len(data))
        else:
            # A client should wait for the 101; one that does not may be a little ahead of it.
            self._early += data
            if len(self._early) > _EARLY_BYTES_MAX:
                self.abort()

    def _swallow(self, size: int) -> None:
        """Drop bytes that come after the last request, within a bound."""
        self._linger_bytes += size
        if self._linger_bytes > self._settings.linger_bytes_max:
            self.abort()

    # Turns.

    def last_came(self, request: Request) -> None:
        """Take no request after this one."""
        self._ended = True
        if request.upgrade is not None:
            self._early = b""

    def work_began(self) -> None:
        """Close when the client has left: that cancels the work."""
        if self._eof:
            self._close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer in the request's place, take nothing more, and close after it."""
        if self.closing:
            return
        counts = self.front.counters.refusals
        counts[refusal.code] = counts.get(refusal.code, 0) + 1
        title = HTTPStatus(refusal.status).phrase
        answer = problem(refusal.status, refusal.code, title, refusal.detail, refusal.headers)
        if self._reader.answers_head:
            answer.body = b""
        self._ended = self._refused = True
        self._held = b""
        self._reader.close()
        self._turns.refuse(answer)

    def advance(self) -> None:
        """Write every answer whose turn has come, then start what waited for it."""
        started = self._turns.started
        while started:
            exchange = started[0]
            answer = exchange.answer
            if answer is None:
                break
            if not isinstance(answer, Response):
                self._begin(exchange, answer)
                return
            started.popleft()
            self._send(exchange, answer)
            if self.closing:
                return
        self._go_on()

    def _go_on(self) -> None:
        """After an answer has left: go on with what it held up."""
        if self._reader.continue_owed and not self._feeding:
            self._send_continue()
        if self._turns.waiting:
            self._turns.start_waiting()
        if self._reading_paused:
            self._resume_reading()

    # Writing.

    def _send(self, exchange: Exchange, answer: Response) -> None:
        request = exchange.request
        status = answer.status
        body = answer.body
        bodiless = status in _BODILESS
        if request is not None:
            self._turns.queued_bytes -= len(request.body)
            self.front.counters.requests[request.method][status // 100] += 1
            bodiless = bodiless or request.method == "HEAD"
        if bodiless:
            body, size, ending = b"", 0, b"\r\n"
        else:
            size = len(body) if isinstance(body, bytes) else sum(map(len, body))
            ending = b"Content-Length: %d\r\n\r\n" % size if size else _NO_BODY
        closes = not exchange.keep_alive or (
            (self._ended or self.front.draining) and self._is_last()
        )
        if closes:
            ending = b"Connection: close\r\n" + ending
        elif exchange.version == "1.0":
            ending = b"Connection: keep-alive\r\n" + ending
        headers = answer.headers
        if status >= 400:
            headers = self.front.request_ids.name(request, answer)
        try:
            head = render_head(status, headers, self.front.date_line, ending, answer.block)
        except ValueError:
            self._fail()
            return
        if isinstance(body, bytes) and size <= JOIN_BYTES_MAX:
            self.write(head + body)
        else:
            self.write_parts((head, body) if isinstance(body, bytes) else (head, *body))
        if closes:
            self._finish()

    def _fail(self) -> None:
        """Say 500 in place of an answer that is unfit to send, and close."""
        log.exception("an answer was dropped")
        answer = failure()
        assert isinstance(answer.body, bytes)
        ending = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(answer.body)
        headers = self.front.request_ids.name(None, answer)
        self.write(render_head(500, headers, self.front.date_line, ending) + answer.body)
        self._finish()

    def _is_last(self) -> bool:
        """Whether, in a connection or server that is to end, nothing follows this answer."""
        if self._turns:
            return False
        return self._ended or (self._reader.between_requests and not self._held)

    def write(self, data: bytes) -> None:
        size = len(data)
        self._written_bytes += size
        self.front.counters.bytes_out += size
        self._transport.write(data)

    def write_parts(self, parts: tuple[bytes, ...]) -> None:
        size = sum(map(len, parts))
        self._written_bytes += size
        self.front.counters.bytes_out += size
        self._transport.writelines(parts)

    def _send_continue(self) -> None:
        """Ask for the announced body, when that is the next thing the client should read."""
        if self._turns or self.closing:
            return
        if self._reader.wants_continue():
            self._reader.rest(now_seconds=self.front.now_seconds)
            self.write(_CONTINUE)

    def pause_writing(self) -> None:
        self.writing_paused = True
        self._pause_reading()

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._stream is not None:
            self._stream.go_on()
        if not self.closing:
            self._go_on()

    # Streams.

    def _begin(self, exchange: Exchange, answer: StreamingResponse | UpgradeResponse) -> None:
        if isinstance(answer, StreamingResponse):
            self._begin_stream(exchange, answer)
        else:
            self._turns.started.popleft()
            self._begin_websocket(exchange, answer)

    def _begin_stream(self, exchange: Exchange, answer: StreamingResponse) -> None:
        request = exchange.request
        assert request is not None
        if self._stream is not None:
            return
        if request.method == "HEAD" or answer.status in _BODILESS:
            self.front.discard(answer)
            exchange.answer = Response(answer.status, answer.headers)
            self.advance()
            return
        if self._eof:
            self._close()
            return
        chunked = exchange.version == "1.1"
        ending = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"\r\n"
        if not chunked or self.front.draining:
            exchange.keep_alive = False
        if not exchange.keep_alive:
            ending = b"Connection: close\r\n" + ending
        try:
            head = render_head(answer.status, answer.headers, self.front.date_line, ending)
        except ValueError:
            self.front.discard(answer)
            self._turns.started.popleft()
            self._fail()
            return
        self.front.counters.requests[request.method][answer.status // 100] += 1
        self.write(head)
        self._stream = OutgoingStream(
            self.front,
            self,
            answer,
            chunked=chunked,
            ended=lambda complete: self._end_stream(exchange, complete),
        )
        if self.front.draining:
            self.begin_drain()

    def _end_stream(self, exchange: Exchange, complete: bool) -> None:
        stream, self._stream = self._stream, None
        if self.gone:
            return
        if not complete:
            # Without its last chunk the client can tell that something is missing.
            self._transport.abort()
            return
        assert stream is not None
        stream.end()
        self._turns.started.popleft()
        assert exchange.request is not None
        self._turns.queued_bytes -= len(exchange.request.body)
        if not exchange.keep_alive or ((self._ended or self.front.draining) and self._is_last()):
            self._finish()
        else:
            self.advance()

    # WebSockets.

    def _begin_websocket(self, exchange: Exchange, answer: UpgradeResponse) -> None:
        request = exchange.request
        assert request is not None
        if request.upgrade is None:
            self._fail()
            return
        if self._eof or self.front.draining:
            self._close()  # the client connects again, elsewhere when this server stops
            return
        # The library behind it takes a while to load, and many servers never need it.
        from fencepost.http.websocket_connection import WebSocketConnection

        self.front.counters.requests[request.method][1] += 1
        self.write(request.upgrade.head(self.front.date_line))
        if self._reading_paused:
            self._transport.resume_reading()
        self.gone = self.closing = True
        self._reader.close()
        early, self._early = self._early or b"", None
        successor = WebSocketConnection(
            self.front, self._transport, answer.settings, self._sender()
        )
        self._transport.set_protocol(successor)
        self.front.replaced(self, successor)
        self._websocket = websocket = successor.websocket
        if self.writing_paused:
            websocket.pause_writing()
        websocket.open(answer.begin(websocket), early)

    # The end.

    def _finish(self) -> None:
        """The last answer is written: close, or first let the client stop talking and read it."""
        if self._eof or not (self._refused or self._linger_bytes):
            self._close()
            return
        self.closing = self._lingering = self._ended = True
        self._linger_until_seconds = self.front.now_seconds + self._settings.linger_seconds
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._transport.write_eof()

    def _close(self) -> None:
        self.closing = True
        self._transport.close()

    def sweep(self, now_seconds: float) -> None:
        """Look at every timeout of this connection; called a few times a second."""
        unsent_bytes = self._transport.get_write_buffer_size()
        if self._stall.is_stalled(now_seconds, self._written_bytes, unsent_bytes):
            self.abort()
        elif self._lingering:
            if now_seconds > self._linger_until_seconds:
                self._transport.close()
        elif not self.closing:
            if self._reading_paused:
                self._resume_reading()
            elif not self._ended:
                self._sweep_reading(now_seconds)

    def count_bodies(self) -> None:
        """Count the small bodies that wait here, and refuse one for which there is no room."""
        if self.closing:
            return
        bodies, sender = self.front.bodies, self._sender()
        waiting = self._turns.small_bytes() + len(self._held)
        if waiting:
            bodies.keep(sender, waiting)
        size = self._reader.small_bytes
        if not size:
            return
        refusal = bodies.refuse(sender, size)
        if refusal is not None and sender is None:
            # The token of the first request on a connection is looked at before it is refused.
            refusal = bodies.refuse(self._reader.sender(), size)
        if refusal is not None:
            self._refuse(refusal)

    def _sweep_reading(self, now_seconds: float) -> None:
        refusal = self._reader.overdue(now_seconds)
        if refusal is not None:
            self._refuse(refusal)
        elif self._turns or not self._reader.between_requests:
            self._idle_after_bytes = -1
        elif self._idle_after_bytes != self._written_bytes:
            # Idleness is dated by the sweep that first sees it, so that no request pays for it.
            self._idle_after_bytes = self._written_bytes
            self._idle_since_seconds = now_seconds
        elif now_seconds - self._idle_since_seconds > self._settings.idle_timeout_seconds:
            self._close()
