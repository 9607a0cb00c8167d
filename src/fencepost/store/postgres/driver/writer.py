"""A connection on the event loop: for turns, for the feed and for notifications.

The statements of a turn leave in one piece, and their results come back in one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import psycopg
from psycopg import AsyncRawCursor

from fencepost.store.database import Row, Values
from fencepost.store.postgres.driver.connection import (
    OPTIONS,
    SERVER,
    adapt,
    ends_session,
    judge,
    session,
)
from fencepost.store.postgres.driver.patience import PatientAsyncConnection
from fencepost.store.postgres.driver.statements import Statement, statement
from fencepost.store.postgres.driver.wire import Parcel, Wire, packed
from fencepost.store.postgres.others import Others, Seen, queries
from fencepost.store.postgres.settings import PostgresSettings

_BEGIN = (packed(b"BEGIN", ()), packed(statement("take_turn").text, ()))
_ROLLBACK = (packed(b"ROLLBACK", ()),)
_COMMIT = packed(b"COMMIT", ())


class WritingConnection:
    """One connection of a node, used by one task at a time."""

    def __init__(self, raw: PatientAsyncConnection) -> None:
        self.raw = raw
        self._wire = Wire(raw)
        self._in_doubt = False

    @classmethod
    async def connect(cls, settings: PostgresSettings) -> Self:
        """Reach the database; it must make commits durable."""
        raw = await PatientAsyncConnection.connect(
            settings.url,
            autocommit=True,
            cursor_factory=AsyncRawCursor,
            **OPTIONS,
            connect_timeout=settings.connect_timeout_s,
        )
        raw.silence_s_max = settings.silence_s_max
        try:
            adapt(raw)
            cursor = await raw.execute(SERVER, prepare=False)
            row = await cursor.fetchone()
            assert row is not None
            judge(row, writes=True)
            text, values = session(
                synchronous_commit=row[-1],
                lock_timeout_ms=settings.turn_wait_ms,
                # The wait for a turn is a statement as well.
                statement_timeout_ms=max(settings.read_timeout_ms, settings.turn_wait_ms),
                idle_in_transaction_timeout_ms=settings.turn_idle_ms,
            )
            await raw.execute(text, values, prepare=False)
        except BaseException:
            await raw.close()
            raise
        return cls(raw)

    @property
    def is_lost(self) -> bool:
        """Whether it was lost with a COMMIT under way, so that nobody knows what came of that."""
        return self._in_doubt

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            await self.raw.close()

    async def fetch(self, query: str, values: Values = ()) -> list[Row]:
        """All rows of a named query."""
        found = statement(query)
        return await self._wire.fetch(packed(found.text, found.values(values)))

    # A turn

    async def begin(self) -> Row:
        """Begin a transaction and wait for the turn: the counters, and the database's clock."""
        _, taken = await self._wire.exchange(_BEGIN)
        [row] = self._wire.rows(taken)
        return row

    async def begin_among(self, seen: Seen) -> tuple[Row, Others]:
        """The same, and in the same round trip what others have written since."""
        _, taken, *found = await self._wire.exchange([*_BEGIN, *_others(seen)])
        [row] = self._wire.rows(taken)
        return row, Others(*map(self._wire.rows, found))

    async def others(self, seen: Seen) -> Others:
        """What others have written since, in a turn."""
        return Others(*map(self._wire.rows, await self._wire.exchange(_others(seen))))

    async def rollback(self) -> None:
        """Undo the turn."""
        await self._wire.exchange(_ROLLBACK)

    async def write(self, statements: Iterable[tuple[str, Sequence[Row]]]) -> None:
        """Write something in the open transaction, in one round trip."""
        await self._wire.exchange(
            [parcel for name, rows in statements for parcel in _parcels(statement(name), rows)]
        )

    async def write_and_commit(
        self,
        statements: Sequence[tuple[str, Sequence[Row]]],
        end: Sequence[object],
        *,
        ending: str = "end_turn",
    ) -> None:
        """Write a turn and end it, in one round trip."""
        self._in_doubt = False
        try:
            *_, committed = await self._wire.exchange(self._ending(statements, ending, end))
            if committed.command_status != b"COMMIT":
                raise psycopg.InternalError(f"COMMIT was answered {committed.command_status!r}")
        except psycopg.Error as error:
            # A statement that is refused undoes the transaction. The end of the session does so
            # too, unless it came after the COMMIT, whose answer it then overtakes.
            self._in_doubt = self._in_doubt and (self.raw.closed or ends_session(error))
            raise
        self._in_doubt = False

    def _ending(
        self, statements: Iterable[tuple[str, Sequence[Row]]], ending: str, end: Sequence[object]
    ) -> Iterator[Parcel]:
        # Values that cannot be sent are an error before the COMMIT is on its way.
        for name, rows in statements:
            yield from _parcels(statement(name), rows)
        ended = statement(ending)
        yield packed(ended.text, ended.values(end))
        self._in_doubt = True
        yield _COMMIT

    # The feed

    async def listen(self, channel: str) -> None:
        await self.raw.execute(f'LISTEN "{channel}"')

    async def wait_for_notification(self, timeout_s: float) -> list[bytes]:
        """Wait until somebody notifies, or for so long: what was said since the last time."""
        return await self._wire.wait_for_notification(timeout_s)


def _others(seen: Seen) -> list[Parcel]:
    return [packed(statement(name).text, values) for name, values in queries(seen)]


def _parcels(found: Statement, rows: Sequence[Row]) -> list[Parcel]:
    if found.by_columns:
        return [packed(found.text, found.columns(rows))]
    return [packed(found.text, found.values(row)) for row in rows]
