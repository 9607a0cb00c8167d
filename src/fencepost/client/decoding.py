"""Messages as Python values: fast for what is usual, and never stuck on what is not.

JSON allows numbers that fit no float and no ordinary integer, and one such message must not keep
the rest of a stream, or of the log of all streams, from being read. What msgspec refuses is
therefore read once more by the standard library, loosely: a float out of range becomes an
infinity, an integer of thousands of digits a `Decimal`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from fencepost.client.errors import InvalidArgumentError, ProtocolError, UnreadableError
from fencepost.client.results import LogEntry

INTEGER_DIGITS_MAX = 4_000
"""Python refuses to read longer integers as such, because that takes quadratic time."""

_ENTRY = msgspec.json.Decoder(LogEntry)


def json_messages(kind: Any) -> Callable[[bytes], list[Any]]:
    """Make a decoder of JSON arrays, whose messages are of type `kind`, or plain values."""
    try:
        decode = msgspec.json.Decoder(list[kind] if kind is not None else list[Any]).decode
    except TypeError as error:
        raise InvalidArgumentError(f"messages cannot be read as {kind!r}: {error}") from None

    def messages(data: bytes) -> list[Any]:
        try:
            decoded: list[Any] = decode(data)
        except msgspec.DecodeError as error:
            if kind is not None and isinstance(error, msgspec.ValidationError):
                if not data.lstrip().startswith(b"["):
                    raise ProtocolError("the server's answer is no JSON array") from None
                raise UnreadableError(f"a message is not of the type asked for: {error}") from error
            decoded = _loosely(data)
            if not isinstance(decoded, list):
                raise ProtocolError("the server's answer is no JSON array") from None
        except RecursionError:
            raise UnreadableError("a message is nested too deeply to be read here") from None
        return decoded

    return messages


def array_inside(data: bytes) -> bytes:
    """What is between the brackets of a JSON array, for arrays that are joined undecoded."""
    array = data.strip()
    if array and not (array.startswith(b"[") and array.endswith(b"]")):
        raise ProtocolError("the server's answer is no JSON array")
    return array[1:-1].strip()


def text_of(data: bytes) -> str:
    """The whole of a text stream."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"the stream is not UTF-8: {error}") from error


class TextDecoder:
    """The pieces of a text stream, which may end inside a character: its rest comes with the next.

    A stream may be split anywhere, because it is bytes to the server.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")().decode

    def __call__(self, data: bytes) -> list[str]:
        try:
            text = self._decode(data)
        except UnicodeDecodeError as error:
            raise UnreadableError(f"the stream is not UTF-8: {error}") from error
        return [text] if text else []


def log_entries(body: bytes) -> list[LogEntry]:
    """A page of the log, from its lines."""
    try:
        return _ENTRY.decode_lines(body)
    except (msgspec.DecodeError, RecursionError):
        return [_entry(line) for line in body.splitlines() if line]


def _entry(line: bytes) -> LogEntry:
    try:
        return _ENTRY.decode(line)
    except msgspec.DecodeError:
        try:
            return msgspec.convert(_loosely(line), LogEntry)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a line of the log is not what it should be: {error}") from None
    except RecursionError:
        raise UnreadableError("a message is nested too deeply to be read here") from None


def _loosely(data: bytes) -> Any:
    try:
        return json.loads(data, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"a message cannot be read: {error}") from error


def _whole(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= INTEGER_DIGITS_MAX else Decimal(digits)
