"""A batch: the messages of one request, as they are stored and as they go out again.

JSON messages are kept joined by commas, exactly as a reader's array will hold them, with their
lengths beside them; a byte append is one message. Nothing is decoded into Python objects on the
way: msgspec checks the syntax and gives back the raw slices.
"""

from __future__ import annotations

import hashlib
import re
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


class TooMany(NamedTuple):
    """The body holds more messages than one append may have."""


class TooDeep(NamedTuple):
    """Arrays and objects of the body are nested deeper than they may be."""


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
            return _joined(_ARRAY.decode(body), body)
        value = bytes(_VALUE.decode(body))
    except msgspec.DecodeError as error:
        return Malformed(f"the body is not JSON: {error}")
    except RecursionError:
        return Malformed("the body is nested too deeply")
    return Batch(1, len(value), value, None)


def json_batch_within(
    body: bytes, *, messages_max: int, depth_max: int
) -> Batch | Malformed | TooMany | TooDeep | None:
    """The same, if the body holds no more messages and is nested no deeper than this."""
    # A message takes two bytes with its comma. No other thread runs during the split, which is one
    # call, so a body that may hold more is looked through first.
    if len(body) > 2 * messages_max and holds_more_than(body, messages_max):
        return TooMany()
    batch = json_batch(body)
    if isinstance(batch, Batch) and batch.messages > messages_max:
        return TooMany()
    # A level of nesting takes two bytes, so messages that are short enough are not looked through.
    if (
        isinstance(batch, Batch)
        and longest_message(batch) >= 2 * depth_max
        and is_nested_deeper(body, depth_max)
    ):
        return TooDeep()
    return batch


def holds_more_than(body: bytes, messages_max: int) -> bool:
    """Whether a JSON body holds more messages than that, found out without splitting it.

    Splitting millions of tiny elements takes seconds and a gigabyte. Each element but the first has
    a comma before it, so few bodies are looked at more closely, and those only as far as the bound.
    """
    if body.count(b",") < messages_max or not body.lstrip(_WHITESPACE).startswith(b"["):
        return False
    if not _is_json(body):
        return False  # the parser stops at the same place and says what is wrong
    depth, left = 0, messages_max
    for found in _TOKENS.finditer(body):
        token = found[0]
        if token == b"," and depth == 1:
            left -= 1
            if left == 0:
                return True
        elif token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
    return False


def is_nested_deeper(body: bytes, depth_max: int) -> bool:
    """Whether arrays and objects of a JSON body are nested deeper, found out by building nothing.

    A body that is not JSON is not: the parser says what is wrong with it.
    """
    if body.count(b"[") + body.count(b"{") <= depth_max:
        return False
    # Only brackets and quotes are left, and then the texts without brackets go. If no other text is
    # there, each round takes the innermost level off; batches have few. The rest is walked over.
    text = body
    if b"\\" in body:
        text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = text.translate(_BRACKETS, _OTHERS).replace(b'""', b"")
    if b'"' not in brackets:
        for _ in range(min(_ROUNDS_MAX, depth_max)):
            brackets = brackets.replace(b"[]", b"")
            if not brackets:
                return False
    if not _is_json(body):
        return False
    depth = 0
    for found in _TOKENS.finditer(body):
        token = found[0]
        if token in _OPENING:
            depth += 1
            if depth > depth_max:
                return True
        elif token in _CLOSING:
            depth -= 1
    return False


_ROUNDS_MAX = 8
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_OPENING, _CLOSING = (b"[", b"{"), (b"]", b"}")
# Nothing is given back once it is matched, so a body that is JSON is walked over once.
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},]', re.DOTALL)


def _is_json(body: bytes) -> bool:
    try:
        _VALUE.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _joined(messages: list[msgspec.Raw], body: bytes) -> Batch | None:
    count = len(messages)
    if count == 0:
        return None
    if count == 1:
        value = bytes(messages[0])
        return Batch(1, len(value), value, None)
    lengths = array("I", map(len, messages))
    size = sum(lengths)
    # A body without spaces between its messages is what a reader gets, but for its brackets.
    is_dense = len(body) == size + count + 1
    data = body[1:-1] if is_dense else b",".join(messages)
    return Batch(count, size, data, lengths.tobytes())


def longest_message(batch: Batch) -> int:
    """How many bytes the longest message of a batch has."""
    return len(batch.data) if batch.lengths is None else max(array("I", batch.lengths))


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


_JOINED_BYTES_MAX = 4096
"""Above this, copying data to hash it in one call takes longer than a second call."""


def digest(content_type: str, closes: bool, data: bytes) -> bytes:
    """What tells a repeated request from another one under the same name, in 16 bytes."""
    if not data:
        return _empty_digest(content_type, closes)
    fields = _fields(content_type, closes)
    if len(data) < _JOINED_BYTES_MAX:
        return hashlib.sha256(fields + data).digest()[:DIGEST_BYTES]
    hashed = hashlib.sha256(fields)
    hashed.update(data)
    return hashed.digest()[:DIGEST_BYTES]


@lru_cache(maxsize=1_024)
def _empty_digest(content_type: str, closes: bool) -> bytes:
    """That of an append that has its data in staged parts, or none."""
    return hashlib.sha256(_fields(content_type, closes)).digest()[:DIGEST_BYTES]


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
