"""How many bytes of request bodies the front end holds at once, in all and for each sender.

A body is held while it is read, and until its request is answered. A large one needs a sender that
the server knows, and a place here, which it gives back when its request is done. Small ones come
and go too fast for that: those that are still there are counted a few times a second, and sooner
where much has come. Where they fill what a sender may take, no more of its requests are read ahead
of their answers, and a body that is not whole yet is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from fencepost.http.settings import HttpSettings
from fencepost.http.wire import Refusal

KnowsSender = Callable[[dict[bytes, bytes], frozenset[bytes]], str | None]
"""The name of the principal that sends these headers, of which some came more than once; None when
the server knows none, and empty when it asks for none."""


class Bodies:
    """The bodies in flight."""

    __slots__ = (
        "_by_sender",
        "_counting",
        "_counting_bytes",
        "_crowded",
        "_knows_sender",
        "_settings",
        "_small",
        "bytes",
        "is_crowded",
        "small_bytes",
    )

    def __init__(self, settings: HttpSettings, knows_sender: KnowsSender | None) -> None:
        self._settings = settings
        self._knows_sender = knows_sender
        self._by_sender: dict[str | None, int] = {}
        self.bytes = 0
        """All large ones."""
        self._small: dict[str | None, int] = {}
        self.small_bytes = 0
        """All small ones, as of the last sweep."""
        self._counting: dict[str | None, int] = {}
        self._counting_bytes = 0
        self._crowded: frozenset[str | None] = frozenset()
        self.is_crowded = False
        """Whether any sender is past what it may take."""

    def place(self, headers: dict[bytes, bytes], repeated: frozenset[bytes], size: int) -> Place:
        """Room for a body of so many bytes; raises `Refusal` without a sender, or without room."""
        sender = self.sender(headers, repeated)
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

    def small_place(self, headers: dict[bytes, bytes], repeated: frozenset[bytes]) -> Place:
        """Room for a body that is small so far, for a front end without a sweep."""
        return Place(self, self.sender(headers, repeated))

    def sender(self, headers: dict[bytes, bytes], repeated: frozenset[bytes]) -> str | None:
        """The principal that sends these headers; None for an unknown one, empty without any."""
        return "" if self._knows_sender is None else self._knows_sender(headers, repeated)

    def take(self, sender: str | None, size: int) -> None:
        """Count so many bytes more; raises `Refusal` when there is no room for them."""
        held = self._by_sender.get(sender, 0)
        limit, bytes_max = self._limit(sender)
        # One body always fits, however the limits are set.
        if held and held + self._small.get(sender, 0) + size > bytes_max:
            raise _full(limit, bytes_max)
        bytes_max = self._settings.bodies_bytes_max
        if self.bytes and self.bytes + self.small_bytes + size > bytes_max:
            raise _full("bodies_bytes_max", bytes_max)
        self._by_sender[sender] = held + size
        self.bytes += size

    def give_back(self, sender: str | None, size: int) -> None:
        """Count so many bytes less."""
        self.bytes -= size
        left = self._by_sender[sender] - size
        if left:
            self._by_sender[sender] = left
        else:
            del self._by_sender[sender]

    # Small bodies. Their sender is None as long as the server does not know it.

    def begin_count(self) -> None:
        """Count anew what waits, connection by connection, until `end_count`."""
        self._counting = {}
        self._counting_bytes = 0

    def keep(self, sender: str | None, size: int) -> None:
        """So many bytes of whole requests wait for their answers."""
        self._counting[sender] = self._counting.get(sender, 0) + size
        self._counting_bytes += size

    def refuse(self, sender: str | None, size: int) -> Refusal | None:
        """Keep so many bytes of a body that is not whole, or say why there is no room for them."""
        limit, bytes_max = self._limit(sender)
        if self._counted(sender) + size > bytes_max:
            return _full(limit, bytes_max)
        bytes_max = self._settings.bodies_bytes_max
        if self.bytes + self._counting_bytes + size > bytes_max:
            return _full("bodies_bytes_max", bytes_max)
        self.keep(sender, size)
        return None

    def end_count(self) -> None:
        """Everything has been counted."""
        self._small, self.small_bytes = self._counting, self._counting_bytes
        if self.small_bytes + self.bytes >= self._settings.bodies_bytes_max:
            self._crowded = frozenset(self._small)
        else:
            self._crowded = frozenset(
                sender for sender in self._small if self._counted(sender) >= self._limit(sender)[1]
            )
        self.is_crowded = bool(self._crowded)

    def reads_ahead(self, sender: str | None) -> bool:
        """Whether a sender's requests are read before those ahead of them are answered."""
        return sender not in self._crowded

    def _counted(self, sender: str | None) -> int:
        return self._by_sender.get(sender, 0) + self._counting.get(sender, 0)

    def _limit(self, sender: str | None) -> tuple[str, int]:
        if sender is None and self._knows_sender is not None:
            return "open_bodies_bytes_max", self._settings.open_bodies_bytes_max
        if not sender:
            return "bodies_bytes_max", self._settings.bodies_bytes_max
        limit = "bodies_bytes_per_principal_max"
        return limit, self._settings.bodies_bytes_per_principal_max


class Place:
    """What one body takes; it is given back with the request that holds it."""

    __slots__ = ("_bodies", "_bytes", "_sender")

    def __init__(self, bodies: Bodies, sender: str | None) -> None:
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
        f"the server reads {bytes_max} bytes of bodies at once ({limit}); retry later",
        [(b"Retry-After", b"1")],
    )
