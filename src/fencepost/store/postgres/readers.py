"""Reading from the database: what a stream holds, and the connections that it is read through.

Readers are threads, each with a connection that is made again when it is lost. What a decision has
to look up goes through a connection of its own, on the event loop (`Lookups`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

import psycopg

from fencepost.protocol.offsets import Offset
from fencepost.store import records
from fencepost.store.contract import (
    BadOffset,
    DataDamagedError,
    Missing,
    StoreAwayError,
    StreamInfo,
    Truncated,
)
from fencepost.store.postgres.driver.connection import PostgresConnection, is_away
from fencepost.store.read import chunks as reading
from fencepost.store.read.chunks import Readers, own_segments
from fencepost.store.sql import Row, Values

T = TypeVar("T")


class Slot:
    """The connection of one reader thread, which is made when it is first used."""

    def __init__(
        self,
        connect: Callable[[], PostgresConnection],
        connected: Callable[[PostgresConnection], None],
        lost: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._connected = connected
        self._lost = lost
        self._connection: PostgresConnection | None = None

    def run(self, work: Callable[[PostgresConnection], T]) -> T:
        """Do some reading; once more on a new connection when the old one turns out to be lost."""
        for is_last in (False, True):
            try:
                if self._connection is None:
                    self._connection = self._connect()
                    self._connected(self._connection)
                return work(self._connection)
            except psycopg.Error as error:
                if not is_away(error):
                    raise
                self.close()
                self._lost()
                if is_last:
                    raise StoreAwayError(str(error).strip()) from error
        raise AssertionError("the second time either returns or raises")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()


class PostgresReaders(Readers[PostgresConnection]):
    """Reader threads whose connections survive a restart of the database."""

    def __init__(
        self,
        connect: Callable[[], PostgresConnection],
        *,
        threads: int,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`lost` is called in a thread that has lost its connection, and in one that has reached
        another server than those before, before it reads."""
        self._connect = connect
        self._lost = lost
        self._server: str | None = None
        self._local = threading.local()
        self._slots: list[Slot] = []
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fencepost-reader")

    def _run(self, work: Callable[[PostgresConnection], T]) -> T:
        slot: Slot | None = getattr(self._local, "slot", None)
        if slot is None:
            slot = self._local.slot = Slot(self._connect, self._connected, self._lost)
            self._slots.append(slot)
        return slot.run(work)

    def _connected(self, connection: PostgresConnection) -> None:
        """Notice that another server has taken the place of the one before: other threads may not
        have heard the end of it yet."""
        if connection.server != self._server:
            self._server = connection.server
            self._lost()

    def close(self) -> None:
        self._pool.shutdown()
        for slot in self._slots:
            slot.close()


class Lookups:
    """What the ledger asks while a request is being decided, beside the connection of the turn.

    No other node can write then, so what is committed is all there is. The error of a connection
    that was lost undoes the turn, and the next question makes another connection. The event loop
    stands still for an answer, so it waits for one no longer than `lookup_wait_ms`.
    """

    def __init__(self, connect: Callable[[], PostgresConnection]) -> None:
        self._connect = connect
        self._connection: PostgresConnection | None = None

    @property
    def _live(self) -> PostgresConnection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    @property
    def after_every_text(self) -> str | bytes:
        return PostgresConnection.after_every_text

    def fetch(self, query: str, values: Values = (), *, rows: str | None = None) -> list[Row]:
        return self._live.fetch(query, values, rows=rows)

    def execute(self, query: str, values: Values = ()) -> int:
        return self._live.execute(query, values)

    def execute_many(self, query: str, rows: Sequence[Row]) -> None:
        self._live.execute_many(query, rows)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._live.__exit__(kind, error, trace)

    def close(self) -> None:
        """Close the connection; the next question makes another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()


def read_stream(
    connection: PostgresConnection, info: StreamInfo, after: Offset, bytes_max: int
) -> reading.Piece | BadOffset | Truncated | Missing:
    """What a stream holds after an offset, up to so many bytes."""
    # The rows that a fork inherited stay when it is deleted; only its own row says that it is gone.
    if info.segments and not connection.fetch("find_stream_by_id", (info.id,)):
        return Missing()
    try:
        return reading.read_chunk(
            connection,
            own_segments(info.id, info.segments, info.tail),
            after,
            bytes_max=bytes_max,
            is_json=info.is_json,
        )
    except reading.OffsetError:
        return BadOffset()
    except reading.RowsGoneError as error:
        return _purged(connection, info, after, str(error))


def _purged(
    connection: PostgresConnection, info: StreamInfo, after: Offset, detail: str
) -> Truncated | Missing:
    """Rows went under the reader: the stream was deleted, or truncated, and purged since."""
    rows: list[Row] = connection.fetch("find_stream_by_id", (info.id,))
    if not rows:
        return Missing()
    stream, _ = records.stream_from_row(rows[0])
    if after.bytes < stream.first.bytes:
        return Truncated(stream.first)
    raise DataDamagedError(f"stream {info.path!r}: {detail}")
