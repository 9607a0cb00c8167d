"""Heads that repeat: requests whose head is that of the last one but for a few values.

The appends of one connection differ in a number, a key, a path, and their body. A `RepeatedHead`
holds the bytes around these places: it compares them and takes the values out, without a parser.
What it gives is what the parser gives for the same bytes. Everything else is left to the parser:
other header lines, another order or spelling of them, values with unusual characters, and requests
that have not come whole. Most often just the producer's number is the next one, so the whole head
that comes next is made up before, and one comparison reads it.

Only what the bytes say is kept. Whether the request may be made is asked anew each time.
"""

from __future__ import annotations

import re

from fencepost.http.settings import HttpSettings

_SEQ = b"producer-seq"
_NUMBERS = frozenset((b"content-length", _SEQ))
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
_KEPT_BYTES_MAX = 16 * 1024
"""A longer head is not kept: to take one apart takes time that grows with its square."""


Repeat = tuple[bytes, bytes, dict[bytes, bytes], bytes, int]
"""What was read of one request: path, query, headers, body, and where in the data it ends."""


_Field = tuple[bytes, bool, bytes, int]
"""A value that varies: its name, whether it is a number, and the bytes between it and the next one.
A plain tuple, which is taken apart in half the time of a named one."""


class RepeatedHead:
    """The head of a POST, which the next ones of its connection may repeat."""

    __slots__ = (
        "_around",
        "_begin",
        "_begin_bytes",
        "_body_bytes_max",
        "_fields",
        "_head_bytes_max",
        "_headers",
        "_likely",
        "_likely_headers",
        "_likely_size",
        "_line_end",
        "_number",
        "_numbers_alone",
        "_path",
        "_query",
        "_target_bytes_max",
        "parsed",
    )

    def __init__(
        self,
        target: bytes,
        line_end: bytes,
        fields: list[_Field],
        headers: dict[bytes, bytes],
        settings: HttpSettings,
    ) -> None:
        self._line_end = line_end  # from behind the target to the first value
        self._fields = tuple(fields)
        self._headers = headers
        self._numbers_alone = _SEQ in headers and all(number for _, number, *_ in fields)
        self._likely: bytes | None = None  # the head that is expected next
        self._likely_headers = headers
        self._likely_size = self._number = 0
        self._target_bytes_max = settings.target_bytes_max
        self._head_bytes_max = settings.header_bytes_max
        # A larger body may need a sender that the server knows, which the parser asks about.
        self._body_bytes_max = min(settings.body_bytes_max, settings.open_body_bytes_max)
        self.parsed: object = None
        """What the application has made of the header lines that do not vary."""
        self._turn_to(target)

    def _turn_to(self, target: bytes) -> None:
        self._path, _, self._query = target.partition(b"?")
        self._begin = _METHOD + target + self._line_end
        self._begin_bytes = len(self._begin)
        self._around = (b"", b"")  # the last producer's number: the bytes before it and behind it
        self._likely = None

    @classmethod
    def of(cls, data: bytes, at: int, settings: HttpSettings) -> RepeatedHead | None:
        """The head that begins at `at`; None when it is of no kind that is kept.

        The parser has not seen it yet: the caller lets it read the same request and compares.
        """
        head_end = data.find(_HEAD_END, at, at + _KEPT_BYTES_MAX)
        if head_end < 0:
            return None
        line, _, rest = data[at:head_end].partition(b"\r\n")
        target = line[len(_METHOD) : -len(_VERSION)]
        if line != _METHOD + target + _VERSION or not _is_plain(target, settings):
            return None
        headers: dict[bytes, bytes] = {}
        names: list[bytes] = []
        between = [_VERSION]  # the bytes before, between and behind the values that vary
        for text in rest.split(b"\r\n"):
            name, _, value = text.partition(b": ")
            lower = name.lower()
            if lower in headers or lower in _ELSEWHERE:
                return None
            headers[lower] = value.strip()
            between[-1] += b"\r\n" + text
            if lower in _VARYING:
                names.append(lower)
                between[-1] = between[-1][: len(between[-1]) - len(value)]
                between.append(b"")
        if b"content-length" not in headers:
            return None
        between[-1] += _HEAD_END
        fields = [
            (name, name in _NUMBERS, after, len(after))
            for name, after in zip(names, between[1:], strict=True)
        ]
        return cls(target, between[0], fields, headers, settings)

    def read(self, data: bytes, at: int) -> Repeat | None:
        """The request that begins at `at`; None when it has another head, or is not whole."""
        likely = self._likely
        if likely is None or not data.startswith(likely, at):
            return self._read_values(data, at)
        headers = self._likely_headers
        begin = at + len(likely)
        end = begin + self._likely_size
        if end > len(data) or begin - at > self._head_bytes_max:
            return None
        self._expect(headers)
        return self._path, self._query, headers, data[begin:end], end

    def _expect(self, headers: dict[bytes, bytes]) -> None:
        """Make up the head after this one: the same, with the producer's next number."""
        self._number += 1
        number = b"%d" % self._number
        before, behind = self._around
        self._likely = before + number + behind
        self._likely_headers = headers = headers.copy()
        headers[_SEQ] = number

    def _read_values(self, data: bytes, at: int) -> Repeat | None:
        if not data.startswith(self._begin, at) and not self._follow(data, at):
            return None
        begin = at + self._begin_bytes
        headers = self._headers.copy()
        number_at = number_end = at
        for name, is_number, after, after_bytes in self._fields:
            end = data.find(b"\r", begin, begin + _VALUE_BYTES_MAX)
            value = data[begin:end]
            is_good = value.isdigit() if is_number else _VALUE.fullmatch(value)
            if not is_good or not data.startswith(after, end):
                return None
            headers[name] = value
            if name == _SEQ:
                number_at, number_end = begin, end
            begin = end + after_bytes
        size = int(headers[b"content-length"])
        end = begin + size
        if end > len(data) or size > self._body_bytes_max or begin - at > self._head_bytes_max:
            return None
        if self._numbers_alone:
            around = data[at:number_at], data[number_end:begin]
            if around == self._around:  # the second in a row that differs in the number alone
                self._likely_size = size
                self._number = int(headers[_SEQ])
                self._expect(headers)
            else:
                self._around = around
                self._likely = None
        return self._path, self._query, headers, data[begin:end], end

    def _follow(self, data: bytes, at: int) -> bool:
        """Turn to the target of the request that begins at `at`, if that is all that is new."""
        begin = at + len(_METHOD)
        end = data.find(b" ", begin, begin + self._target_bytes_max + 1)
        target = data[begin:end]
        if (
            end < 0
            or not data.startswith(_METHOD, at)
            or not data.startswith(self._line_end, end)
            or _TARGET.fullmatch(target) is None
        ):
            return False
        self._turn_to(target)
        return True


def _is_plain(target: bytes, settings: HttpSettings) -> bool:
    return len(target) <= settings.target_bytes_max and _TARGET.fullmatch(target) is not None
