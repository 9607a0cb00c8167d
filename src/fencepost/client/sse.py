"""Server-sent events as they arrive: bytes in, pieces of any size; whole events out."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.client.errors import ProtocolError

EVENT_BYTES_MAX = 256 << 20
"""The most that is held of one event, or of all events that belong together."""


class Event(NamedTuple):
    """One event: its name, and its data lines joined."""

    name: str
    data: bytes


class EventParser:
    """The events of one connection."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._held = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes."""
        # Line ends may be CRLF as well; a CR at the end of a piece may be half of one.
        piece = self._held + piece
        self._held = b"\r" if piece.endswith(b"\r") else b""
        piece = piece.removesuffix(b"\r").replace(b"\r\n", b"\n")
        # Looking at the new piece alone keeps a large event that arrives in many pieces linear.
        begin = max(len(self._rest) - 1, 0)
        self._rest += piece
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ProtocolError("an event of the server has no end")
        if self._rest.find(b"\n\n", begin) < 0:
            return []
        blocks = bytes(self._rest).split(b"\n\n")
        self._rest = bytearray(blocks.pop())
        return [event for event in map(_event, blocks) if event is not None]


def _event(block: bytes) -> Event | None:
    name = "message"
    data = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
    return Event(name, b"\n".join(data)) if data else None
