"""Notes: for which reactions a target is told of an event, written down when it is told.

Between that moment and the one in which the event is handled, a program of other code may take
over. Its resolvers may send the event elsewhere, and its reactions may have other names. So the
note names the reactions that the event is handed to at this target, and those that it has at
others: the first run there and nowhere else, the second do not run there, whatever the code says by
then. An event for which a resolver raised goes to its own stream, and the note says so: there the
resolver is called once more.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

NOTE_BYTES_MAX = 4_096
"""Bytes of a note; the server takes no more."""


class Note(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Names of reactions to an event."""

    here: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    raised: tuple[str, ...] = ()
    """Those of the first whose resolver raised."""


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Note)


def encode_note(note: Note) -> str:
    """The text that goes with the event."""
    return _ENCODER.encode(note).decode()


def decode_note(text: str | None) -> Note | None:
    """What a text says; None where it is no note of an app."""
    if text is None:
        return None
    try:
        return _DECODER.decode(text)
    except msgspec.DecodeError:
        return None


def fits_note(names: Iterable[str]) -> bool:
    """Whether a note can name so many reactions, all of which may have raised."""
    given = tuple(names)
    return len(encode_note(Note(given, (), given)).encode()) <= NOTE_BYTES_MAX
