"""One HTTP/1.1 connection: bytes in through llhttp, answers out in the order of the requests.

The way of a request: llhttp's callbacks collect its head and body, `on_message_complete` makes a
`Request` and an `_Exchange`, the exchange waits for its turn (`_waiting`) or is handed to the
application at once (`_started`), and its answer is written when every earlier one has been.

Turns: POSTs that follow each other are handed over as they arrive, so that the appends of one
connection can share a commit. Any other method waits until all before it is answered, and what
comes after it waits for it: a read sees the writes that were sent before it.

A client that closes its sending side (EOF) counts as gone for everything that can be cancelled,
long-polls and streams, because a disconnect looks no different. Requests that cannot be cancelled,
such as appends, are still answered, and then the connection is closed.

Nothing is timed per request: the sweep of `Front` looks at each connection a few times a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import cast

import httptools

from fencepost.server.front import Front
from fencepost.server.http import Answer, Cancellable, Headers, Request, Response, StreamingResponse
from fencepost.server.problems import problem
from fencepost.server.wire import (
    METHODS,
    NO_NAMES,
    Refusal,
    bad_request,
    check_coding,
    check_host,
    first_values,
    header_bytes,
    render_head,
    split_target,
)

log = logging.getLogger("fencepost.http")

_BETWEEN, _HEAD, _BODY = range(3)
"""Where the parser stands: between requests, in a head, in a body."""

_FEED_BYTES_MAX = 16 * 1024
"""Heads are parsed in slices, so that one segment cannot queue thousands of tiny requests."""

_JOIN_BYTES_MAX = 64 * 1024
"""Larger bodies are written beside their head, not joined to it: copying them costs more."""

_BODILESS = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Stopped(Exception):  # noqa: N818 - it only carries control out of the parser
    """No further request is taken; what the parser was about to read is dropped."""


class _Exchange:
    """A request and, once there is one, its answer, in its place in the connection's order."""

    __slots__ = (
        "answer",
        "answered",
        "connection",
        "keep_alive",
        "request",
        "shares",
        "version",
        "work",
    )

    def __init__(
        self, connection: Connection, request: Request | None, keep_alive: bool, version: str
    ) -> None:
        self.connection = connection
        self.request = request  # None when the front end answers by itself
        self.keep_alive = keep_alive
        self.version = version
        self.shares = request is None or request.method == "POST"
        self.answer: Answer | None = None
        self.answered = False
        self.work: Cancellable | None = None

    def respond(self, answer: Answer) -> None:
        """What the application calls, once. Later calls and calls for the departed are dropped."""
        connection = self.connection
        if self.answered or connection.gone:
            connection.front.discard(answer)
            return
        self.answered = True
        self.answer = answer
        self.work = None
        if connection.first is self:
            connection.advance()


class Connection(asyncio.Protocol):
    """The protocol object of one accepted socket."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.gone = False
        self._settings = front.settings
        self._parser = httptools.HttpRequestParser(self)
        self._started: deque[_Exchange] = deque()
        self._waiting: deque[_Exchange] = deque()
        self._starting = False
        self._alone = False  # the newest started exchange shares its turn with no other
        self._queued_bytes = 0
        # Reading.
        self._phase = _BETWEEN
        self._since_seconds = front.now_seconds
        self._held = b""  # read from the socket, not yet parsed: the pipeline is full
        self._feeding = False
        self._reading_paused = False
        self._ended = False  # no further request is taken
        self._eof = False
        self._fed_bytes = 0
        self._carried_bytes = 0
        self._target = b""
        self._pairs: list[tuple[bytes, bytes]] = []
        self._method = ""
        self._version = "1.1"
        self._keep_alive = True
        self._path = self._query = b""
        self._headers: dict[bytes, bytes] = {}
        self._repeated = NO_NAMES
        self._host_seen: bytes | None = None
        self._chunked = False
        self._continue_owed = False
        self._body = b""
        self._more: bytearray | None = None
        self._body_bytes = 0
        self._body_bytes_left = 0
        self._body_bytes_before = 0
        # Writing.
        self._writing_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._stream: asyncio.Task[None] | None = None
        self._stream_is_live = False
        self._closing = False
        self._turned_away = False
        self._refused_one = False
        self._lingering = False
        self._linger_until_seconds = 0.0
        self._linger_bytes = 0
        self._written_bytes = 0
        self._sent_bytes = 0
        self._moved_seconds = front.now_seconds

    # The socket.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's, though they have all its methods.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(
            high=self._settings.write_buffer_bytes_high, low=self._settings.write_buffer_bytes_low
        )
        peername = transport.get_extra_info("peername")
        self._peer = str(peername[0]) if peername else ""
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
            self._transport.abort()
            return
        detail = "the server serves as many connections as it may; retry later"
        self._refuse(Refusal(503, "too_many_connections", detail))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self.gone = self._closing = True
        front = self.front
        front.left(self)
        front.refusing -= self._turned_away
        if self._stream is not None:
            self._stream.cancel()
        for exchange in (*self._started, *self._waiting):
            if exchange.work is not None:
                exchange.work.cancel()
            if exchange.answer is not None and self._stream is None:
                front.discard(exchange.answer)
        self._started.clear()
        self._waiting.clear()
        self._held = b""
        if self._drained is not None and not self._drained.done():
            self._drained.cancel()
        # The parser and its callbacks hold each other; a server with many connections should not
        # have to wait for the garbage collector.
        del self._parser

    def eof_received(self) -> bool:
        self._ended = self._eof = True
        self._phase = _BETWEEN
        if self._lingering or not (self._started or self._waiting):
            return False
        leaving = self._stream is not None or any(one.work is not None for one in self._started)
        return not leaving

    def abort(self) -> None:
        """Cut the connection now, whatever is under way."""
        self.front.counters.connections_aborted += 1
        self._transport.abort()

    def begin_drain(self) -> None:
        """Take no new request; close when idle, else with the answer of the last one under way."""
        if self._stream is not None:
            if self._stream_is_live:
                self._stream.cancel()
        elif self._phase == _BETWEEN and not (self._started or self._waiting or self._lingering):
            self._close()

    # Reading.

    def data_received(self, data: bytes) -> None:
        self.front.counters.bytes_in += len(data)
        if self._ended:
            self._swallow(len(data))
            return
        if self._reading_paused:
            self._held += data
            return
        self._feed(data)
        if self._is_full():
            self._pause_reading()

    def _feed(self, data: bytes) -> None:
        self._feeding = True
        try:
            if len(data) <= _FEED_BYTES_MAX:
                self._feed_slice(data, len(data))
            else:
                self._feed_slices(memoryview(data))
        except Refusal as refusal:
            self._refuse(refusal)
        except httptools.HttpParserError as error:
            self._parser_stopped(error)
        finally:
            self._feeding = False
        if self._continue_owed:
            self._send_continue()

    def _feed_slices(self, data: memoryview) -> None:
        at = 0
        while at < len(data) and not self._closing:
            # Inside a body of known length no further request can begin: pass it whole.
            size = max(_FEED_BYTES_MAX, self._body_bytes_left)
            part = data[at : at + size]
            self._feed_slice(part, len(part))
            at += size
            if self._is_full():
                self._held = bytes(data[at:])
                return

    def _feed_slice(self, data: bytes | memoryview, size: int) -> None:
        phase = self._phase
        body_bytes = self._body_bytes
        self._fed_bytes = size
        self._parser.feed_data(data)
        if self._phase == _BETWEEN:
            return
        if phase == _BETWEEN or self._body_bytes != body_bytes:
            self._carried_bytes = 0
            return
        # Bytes that moved neither a request nor its body on are an unfinished header, trailer or
        # chunk extension, which the parser keeps.
        self._carried_bytes += size
        if self._carried_bytes > self._settings.header_bytes_max + self._settings.target_bytes_max:
            raise Refusal(431, "header_too_large", "the headers of the request are too large")

    def _parser_stopped(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, Refusal):
            self._refuse(cause)
        elif self._ended:
            self._swallow(0)  # bytes after a request that said it was the last
        elif isinstance(error, httptools.HttpParserInvalidMethodError):
            self._refuse(Refusal(501, "method_not_implemented", "the method is not known here"))
        elif isinstance(error, httptools.HttpParserCallbackError):
            log.error("the front end failed on a request", exc_info=cause)
            self._refuse(Refusal(500, "internal_error", "the server failed on this request"))
        else:
            self._refuse(bad_request(f"the request is malformed: {error}"))

    def on_message_begin(self) -> None:
        if self._ended or self.front.draining:
            self._ended = True
            raise _Stopped
        self._phase = _HEAD
        self._method = ""
        self._since_seconds = self.front.now_seconds
        self._target = b""
        self._pairs = []

    def on_url(self, part: bytes) -> None:
        target = self._target + part if self._target else part
        if len(target) > self._settings.target_bytes_max:
            raise Refusal(414, "target_too_long", "the request target is too long")
        self._target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        self._pairs.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        parser = self._parser
        settings = self._settings
        pairs = self._pairs
        headers = dict(pairs)
        repeated = NO_NAMES
        if len(headers) != len(pairs):
            headers, repeated = first_values(pairs)
        name = parser.get_method()
        method = METHODS.get(name)
        version = parser.get_http_version()
        if method is None:
            raise Refusal(501, "method_not_implemented", f"{name.decode()} is not known here")
        self._method = method
        self._version = version
        if version != "1.1" and version != "1.0":
            raise Refusal(505, "version_not_supported", "this server speaks HTTP/1.1 and HTTP/1.0")
        if len(pairs) > settings.header_count_max or (
            self._carried_bytes + self._fed_bytes > settings.header_bytes_max
            and header_bytes(pairs) > settings.header_bytes_max
        ):
            raise Refusal(431, "header_too_large", "the headers of the request are too large")
        host = headers.get(b"host")
        if host is None or host != self._host_seen or repeated:
            if version == "1.1" or host is not None:
                check_host(host, repeated)
            self._host_seen = host
        self._path, self._query = split_target(self._target, headers, method)
        self._keep_alive = parser.should_keep_alive()
        self._headers = headers
        self._repeated = repeated
        # Trailers arrive through `on_header` too. They are dropped: nothing here reads them, and
        # a trailer must not be able to change what the head said.
        self._pairs = []
        self._phase = _BODY
        self._begin_body(headers, repeated, version)

    def _begin_body(
        self, headers: dict[bytes, bytes], repeated: frozenset[bytes], version: str
    ) -> None:
        self._body = b""
        self._more = None
        self._body_bytes = self._body_bytes_before = self._body_bytes_left = 0
        self._chunked = False
        self._carried_bytes = 0
        length = headers.get(b"content-length")
        if b"transfer-encoding" in headers:
            check_coding(headers, repeated, version)
            self._chunked = True
        elif length is not None:
            # llhttp has checked that this is one run of digits that fits 64 bits.
            self._body_bytes_left = int(length)
            if self._body_bytes_left > self._settings.body_bytes_max:
                raise self._too_large()
        if b"upgrade" in headers and self._parser.should_upgrade():
            raise Refusal(400, "upgrade_refused", "this server does not change protocols")
        if b"expect" in headers:
            if headers[b"expect"].lower() != b"100-continue":
                raise Refusal(417, "expectation_failed", "the only expectation is 100-continue")
            self._continue_owed = version == "1.1" and (self._chunked or self._body_bytes_left > 0)

    def on_body(self, part: bytes) -> None:
        size = len(part)
        self._body_bytes += size
        if self._chunked:
            if self._body_bytes > self._settings.body_bytes_max:
                raise self._too_large()
        else:
            self._body_bytes_left -= size
        if self._body_bytes == size:
            self._body = part
        elif self._more is None:
            self._more = bytearray(self._body + part)
        else:
            self._more += part

    def on_message_complete(self) -> None:
        self._phase = _BETWEEN
        self._continue_owed = False
        if self._more is not None:
            self._body = bytes(self._more)
            self._more = None
        request = Request(
            self._method,
            self._path,
            self._query,
            self._headers,
            self._body,
            repeated=self._repeated,
            peer=self._peer,
        )
        self._queued_bytes += self._body_bytes
        self._body = b""
        if not self._keep_alive:
            self._ended = True
        self._take(_Exchange(self, request, self._keep_alive, self._version))

    def _too_large(self) -> Refusal:
        limit = self._settings.body_bytes_max
        return Refusal(413, "body_too_large", f"a request body may have up to {limit} bytes")

    def _is_full(self) -> bool:
        return (
            len(self._started) + len(self._waiting) >= self._settings.pipeline_depth_max
            or self._queued_bytes >= self._settings.pipeline_bytes_max
            or self._writing_paused
        )

    def _pause_reading(self) -> None:
        if not (self._reading_paused or self._closing or self._ended):
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        """Go on reading, held bytes first, when there is room again."""
        while self._reading_paused and not (self._feeding or self._is_full() or self._closing):
            held, self._held = self._held, b""
            if held:
                self._feed(held)
                continue
            self._reading_paused = False
            # The time the server made the client wait is not the client's slowness.
            self._since_seconds = self.front.now_seconds
            self._body_bytes_before = self._body_bytes
            self._transport.resume_reading()

    def _swallow(self, size: int) -> None:
        """Drop bytes that come after the last request, within a bound."""
        self._linger_bytes += size
        if self._linger_bytes > self._settings.linger_bytes_max:
            self.abort()

    # Turns.

    @property
    def first(self) -> _Exchange:
        """The exchange whose answer is to be written next."""
        return self._started[0]

    def _take(self, exchange: _Exchange) -> None:
        if (
            not self._waiting
            and (not self._started or (exchange.shares and not self._alone))
            and not self._writing_paused
        ):
            self._start(exchange)
        else:
            self._waiting.append(exchange)

    def _start(self, exchange: _Exchange) -> None:
        self._started.append(exchange)
        self._alone = not exchange.shares
        request = exchange.request
        if request is None:
            if self._started[0] is exchange:
                self.advance()
            return
        try:
            work = self.front.app.handle(request, exchange.respond)
        except Exception:
            log.exception("the application raised on %s", request.method)
            detail = "the server failed on this request"
            exchange.respond(problem(500, "internal_error", "Internal Server Error", detail))
            return
        if work is not None and not exchange.answered:
            exchange.work = work
            if self._eof:
                self._close()

    def _start_waiting(self) -> None:
        # Whoever is answered from inside `_start` comes back here through `advance`; the flag lets
        # the loop below go on instead, so the stack does not grow with the pipeline.
        if self._starting:
            return
        self._starting = True
        try:
            waiting, started = self._waiting, self._started
            while waiting and not (self._closing or self._writing_paused):
                if started and (self._alone or not waiting[0].shares):
                    return
                self._start(waiting.popleft())
        finally:
            self._starting = False

    def _refuse(self, refusal: Refusal) -> None:
        """Answer in the request's place, take nothing more, and close after it."""
        if self._closing:
            return
        counts = self.front.counters.refusals
        counts[refusal.code] = counts.get(refusal.code, 0) + 1
        title = HTTPStatus(refusal.status).phrase
        answer = problem(refusal.status, refusal.code, title, refusal.detail)
        if self._method == "HEAD":
            answer.body = b""
        self._ended = self._refused_one = True
        self._phase = _BETWEEN
        self._continue_owed = False
        self._held = b""
        self._more = None
        exchange = _Exchange(self, None, False, "1.1")
        exchange.answered = True
        exchange.answer = answer
        self._take(exchange)

    # Writing.

    def advance(self) -> None:
        """Write every answer whose turn has come, then start what waited for it."""
        started = self._started
        while started:
            exchange = started[0]
            answer = exchange.answer
            if answer is None:
                break
            if isinstance(answer, StreamingResponse):
                self._begin_stream(exchange, answer)
                return
            started.popleft()
            self._send(exchange, answer)
            if self._closing:
                return
        self._rested()

    def _rested(self) -> None:
        """After an answer has left: go on with what it held up."""
        if not self._started:
            if self._phase == _BETWEEN:
                self._since_seconds = self.front.now_seconds
            if self._continue_owed and not self._feeding:
                self._send_continue()
        if self._waiting:
            self._start_waiting()
        if self._reading_paused:
            self._resume_reading()

    def _send(self, exchange: _Exchange, answer: Response) -> None:
        request = exchange.request
        status = answer.status
        body = answer.body
        if request is not None:
            self._queued_bytes -= len(request.body)
            self.front.counters.requests[request.method][status // 100] += 1
        if status in _BODILESS or (request is not None and request.method == "HEAD"):
            body = b""
            ending = b"\r\n"
            size = 0
        else:
            size = len(body) if isinstance(body, bytes) else sum(map(len, body))
            ending = b"Content-Length: %d\r\n\r\n" % size
        closes = not exchange.keep_alive or self._is_last()
        if closes:
            ending = b"Connection: close\r\n" + ending
        elif exchange.version == "1.0":
            ending = b"Connection: keep-alive\r\n" + ending
        head = self._head(status, answer.headers, ending)
        if head is None:
            closes = True
        elif isinstance(body, bytes) and size <= _JOIN_BYTES_MAX:
            self._write(head + body)
        else:
            self._write_parts((head, body) if isinstance(body, bytes) else (head, *body))
        if closes:
            self._finish()

    def _head(self, status: int, headers: Headers, ending: bytes) -> bytes | None:
        """The head of an answer, or None when it was unfit to send and a 500 went instead."""
        try:
            return render_head(status, headers, self.front.date_line, ending)
        except ValueError:
            log.exception("an answer was dropped")
        detail = "the server made an answer it cannot send"
        instead = problem(500, "internal_error", "Internal Server Error", detail)
        body = instead.body
        assert isinstance(body, bytes)
        ending = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._write(render_head(500, instead.headers, self.front.date_line, ending) + body)
        return None

    def _is_last(self) -> bool:
        """Whether nothing can follow the answer that is being written."""
        if self._ended:
            return not (self._started or self._waiting)
        return self.front.draining and not (
            self._started or self._waiting or self._held or self._phase != _BETWEEN
        )

    def _write(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self.front.counters.bytes_out += len(data)
        self._transport.write(data)

    def _write_parts(self, parts: tuple[bytes, ...]) -> None:
        size = sum(map(len, parts))
        self._written_bytes += size
        self.front.counters.bytes_out += size
        self._transport.writelines(parts)

    def _send_continue(self) -> None:
        """Ask for the announced body, when that is the next thing the client should read."""
        if self._started or self._waiting or self._closing:
            return
        self._continue_owed = False
        if self._body_bytes == 0:
            self._since_seconds = self.front.now_seconds
            self._write(_CONTINUE)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if not self._closing:
            self._rested()

    # Streams.

    def _begin_stream(self, exchange: _Exchange, answer: StreamingResponse) -> None:
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
        if not chunked:
            exchange.keep_alive = False
        ending = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"\r\n"
        if not exchange.keep_alive or self.front.draining:
            exchange.keep_alive = False
            ending = b"Connection: close\r\n" + ending
        head = self._head(answer.status, answer.headers, ending)
        self.front.counters.requests[request.method][answer.status // 100] += 1
        if head is None:
            self._finish()
            return
        self._write(head)
        self.front.counters.streams_open += 1
        self._stream_is_live = any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in answer.headers
        )
        self._stream = self.front.spawn(self._pull(answer, chunked))
        self._stream.add_done_callback(lambda task: self._end_stream(exchange, answer, task))
        if self.front.draining:
            self.begin_drain()

    async def _pull(self, answer: StreamingResponse, chunked: bool) -> None:
        async for chunk in answer.chunks:
            if not chunk:
                continue  # an empty chunk would end the body
            if not chunked:
                self._write(chunk)
            elif len(chunk) <= _JOIN_BYTES_MAX:
                self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            else:
                self._write_parts((b"%x\r\n" % len(chunk), chunk, b"\r\n"))
            if self._writing_paused:
                self._drained = self.front.loop.create_future()
                await self._drained

    def _end_stream(
        self, exchange: _Exchange, answer: StreamingResponse, task: asyncio.Task[None]
    ) -> None:
        # The iterator is closed from here and not inside the task, because a task that is cancelled
        # before its first step never runs its own `finally`.
        self.front.discard(answer)
        self.front.counters.streams_open -= 1
        self._stream = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a stream ended with an error", exc_info=error)
        if self.gone:
            return
        if error is not None:
            # Without its last chunk the client can tell that something is missing.
            self._transport.abort()
            return
        self._started.popleft()
        if exchange.request is not None:
            self._queued_bytes -= len(exchange.request.body)
        if exchange.version == "1.1":
            self._write(b"0\r\n\r\n")
        if not exchange.keep_alive or self._is_last():
            self._finish()
        else:
            self.advance()

    # The end.

    def _finish(self) -> None:
        """The last answer is written: close, or first let the client stop talking and read it."""
        if self._eof or (not self._refused_one and not self._linger_bytes):
            self._close()
            return
        self._closing = self._lingering = self._ended = True
        self._linger_until_seconds = self.front.now_seconds + self._settings.linger_seconds
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        self._transport.write_eof()

    def _close(self) -> None:
        self._closing = True
        self._transport.close()

    def sweep(self, now_seconds: float) -> None:
        """Look at every timeout of this connection; called a few times a second."""
        unsent_bytes = self._transport.get_write_buffer_size()
        sent_bytes = self._written_bytes - unsent_bytes
        if unsent_bytes == 0 or sent_bytes != self._sent_bytes:
            self._sent_bytes = sent_bytes
            self._moved_seconds = now_seconds
        elif now_seconds - self._moved_seconds > self._settings.write_stall_seconds:
            self.abort()
            return
        if self._lingering:
            if now_seconds > self._linger_until_seconds:
                self._transport.close()
        elif not (self._closing or self._ended or self._reading_paused):
            self._sweep_reading(now_seconds - self._since_seconds)

    def _sweep_reading(self, waited_seconds: float) -> None:
        settings = self._settings
        if self._phase == _HEAD:
            if waited_seconds > settings.header_timeout_seconds:
                self._refuse(Refusal(408, "request_timeout", "the headers took too long"))
        elif self._phase == _BODY:
            received = self._body_bytes - self._body_bytes_before
            allowed_seconds = (
                settings.body_grace_seconds + received / settings.body_bytes_per_second_min
            )
            if waited_seconds > allowed_seconds and not self._continue_owed:
                self._refuse(Refusal(408, "request_timeout", "the body came too slowly"))
        elif waited_seconds > settings.idle_timeout_seconds and not (
            self._started or self._waiting
        ):
            self._close()
