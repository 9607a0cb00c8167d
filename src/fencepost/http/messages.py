"""What a handler sees of HTTP: a request, and the shapes an answer can take.

Nothing here reads a socket. The front end (`connection.py`) and the ASGI adapter (`asgi.py`) both
turn bytes into a `Request`, call `App.handle`, and write whatever `answer` is called with. A
handler is a plain call: it may answer before it returns, or later from a callback, which is how an
append is answered after its commit without a task of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from fencepost.http.heads import RepeatedHead
from fencepost.http.settings import WebSocketSettings
from fencepost.http.upgrade import Upgrade
from fencepost.protocol.grants import Principal

if TYPE_CHECKING:
    from fencepost.http.websocket import Receiver

Headers = list[tuple[bytes, bytes]]


class Connected(Protocol):
    """A connection, as far as the application sees it."""

    principal: Principal | None
    """Whose requests came on it last, and what counts it for them."""
    counted: object

    def last_came(self, request: Request) -> None:
        """This request is the connection's last."""
        ...


class Request(msgspec.Struct, eq=False):
    """One request, whole: the body has been read, within the limit, before a handler sees it.

    `headers` has lower-case names. A name that came more than once is in `repeated` and `headers`
    holds its first value: handlers refuse repeated headers that they give a meaning to.
    """

    method: str
    path: bytes  # raw: percent escapes as they came, because %2F is not a slash
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    repeated: frozenset[bytes] = frozenset()
    scheme: str = "http"
    peer: str = ""
    root: bytes = b""  # where the application is mounted; `path` is below it
    head: RepeatedHead | None = None  # that others of its connection have as well
    connection: Connected | None = None  # what it came on; not every front end tells
    principal: Principal | None = None  # who was recognised; None without authorization
    upgrade: Upgrade | None = None  # a WebSocket is asked for
    place: object = None
    """The room that a large body takes in the front end (`bodies.py`), while this request lasts."""
    waits: object = None
    """What counts a request that waits, while it lasts."""

    def base_url(self) -> bytes:
        """The URL of the root, as the client that sent this knows it."""
        host = self.headers.get(b"host", b"localhost")
        return b"%b://%b%b" % (self.scheme.encode(), host, self.root)


class Response(msgspec.Struct, eq=False):
    """A complete answer. `body` may be a tuple of parts, written without joining them.

    Neither Content-Length nor Date nor Connection is in `headers`: the front end adds them. For a
    HEAD request `body` is empty; 204 and 304 never have one. `block` is for header lines that are
    rendered already, each with its line end: constant ones, and those of the hottest answers. It
    never holds what a client sent.
    """

    status: int
    headers: Headers
    body: bytes | tuple[bytes, ...] = b""
    block: bytes = b""


class StreamingResponse:
    """An answer without an end in sight (SSE, a long log read): chunks are pulled one at a time.

    The front end asks for the next chunk only when the previous one has left its buffers, so a
    reader that does not read holds one chunk, not the stream. It always closes the iterator
    (`aclose`), also when the client goes away.
    """

    __slots__ = ("chunks", "headers", "status")

    def __init__(self, status: int, headers: Headers, chunks: AsyncIterator[bytes]) -> None:
        self.status = status
        self.headers = headers
        self.chunks = chunks


class Socket(Protocol):
    """A WebSocket, as what receives from it sees it; behind the front end a `WebSocket`."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        ...

    @property
    def writing_paused(self) -> bool:
        """Whether the client has to read before more should be sent; then comes `writable`."""
        ...

    def send(self, message: bytes) -> bool:
        """Send a text message; False when the connection is closing and it was dropped."""
        ...

    def close(self, code: int, reason: bytes = b"") -> None:
        """Begin to close: nothing is sent or handed over after this."""
        ...

    def pause(self) -> None:
        """Keep messages back until `resume`."""
        ...

    def resume(self) -> None:
        """Go on with messages, those that were kept back first."""
        ...


class UpgradeResponse:
    """The connection becomes a WebSocket: `begin` is handed it and returns what receives from it.

    Only a request whose `upgrade` is set may be answered so.
    """

    __slots__ = ("begin", "settings")

    def __init__(self, begin: Callable[[Socket], Receiver], settings: WebSocketSettings) -> None:
        self.begin = begin
        self.settings = settings


Answer = Response | StreamingResponse | UpgradeResponse
"""What a handler hands back, exactly once for each request."""


def all_headers(answer: Response | StreamingResponse) -> Headers:
    """The headers with those of the block, for a front end that wants them one by one."""
    if isinstance(answer, StreamingResponse) or not answer.block:
        return answer.headers
    lines = (line.partition(b": ") for line in answer.block.split(b"\r\n")[:-1])
    return answer.headers + [(name, value) for name, _, value in lines]


class Cancellable(Protocol):
    """Work that goes on after `handle` returned, and is cancelled when the client leaves."""

    def cancel(self) -> object: ...


class App(Protocol):
    """The application behind a front end."""

    def handle(self, request: Request, answer: Callable[[Answer], None]) -> Cancellable | None:
        """Take a request and see that `answer` is called once, now or later, on the event loop.

        Must not raise: an unexpected error is answered as a 500. What it returns is cancelled when
        the client disconnects before the answer; after that `answer` may still be called, and the
        front end ignores it. Durable writes are never returned here: they finish either way.
        """
        ...
