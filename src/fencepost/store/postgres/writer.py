"""A connection on the event loop: for turns, for the feed and for notifications.

Statements of a turn are pipelined: they leave in one piece, and their results come back in one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Self

import psycopg
from psycopg import AsyncCursor, AsyncRawCursor, generators
from psycopg.pq import ExecStatus

from fencepost.store.engine.database import Row, Values
from fencepost.store.postgres.database import OPTIONS, SERVER, adapt, ends_session, judge, session
from fencepost.store.postgres.patience import PatientAsyncConnection
from fencepost.store.postgres.settings import PostgresSettings
from fencepost.store.postgres.statements import Statement, statement

_BEGIN = b"BEGIN; " + statement("take_turn").text


class WritingConnection:
    """One connection of a node, used by one task at a time."""

    def __init__(self, raw: PatientAsyncConnection) -> None:
        self.raw = raw
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
        cursor = self.raw.cursor(binary=True)
        await cursor.execute(found.text, found.values(values))
        return await cursor.fetchall()

    # A turn

    async def begin(self) -> Row:
        """Begin a transaction and wait for the turn: the counters, and the database's clock."""
        # Not pipelined: psycopg ends a pipeline with a message after the Sync, at which PostgreSQL
        # stops counting how long this session is idle, and a node that freezes in its turn would
        # never be freed.
        cursor = await self.raw.execute(_BEGIN, prepare=False)
        cursor.nextset()
        row = await cursor.fetchone()
        assert row is not None, "the row of counters is there since the first migration"
        return row

    async def rollback(self) -> None:
        # Past psycopg's own, which after every ROLLBACK has all statements prepared again.
        self.raw.pgconn.send_query(b"ROLLBACK")
        [result] = await self.raw.wait(generators.execute(self.raw.pgconn))
        if result.status != ExecStatus.COMMAND_OK:
            raise psycopg.errors.error_from_result(result)

    async def write_and_commit(
        self, statements: Sequence[tuple[str, Sequence[Row]]], end: Sequence[object]
    ) -> None:
        """Write a turn and end it, in one round trip."""
        cursor = self.raw.cursor()
        self._in_doubt = False
        try:
            async with self.raw.pipeline():
                for name, rows in statements:
                    await _execute(cursor, statement(name), rows)
                ending = statement("end_turn")
                await cursor.execute(ending.text, ending.values(end))
                self._in_doubt = True
                await cursor.execute("COMMIT")
        except psycopg.Error as error:
            # A statement that is refused undoes the transaction. The end of the session does so
            # too, unless it came after the COMMIT, whose answer it then overtakes. Any other error
            # came before: values that cannot be sent.
            self._in_doubt = self._in_doubt and (self.raw.closed or ends_session(error))
            raise
        self._in_doubt = False

    # The feed

    async def listen(self, channel: str) -> None:
        await self.raw.execute(f'LISTEN "{channel}"')

    async def wait_for_notification(self, timeout_s: float) -> None:
        """Wait until somebody notifies, or for so long."""
        async for _ in self.raw.notifies(timeout=timeout_s, stop_after=1):
            pass


async def _execute(cursor: AsyncCursor[Any], found: Statement, rows: Sequence[Row]) -> None:
    if found.by_columns:
        await cursor.execute(found.text, found.columns(rows))
    else:
        for row in rows:
            await cursor.execute(found.text, found.values(row))
