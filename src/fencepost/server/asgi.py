"""The same handlers as an ASGI application, to be mounted in another server.

A host such as uvicorn does the reading and bounds its connections; this adapter keeps bodies within
their limits, in size, in time and together, works on the raw path (ASGI's `path` has decoded `%2F`
into a slash), and turns a disconnect into a cancellation. Everything else a handler sees is what it
sees behind our own front end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from fencepost.clock import SystemClock
from fencepost.http.bodies import Bodies, KnowsSender, Place
from fencepost.http.front import close_chunks
from fencepost.http.messages import (
    Answer,
    App,
    Headers,
    Request,
    Response,
    StreamingResponse,
    UpgradeResponse,
    all_headers,
)
from fencepost.http.problems import problem
from fencepost.http.request_ids import RequestIds
from fencepost.http.settings import HttpSettings
from fencepost.http.wire import METHODS, Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_METHODS = frozenset(METHODS.values())
_BODILESS = (204, 304)
_PATH_SAFE = "/:@!$&'()*+,;=-._~"


class ASGIApp:
    """An ASGI application over an `App`.

    `startup` and `shutdown` run with the host's lifespan, where it has one; a mounted application
    does not, and the program that mounts it starts and stops what is behind it. `stop_waiting`
    answers every live reader, so that a host which waits for open requests can stop.
    """

    def __init__(
        self,
        app: App,
        settings: HttpSettings | None = None,
        *,
        knows_sender: KnowsSender | None = None,
        startup: Callable[[], Awaitable[None]] | None = None,
        shutdown: Callable[[], Awaitable[None]] | None = None,
        stop_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.stop_waiting = stop_waiting
        self._app = app
        self._request_ids = RequestIds(SystemClock())
        self._settings = settings or HttpSettings()
        self._bodies = Bodies(self._settings, knows_sender)
        self._startup = startup
        self._shutdown = shutdown

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":
                await self._websocket(scope, receive, send)
            case other:
                raise ValueError(f"an ASGI scope of type {other!r} is not served here")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        hooks = {"lifespan.startup": self._startup, "lifespan.shutdown": self._shutdown}
        while True:
            kind = (await receive())["type"]
            hook = hooks[kind]
            try:
                if hook is not None:
                    await hook()
            except Exception as error:
                await send({"type": f"{kind}.failed", "message": str(error)})
                raise
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _http(self, scope: Message, receive: Receive, send: Send) -> None:
        headers, repeated = _headers(scope)
        if scope["method"] not in _METHODS:
            detail = f"{scope['method']} is not known here"
            await _send(send, problem(400, "method_unknown", "Bad Request", detail), False)
            return
        try:
            body = await _Body(self._settings, self._bodies, headers, repeated).read(receive)
        except Refusal as refusal:
            title = HTTPStatus(refusal.status).phrase
            answer = problem(refusal.status, refusal.code, title, refusal.detail, refusal.headers)
            await _send(send, answer, scope["method"] == "HEAD")
            return
        if body is None:
            return
        request = _request(scope, headers, repeated, body[0])
        request.place = body[1]
        await self._exchange(request, receive, send)

    async def _websocket(self, scope: Message, receive: Receive, send: Send) -> None:
        # The library behind it takes a while to load, and many programs never need it.
        from fencepost.server.asgi_websocket import serve_websocket

        headers, repeated = _headers(scope)
        request = _request(scope, headers, repeated, b"")
        await serve_websocket(self._app, request, scope.get("extensions"), receive, send)

    async def _exchange(self, request: Request, receive: Receive, send: Send) -> None:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        late: set[asyncio.Task[None]] = set()

        def respond(answer: Answer) -> None:
            if isinstance(answer, Response) and answer.status >= 400:
                headers = self._request_ids.name(request, answer)
                answer = Response(answer.status, headers, answer.body, answer.block)
            if not answered.done():
                answered.set_result(answer)
            elif isinstance(answer, StreamingResponse):
                task = asyncio.get_running_loop().create_task(close_chunks(answer.chunks))
                late.add(task)
                task.add_done_callback(late.discard)

        work = self._app.handle(request, respond)
        head_only = request.method == "HEAD"
        if answered.done() and isinstance(answered.result(), Response):
            await _send(send, answered.result(), head_only)
            return
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            either: set[asyncio.Future[Any]] = {answered, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                await _send_unless_gone(send, answered.result(), head_only, gone)
        finally:
            gone.cancel()
            if not answered.done():
                answered.cancel()
                if work is not None:
                    work.cancel()


class _Body:
    """One body that is being read."""

    def __init__(
        self,
        settings: HttpSettings,
        bodies: Bodies,
        headers: dict[bytes, bytes],
        repeated: frozenset[bytes],
    ) -> None:
        self._settings = settings
        self._bodies = bodies
        self._headers = headers
        self._repeated = repeated
        self._place: Place | None = None
        self._parts: list[bytes] = []
        self._size = 0
        """Bytes of the body that have arrived."""
        self._room = 0
        """Bytes that its place among the bodies in memory is for."""

    async def read(self, receive: Receive) -> tuple[bytes, Place | None] | None:
        """The whole body and its place, or None for a client that left; raises `Refusal`."""
        settings, loop = self._settings, asyncio.get_running_loop()
        length = self._headers.get(b"content-length", b"")
        self._grow(int(length) if length.isdigit() else 0)
        began = loop.time()
        while True:
            window, before = loop.time(), self._size
            try:
                async with asyncio.timeout_at(window + settings.body_grace_seconds):
                    if not await self._take(receive):
                        return None
                parts = self._parts
                return parts[0] if len(parts) == 1 else b"".join(parts), self._place
            except TimeoutError:
                self._check_pace(loop.time() - began, self._size - before)

    async def _take(self, receive: Receive) -> bool:
        """Receive to the end; False for a client that left."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            self._size += len(part)
            more = message.get("more_body", False)
            self._grow(self._size, waits=more)
            self._parts.append(part)
            if not more:
                return True

    def _grow(self, size: int, *, waits: bool = False) -> None:
        """See that there is a place for so many bytes, where they are many or more is to come."""
        settings = self._settings
        if size > settings.body_bytes_max:
            detail = f"a request body may have up to {settings.body_bytes_max} bytes"
            raise Refusal(413, "body_too_large", detail)
        is_large = size > settings.open_body_bytes_max
        if size <= self._room or not (is_large or waits):
            return
        if is_large and self._room <= settings.open_body_bytes_max:
            self._place = None  # that of a small body needs no token
            self._place = self._bodies.place(self._headers, self._repeated, size)
        else:
            if self._place is None:
                self._place = self._bodies.small_place(self._headers, self._repeated)
            self._place.grow(size - self._room)
        self._room = size

    def _check_pace(self, seconds: float, received: int) -> None:
        settings = self._settings
        if seconds > settings.body_seconds_max:
            raise Refusal(408, "request_timeout", "the body took too long")
        if received < settings.body_bytes_per_second_min * settings.body_grace_seconds:
            raise Refusal(408, "request_timeout", "the body came too slowly")


def _request(
    scope: Message, headers: dict[bytes, bytes], repeated: frozenset[bytes], body: bytes
) -> Request:
    client = scope.get("client")
    path = raw_path(scope)
    scheme: str = scope.get("scheme", "http")
    return Request(
        scope.get("method", "GET"),
        path,
        scope.get("query_string", b""),
        headers,
        body,
        repeated=repeated,
        scheme={"ws": "http", "wss": "https"}.get(scheme, scheme),
        peer=client[0] if client else "",
        root=_mount(scope, path),
    )


def _mount(scope: Message, below: bytes) -> bytes:
    """Where the application is mounted, as it stands in the URL."""
    root = scope.get("root_path", "").rstrip("/")
    whole: bytes = (scope.get("raw_path") or b"").partition(b"?")[0]
    if root and whole.endswith(below) and len(whole) > len(below):
        return whole[: -len(below)]
    return quote(root, safe=_PATH_SAFE).encode()


def raw_path(scope: Message) -> bytes:
    """The path below the mount point with its percent escapes as they came."""
    raw: bytes | None = scope.get("raw_path")
    path = quote(scope["path"], safe=_PATH_SAFE).encode() if raw is None else raw
    path = path.partition(b"?")[0]  # some hosts leave the query in
    root = scope.get("root_path", "").rstrip("/").encode()
    if not root:
        return path
    # The root is decoded and the path is not, so the two are compared segment by segment.
    at = 0
    while at != -1:
        at = path.find(b"/", at + 1)
        prefix = path if at == -1 else path[:at]
        if unquote_to_bytes(prefix) == root:
            return path[len(prefix) :] or b"/"
    return path


def _headers(scope: Message) -> tuple[dict[bytes, bytes], frozenset[bytes]]:
    headers: dict[bytes, bytes] = {}
    repeated: set[bytes] = set()
    for name, value in scope["headers"]:
        lower = bytes(name).lower()
        if lower in headers:
            repeated.add(lower)
        else:
            headers[lower] = bytes(value)
    return headers, frozenset(repeated)


async def _disconnected(receive: Receive) -> None:
    """Return once the host says that the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_unless_gone(
    send: Send, answer: Answer, head_only: bool, gone: asyncio.Future[None]
) -> None:
    sending = asyncio.ensure_future(_send(send, answer, head_only))
    try:
        await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            sending.result()
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        # A task that is cancelled before its first step has not closed anything itself.
        if isinstance(answer, StreamingResponse):
            await close_chunks(answer.chunks)


async def _send(send: Send, answer: Answer, head_only: bool) -> None:
    assert not isinstance(answer, UpgradeResponse), "a request of ASGI asks for no upgrade"
    bodiless = head_only or answer.status in _BODILESS
    headers: Headers = [(name.lower(), value) for name, value in all_headers(answer)]
    parts: tuple[bytes, ...] = ()
    if isinstance(answer, Response) and not bodiless:
        parts = (answer.body,) if isinstance(answer.body, bytes) else answer.body
        headers.append((b"content-length", b"%d" % sum(map(len, parts))))
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    if not await _deliver(send, start):
        return
    for part in parts:
        await _deliver(send, {"type": "http.response.body", "body": part, "more_body": True})
    if isinstance(answer, StreamingResponse) and not bodiless:
        async for chunk in answer.chunks:
            message = {"type": "http.response.body", "body": chunk, "more_body": True}
            if chunk and not await _deliver(send, message):
                return
    await _deliver(send, {"type": "http.response.body", "body": b""})


async def _deliver(send: Send, message: Message) -> bool:
    """Pass a message to the host; False when it says, by an OSError, that the client has left."""
    try:
        await send(message)
    except OSError:
        return False
    return True
