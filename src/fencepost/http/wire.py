"""The pure half of the front end: what a request head may look like and how an answer is written.

No socket and no parser here. `parser.py` feeds bytes to llhttp, which refuses most malformed
heads (both lengths at once, folded lines, bare CR or LF, control characters); what llhttp lets
through and we do not is refused by the `check_*` functions and `split_target`. Answers become bytes
in `render_head`.
"""

from __future__ import annotations

import re
from email.utils import formatdate
from http import HTTPStatus

from fencepost.http.messages import Headers

METHODS = {
    name.encode(): name for name in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
}
"""What reaches the application, which answers 405 where it has no use for one; others are 400."""

NO_NAMES: frozenset[bytes] = frozenset()

_HOST = re.compile(rb"(?:[A-Za-z0-9._~%!$&'()*+,;=-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


class Refusal(Exception):  # noqa: N818 - it is an answer on its way, not a fault of the program
    """This request is not taken: `status` and `code` say why, and the connection ends with it."""

    def __init__(self, status: int, code: str, detail: str, headers: Headers | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.headers = headers


def bad_request(detail: str) -> Refusal:
    """A request that cannot be understood in only one way."""
    return Refusal(400, "bad_request", detail)


def check_host(host: bytes | None, repeated: frozenset[bytes]) -> None:
    """Refuse a request without exactly one plain Host header."""
    if host is None:
        raise bad_request("an HTTP/1.1 request needs a Host header")
    if b"host" in repeated:
        raise bad_request("the Host header came more than once")
    if _HOST.fullmatch(host) is None:
        raise bad_request("the Host header is not a host")


def check_coding(headers: dict[bytes, bytes], repeated: frozenset[bytes], version: str) -> None:
    """Refuse every Transfer-Encoding but a single `chunked` on HTTP/1.1.

    Two parties that read such a head differently disagree on where the request ends, which is how
    requests are smuggled.
    """
    if b"transfer-encoding" in repeated or headers[b"transfer-encoding"].lower() != b"chunked":
        raise bad_request("the only Transfer-Encoding understood is chunked")
    if version != "1.1":
        raise bad_request("Transfer-Encoding needs HTTP/1.1")
    if b"content-length" in headers:
        raise bad_request("Content-Length and Transfer-Encoding exclude each other")


def split_target(target: bytes, headers: dict[bytes, bytes], method: str) -> tuple[bytes, bytes]:
    """The raw path and query of a request target.

    An absolute-form target (`http://host/path`) is what a proxy sends: its authority replaces the
    Host header, as RFC 9112 says.
    """
    if b"#" in target:
        raise bad_request("a request target has no fragment")
    if target[:1] != b"/":
        if target == b"*" and method == "OPTIONS":
            return target, b""
        target = _origin_form(target, headers)
    path, _, query = target.partition(b"?")
    return path, query


def _origin_form(target: bytes, headers: dict[bytes, bytes]) -> bytes:
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        raise bad_request("the request target must be a path")
    end = next((at for at, byte in enumerate(rest) if byte in b"/?"), len(rest))
    authority, origin = rest[:end], rest[end:]
    if not authority or _HOST.fullmatch(authority) is None:
        raise bad_request("the request target has no plain host")
    headers[b"host"] = authority
    return origin if origin[:1] == b"/" else b"/" + origin


def is_spaced(piece: bytes, method: bytes, target: bytes) -> bool:
    """Whether a request line somewhere in `piece` has two spaces between its parts."""
    parts = (re.escape(method), re.escape(target), re.escape(target))
    return re.search(rb"%b(?:  +%b +| +%b  +)HTTP/" % parts, piece) is not None


def header_bytes(pairs: list[tuple[bytes, bytes]]) -> int:
    """How many bytes these header lines take on the wire, without optional white space."""
    return sum(len(name) + len(value) + 4 for name, value in pairs)


def status_line(status: int) -> bytes:
    """The first line of an answer; a status without a registered phrase goes without one."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def render_head(
    status: int, headers: Headers, date_line: bytes, ending: bytes, block: bytes = b""
) -> bytes:
    """The head of an answer: status line, date, the handler's headers, then the front end's own.

    Raises ValueError when a header would break out of its line: a handler that echoes what a client
    sent must not be able to write a second answer.
    """
    first = _STATUS_LINES.get(status) or status_line(status)
    if not headers:
        return b"".join((first, date_line, block, ending))
    parts = [first, date_line]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    head = b"".join(parts)
    # Counting the whole head is one pass in C, an order cheaper than looking into every value.
    lines = len(headers) + 2
    if head.count(b"\n") != lines or head.count(b"\r") != lines:
        raise ValueError("a header of the answer holds a line break")
    return b"%b%b%b" % (head, block, ending)


def date_line(now_ms: int) -> bytes:
    """The Date header line for a wall clock in milliseconds."""
    return b"Date: %s\r\n" % formatdate(now_ms / 1000, usegmt=True).encode()
