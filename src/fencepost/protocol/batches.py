"""A batch: the messages of one request, as they are stored and as they go out again.

JSON messages are kept joined by commas, exactly as a reader's array will hold them, with their
lengths beside them; a byte append is one message. Nothing is decoded into Python objects on the
way: msgspec checks the syntax and gives back the raw slices.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

DIGEST_BYTES = 16

_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)
_WHITESPACE = b" \t\r\n"


class Batch(msgspec.Struct, frozen=True, gc=False):
    """The messages of one append.

    `data` is what a reader gets, separators included; `size` counts the payload bytes without them.
    `lengths` holds each message's length (unsigned 32-bit, native order is little-endian on every
    platform we run on) and is None when there is only one message.
    """

    messages: int
    size: int
    data: bytes
    lengths: bytes | None
    chunks: tuple[StagedChunk, ...] = ()


class StagedChunk(NamedTuple):
    """Data that was uploaded ahead of its commit: the batch refers to it and has none itself."""

    id: int
    messages: int
    size: int


class Malformed(NamedTuple):
    """The body is not what its content type promises; `detail` says where."""

    detail: str


def bytes_batch(body: bytes) -> Batch:
    """A body of any other type than JSON: one message, whatever its bytes."""
    return Batch(1, len(body), body, None)


def json_batch(body: bytes) -> Batch | Malformed | None:
    """The messages of a JSON body; None for an empty array, which holds none.

    One level of array is flattened. The bytes of each message stay as the client sent them.
    """
    # msgspec looks at structure, not at the encoding inside strings, so that is checked first.
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            return Malformed(f"the body is not UTF-8: {error.reason} at byte {error.start}")
    try:
        if body.lstrip(_WHITESPACE).startswith(b"["):
            return _joined(_ARRAY.decode(body))
        value = bytes(_VALUE.decode(body))
    except msgspec.DecodeError as error:
        return Malformed(f"the body is not JSON: {error}")
    except RecursionError:
        return Malformed("the body is nested too deeply")
    return Batch(1, len(value), value, None)


def holds_more_than(body: bytes, messages_max: int) -> bool:
    """Whether a JSON body holds more messages than that, found out without splitting it.

    Splitting millions of tiny elements takes seconds and a gigabyte. Each element but the first has
    a comma before it, so few bodies are looked at more closely, and those only as far as the bound.
    """
    if body.count(b",") < messages_max or not body.lstrip(_WHITESPACE).startswith(b"["):
        return False
    try:
        text = body.decode()
        at = text.index("[") + 1
        for _ in range(messages_max):
            _, at = _ELEMENT.raw_decode(text, _skipped(text, at))
            at = _skipped(text, at)
            if text[at] != ",":
                return False
            at += 1
    except (ValueError, IndexError, RecursionError):
        return False  # not JSON: the parser stops at the same place and says what is wrong
    return True


def _skipped(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


# Numbers are skipped over, not made: what they come to does not matter here.
_ELEMENT = json.JSONDecoder(parse_int=bool, parse_float=bool, parse_constant=bool)


def _joined(messages: list[msgspec.Raw]) -> Batch | None:
    count = len(messages)
    if count == 0:
        return None
    if count == 1:
        value = bytes(messages[0])
        return Batch(1, len(value), value, None)
    data = b",".join(messages)
    lengths = array("I", map(_length, messages))
    return Batch(count, len(data) - count + 1, data, lengths.tobytes())


def _length(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


def message_lengths(batch_count: int, data_length: int, lengths: bytes | None) -> Iterable[int]:
    """How long each message of a stored batch is, in order."""
    if lengths is None:
        assert batch_count == 1
        return (data_length,)
    return array("I", lengths)


def cut(data: bytes, lengths: bytes | None, start: int, stop: int) -> tuple[bytes, int]:
    """The data of messages `start` up to `stop` of a JSON batch, and its payload size."""
    if lengths is None:
        assert (start, stop) == (0, 1)
        return data, len(data)
    sizes = array("I", lengths)
    before = sum(sizes[:start]) + start
    size = sum(sizes[start:stop])
    return data[before : before + size + stop - start - 1], size


def digest(content_type: str, closes: bool, data: bytes) -> bytes:
    """What tells a repeated request from another one under the same name, in 16 bytes."""
    return hashlib.sha256(_fields(content_type, closes) + data).digest()[:DIGEST_BYTES]


@lru_cache(maxsize=1_024)
def _fields(content_type: str, closes: bool) -> bytes:
    # No content type holds a NUL, so the data cannot imitate the fields before it.
    return b"%d%b\0" % (closes, content_type.encode())


def split(lengths: bytes, data: bytes) -> list[bytes]:
    """The messages of a batch, which may have a byte between them or not."""
    sizes = array("I", lengths)
    gap = 1 if len(data) > sum(sizes) else 0
    messages = []
    at = 0
    for size in sizes:
        messages.append(data[at : at + size])
        at += size + gap
    return messages
