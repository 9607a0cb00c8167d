"""How many bytes of request bodies the front end holds at once, in all and for each sender.

A body is held while it is read, and until its request is answered. Small bodies are not counted:
there are at most as many of them as connections. A larger one needs a sender that the server knows,
and a place here, which it gives back when its request is done.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost.http.settings import HttpSettings
from fencepost.http.wire import Refusal

KnowsSender = Callable[[dict[bytes, bytes], frozenset[bytes]], str | None]
"""The name of the principal that sends these headers, of which some came more than once; None when
the server knows none, and empty when it asks for none."""


class Bodies:
    """The large bodies in flight."""

    __slots__ = ("_by_sender", "_knows_sender", "_settings", "bytes")

    def __init__(self, settings: HttpSettings, knows_sender: KnowsSender | None) -> None:
        self._settings = settings
        self._knows_sender = knows_sender
        self._by_sender: dict[str, int] = {}
        self.bytes = 0
        """All of them, for the metrics."""

    def place(self, headers: dict[bytes, bytes], repeated: frozenset[bytes], size: int) -> Place:
        """Room for a body of so many bytes; raises `Refusal` without a sender, or without room."""
        sender = "" if self._knows_sender is None else self._knows_sender(headers, repeated)
        if sender is None:
            raise Refusal(
                401,
                "unauthorized",
                f"a body of more than {self._settings.open_body_bytes_max} bytes"
                " (open_body_bytes_max) needs the token of a principal",
                [(b"WWW-Authenticate", b'Bearer realm="fencepost"')],
            )
        place = Place(self, sender)
        place.grow(size)
        return place

    def take(self, sender: str, size: int) -> None:
        """Count so many bytes more; raises `Refusal` when there is no room for them."""
        settings = self._settings
        held = self._by_sender.get(sender, 0)
        # One body always fits, however the limits are set.
        if sender and held and held + size > settings.bodies_bytes_per_principal_max:
            raise _full("bodies_bytes_per_principal_max", settings.bodies_bytes_per_principal_max)
        if self.bytes and self.bytes + size > settings.bodies_bytes_max:
            raise _full("bodies_bytes_max", settings.bodies_bytes_max)
        self._by_sender[sender] = held + size
        self.bytes += size

    def give_back(self, sender: str, size: int) -> None:
        """Count so many bytes less."""
        self.bytes -= size
        left = self._by_sender[sender] - size
        if left:
            self._by_sender[sender] = left
        else:
            del self._by_sender[sender]


class Place:
    """What one body takes; it is given back with the request that holds it."""

    __slots__ = ("_bodies", "_bytes", "_sender")

    def __init__(self, bodies: Bodies, sender: str) -> None:
        self._bodies = bodies
        self._sender = sender
        self._bytes = 0

    def grow(self, size: int) -> None:
        """Take so many bytes more; raises `Refusal` when there is no room for them."""
        self._bodies.take(self._sender, size)
        self._bytes += size

    def __del__(self) -> None:
        if self._bytes:
            self._bodies.give_back(self._sender, self._bytes)


def _full(limit: str, bytes_max: int) -> Refusal:
    return Refusal(
        503,
        "too_many_bodies",
        f"the server reads {bytes_max} bytes of large bodies at once ({limit}); retry later",
        [(b"Retry-After", b"1")],
    )
