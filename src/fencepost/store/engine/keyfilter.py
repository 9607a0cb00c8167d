"""A filter of Idempotency-Keys: whether a key may have been used, without asking the database.

Nearly every key is new, and to find that out in the database costs as much as deciding the rest of
the append. The filter is a table of bits that every key in use has set some of; a key with a bit
unset is new for certain, and any other is looked for on disk. It says nothing until it has learned
the keys on disk, which happens in the background and in pieces. Keys that are forgotten stay in it,
so it is made anew, and larger if need be, when it has filled up.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencepost.store.engine.database import Connection

Place = tuple[int, str, str]

BITS_MIN = 1 << 20
BITS_PER_KEY = 16
"""With three bits set for each of as many keys as fit, one new key in 200 is looked for in vain."""
KEYS_PER_PIECE = 20_000


class KeyFilter:
    """What one store knows of its keys. Used on the event loop; pieces are read elsewhere."""

    def __init__(self) -> None:
        self._make(0)

    def _make(self, keys: int) -> None:
        bits = BITS_MIN
        while bits < 2 * keys * BITS_PER_KEY:
            bits *= 2
        self._table = bytearray(bits // 8)
        self._mask = bits - 1
        self._count = 0
        self._learned_to: Place | None = (-1, "", "")

    @property
    def is_complete(self) -> bool:
        """Whether it knows every key on disk, and can tell what is new."""
        return self._learned_to is None

    @property
    def is_full(self) -> bool:
        return self._count * BITS_PER_KEY > self._mask

    def is_new(self, place: Place) -> bool:
        """Whether a key was certainly never used."""
        if self._learned_to is not None:
            return False
        table, mask, hashed = self._table, self._mask, hash(place)
        for _ in range(3):
            bit = hashed & mask
            if not table[bit >> 3] & (1 << (bit & 7)):
                return True
            hashed >>= 20
        return False

    def add(self, place: Place) -> None:
        """A key is used, or about to be."""
        self._set(hash(place))

    def _set(self, hashed: int) -> None:
        table, mask = self._table, self._mask
        for _ in range(3):
            bit = hashed & mask
            table[bit >> 3] |= 1 << (bit & 7)
            hashed >>= 20
        self._count += 1

    # Learning

    @property
    def next_piece(self) -> Place | None:
        """After which key the next piece of those on disk begins; None when all are known."""
        return self._learned_to

    def learn(self, hashes: Iterable[int], last: Place | None) -> None:
        """Take in a piece of the keys on disk; `last` is where it ended, None at the end of all."""
        for hashed in hashes:
            self._set(hashed)
        self._learned_to = last

    def begin_again(self, keys: int) -> None:
        """Forget everything, and be made for so many keys; those on disk are to be learned."""
        self._make(keys)


def read_piece(connection: Connection, after: Place) -> tuple[list[int], Place | None]:
    """Some keys on disk as their hashes, and where the next piece begins."""
    rows = connection.fetch("key_places_after", (*after, KEYS_PER_PIECE))
    last = (rows[-1][0], rows[-1][1], rows[-1][2]) if len(rows) == KEYS_PER_PIECE else None
    return [hash((row[0], row[1], row[2])) for row in rows], last
