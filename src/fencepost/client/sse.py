"""Server-sent events as they arrive: bytes in, pieces of any size; whole events out."""

from __future__ import annotations

from typing import NamedTuple

from fencepost.client.errors import ProtocolError

EVENT_BYTES_MAX = 1 << 30


class Event(NamedTuple):
    """One event: its name, and its data lines joined."""

    name: str
    data: bytes


class EventParser:
    """The events of one connection."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._held = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes."""
        # Line ends may be CRLF as well; a CR at the end of a piece may be half of one.
        piece = self._held + piece
        self._held = b"\r" if piece.endswith(b"\r") else b""
        piece = piece.removesuffix(b"\r").replace(b"\r\n", b"\n")
        last = self._pieces[-1][-1:] if self._pieces else b""
        if piece:
            self._pieces.append(piece)
        self._size += len(piece)
        if self._size > EVENT_BYTES_MAX:
            raise ProtocolError("an event of the server has no end")
        # Looking at the new piece alone keeps a large event that arrives in many pieces linear.
        if b"\n\n" not in last + piece:
            return []
        blocks = b"".join(self._pieces).split(b"\n\n")
        rest = blocks.pop()
        self._pieces = [rest] if rest else []
        self._size = len(rest)
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
