"""Statements sent in one piece: connections on the event loop, for turns, feed and notifications.

A turn is a few statements that are always the same, many times a second. A cursor of psycopg looks
at each of them anew: how it is written, of what types its values are, what its result looks like;
that takes longer than deciding the requests of the turn. Here a statement is prepared when a
connection first uses it, its values leave as PostgreSQL keeps them, all statements of a turn leave
in one piece, and one look at the socket takes in all the results that are there.

What leaves together is a stretch. It ends with a Sync and with nothing after that: only from there
does PostgreSQL count how long a session is idle, and by that count it ends the turn of a node that
stopped in it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Self

import psycopg
from psycopg import AsyncRawCursor
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGresult

from fencepost.store.postgres.driver.connection import (
    OPTIONS,
    SERVER,
    PatientAsyncConnection,
    SilentError,
    adapt,
    ends_session,
    judge,
    session,
)
from fencepost.store.postgres.driver.statements import (
    Parcel,
    Query,
    asked,
    packed,
    parcels,
    statement,
)
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Row, Values

PIECE_BYTES = 8192
"""When so many bytes of a stretch are packed, they are sent ahead of the rest."""
OVERTAKEN = "22P02"
"""What the server says when `quick_turn` finds that another node has had a turn. Another statement
that meets it is undone likewise, and meets it again in the ordinary turn that follows."""
CANCELLED_S_MAX = 1.0
"""How long a task that is cancelled waits for the answers that are still on their way."""

_GOOD = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
_SYNC, _BAD, _FATAL = ExecStatus.PIPELINE_SYNC, ConnStatus.BAD, ExecStatus.FATAL_ERROR
_BINARY = Format.BINARY


_Key = tuple[bytes, tuple[int, ...]]
"""What a prepared statement is known by: its text and the types of its values."""


class Pipeline:
    """The way to the database of one connection, for one user at a time."""

    def __init__(self, raw: PatientAsyncConnection) -> None:
        self._raw = raw
        self._pgconn = raw.pgconn
        self._transformer = Transformer(raw)
        self._prepared: dict[_Key, bytes] = {}
        self._names = 0
        self._notified: list[bytes] = []
        self.cut_off_count = 0
        """How many answers of the last stretch were still to come, behind the one in whose place
        the server said that it ends the session; -1 when it said so behind all of them."""
        # Of the wait that is under way:
        self._loop = asyncio.get_running_loop()
        self._socket = -1
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._results: list[PGresult] = []
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # Statements

    async def exchange(self, stretch: Iterable[Parcel]) -> list[PGresult]:
        """Send statements in one piece; their results, once all of them were carried out.

        A statement that is refused keeps those after it from being carried out, and is an error.
        The database begins with the first ones while later ones are still being packed.
        """
        self.cut_off_count = -1
        prepared = self._send(stretch)
        try:
            await self._receive()
        except psycopg.Error as error:
            if error.sqlstate is not None:
                answered = sum(result.status in _GOOD for result in self._results)
                self.cut_off_count = len(prepared) - answered - 1
            raise
        self._pgconn.exit_pipeline_mode()
        results, self._results = self._results, []
        for result in results:
            if result.status not in _GOOD:
                self._unprepare(prepared, results)
                raise error_from_result(result)
        return [result for result, new in zip(results, prepared, strict=True) if new is None]

    def check(self) -> None:
        """Raise if it is known by now that the connection is lost."""
        for _ in range(2):  # what the server said when it went, and that it is gone
            self._pgconn.consume_input()
        if self._pgconn.status == _BAD:
            raise psycopg.OperationalError(f"the connection is lost: {_said(self._pgconn)}")

    def _unprepare(self, prepared: Sequence[_Key | None], results: Sequence[PGresult]) -> None:
        """Forget the statements that were not prepared, because one before them was refused."""
        for key, result in zip(prepared, results, strict=False):
            if key is not None and result.status not in _GOOD:
                del self._prepared[key]

    async def fetch(self, parcel: Parcel) -> list[Row]:
        """All rows of a query."""
        [result] = await self.exchange([parcel])
        return self.rows(result)

    def rows(self, result: PGresult) -> list[Row]:
        """The rows of a result."""
        count = result.ntuples
        if not count:
            return []
        self._transformer.set_pgresult(result, set_loaders=True, format=_BINARY)
        return self._transformer.load_rows(0, count, tuple)

    def _send(self, stretch: Iterable[Parcel]) -> list[_Key | None]:
        """Hand a stretch to libpq: for each result the statement that it prepares, or None."""
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        prepared: list[_Key | None] = []
        waiting_bytes = 0
        for text, types, values in stretch:
            key = (text, types)
            name = self._prepared.get(key)
            if name is None:
                self._names += 1
                name = self._prepared[key] = b"fencepost_%d" % self._names
                pgconn.send_prepare(name, text, types)
                prepared.append(key)
            pgconn.send_query_prepared(name, values, (_BINARY,) * len(values), _BINARY)
            prepared.append(None)
            waiting_bytes += sum([len(value) for value in values if value is not None])
            if waiting_bytes > PIECE_BYTES:
                pgconn.flush()
                waiting_bytes = 0
        pgconn.pipeline_sync()
        return prepared

    # Notifications

    async def wait_for_notification(self, timeout_s: float) -> list[bytes]:
        """Wait for a notification, for so long at most: those that came since the last call."""
        # What came between the last result and its Sync was read with them; nothing tells of it.
        self._gather()
        if not self._notified:
            over = self._over = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._end)
            self._watch(self._take_notifications)
            try:
                await over
            finally:
                timer.cancel()
                self._unwatch()
        notified, self._notified = self._notified, []
        return notified

    def _take_notifications(self) -> None:
        try:
            self._consume()
        except psycopg.Error as error:
            self._end(error)
        else:
            if self._notified:
                self._end()
            else:
                self._watch_on(self._take_notifications)

    # Waiting. The socket is let go of in the same breath in which libpq may have closed it: its
    # number may be that of another one soon.

    async def _receive(self) -> None:
        """Send what is still to be sent, and wait until all results of the stretch are here."""
        loop = self._loop
        self._over = loop.create_future()
        self._results = []
        self._heard_at = loop.time()
        patience_s = self._raw.silence_s_max
        if patience_s is not None:
            self._timer = loop.call_later(patience_s, self._doubt, patience_s)
        try:
            is_sent = not self._pgconn.flush()
            if self._pgconn.status == _BAD:
                raise psycopg.OperationalError(f"the connection is lost: {_said(self._pgconn)}")
            self._watch(self._take)
            if not is_sent:
                loop.add_writer(self._socket, self._push)
            await self._over
        except asyncio.CancelledError:
            # The next stretch must not find the answers to this one.
            over = self._over = loop.create_future()
            late = loop.call_later(CANCELLED_S_MAX, self._end, SilentError("given up"))
            try:
                await over
                self._pgconn.exit_pipeline_mode()
            except BaseException:
                self._unwatch()
                self._pgconn.finish()
            finally:
                late.cancel()
            raise
        except SilentError:
            # It is closed, because an answer may still be on its way.
            self._unwatch()
            self._pgconn.finish()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._unwatch()

    def _take(self) -> None:
        """The socket has something to read."""
        try:
            self._consume()
            if not self._collect():
                self._watch_on(self._take)
                return
        except psycopg.Error as error:
            # What the server said about its going tells more than that it went.
            said = [error_from_result(r) for r in self._results if r.status == _FATAL]
            self._end(next((e for e in said if e.sqlstate is not None), error))
            return
        self._end()

    def _consume(self) -> None:
        self._heard_at = self._loop.time()
        self._pgconn.consume_input()
        self._gather()

    def _gather(self) -> None:
        while (notification := self._pgconn.notifies()) is not None:
            self._notified.append(notification.extra)

    def _collect(self) -> bool:
        """Take in the results that are there; whether that was all of the stretch."""
        pgconn = self._pgconn
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if pgconn.status == _BAD:
                if result is not None:
                    self._results.append(result)
                raise psycopg.OperationalError(f"the connection is lost: {_said(pgconn)}")
            if result is None:
                continue  # between two statements
            if result.status == _SYNC:
                return True
            self._results.append(result)
        return False

    def _push(self) -> None:
        """The socket has room for more."""
        self._heard_at = self._loop.time()
        try:
            is_sent = not self._pgconn.flush()
        except psycopg.Error as error:
            self._end(error)
            return
        if self._pgconn.status == _BAD:
            self._take()
        elif is_sent:
            self._loop.remove_writer(self._socket)

    def _doubt(self, patience_s: float) -> None:
        """Give the connection up when the database was silent for too long."""
        left_s = self._heard_at + patience_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._doubt, patience_s)
        else:
            self._end(SilentError(f"the database has said nothing for {patience_s:g} s"))

    def _watch(self, take: Callable[[], None]) -> None:
        self._socket = self._pgconn.socket
        self._loop.add_reader(self._socket, take)

    def _watch_on(self, take: Callable[[], None]) -> None:
        """Watch anew: uvloop tells of a socket that has failed once, and no more."""
        self._loop.remove_reader(self._socket)
        self._loop.add_reader(self._socket, take)

    def _unwatch(self) -> None:
        if self._socket >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket = -1

    def _end(self, error: BaseException | None = None) -> None:
        self._unwatch()
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


def _said(pgconn: Any) -> str:
    return str(pgconn.get_error_message()).strip()


_BEGIN = (packed(b"BEGIN", ()), packed(statement("take_turn").text, ()))
_ROLLBACK = (packed(b"ROLLBACK", ()),)
_COMMIT = packed(b"COMMIT", ())


class WritingConnection:
    """One connection of a node, used by one task at a time."""

    def __init__(self, raw: PatientAsyncConnection) -> None:
        self.raw = raw
        self._pipeline = Pipeline(raw)
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
            *server, _ = row
            judge(server, writes=True)
            text, values = session(
                synchronous_commit=server[-1],
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
        """Whether it was lost with a COMMIT under way, so that the outcome is unknown."""
        return self._in_doubt

    async def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            await self.raw.close()

    async def fetch(self, query: str, values: Values = ()) -> list[Row]:
        """All rows of a named query."""
        found = statement(query)
        return await self._pipeline.fetch(packed(found.text, found.values(values)))

    # A turn

    async def begin(self) -> Row:
        """Begin a transaction and wait for the turn: the counters, and the database's clock."""
        _, taken = await self._pipeline.exchange(_BEGIN)
        [row] = self._pipeline.rows(taken)
        return row

    async def begin_and_fetch(self, queries: Iterable[Query]) -> tuple[Row, list[list[Row]]]:
        """The same, and in the same round trip the rows of some queries, asked in the turn."""
        sent = [*_BEGIN, *asked(queries)]
        _, taken, *found = await self._pipeline.exchange(sent)
        rows = self._pipeline.rows
        [counters] = rows(taken)
        return counters, [rows(result) for result in found]

    async def fetch_all(self, queries: Iterable[Query]) -> list[list[Row]]:
        """The rows of some queries, in one round trip."""
        results = await self._pipeline.exchange(asked(queries))
        return [self._pipeline.rows(result) for result in results]

    async def rollback(self) -> None:
        """Undo the turn."""
        await self._pipeline.exchange(_ROLLBACK)

    async def write(self, statements: Iterable[tuple[str, Sequence[Row]]]) -> None:
        """Write something in the open transaction, in one round trip."""
        await self._pipeline.exchange(parcels(statements))

    async def write_and_commit(
        self,
        statements: Sequence[tuple[str, Sequence[Row]]],
        end: Sequence[object],
        *,
        ending: str = "end_turn",
    ) -> None:
        """Write a turn that has begun and end it, in one round trip."""
        written = chain(parcels(statements), asked([(ending, end)]))
        *_, committed = await self._commit(written, (_COMMIT,))
        if committed.command_status != b"COMMIT":
            raise psycopg.InternalError(f"COMMIT was answered {committed.command_status!r}")

    async def take_quick_turn(
        self, statements: Sequence[tuple[str, Sequence[Row]]], end: Sequence[object]
    ) -> int | None:
        """Begin a turn, write it and end it, in one round trip; the database's time.

        None when another node has had a turn: then nothing has happened. What leaves in one piece
        is one transaction without a word, which ends with the piece.
        """
        # To a connection that was lost while it was idle nothing is sent, so nothing is in doubt.
        self._in_doubt = False
        self._pipeline.check()
        written = chain(asked([("quick_turn", end)]), parcels(statements))
        try:
            taken, *_ = await self._commit(written)
        except psycopg.Error as error:
            if error.sqlstate == OVERTAKEN:
                return None
            raise
        [(now_ms,)] = self._pipeline.rows(taken)
        return int(now_ms)

    async def _commit(
        self, written: Iterable[Parcel], ending: tuple[Parcel, ...] = ()
    ) -> list[PGresult]:
        self._in_doubt = False
        try:
            results = await self._pipeline.exchange(self._doubted(written, ending))
        except psycopg.Error as error:
            # A statement that is refused undoes the transaction. The end of the session does so
            # too, unless it came in the COMMIT or after it, whose answer it then overtakes.
            is_undone = self._pipeline.cut_off_count >= len(ending)
            is_over = self.raw.closed or ends_session(error)
            self._in_doubt = self._in_doubt and is_over and not is_undone
            raise
        self._in_doubt = False
        return results

    def _doubted(self, written: Iterable[Parcel], ending: tuple[Parcel, ...]) -> Iterator[Parcel]:
        # Values that cannot be sent are an error before the commit is on its way.
        yield from written
        self._in_doubt = True
        yield from ending

    # The feed

    async def listen(self, channel: str) -> None:
        await self.raw.execute(f'LISTEN "{channel}"')

    async def wait_for_notification(self, timeout_s: float) -> list[bytes]:
        """Wait for a notification, for so long at most: those that came since the last call."""
        return await self._pipeline.wait_for_notification(timeout_s)
