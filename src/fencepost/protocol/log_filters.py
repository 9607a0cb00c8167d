"""Select messages of the log that are events: by their name, by their correlation.

An event is a JSON object with a `name` and perhaps `meta.correlation`. A message that is no such
object, and a marker, is none of the wanted events. Everything here works on the bytes of one
message; the store finds them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from fencepost.protocol.groups import NAMES_MAX, TEXT_MAX, check_text


class _Meta(msgspec.Struct, gc=False):
    correlation: Any = None


class _Named(msgspec.Struct, gc=False):
    name: Any = None


class _Correlated(msgspec.Struct, gc=False):
    name: Any = None
    meta: _Meta | None = None


_NAMED = msgspec.json.Decoder(_Named)
_CORRELATED = msgspec.json.Decoder(_Correlated)


class EventFilter(NamedTuple):
    """Events with one of these names (none: any name) and with this correlation (None: any)."""

    names: frozenset[str] = frozenset()
    correlation: str | None = None

    def takes(self, message: bytes) -> bool:
        """Whether a JSON message is a wanted event."""
        try:
            if self.correlation is None:
                name = _NAMED.decode(message).name
            else:
                event = _CORRELATED.decode(message)
                if event.meta is None or event.meta.correlation != self.correlation:
                    return False
                name = event.name
        except (msgspec.DecodeError, RecursionError):
            return False  # another kind of message
        if self.names:
            return isinstance(name, str) and name in self.names
        return isinstance(name, str)


def check_names(names: list[str]) -> str | None:
    """What is wrong with the names that a reader asks for; None when nothing is."""
    if len(names) > NAMES_MAX:
        return f"name comes {len(names)} times, and may come {NAMES_MAX} times"
    return next((wrong for name in names if (wrong := _wrong("name", name))), None)


def check_correlation(correlation: str) -> str | None:
    """What is wrong with a correlation that a reader asks for."""
    return _wrong("correlation", correlation)


def _wrong(parameter: str, text: str) -> str | None:
    refused = check_text(parameter, text, TEXT_MAX)
    return None if refused is None else refused.detail
