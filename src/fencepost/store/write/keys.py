"""Idempotency-Keys: whether a key was used before, and what was answered then.

`KeyLedger` answers both. It asks in the order of what a question costs: the filter in memory, which
knows most new keys to be new (`KeyFilter`); the groups that are not on disk yet; the newest keys on
disk, which are not in the index yet (`RecentKeys`); the index.

The filter exists because nearly every key is new, and to find that out in the database costs as
much as deciding the rest of the append. It is a table of bytes. Every key in use has set three bits
of one byte; a key with one of its bits unset is certainly new, and any other is looked up on disk.
All bits of a key are in one byte because reading one byte costs a third of reading three. The
filter gives no answer until it has learned the keys on disk, which happens in the background and in
pieces. Forgotten keys stay in it, so it is rebuilt, and larger if need be, when it is full.

Recent keys exist because the rows of keys lie in the order of their use. To put each key at once
into an index with another order would write one page for each key; to put in thousands together
writes one page for many. Until then the number of a key's row is found in memory, by the hash of
the key's place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

from fencepost.protocol.appends import Appended, KeyRecord
from fencepost.store import records
from fencepost.store.sql import Connection, Row

COMMITS = 0
"""The stream id under which the keys of whole commits are kept; no stream has it."""


class KeyTable(NamedTuple):
    """The queries of a table whose rows lie in the order of their use, with an index behind."""

    count_rows: str
    unindexed: str
    find_by_id: str
    find_unindexed: str
    places_after: str
    last_to_index: str
    index_rows: str
    mark_indexed: str


KEYS = KeyTable(
    "count_keys",
    "unindexed_keys",
    "find_key_by_id",
    "find_unindexed_key",
    "key_places_after",
    "last_to_index",
    "index_keys",
    "mark_indexed",
)


class KeyGroup(Protocol):
    """A group, as far as keys go."""

    keys: dict[KeyPlace, Row]
    numbered_keys: list[tuple[Collection[KeyPlace], int]]


class KeyLoader(Protocol):
    """Finds keys as they are on disk."""

    @property
    def connection(self) -> Connection: ...

    def key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None: ...


class KeyLedger:
    """What a ledger knows of keys."""

    def __init__(
        self, loader: KeyLoader, pending: Sequence[KeyGroup], key_retention_ms: int | None
    ) -> None:
        self._key_loader = loader
        self._keyed = pending
        self.key_retention_ms = key_retention_ms
        self.key_filter: KeyFilter | None = None
        """Tells most new keys from used ones without a look at the disk, where there is one."""

    def filter_keys(self) -> KeyFilter:
        """Have a filter of keys, which is to learn those on disk."""
        self.key_filter = KeyFilter()
        self.key_filter.load(self._key_loader.connection.fetch("unindexed_keys"))
        return self.key_filter

    def reset_keys(self) -> None:
        """Load again which keys are not in the index: after a failed commit that is not known."""
        if self.key_filter is not None:
            self.key_filter.load(self._key_loader.connection.fetch("unindexed_keys"))

    def keys_committed(self, group: KeyGroup) -> None:
        """The keys of a group are on disk."""
        if self.key_filter is not None:
            for places, last_id in group.numbered_keys:
                self.key_filter.recent.add(places, last_id)

    def find_key(self, place: KeyPlace) -> KeyRecord | None:
        """What an Idempotency-Key of a stream and a principal stands for."""
        if self.key_filter is not None and self.key_filter.is_new(place):
            return None
        found = self._find_key(place)
        return None if found is None else found[0]

    def find_commit_key(self, principal: str, key: str) -> tuple[KeyRecord, bytes] | None:
        """What the key of a whole commit stands for, and what was answered."""
        place = (COMMITS, principal, key)
        if self.key_filter is not None and self.key_filter.is_new(place):
            return None
        return self._find_key(place)

    def _find_key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        kept = self._kept_key(place)
        if kept is not None:
            return kept
        if self.key_filter is not None:
            rows = self.key_filter.recent.find(self._key_loader.connection, place)
            if rows:
                return records.key_from_row(rows[0])
        return self._key_loader.key(place)

    def _kept_key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        """A key whose row is not on disk yet."""
        for group in self._keyed:
            row = group.keys.get(place)
            if row is not None:
                return records.key_from_columns(row)
        return None

    def kept_keys(self) -> list[KeyPlace]:
        """The keys whose rows are not on disk yet."""
        return [place for group in self._keyed for place in group.keys]

    def keep_key(
        self,
        group: KeyGroup,
        place: KeyPlace,
        record: KeyRecord,
        answer: bytes = b"",
    ) -> None:
        """Remember what the key of a commit was used for, in the transaction of the commit."""
        retention_ms = self.key_retention_ms
        expires_ms = None if retention_ms is None else record.created_ms + retention_ms
        group.keys[place] = records.key_columns(*place, record, answer, expires_ms)
        if self.key_filter is not None:
            self.key_filter.add(place)

    def keep_append_key(
        self,
        group: KeyGroup,
        place: KeyPlace,
        digest: bytes,
        outcome: Appended,
        now_ms: int,
    ) -> None:
        """The same for the key of an append. Its row is made at once, value by value: what it says
        is asked for only by the few that come again, and this is done for each."""
        stream_id, principal, key = place
        start_messages, start_bytes = outcome.start
        tail_messages, tail_bytes = outcome.tail
        retention_ms = self.key_retention_ms
        group.keys[place] = (
            stream_id,
            principal,
            key,
            digest,
            start_messages,
            start_bytes,
            tail_messages,
            tail_bytes,
            outcome.closed,
            outcome.position,
            now_ms,
            None if retention_ms is None else now_ms + retention_ms,
            None,
        )
        if self.key_filter is not None:
            self.key_filter.add(place)


BYTES_MIN = 1 << 17
BYTES_PER_KEY = 2
"""With this many for each of as many keys as fit, one new key in 40 is looked for in vain."""
KEYS_PER_PIECE = 20_000

_PATTERNS = bytes(sum(1 << bit for bit in bits) for bits in combinations(range(8), 3))
_PATTERNS += _PATTERNS[: 64 - len(_PATTERNS)]
"""The ways to set three bits of a byte, some of them twice to make up a power of two."""


class KeyFilter:
    """What one store knows of its keys. Used on the event loop; pieces are read elsewhere."""

    def __init__(self, table: KeyTable = KEYS) -> None:
        self.table = table
        self.recent = RecentKeys(table)
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


def read_piece(
    connection: Connection, after: KeyPlace, table: KeyTable = KEYS
) -> tuple[list[int], KeyPlace | None]:
    """Some keys on disk as their hashes, and where the next piece begins."""
    rows = connection.fetch(table.places_after, (*after, KEYS_PER_PIECE))
    last = (rows[-1][0], rows[-1][1], rows[-1][2]) if len(rows) == KEYS_PER_PIECE else None
    return [hash((row[0], row[1], row[2])) for row in rows], last


KeyPlace = tuple[int, str, str]
"""Where a key is kept: its stream (0: of whole commits), whose it is, and the key itself. The
row of a send is kept in the same way: by its mesh, its sender and its id (`sends.py`)."""


class RecentKeys:
    """The numbers of the rows of keys that are not in the index."""

    def __init__(self, table: KeyTable = KEYS) -> None:
        self._table = table
        self._ids: dict[int, int] = {}
        self._indexing: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ids) + len(self._indexing)

    def hashes(self) -> Iterable[int]:
        """The hashes of the places of all these keys."""
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
        rows = connection.fetch(self._table.find_by_id, (found, *place))
        # It was swept meanwhile, or it is another place that comes to the same hash, which is as
        # good as impossible: then it takes its time.
        return rows or connection.fetch(self._table.find_unindexed, place)

    def begin_indexing(self) -> None:
        """All that came to disk so far is about to be put into the index."""
        # What is left of a time before that came to nothing is still there.
        self._indexing.update(self._ids)
        self._ids = {}

    def end_indexing(self) -> None:
        """All that was there when the indexing began is in the index."""
        self._indexing = {}
