"""Writing a sealed group: a handful of statements, whatever the number of requests."""

from __future__ import annotations

import apsw

from fencepost.store.commit import DiskFullError
from fencepost.store.engine.ledger import LedgerGroup
from fencepost.store.engine.records import producer_columns
from fencepost.store.sqlite.database import Writer


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
            connection.execute_many("update_stream", sealed.updates)
        if sealed.inserts:
            connection.execute_many("insert_stream", sealed.inserts)
        if sealed.rows:
            connection.execute_many("insert_log", sealed.rows)
        if sealed.producers:
            rows = [
                producer_columns(stream_id, producer)
                for (stream_id, _), producer in sealed.producers.items()
            ]
            connection.execute_many("save_producer", rows)
        if sealed.key_rows:
            connection.execute_many("save_key", sealed.key_rows)
        for statement, values in sealed.statements:
            connection.execute(statement, values)
        connection.execute("save_counters", sealed.counters)
