"""The ledger of a node: true for as long as nobody else has had a turn.

A turn begins with the locked row of counters. When it shows that another node has written since
this one's last turn, what that one changed is dropped, or everything when that is not known
(`others.py`), so no decision stands on what somebody else may have changed. What the requests of a
turn name is loaded in bulk before they are decided; what was looked for and is not there is
remembered as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fencepost.protocol.appends import Append, KeyRecord
from fencepost.protocol.commits import Commit, Part
from fencepost.protocol.streams import Producer, Stream
from fencepost.store import records
from fencepost.store.database import Row
from fencepost.store.postgres.large import marks
from fencepost.store.postgres.others import Others
from fencepost.store.postgres.staged import TurnStaging
from fencepost.store.write.ledger import Entry, Ledger, LedgerGroup

KeyPlace = tuple[int, str, str]


class Needs:
    """What the requests of one turn will ask for."""

    __slots__ = (
        "chunks",
        "commit_keys",
        "keys",
        "lanes",
        "parts",
        "paths",
        "producers",
        "writers",
    )

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.producers: set[tuple[str, str]] = set()  # path and id
        self.keys: set[tuple[str, str, str]] = set()  # path, principal and key
        self.parts: set[Part] = set()  # with all their chunks
        self.chunks: set[tuple[Part, int]] = set()  # by their part and number
        # What is not loaded, but may be held by a large commit:
        self.writers: set[str] = set()
        self.commit_keys: set[tuple[str, str]] = set()  # principal and key
        self.lanes: set[str] = set()  # those who must stay in order

    def add(self, append: Append) -> None:
        """An append is to be decided."""
        self.paths.add(append.path)
        if append.producer is not None:
            self.producers.add((append.path, append.producer.id))
        conditions = append.conditions
        if conditions is not None and conditions.key is not None:
            self.keys.add((append.path, append.principal, conditions.key))

    def add_commit(self, request: Commit) -> None:
        """A commit is to be decided."""
        for item in request.items:
            self.add(item.append)
            self.parts.update(item.parts)
        if request.writer is not None:
            self.writers.add(request.writer.name)
        if request.key is not None:
            self.commit_keys.add((request.principal, request.key))

    def marks(self) -> set[int]:
        """What is needed, as the numbers by which large commits hold it."""
        return {
            *map(marks.of_path, self.paths),
            *map(marks.of_part, self.parts),
            *(marks.of_part(part) for part, _ in self.chunks),
            *map(marks.of_writer, self.writers),
            *(marks.of_key(*key) for key in self.commit_keys),
            *map(marks.of_lane, self.lanes),
        }


class TurnLedger(Ledger):
    """A ledger that is filled before it is asked."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._absent: set[str] = set()
        self._keys: dict[KeyPlace, tuple[KeyRecord, bytes] | None] = {}
        super().__init__(*arguments, **options)
        self.parts = self.staging = TurnStaging(self._connection, self._pending)

    def reset(self, counters: Row | None = None) -> None:
        self._absent.clear()
        self._keys.clear()
        super().reset(counters)

    def follow(self, counters: Row, others: Others) -> None:
        """Drop what other nodes have changed, which is all of this, and take in how it is now."""
        assert not self._pending, "between two turns nothing is under way"
        kept = self._by_path, self._by_id
        self._by_path, self._by_id = {}, {}
        self.reset(counters)
        self._by_path, self._by_id = kept
        stale = set(others.producers)
        dropped = {}
        for stream_id in others.changed() & self._by_id.keys():
            dropped[stream_id] = self._by_id[stream_id]
            self._drop(dropped[stream_id])
        for row in others.streams:
            before = dropped.get(row[0])
            if before is not None:
                self.take_in(row).producers = {
                    producer_id: producer
                    for producer_id, producer in before.producers.items()
                    if (row[0], producer_id) not in stale
                }

    # What is missing, and taking it in

    def unknown_paths(self, needs: Needs) -> list[str]:
        """Streams that have to be loaded."""
        return [
            path for path in needs.paths if path not in self._by_path and path not in self._absent
        ]

    def take_streams(self, asked: Iterable[str], rows: Iterable[Row]) -> None:
        """Take in what was found at some paths."""
        self._absent.update(asked)
        for row in rows:
            entry = self.take_in(row)
            self._absent.discard(entry.stream.path)

    def unknown_producers(self, needs: Needs) -> list[tuple[int, str]]:
        """Producers that have to be loaded, of streams that are known by now."""
        missing = []
        for path, producer_id in needs.producers:
            entry = self._by_path.get(path)
            if entry is not None and producer_id not in entry.producers:
                missing.append((entry.stream.id, producer_id))
        return missing

    def take_producers(self, asked: Iterable[tuple[int, str]], rows: Iterable[Row]) -> None:
        """Take in what was found of some producers."""
        found = {(row[0], row[1]): _producer(row[1], row[2:]) for row in rows}
        for stream_id, producer_id in asked:
            entry = self._by_id[stream_id]
            if len(entry.producers) >= self._producers_max:
                self._forget_producers(entry)
            entry.producers[producer_id] = found.get((stream_id, producer_id))

    def unknown_keys(self, needs: Needs) -> list[KeyPlace]:
        """Keys that have to be loaded, of streams that are known by now."""
        missing = []
        for path, principal, key in needs.keys:
            entry = self._by_path.get(path)
            if entry is not None:
                missing.append((entry.stream.id, principal, key))
        return missing

    def take_keys(self, asked: Iterable[KeyPlace], rows: Iterable[Row]) -> None:
        """Take in what was found of some keys; it is forgotten after the turn."""
        self._keys = dict.fromkeys(asked)
        for stream_id, principal, key, *columns in rows:
            self._keys[stream_id, principal, key] = records.key_from_row(tuple(columns))

    def forget(self) -> None:
        """A turn is over: there may be any number of keys and parts, and most are used once."""
        self._keys.clear()
        self.parts.forget()
        if len(self._absent) > self._streams_max:
            # Anybody may ask for any number of streams that are not there.
            self._absent.clear()

    # Finding

    def find(self, path: str) -> Entry | None:
        entry = self._by_path.get(path)
        if entry is not None:
            return None if entry.gone else entry
        return None if path in self._absent else super().find(path)

    def add(self, group: LedgerGroup, stream: Stream) -> Entry:
        self._absent.discard(stream.path)
        entry = super().add(group, stream)
        entry.stored_deadline_ms = stream.lifetime.deadline_ms(stream.touched_ms)
        return entry

    # A stream's end. Whoever writes to it writes its deadline as well, to the millisecond, because
    # other nodes know it from there alone; only reads leave slack, or each would be a write.

    def slide(self, entry: Entry, now_ms: int) -> bool:
        stream = entry.stream
        if stream.lifetime.ttl_s is None:
            return False
        stream.touched_ms = max(stream.touched_ms, now_ms)
        deadline_ms = stream.lifetime.deadline_ms(now_ms)
        assert deadline_ms is not None
        if entry.stored_deadline_ms is not None and entry.stored_deadline_ms >= deadline_ms:
            return False
        entry.stored_deadline_ms = deadline_ms
        return True

    def slide_loosely(self, entry: Entry, now_ms: int) -> bool:
        """The same for a read: what is stored then covers the reads of some time to come."""
        return super().slide(entry, now_ms)

    def _load_producer(self, _stream_id: int, producer_id: str, row: Row) -> Producer:
        return _producer(producer_id, row)

    def _find_key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        kept = self._kept_key(place)
        if kept is None and place in self._keys:
            return self._keys[place]
        return kept or super()._find_key(place)


def _producer(producer_id: str, row: Row) -> Producer:
    epoch, seq, first, position, updated_ms, principal, claim, recent = row
    return Producer(producer_id, epoch, seq, first, recent, position, updated_ms, principal, claim)
