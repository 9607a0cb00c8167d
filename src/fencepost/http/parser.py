"""From bytes to requests: llhttp, driven and bounded, without a socket.

`RequestReader.feed` takes whatever arrived and calls `take` for every request that is whole. A head
or body that goes past a limit, or that two parties could read in two ways, raises `Refusal`, and
the reader is of no use after that: where the next request begins can no longer be trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import httptools

from fencepost.http.bodies import Place
from fencepost.http.front import Front
from fencepost.http.heads import RepeatedHead
from fencepost.http.messages import Connected, Request
from fencepost.http.upgrade import Upgrade, UpgradeRefused, read_upgrade
from fencepost.http.wire import (
    METHODS,
    NO_NAMES,
    Refusal,
    bad_request,
    check_coding,
    check_host,
    header_bytes,
    is_spaced,
    split_target,
)

log = logging.getLogger("fencepost.http")

_BETWEEN, _HEAD, _BODY = range(3)
"""Where the parser stands: between requests, in a head, in a body."""

_MISSES_MAX = 64
"""How many requests that did not repeat a head go by, at most, before another head is kept."""

_SEARCHED_BYTES_MAX = 2_048
"""Longer pieces are not searched for doubled spaces: each request line in them is looked at."""

_SLASH = 0x2F
_SPACE = 0x20
_PARTS_MAX = 16
"""How many parts of a body are kept apart behind the first, so that their bytes are copied once,
when all are there. A sender of tiny parts would make objects larger than their content."""


class Stopped(Exception):  # noqa: N818 - it only carries control out of the parser
    """No further request is taken on this connection; the bytes of the next one are dropped."""


class Upgraded(Exception):  # noqa: N818 - it only carries control out of the parser
    """The request that was read last asks for a WebSocket; `rest` came behind it."""

    def __init__(self, rest: bytes) -> None:
        super().__init__()
        self.rest = rest


class RequestReader:
    """The reading half of one connection."""

    __slots__ = (
        "_begun_seconds",
        "_body",
        "_body_bytes",
        "_body_bytes_before",
        "_carried_bytes",
        "_chunked",
        "_connection",
        "_fed_bytes",
        "_front",
        "_has_spaces",
        "_head",
        "_head_split",
        "_headed",
        "_headers",
        "_host_seen",
        "_incoming",
        "_keep_alive",
        "_line_at",
        "_method",
        "_misses",
        "_more",
        "_parser",
        "_path",
        "_peer",
        "_phase",
        "_piece",
        "_place",
        "_query",
        "_repeated",
        "_repeats",
        "_rest",
        "_settings",
        "_since_seconds",
        "_take",
        "_target",
        "_upgrade",
        "_version",
        "body_bytes_left",
        "continue_owed",
    )

    def __init__(
        self,
        front: Front,
        peer: str,
        take: Callable[[Request, bool, str], None],
        connection: Connected | None = None,
    ) -> None:
        self._front = front
        self._connection = connection
        self._settings = front.settings
        self._peer = peer
        self._take = take
        self._phase = _BETWEEN
        self._since_seconds = self._begun_seconds = front.now_seconds
        self._fed_bytes = 0
        self._carried_bytes = 0
        self._head_split = False
        self._piece: bytes | memoryview = b""  # what was fed with the head that is being read
        self._line_at = 0  # where in it that head begins; -1 when that is not known
        self._headed = False  # whether a head ended in it, when those are counted
        self._has_spaces = False  # whether it may have two spaces in a row
        self._head: RepeatedHead | None = None  # that the next requests may repeat
        self._misses = 0  # pieces in a row that began with another one
        # The request that is being read.
        self._method = ""
        self._version = "1.1"
        self._keep_alive = True
        self._target = self._path = self._query = b""
        self._incoming: dict[bytes, bytes] = {}
        self._repeats: list[tuple[bytes, bytes]] = []
        self._headers: dict[bytes, bytes] = {}
        self._repeated = NO_NAMES
        self._host_seen: bytes | None = None
        self._upgrade: Upgrade | None = None
        self._chunked = False
        self.continue_owed = False
        self._body = b""
        self._rest: list[bytes] = []  # of the body, the next few parts
        self._more: bytearray | None = None  # all of it, when it comes in more of them
        self._body_bytes = 0
        self._body_bytes_before = 0
        self.body_bytes_left = 0
        self._place: Place | None = None  # of a large body
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)

    @property
    def between_requests(self) -> bool:
        """Whether the last byte fed was the last of a request, or nothing was fed yet."""
        return self._phase == _BETWEEN

    @property
    def in_head(self) -> bool:
        """Whether a head has begun and is not whole."""
        return self._phase == _HEAD

    @property
    def answers_head(self) -> bool:
        """Whether the request that is being read is a HEAD, whose answer has no body."""
        return self._phase == _BODY and self._method == "HEAD"

    @property
    def small_bytes(self) -> int:
        """What is here of a body that is not whole yet, and that has no place among large ones."""
        return self._body_bytes if self._phase == _BODY and self._place is None else 0

    def sender(self) -> str | None:
        """The principal that sends the request that is being read; None if there is none."""
        return self._front.bodies.sender(self._headers, self._repeated)

    def feed(self, data: bytes | memoryview) -> None:
        """Read on. Raises `Refusal`, `Stopped` or `Upgraded`, and is not called again after it."""
        if isinstance(data, bytes):
            at = self.take_repeats(data, 0, len(data))
            if at:
                data = data[at:]
        if data:
            self._parse(data)

    def take_repeats(self, data: bytes, at: int, until: int) -> int:
        """Take the requests that begin at `at`, and before `until`, as far as they are whole and
        repeat a head; where the last of them ends. None does where another request has begun."""
        if self._phase != _BETWEEN:
            return at
        front, begun = self._front, at
        head = self._head
        if head is not None:
            while at < until and at < len(data) and not front.draining:
                found = head.read(data, at)
                if found is None:
                    break
                path, query, headers, body, at = found
                front.counters.heads_repeated += 1
                self._misses = 0
                request = Request(
                    "POST",
                    path,
                    query,
                    headers,
                    body,
                    peer=self._peer,
                    head=head,
                    connection=self._connection,
                )
                try:
                    self._take(request, True, "1.1")
                except Exception as error:
                    raise _failed(error) from error
            if at > begun:
                return at
        self._misses += 1
        # The second request in a row that repeats nothing, the fourth, the eighth, and so on.
        if self._misses > 1 and not self._misses & (self._misses - 1):
            return self._keep_head(data, at)
        return at

    def _keep_head(self, data: bytes, at: int) -> int:
        """Parse the request at `at`, if it is whole, and keep its head; where it ends."""
        if self._misses >= _MISSES_MAX:
            self._misses = _MISSES_MAX // 2
        head = RepeatedHead.of(data, at, self._settings)
        found = None if head is None else head.read(data, at)
        if found is None:
            return at
        path, query, headers, _, end = found
        self._parse(data[at:end])
        # What both understood alike, they understand alike with other values in the same places.
        parsed = (self._method, self._version, self._path, self._query, self._headers)
        read = ("POST", "1.1", path, query, headers)
        if parsed == read and self.between_requests and self._keep_alive and not self._repeated:
            self._head = head
        return end

    def _parse(self, data: bytes | memoryview) -> None:
        phase = self._phase
        body_bytes = self._body_bytes
        self._fed_bytes = len(data)
        if self._head_split:
            self._piece = bytes(self._piece) + data
        else:
            self._piece = data
            self._headed = False
            # A request begins behind what is left of the body, if that is known.
            self._line_at = 0
            if phase == _BODY:
                self._line_at = -1 if self._chunked else self.body_bytes_left
        # Few pieces have two spaces in a row; in the others no request line needs a look. To search
        # a long one, of which a body is the most, takes longer than to look.
        piece = self._piece
        self._has_spaces = len(piece) > _SEARCHED_BYTES_MAX or b"  " in bytes(piece)
        headers = self._headers
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            raise Upgraded(bytes(data[upgrade.args[0] :])) from None
        except httptools.HttpParserError as error:
            raise self._why_stopped(error) from None
        self._head_split = self._phase == _HEAD
        if not self._head_split:
            self._piece = b""
        elif not self._has_spaces and headers is not self._headers:
            self._line_at = -1  # other heads ended in this piece, and were not counted
        if self._phase != _BETWEEN and phase != _BETWEEN:
            self._carry(progressed=self._body_bytes != body_bytes)

    def _carry(self, *, progressed: bool) -> None:
        # Bytes that moved neither a request nor its body on belong to an unfinished header, trailer
        # or chunk extension, which llhttp and httptools keep for as long as it lasts.
        self._carried_bytes = 0 if progressed else self._carried_bytes + self._fed_bytes
        if self._carried_bytes > self._settings.header_bytes_max + self._settings.target_bytes_max:
            raise self._header_too_large()

    def _why_stopped(self, error: httptools.HttpParserError) -> Exception:
        cause = error.__context__
        if isinstance(cause, Refusal | Stopped):
            return cause
        if isinstance(error, httptools.HttpParserCallbackError):
            return _failed(cause)
        if not self._keep_alive and self._phase == _BETWEEN:
            return Stopped()  # bytes after a request that said it was the last
        if isinstance(error, httptools.HttpParserInvalidMethodError):
            return Refusal(400, "method_unknown", "the method is not known here")
        return bad_request(f"the request is malformed: {error}")

    # What llhttp calls, in this order.

    def on_message_begin(self) -> None:
        if self._front.draining:
            raise Stopped
        self._phase = _HEAD
        self._since_seconds = self._begun_seconds = self._front.now_seconds
        if self._headed:
            self._headed = False
            if self._chunked:
                self._line_at = -1
            elif self._line_at >= 0:
                head_end = bytes(self._piece).find(b"\r\n\r\n", self._line_at) + 4
                self._line_at = head_end + self._body_bytes

    def on_url(self, part: bytes) -> None:
        target = self._target + part if self._target else part
        if len(target) > self._settings.target_bytes_max:
            raise Refusal(414, "target_too_long", "the request target is too long")
        self._target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        headers = self._incoming
        if name in headers:
            self._repeats.append((name, value))
        else:
            headers[name] = value.strip()  # llhttp takes the white space off in front only

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        settings = self._settings
        # Trailers arrive through `on_header` too. They are dropped: nothing here reads them, and
        # a trailer must not be able to change what the head said.
        headers, self._incoming = self._incoming, {}
        target, self._target = self._target, b""
        repeated = NO_NAMES
        count = len(headers)
        if self._repeats:
            count += len(self._repeats)
            repeated = frozenset(name for name, _ in self._repeats)
        name = parser.get_method()
        method = METHODS.get(name)
        if method is None:
            raise Refusal(400, "method_unknown", f"{name.decode()} is not known here")
        if self._has_spaces:
            self._check_line(name, target)
        self._method = method
        self._phase = _BODY
        self._keep_alive = keep_alive = parser.should_keep_alive()
        # Only HTTP/1.1 keeps a connection without being asked to, and asking for the version by
        # name is one of the dearer calls here.
        version = "1.1"
        if not keep_alive or b"connection" in headers:
            version = parser.get_http_version()
            if not keep_alive:
                self._head = None  # no request follows, whatever its head
        self._version = version
        if version != "1.1" and version != "1.0":
            raise Refusal(505, "version_not_supported", "this server speaks HTTP/1.1 and HTTP/1.0")
        # What was fed bounds the size of a head that came in one piece: few need counting.
        if count > settings.header_count_max or (
            (self._head_split or self._fed_bytes > settings.header_bytes_max)
            and header_bytes([*headers.items(), *self._repeats]) > settings.header_bytes_max
        ):
            raise self._header_too_large()
        if repeated:
            self._repeats = []
        host = headers.get(b"host")
        if host is None or host != self._host_seen or repeated:
            if version == "1.1" or host is not None:
                check_host(host, repeated)
            self._host_seen = host
        if target[0] == _SLASH and b"#" not in target:
            self._path, _, self._query = target.partition(b"?")
        else:
            self._path, self._query = split_target(target, headers, method)
        self._headers = headers
        self._repeated = repeated
        if b"upgrade" in headers and parser.should_upgrade():
            self._upgrade = self._read_upgrade(headers)
        self._begin_body(headers)

    def _check_line(self, method: bytes, target: bytes) -> None:
        # llhttp skips further spaces in the request line, where another parser sees an empty part.
        piece, at = self._piece, self._line_at
        if at < 0:
            fed = bytes(piece)
            self._has_spaces = b"  " in fed  # a long piece was not searched before
            spaced = self._has_spaces and is_spaced(fed, method, target)
        else:
            while piece[at] < _SPACE:  # llhttp skips empty lines before a request as well
                at += 1
            self._line_at = at  # the end of this head is looked for behind those lines
            at += len(method) + 1
            spaced = piece[at] == _SPACE or piece[at + len(target) + 1] == _SPACE
        if spaced:
            raise bad_request("the request line has more than one space between its parts")
        self._headed = True

    def _read_upgrade(self, headers: dict[bytes, bytes]) -> Upgrade:
        takes = self._front.takes_websocket
        if takes is None or not takes(self._path):
            raise Refusal(400, "upgrade_refused", "this path does not change protocols")
        upgrade = read_upgrade(self._method, self._version, headers, self._repeated)
        if isinstance(upgrade, UpgradeRefused):
            if upgrade.status == 426:
                raise Refusal(426, "upgrade_refused", upgrade.detail, [*upgrade.headers])
            raise Refusal(400, "upgrade_refused", upgrade.detail)
        return upgrade

    def _begin_body(self, headers: dict[bytes, bytes]) -> None:
        self._body = b""
        self._body_bytes = self._body_bytes_before = self.body_bytes_left = 0
        self._carried_bytes = 0
        self._chunked = self.continue_owed = False
        if b"transfer-encoding" in headers:
            check_coding(headers, self._repeated, self._version)
            self._chunked = True
        elif b"content-length" in headers:
            # llhttp has checked that this is one run of digits that fits 64 bits.
            self.body_bytes_left = int(headers[b"content-length"])
            if self.body_bytes_left > self._settings.body_bytes_max:
                raise self._body_too_large()
            if self.body_bytes_left > self._settings.open_body_bytes_max:
                self._take_place(self.body_bytes_left)
        if b"expect" in headers:
            if headers[b"expect"].lower() != b"100-continue":
                raise Refusal(417, "expectation_failed", "the only expectation is 100-continue")
            self.continue_owed = self._version == "1.1" and (
                self._chunked or self.body_bytes_left > 0
            )

    def _take_place(self, size: int) -> None:
        """Count a large body, or refuse it."""
        self._place = self._front.bodies.place(self._headers, self._repeated, size)

    def on_body(self, part: bytes) -> None:
        size = len(part)
        self._body_bytes += size
        if self._chunked:
            if self._body_bytes > self._settings.body_bytes_max:
                raise self._body_too_large()
            if self._place is not None:
                self._place.grow(size)
            elif self._body_bytes > self._settings.open_body_bytes_max:
                self._take_place(self._body_bytes)
        else:
            self.body_bytes_left -= size
        if self._body_bytes == size:
            self._body = part
        elif self._more is not None:
            self._more += part
        elif len(self._rest) < _PARTS_MAX:
            self._rest.append(part)
        else:
            self._more = bytearray().join((self._body, *self._rest, part))
            self._rest = []

    def on_message_complete(self) -> None:
        self._phase = _BETWEEN
        body, self._body = self._body, b""
        if self._more is not None:
            body = bytes(self._more)
            self._more = None
        elif self._rest:
            body = b"".join((body, *self._rest))
            self._rest = []
        if self._chunked:
            self._incoming = {}
            self._repeats = []
            self._carried_bytes = 0
        request = Request(
            self._method,
            self._path,
            self._query,
            self._headers,
            body,
            repeated=self._repeated,
            peer=self._peer,
            connection=self._connection,
        )
        if self._place is not None:
            request.place = self._place
            self._place = None
        if self._upgrade is not None:
            request.upgrade = self._upgrade
            self._keep_alive = False  # whatever the answer: no request of HTTP follows
        self._take(request, self._keep_alive, self._version)

    # Time.

    def rest(self, *, now_seconds: float) -> None:
        """Count from now: so far it was the server that kept the client waiting."""
        self._since_seconds = now_seconds
        self._body_bytes_before = self._body_bytes

    def wants_continue(self) -> bool:
        """Whether a 100 is of use; it is not once the body has begun. Asking settles the debt."""
        self.continue_owed = False
        return self._phase == _BODY and self._body_bytes == 0

    def overdue(self, now_seconds: float) -> Refusal | None:
        """Why a request that has begun is no longer waited for, if that is so."""
        settings = self._settings
        waited_seconds = now_seconds - self._since_seconds
        if self._phase == _HEAD and waited_seconds > settings.header_timeout_seconds:
            return Refusal(408, "request_timeout", "the headers took too long")
        if self._phase == _BODY and not self.continue_owed:
            if now_seconds - self._begun_seconds > settings.body_seconds_max:
                return Refusal(408, "request_timeout", "the body took too long")
            if waited_seconds > settings.body_grace_seconds:
                received = self._body_bytes - self._body_bytes_before
                if received < settings.body_bytes_per_second_min * waited_seconds:
                    return Refusal(408, "request_timeout", "the body came too slowly")
                # It kept the pace so far; what came early does not let it rest later.
                self.rest(now_seconds=now_seconds)
        return None

    def close(self) -> None:
        """Let go of the parser: it and this object hold each other, and would wait for the
        garbage collector."""
        self._phase = _BETWEEN
        self._more = None
        self._rest = []
        self._body = self._piece = b""
        self._place = None
        self._connection = None
        self.continue_owed = False
        self._parser = None

    def _header_too_large(self) -> Refusal:
        return Refusal(431, "header_too_large", "the headers of the request are too large")

    def _body_too_large(self) -> Refusal:
        limit = self._settings.body_bytes_max
        return Refusal(413, "body_too_large", f"a request body may have up to {limit} bytes")


def _failed(cause: BaseException | None) -> Refusal:
    log.error("the front end failed on a request", exc_info=cause)
    return Refusal(500, "internal_error", "the server failed on this request")
