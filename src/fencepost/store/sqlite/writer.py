"""Writing a sealed group: a handful of statements, whatever the number of requests."""

from __future__ import annotations

from collections.abc import Iterable

import apsw

from fencepost.store.database import Row
from fencepost.store.records import producer_columns
from fencepost.store.sqlite.connection import Writer
from fencepost.store.write.group_commit import DiskFullError
from fencepost.store.write.ledger import Carried, LedgerGroup


class LedgerWriter(Writer):
    """The writing connection, as the group commit sees it."""

    def write(self, sealed: LedgerGroup) -> None:
        try:
            self._write(sealed)
        except apsw.FullError as error:
            # A large group goes to the log before its commit, as far as it fits.
            raise DiskFullError(str(error)) from error

    def _write(self, sealed: LedgerGroup) -> None:
        # Slices were decided before anything else that the group holds.
        for piece in sealed.carried:
            last_id = self._write_slice(piece)
            if piece.keys:
                places = [(stream, principal, key) for stream, principal, key, *_ in piece.keys]
                sealed.numbered_keys.append((places, last_id))
        producers = [
            producer_columns(stream_id, producer)
            for (stream_id, _), producer in sealed.producers.items()
        ]
        self._write_rows(sealed.updates, sealed.inserts, sealed.rows, producers)
        if sealed.key_rows:
            sealed.numbered_keys.append((sealed.keys, self._write_keys(sealed.key_rows)))
        self._write_statements(sealed.statements)
        self.connection.execute("save_counters", sealed.counters)

    def write_slice(self, piece: Carried) -> None:
        """What a part of a large commit writes, in a transaction that somebody else has begun."""
        self._write_slice(piece)

    def _write_slice(self, piece: Carried) -> int:
        self._write_rows(piece.updates, piece.inserts, piece.log, piece.producers)
        last_id = self._write_keys(piece.keys)
        self._write_statements(piece.statements)
        return last_id

    def _write_keys(self, rows: list[Row]) -> int:
        """Write rows of keys. They get numbers that follow each other; what is the last one."""
        if rows:
            self.connection.execute_many("save_key", rows)
        return self.connection.raw.last_insert_rowid()

    def _write_rows(
        self,
        updates: list[Row],
        inserts: list[Row],
        log: list[Row],
        producers: list[Row],
    ) -> None:
        connection = self.connection
        # Updates first: a deleted stream gives its path up before a new one takes it.
        if updates:
            connection.execute_many("update_stream", updates)
        if inserts:
            connection.execute_many("insert_stream", inserts)
        if log:
            connection.execute_many("insert_log", log)
        if producers:
            connection.execute_many("save_producer", producers)

    def _write_statements(self, statements: Iterable[tuple[str, Row]]) -> None:
        for statement, values in statements:
            self.connection.execute(statement, values)
