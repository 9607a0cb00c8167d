"""Offsets: a place in a stream, as two numbers and as the opaque token on the wire.

An offset counts the messages before it and the payload bytes before it (separators not counted).
Zero-padded to a fixed width, tokens of one stream sort as strings in the order of the stream.
Bytes alone name the place, because no message is empty; the message count rides along so that a
version is read off an offset without a look-up, and so that an offset made up by a client is
noticed.

A byte stream may be cut inside an append: such an offset counts the messages that are whole before
it. A JSON stream is only ever cut between messages.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

DIGITS = 16
"""Digits of each number in a token: enough for 2**53, which is where JavaScript's integers end."""

_TOKEN = re.compile(r"([0-9]{16})_([0-9]{16})")


class Offset(NamedTuple):
    """A place in a stream: so many messages, so many payload bytes before it."""

    messages: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.messages:016d}_{self.bytes:016d}"


START = Offset(0, 0)
"""Where every stream that is not a fork begins."""


def wire(offset: Offset) -> bytes:
    """The offset as it goes into a header."""
    return b"%016d_%016d" % offset


Sentinel = Literal["-1", "now"]


def parse_offset(text: str) -> Offset | Sentinel | None:
    """The offset that a client named, a sentinel, or None when it is no offset at all."""
    if text == "-1":
        return "-1"
    if text == "now":
        return "now"
    match = _TOKEN.fullmatch(text)
    return Offset(int(match[1]), int(match[2])) if match else None
