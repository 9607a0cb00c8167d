"""The keys that were used last: on disk, but not in the index by which a key is found there.

The rows of keys lie in the order of their use. To put each into an index that is ordered otherwise
writes a page for a key; to put in thousands at once writes a page for many. Until that is done they
are found by what is kept here: the number of its row, by the hash of a key's place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fencepost.store.database import Connection, Row

KeyPlace = tuple[int, str, str]
"""Where a key is kept: its stream (0: of whole commits), whose it is, and the key itself."""


class RecentKeys:
    """The numbers of the rows of keys that are not in the index."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._indexing: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ids) + len(self._indexing)

    def hashes(self) -> Iterable[int]:
        """What the places of all of them come to."""
        return (*self._indexing, *self._ids)

    def add(self, places: Collection[KeyPlace], last_id: int) -> None:
        """These came to disk together, and the row of the last of them has this number."""
        numbers = range(last_id - len(places) + 1, last_id + 1)
        self._ids.update(zip(map(hash, places), numbers, strict=True))

    def load(self, rows: Iterable[Row]) -> None:
        """Forget everything: these are the keys that are not in the index, their numbers first."""
        self._indexing = {}
        self._ids = {hash((stream, principal, key)): id_ for id_, stream, principal, key in rows}

    def find(self, connection: Connection, place: KeyPlace) -> list[Row]:
        """The row of a key, if it is one of these."""
        hashed = hash(place)
        found = self._ids.get(hashed) or self._indexing.get(hashed)
        if found is None:
            return []
        rows = connection.fetch("find_key_by_id", (found, *place))
        # It was swept meanwhile, or it is another place that comes to the same hash, which is as
        # good as impossible: then it takes its time.
        return rows or connection.fetch("find_unindexed_key", place)

    def begin_indexing(self) -> None:
        """All that came to disk so far is about to be put into the index."""
        # What is left of a time before that came to nothing is still there.
        self._indexing.update(self._ids)
        self._ids = {}

    def end_indexing(self) -> None:
        """All that was there when the indexing began is in the index."""
        self._indexing = {}
