"""Loaders: where a ledger finds a record that it does not have in memory.

A ledger asks its loader for one record at a time and does not know where that comes from. The
loader here asks the database for each (`DiskLoader`); others have fetched in bulk what a turn of
several servers (`postgres/cache.py`) or a slice of a large commit (`large/copies.py`) names.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Protocol

from fencepost.protocol.appends import KeyRecord
from fencepost.protocol.commits import Part
from fencepost.protocol.streams import RECENT_BATCHES, Producer
from fencepost.store import records
from fencepost.store.sql import Connection, Row
from fencepost.store.write.behind import Behind
from fencepost.store.write.books import BooksRows
from fencepost.store.write.groups import GroupRows
from fencepost.store.write.keys import KeyPlace
from fencepost.store.write.staging import ChunkRow, StagedPart


class Loader(Protocol):
    """Finds records as they are on disk."""

    @property
    def connection(self) -> Connection:
        """Where everything else is asked for that a ledger needs only now and then."""
        ...

    @property
    def groups(self) -> GroupRows:
        """Where the rows of groups are found."""
        ...

    @property
    def books(self) -> BooksRows:
        """Where is found what books need."""
        ...

    def stream(self, path: str) -> Row | None:
        """The row of the stream at a path, soft-deleted ones included."""
        ...

    def stream_by_id(self, stream_id: int) -> Row | None:
        """The row of a stream that is not deleted, by its incarnation."""
        ...

    def producer(self, stream_id: int, producer_id: str) -> Producer | None:
        """What a producer has done on a stream."""
        ...

    def key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        """What a key stands for, and what was answered."""
        ...

    def send(self, place: KeyPlace) -> Row | None:
        """The dedupe row of a send, without its place."""
        ...

    def part(self, part: Part) -> StagedPart | None:
        """A part that was staged, committed ones included."""
        ...

    def parts(self, parts: Collection[Part]) -> dict[Part, StagedPart]:
        """Those of some parts that were staged."""
        ...

    def chunks(self, part: Part) -> dict[int, ChunkRow]:
        """The chunks of a part by their numbers."""
        ...

    def digest(self, part: Part, ordinal: int) -> bytes | None:
        """The digest of a chunk that was uploaded before."""
        ...

    def digests(self, chunks: Collection[tuple[Part, int]]) -> dict[tuple[Part, int], bytes]:
        """The digests of those of some chunks that were uploaded before."""
        ...


class DiskLoader:
    """Asks the database for each record when it is needed.

    What is only in the log as yet is in memory (`behind`). It is taken before the row is read: what
    is written and dropped meanwhile is in the one or in the other.
    """

    def __init__(self, connection: Connection, behind: Behind | None = None) -> None:
        self.connection = connection
        self._behind = Behind(0) if behind is None else behind
        self._groups = GroupRows(connection)
        self._books = BooksRows(connection)

    @property
    def groups(self) -> GroupRows:
        return self._groups

    @property
    def books(self) -> BooksRows:
        return self._books

    def stream(self, path: str) -> Row | None:
        tails = self._behind.tails
        rows = self.connection.fetch("find_stream", (path,))
        return records.with_tail(rows[0], tails.get(rows[0][0])) if rows else None

    def stream_by_id(self, stream_id: int) -> Row | None:
        tails = self._behind.tails
        rows = self.connection.fetch("find_stream_by_id", (stream_id,))
        return records.with_tail(rows[0], tails.get(stream_id)) if rows else None

    def producer(self, stream_id: int, producer_id: str) -> Producer | None:
        newest = self._behind.producers.get((stream_id, producer_id))
        rows = self.connection.fetch("find_producer", (stream_id, producer_id))
        if not rows:
            return None
        row = records.with_batch(rows[0], newest)
        _, seq, _, position, *_ = row
        batches = self.connection.fetch("recent_batches", (position, RECENT_BATCHES))
        producer = records.producer_from_rows(producer_id, row, batches)
        if len(batches) < min(seq + 1, RECENT_BATCHES):
            # A purge after a truncation took the rows of the other batches, and left this behind.
            for kept in self.connection.fetch("find_remembered", (stream_id, producer_id)):
                return records.with_remembered(producer, len(batches), *kept)
        return producer

    def key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        rows = self.connection.fetch("find_key", place)
        return records.key_from_row(rows[0]) if rows else None

    def send(self, place: KeyPlace) -> Row | None:
        rows = self.connection.fetch("find_send", place)
        return rows[0] if rows else None

    def part(self, part: Part) -> StagedPart | None:
        rows = self.connection.fetch("find_part", part)
        return StagedPart(*rows[0]) if rows else None

    def parts(self, parts: Collection[Part]) -> dict[Part, StagedPart]:
        named = {"parts": json.dumps(list(parts))}
        return {
            Part(txn, part): StagedPart(*found)
            for txn, part, *found in self.connection.fetch("find_parts", named)
        }

    def chunks(self, part: Part) -> dict[int, ChunkRow]:
        return {row[1]: ChunkRow(*row) for row in self.connection.fetch("part_chunks", part)}

    def digest(self, part: Part, ordinal: int) -> bytes | None:
        rows = self.connection.fetch("find_chunk", (*part, ordinal))
        return bytes(rows[0][0]) if rows else None

    def digests(self, chunks: Collection[tuple[Part, int]]) -> dict[tuple[Part, int], bytes]:
        named = {"chunks": json.dumps([(*part, ordinal) for part, ordinal in chunks])}
        rows = self.connection.fetch("find_chunks", named)
        return {(Part(txn, part), ordinal): bytes(found) for txn, part, ordinal, found in rows}
