"""Server-sent events: how data and control events look on the wire.

A payload is cut at every line ending, so nothing in it can end an event or begin another. Types
that are not text travel as base64. The id of every event is the offset after it, so that an
EventSource, which sends the last id again when it reconnects, goes on where it stopped.
"""

from __future__ import annotations

import base64
import re

import msgspec

from fencepost.protocol.offsets import Offset, wire
from fencepost.protocol.streams import JSON

_LINE_END = re.compile(rb"\r\n|\r|\n")


def is_text(media_type: str) -> bool:
    """Whether data events of this type carry text as it is."""
    return media_type == JSON or media_type.startswith("text/")


def data_event(data: bytes, media_type: str, next_offset: Offset) -> bytes:
    """A data event; `data` of a JSON stream is messages joined by commas."""
    at = wire(next_offset)
    if media_type == JSON:
        data = b"[%b]" % data
    elif not is_text(media_type):
        return b"event: data\ndata:%b\nid:%b\n\n" % (base64.b64encode(data), at)
    if b"\n" in data or b"\r" in data:
        lines = b"\n".join(map(_line, _LINE_END.split(data)))
        return b"event: data\n%b\nid:%b\n\n" % (lines, at)
    return b"event: data\n%b\nid:%b\n\n" % (_line(data), at)


def _line(line: bytes) -> bytes:
    # A reader drops one space after the colon, so a line that begins with one is given another.
    return b"data: " + line if line[:1] == b" " else b"data:" + line


def control_event(
    next_offset: Offset, *, cursor: int | None, up_to_date: bool, closed: bool
) -> bytes:
    """Where the reader stands now; a closed stream has no cursor, as its reader is done."""
    control: dict[str, object] = {"streamNextOffset": str(next_offset)}
    if cursor is not None and not closed:
        control["streamCursor"] = str(cursor)
    if up_to_date:
        control["upToDate"] = True
    if closed:
        control["streamClosed"] = True
    encoded = msgspec.json.encode(control)
    return b"event: control\ndata:%b\nid:%b\n\n" % (encoded, wire(next_offset))
