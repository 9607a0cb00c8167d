"""Writing a sealed group: a handful of statements, whatever the number of requests."""

from __future__ import annotations

import apsw

from fencepost.store.commit import DiskFullError
from fencepost.store.sqlite.database import QUERIES, Writer
from fencepost.store.sqlite.ledger import LedgerGroup
from fencepost.store.sqlite.records import producer_columns


class LedgerWriter(Writer):
    """The writing connection, as the group commit sees it."""

    def write(self, sealed: LedgerGroup) -> None:
        try:
            self._write(sealed)
        except apsw.FullError as error:
            # A large group goes to the log before its commit, as far as it fits.
            raise DiskFullError(str(error)) from error

    def _write(self, sealed: LedgerGroup) -> None:
        connection = self.connection
        # Updates first: a deleted stream gives its path up before a new one takes it.
        if sealed.updates:
            connection.executemany(QUERIES["update_stream"], sealed.updates)
        if sealed.inserts:
            connection.executemany(QUERIES["insert_stream"], sealed.inserts)
        if sealed.rows:
            connection.executemany(QUERIES["insert_log"], sealed.rows)
        if sealed.producers:
            rows = [
                producer_columns(stream_id, producer)
                for (stream_id, _), producer in sealed.producers.items()
            ]
            connection.executemany(QUERIES["save_producer"], rows)
        if sealed.key_rows:
            connection.executemany(QUERIES["save_key"], sealed.key_rows)
        for statement, values in sealed.statements:
            connection.execute(statement, values)
        connection.execute(QUERIES["save_counters"], sealed.counters)
