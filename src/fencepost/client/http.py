"""HTTP/1.1 as values: requests are rendered to bytes, bytes are parsed to responses.

No sockets here. A `ResponseParser` takes whatever arrived, in pieces of any size, and gives back
complete responses in order, so that requests may be pipelined; the body of a streaming response
(SSE) can be taken piece by piece instead.
"""

from __future__ import annotations

import re
import ssl as tls
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode, urljoin, urlsplit

import httptools
import msgspec

from fencepost.client.errors import (
    InvalidArgumentError,
    ProtocolError,
    integer_of,
)
from fencepost.client.proxies import Proxy

RESPONSE_BYTES_MAX = 256 << 20
"""The largest body that is held in memory; a server of ours sends about 1 MiB at a time."""
HEAD_BYTES_MAX = 64 * 1024
"""All header lines of a response, and all trailers behind it."""
GZIP = b"\x1f\x8b"
SMALL_BYTES = 4 * 1024
"""Pieces of a body that are smaller are put together: a list of them would be many times larger."""

_BAD_VALUE = re.compile(r"[\r\n\x00]")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
PATH_SAFE = "/!$&'()*+,;=:@~"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: host, port, TLS or not, and the path below which it lives."""

    host: str
    port: int
    ssl: tls.SSLContext | None
    prefix: str
    proxy: Proxy | None = None
    socket: str = ""
    """The path of a unix socket of this machine, instead of a host and a port."""

    @property
    def reached_at(self) -> tuple[str, int]:
        """The host and port to connect to: the server's own, or its proxy's."""
        return (self.host, self.port) if self.proxy is None else (self.proxy.host, self.proxy.port)

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.ssl else 80) else f"{host}:{self.port}"


def parse_url(url: str, ssl: tls.SSLContext | None = None) -> Address:
    """The address in a URL such as `http://localhost:4437`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ProtocolError(f"{url!r} is not a URL like http://localhost:4437: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProtocolError(f"{url!r} is not a URL like http://localhost:4437")
    if parts.query or parts.fragment or parts.username:
        raise ProtocolError("the URL has a query, a fragment or a user: use params and token")
    path = parts.path.rstrip("/")
    if path.endswith("/v1/stream"):
        raise InvalidArgumentError(f"{url!r} ends with /v1/stream, which the client adds itself")
    context = None
    if parts.scheme == "https":
        context = ssl or tls.create_default_context()
    return Address(parts.hostname, port or (443 if context else 80), context, path)


class Request(msgspec.Struct, frozen=True):
    """What to ask: the target is a path below the server's prefix, escaped, with its query."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | bytearray = b""
    absolute: bool = False
    """Whether the target is a path of the server itself, not one below the prefix."""
    live: bool = False
    """Whether the server may let it wait for news: then the longer timeout counts."""
    answer_bytes_max: int | None = None
    """A longer answer is refused before it is held; None: as for every answer."""


class Response(msgspec.Struct):
    """What was answered; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    def is_true(self, name: str) -> bool:
        return self.headers.get(name, "").lower() == "true"

    def integer(self, name: str) -> int | None:
        return integer_of(self.headers.get(name))


def target_of(path: str, query: Iterable[tuple[str, str]] = ()) -> str:
    """A request target from a path that is not escaped yet and the pairs of a query."""
    try:
        escaped = quote(path, safe=PATH_SAFE)
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{path!r} is not a path: it is not Unicode") from None
    encoded = urlencode(list(query))
    return f"{escaped}?{encoded}" if encoded else escaped


def is_url(path: str) -> bool:
    """Whether a stream is named by its full URL."""
    return path.startswith(("http://", "https://"))


def wire_target(address: Address, request: Request) -> str:
    """The target as it goes on the wire: below the server's prefix, unless it is a full one."""
    if is_url(request.target):
        rest = request.target.partition("://")[2].partition("/")[2]
        return "/" + quote(rest, safe=PATH_SAFE + "%?")
    return request.target if request.absolute else address.prefix + request.target


def path_of(address: Address, request: Request) -> str:
    """What errors and the log call a request: without the query, which may hold a secret."""
    return wire_target(address, request).partition("?")[0]


def check_headers(headers: Mapping[str, str]) -> None:
    """Refuse names and values that would not stay on their line."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"{name!r} cannot be the name of a header")
        if _BAD_VALUE.search(value):
            raise InvalidArgumentError(f"the value of the header {name} holds a line end")


def render_head(address: Address, request: Request, body_bytes: int) -> bytes:
    """The head of a request; the body follows as it is, so that nothing large is copied."""
    proxy = None if address.ssl else address.proxy  # what goes through a tunnel is not for it
    origin = "" if proxy is None else f"http://{address.authority}"
    lines = [
        f"{request.method} {origin}{wire_target(address, request)} HTTP/1.1",
        f"Host: {address.authority}",
        "Accept-Encoding: identity",
    ]
    if proxy is not None and proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    for name, value in request.headers:
        if _BAD_VALUE.search(value):
            raise InvalidArgumentError(f"the value of the header {name} holds a line end")
        lines.append(f"{name}: {value}")
    if body_bytes or request.method in ("POST", "PUT"):
        lines.append(f"Content-Length: {body_bytes}")
    lines.append("\r\n")
    try:
        return "\r\n".join(lines).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError("a header of the request is not Unicode") from None


def redirected(address: Address, request: Request, response: Response) -> Request | None:
    """The request to send after a redirect; None when it must not be followed.

    Only what changes nothing is followed, and only to the same scheme, host and port.
    """
    location = response.headers.get("location")
    if location is None or request.method not in ("GET", "HEAD"):
        return None
    scheme = "https" if address.ssl else "http"
    here = f"{scheme}://{address.authority}"
    try:
        found = urlsplit(urljoin(here + wire_target(address, request), location))
        port = found.port or (443 if found.scheme == "https" else 80)
    except ValueError:
        return None
    if (found.scheme, found.hostname, port) != (scheme, address.host.lower(), address.port):
        return None
    target = quote(found.path or "/", safe=PATH_SAFE + "%")
    if found.query:
        target += "?" + quote(found.query, safe=PATH_SAFE + "%?")
    return msgspec.structs.replace(request, target=target, absolute=True)


class _Encoding:
    """Undoes the content encoding of a body as it arrives.

    The client asks for none; some proxies compress all the same.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin = b""
        self._inflate: zlib._Decompress | None = None

    def decode(self, data: bytes, bytes_max: int) -> bytes:
        """What `data` adds to the body; of more than `bytes_max` only the beginning."""
        decoded = b""
        while data and len(decoded) < bytes_max:
            if self._inflate is None or self._inflate.eof:
                # Behind one gzip there may be another: together they are the body.
                self._begin += data
                if len(self._begin) < 2:
                    break
                data, self._begin = self._begin, b""
                self._inflate = zlib.decompressobj(self._window(data))
            try:
                decoded += self._inflate.decompress(data, bytes_max - len(decoded))
            except zlib.error as error:
                raise ProtocolError(f"the server's answer is not {self._name}: {error}") from None
            data = self._inflate.unused_data
        return decoded

    def end(self) -> None:
        """See that the body is whole, now that nothing follows."""
        if self._begin or not (self._inflate is None or self._inflate.eof):
            raise ProtocolError(f"the server's answer ends in the middle of its {self._name}")

    def _window(self, data: bytes) -> int:
        # Some servers send deflate without the header of zlib, which it should have.
        has_header = data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0
        if self._name == "deflate" and not has_header and data[:2] != GZIP:
            return -15
        return 47  # 32 + 15: the header says whether it is gzip or zlib


class ResponseParser:
    """Turns what arrives on one connection into responses, in order."""

    def __init__(self) -> None:
        self.done: list[Response] = []
        """Complete responses that were not taken yet."""
        self.head: Response | None = None
        """The response that is under way, once its headers are complete."""
        self.pieces: list[bytes | bytearray] = []
        """Body of the response under way, as far as it came."""
        self.closing = False
        """Whether the server will close the connection after the last response."""
        self.without_body = False
        """Set it for a HEAD: its response ends with its headers, whatever they say."""
        self.limit(None)
        self._fresh()

    def limit(self, bytes_max: int | None) -> None:
        """Refuse a body that is longer than this; None: than any answer may be."""
        self._bytes_max = RESPONSE_BYTES_MAX if bytes_max is None else bytes_max

    def _fresh(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._size = 0
        self._fields_size = 0
        self._waiting_size = 0
        self._moved = False
        self._encoding: _Encoding | None = None

    @property
    def idle(self) -> bool:
        """Whether no response is half way through."""
        return self.head is None and not self._headers and not self.done

    def feed(self, data: bytes) -> None:
        """Take what arrived."""
        self._moved = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self.done and self.without_body:
                return
            if isinstance(error.__context__, ProtocolError):
                raise error.__context__ from None
            raise ProtocolError(f"the server's answer is not HTTP: {error}") from None
        except httptools.HttpParserUpgrade:
            raise ProtocolError(
                "the server's answer is an upgrade that was not asked for"
            ) from None
        # What the parser holds back itself is a line without an end: it tells of whole ones only.
        self._waiting_size = 0 if self._moved else self._waiting_size + len(data)
        if self._waiting_size > HEAD_BYTES_MAX:
            raise ProtocolError("the headers of the server's answer have no end")

    def end(self) -> bool:
        """The connection ended; says whether a response that has no length ended with it."""
        head = self.head
        unbounded = (
            head is not None
            and "content-length" not in head.headers
            and "transfer-encoding" not in head.headers
        )
        if unbounded:
            self._finish()
        return unbounded

    def take_body(self) -> tuple[bytes, bool]:
        """The bytes of a streaming body since the last call, and whether the body has ended."""
        ended = bool(self.done)
        body = self.done.pop(0).body if ended else b"".join(self.pieces)
        self.pieces = []
        self._size = 0
        return body, ended

    # What httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_size += len(name) + len(value)
        if self._fields_size > HEAD_BYTES_MAX:
            raise ProtocolError("the headers of the server's answer have no end")
        if self.head is None:  # else it is a trailer, which says nothing that we know
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self.closing = self._is_last()
        self.head = Response(status, self._headers)
        self._size = self._fields_size = 0
        self._moved = self._moved or status >= 200
        self._encoding = None
        encoding = self._headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("gzip", "x-gzip", "deflate"):
            self._encoding = _Encoding(encoding)
        elif encoding not in ("identity", "") and not self.without_body:
            raise ProtocolError(f"the server's answer is encoded as {encoding!r}")
        if self.without_body:
            self.done.append(self.head)
            self.head = None
            self._fresh()

    def _is_last(self) -> bool:
        if not self.without_body:
            return not self._parser.should_keep_alive()
        # The parser takes an answer without a length to end with its connection. That to a HEAD has
        # no body, and servers need not send a length with it.
        connection = self._headers.get("connection", "").lower()
        if self._parser.get_http_version() == "1.0":
            return "keep-alive" not in connection
        return "close" in connection

    def on_body(self, body: bytes) -> None:
        self._moved = True
        if self._encoding is not None:
            body = self._encoding.decode(body, self._bytes_max + 1 - self._size)
        self._size += len(body)
        if self._size > self._bytes_max:
            raise ProtocolError("the server's answer is too large to hold")
        if not self.pieces or len(body) >= SMALL_BYTES:
            self.pieces.append(body)
        elif isinstance(last := self.pieces[-1], bytearray):
            last += body
        else:
            self.pieces.append(bytearray(body))

    def on_message_complete(self) -> None:
        if self.head is not None and self.head.status >= 200:
            self._finish()
        else:
            # An interim answer (100 Continue): the real one follows.
            self.head = None
            self._headers = {}

    def _finish(self) -> None:
        assert self.head is not None
        if self._encoding is not None:
            self._encoding.end()
        self.head.body = b"".join(self.pieces)
        self.done.append(self.head)
        self.head = None
        self.pieces = []
        self._headers = {}
        self._size = self._fields_size = 0
