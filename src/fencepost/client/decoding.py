"""Messages as Python values: fast for what is usual, and never stuck on what is not.

JSON allows numbers that fit no float and no ordinary integer, and one such message must not keep
the rest of a stream, or of the log of all streams, from being read. What msgspec refuses is
therefore read once more by the standard library, loosely: a float out of range becomes an
infinity, an integer of thousands of digits a `Decimal`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import msgspec

from fencepost.client.errors import UnreadableError
from fencepost.client.results import LogEntry

INTEGER_DIGITS_MAX = 4_000
"""Python refuses to read longer integers as such, because that takes quadratic time."""

_ENTRY = msgspec.json.Decoder(LogEntry)


def json_messages(kind: Any) -> Callable[[bytes], list[Any]]:
    """How a JSON array becomes messages: of a type, or whatever they are."""
    decode = msgspec.json.Decoder(list[kind] if kind is not None else list[Any]).decode

    def messages(data: bytes) -> list[Any]:
        try:
            decoded: list[Any] = decode(data)
        except msgspec.ValidationError as error:
            if kind is not None:
                raise UnreadableError(f"a message is not of the type asked for: {error}") from error
            decoded = _loosely(data)
        except RecursionError:
            raise UnreadableError("a message is nested too deeply to be read here") from None
        return decoded

    return messages


def text_messages(data: bytes) -> list[str]:
    """A piece of a text stream."""
    try:
        return [data.decode()]
    except UnicodeDecodeError as error:
        raise UnreadableError(f"the stream is not UTF-8: {error}") from error


def log_entries(body: bytes) -> list[LogEntry]:
    """A page of the log, from its lines."""
    try:
        return _ENTRY.decode_lines(body)
    except (msgspec.ValidationError, RecursionError):
        return [_entry(line) for line in body.splitlines() if line]


def _entry(line: bytes) -> LogEntry:
    try:
        return _ENTRY.decode(line)
    except msgspec.ValidationError:
        return msgspec.convert(_loosely(line), LogEntry)
    except RecursionError:
        raise UnreadableError("a message is nested too deeply to be read here") from None


def _loosely(data: bytes) -> Any:
    try:
        return json.loads(data, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"a message cannot be read: {error}") from error


def _whole(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= INTEGER_DIGITS_MAX else Decimal(digits)
