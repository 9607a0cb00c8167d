"""A filter of Idempotency-Keys: whether a key may have been used, without asking the database.

Nearly every key is new, and to find that out in the database costs as much as deciding the rest of
the append. The filter is a table of bytes, in one of which every key in use has set some bits; a
key with one of its bits unset is new for certain, and any other is looked for on disk. All bits of
a key are in one byte because a look at one costs a third of a look at three. It says nothing until
it has learned the keys on disk, which happens in the background and in pieces. Keys that are
forgotten stay in it, so it is made anew, and larger if need be, when it has filled up.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from fencepost.store.database import Connection, Row
from fencepost.store.write.recent_keys import KeyPlace, RecentKeys

BYTES_MIN = 1 << 17
BYTES_PER_KEY = 2
"""With this many for each of as many keys as fit, one new key in 40 is looked for in vain."""
KEYS_PER_PIECE = 20_000

_PATTERNS = bytes(sum(1 << bit for bit in bits) for bits in combinations(range(8), 3))
_PATTERNS += _PATTERNS[: 64 - len(_PATTERNS)]
"""The ways to set three bits of a byte, some of them twice to make up a power of two."""


class KeyFilter:
    """What one store knows of its keys. Used on the event loop; pieces are read elsewhere."""

    def __init__(self) -> None:
        self.recent = RecentKeys()
        self._make(0)

    def _make(self, keys: int) -> None:
        size = BYTES_MIN
        while size < 2 * keys * BYTES_PER_KEY:
            size *= 2
        self._table = bytearray(size)
        self._mask = size - 1
        self._count = 0
        self._learned_to: KeyPlace | None = (-1, "", "")

    @property
    def is_complete(self) -> bool:
        """Whether it knows every key on disk, and can tell what is new."""
        return self._learned_to is None

    @property
    def is_full(self) -> bool:
        return self._count * BYTES_PER_KEY > self._mask

    def is_new(self, place: KeyPlace) -> bool:
        """Whether a key was certainly never used."""
        if self._learned_to is not None:
            return False
        hashed = hash(place)
        pattern = _PATTERNS[hashed & 63]
        return self._table[(hashed >> 6) & self._mask] & pattern != pattern

    def add(self, place: KeyPlace) -> None:
        """A key is used, or about to be."""
        hashed = hash(place)
        self._table[(hashed >> 6) & self._mask] |= _PATTERNS[hashed & 63]
        self._count += 1

    # Learning

    @property
    def next_piece(self) -> KeyPlace | None:
        """After which key the next piece of those on disk begins; None when all are known."""
        return self._learned_to

    def learn(self, hashes: Iterable[int], last: KeyPlace | None) -> None:
        """Take in a piece of the keys on disk; `last` is where it ended, None at the end of all."""
        self._add_all(hashes)
        self._learned_to = last

    def begin_again(self, keys: int, kept: Iterable[KeyPlace]) -> None:
        """Forget everything, and be made for so many keys; those in the index are to be learned.

        `kept` are those whose rows are on their way to disk. Like the recent ones, they may come to
        lie in a piece of the index that was read before.
        """
        self._make(keys)
        for place in kept:
            self.add(place)
        self._add_all(self.recent.hashes())

    def load(self, rows: Iterable[Row]) -> None:
        """Take in the keys that are on disk but not in the index."""
        self.recent.load(rows)
        self._add_all(self.recent.hashes())

    def _add_all(self, hashes: Iterable[int]) -> None:
        table, mask = self._table, self._mask
        for hashed in hashes:
            table[(hashed >> 6) & mask] |= _PATTERNS[hashed & 63]
            self._count += 1


def read_piece(connection: Connection, after: KeyPlace) -> tuple[list[int], KeyPlace | None]:
    """Some keys on disk as their hashes, and where the next piece begins."""
    rows = connection.fetch("key_places_after", (*after, KEYS_PER_PIECE))
    last = (rows[-1][0], rows[-1][1], rows[-1][2]) if len(rows) == KEYS_PER_PIECE else None
    return [hash((row[0], row[1], row[2])) for row in rows], last
