"""Heads that repeat: requests whose head is that of the last one but for a few values.

The appends of one connection differ in a number, a key, a path, and their body. A `RepeatedHead`
holds the bytes around these places: it compares them and takes the values out, without a parser.
What it gives is what the parser gives for the same bytes. Everything else is left to the parser:
other header lines, another order or spelling of them, values with unusual characters, and requests
that have not come whole.

Only what the bytes say is kept. Whether the request may be made is asked anew each time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fencepost.http.settings import HttpSettings

_NUMBERS = frozenset((b"content-length", b"producer-seq"))
_VARYING = _NUMBERS | {b"idempotency-key", b"if-match"}
"""Headers whose values may differ from those of the last request."""
_ELSEWHERE = frozenset((b"connection", b"expect", b"transfer-encoding", b"upgrade"))
"""Headers that change how a connection goes on: the parser reads requests with them."""

_METHOD = b"POST "
_VERSION = b" HTTP/1.1"
_HEAD_END = b"\r\n\r\n"
_TARGET = re.compile(rb"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*(?:\?[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*)?")
_VALUE = re.compile(rb"[!-~]+")
_VALUE_BYTES_MAX = 256
_NUMBER_BYTES_MAX = 16


class Repeat(NamedTuple):
    """What was read of one request: its parts, and where in the data it ends."""

    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    body: bytes
    end: int


class _Field(NamedTuple):
    """A value that varies, and the bytes between the place that varies before it and this one."""

    before: bytes
    before_bytes: int
    name: bytes
    is_number: bool


class RepeatedHead:
    """The head of a POST, which the next ones of its connection may repeat."""

    __slots__ = (
        "_body_bytes_max",
        "_ending",
        "_fields",
        "_head_bytes_max",
        "_headers",
        "_path",
        "_query",
        "_target",
        "_target_bytes_max",
        "parsed",
    )

    def __init__(
        self,
        fields: list[_Field],
        ending: bytes,
        headers: dict[bytes, bytes],
        settings: HttpSettings,
    ) -> None:
        self._fields = tuple(fields)
        self._ending = ending
        self._headers = headers
        self._target = self._path = self._query = b""
        self._target_bytes_max = settings.target_bytes_max
        self._head_bytes_max = settings.header_bytes_max
        # A larger body may need a sender that the server knows, which the parser asks about.
        self._body_bytes_max = min(settings.body_bytes_max, settings.open_body_bytes_max)
        self.parsed: object = None
        """What the application has made of the header lines that do not vary."""

    @classmethod
    def of(cls, data: bytes, settings: HttpSettings) -> RepeatedHead | None:
        """The head that `data` begins with; None when it is of no kind that is kept.

        The parser has not seen it yet: the caller lets it read the same request and compares.
        """
        if not data.startswith(_METHOD):
            return None
        line, _, rest = data[: data.find(_HEAD_END)].partition(b"\r\n")
        between = line[-len(_VERSION) :]
        headers: dict[bytes, bytes] = {}
        fields: list[_Field] = []
        for text in rest.split(b"\r\n"):
            name, _, value = text.partition(b": ")
            lower = name.lower()
            if lower in headers or lower in _ELSEWHERE:
                return None
            headers[lower] = value.strip()
            between += b"\r\n" + text
            if lower in _VARYING:
                before = between[: len(between) - len(value)]
                fields.append(_Field(before, len(before), lower, lower in _NUMBERS))
                between = b""
        if b"content-length" not in headers:
            return None
        return cls(fields, between + _HEAD_END, headers, settings)

    def read(self, data: bytes, at: int) -> Repeat | None:
        """The request that begins at `at`; None when it has another head, or is not whole."""
        if not data.startswith(_METHOD, at):
            return None
        begin = at + 5
        end = data.find(b" ", begin, begin + self._target_bytes_max + 1)
        if end < 0:
            return None
        target = data[begin:end]
        if target != self._target:
            if _TARGET.fullmatch(target) is None:
                return None
            self._target = target
            self._path, _, self._query = target.partition(b"?")
        headers = self._headers.copy()
        size = 0
        for before, before_bytes, name, is_number in self._fields:
            if not data.startswith(before, end):
                return None
            begin = end + before_bytes
            end = data.find(b"\r", begin, begin + _VALUE_BYTES_MAX + 1)
            if end < 0:
                return None
            value = data[begin:end]
            if is_number:
                if not value.isdigit() or end - begin > _NUMBER_BYTES_MAX:
                    return None
                if name == b"content-length":
                    size = int(value)
            elif _VALUE.fullmatch(value) is None:
                return None
            headers[name] = value
        ending = self._ending
        if not data.startswith(ending, end):
            return None
        begin = end + len(ending)
        end = begin + size
        if end > len(data) or size > self._body_bytes_max or begin - at > self._head_bytes_max:
            return None
        return Repeat(self._path, self._query, headers, data[begin:end], end)
