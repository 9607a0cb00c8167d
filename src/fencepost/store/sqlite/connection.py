"""The SQLite file of the embedded store: connections to it, writing to it, and its folder's lock.

Durability rests on a few settings that look like details: WAL with synchronous=FULL means that
COMMIT returns after the fsync of the log; auto_vacuum has to be chosen before the first table, or
deleted space never comes back; automatic checkpoints are off because they would run inside the
commit of some request.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import apsw

from fencepost.protocol.streams import Producer
from fencepost.store.records import producer_columns
from fencepost.store.sql import Row, Values, load_store_queries
from fencepost.store.write.behind import Behind, Piece, Place
from fencepost.store.write.group_commit import DiskFullError
from fencepost.store.write.ledger_group import Carried, LedgerGroup
from fencepost.store.write.staging import gathered

log = logging.getLogger(__name__)

FILE = "fencepost.db"
PRIVATE = 0o600
"""The rights of a file that only its owner may read and write."""
RESTART_BUSY_MS_MAX = 20
"""How long writers wait for readers of the write-ahead log to leave it."""
BUSY_MS_MAX = 10_000
"""How long a connection waits for a lock that another one of this process holds."""

STATEMENTS_CACHED = 192
"""Places for prepared statements, of which there are far fewer: every row that `executemany` writes
takes the next place, in a circle, and puts out whatever was there. With fewer places than a group
has rows, the statements of each group would be prepared anew."""

PAGE_BYTES = 4096
"""SQLite's default, set nowhere else: what a page of the write-ahead log takes."""

QUERIES = load_store_queries(
    "fencepost.store.sqlite",
    (
        "queries",
        "keys",
        "logs",
        "lists",
        "retention",
        "subscriptions",
        "groups",
        "meshes",
        "books",
        "behind",
    ),
)


class FolderInUseError(Exception):
    """Another server has this data folder open: stop it, or name another folder with --data."""


class FolderLock:
    """An operating-system lock on a data folder; it goes with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        make_private(folder / "lock")
        self._file: TextIO = open(folder / "lock", "a+")  # noqa: SIM115  held open on purpose
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise FolderInUseError(
                f"the data folder {folder} is in use by another fencepost server"
                + (f" (process {holder})" if holder else "")
                + ": stop it, or give this one another folder with --data"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def connect(
    file: Path, *, readonly: bool = False, synchronous: str = "FULL", vfs: str | None = None
) -> apsw.Connection:
    """A connection with our settings. The writer's makes the file when it is not there."""
    if not readonly and vfs is None:
        make_private(file)
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    connection = apsw.Connection(
        str(file), flags=flags, vfs=vfs, statementcachesize=STATEMENTS_CACHED
    )
    connection.set_busy_timeout(BUSY_MS_MAX)
    if sys.platform == "darwin":
        # There a plain fsync leaves the data in the drive's cache.
        connection.pragma("fullfsync", 1)
        connection.pragma("checkpoint_fullfsync", 1)
    # Turning to WAL deletes a rollback journal. Should a power loss bring that back beside a log,
    # SQLite undoes the turn and uses the log all the same, and no second connection can follow it;
    # EXTRA syncs the folder after the deletion.
    connection.pragma("synchronous", "EXTRA")
    if not readonly and connection.pragma("page_count") == 0:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    mode = connection.pragma("journal_mode", "wal")
    assert mode == "wal", f"SQLite would not use WAL here but {mode}"
    connection.pragma("synchronous", synchronous)
    connection.pragma("wal_autocheckpoint", 0)
    connection.pragma("temp_store", "memory")
    connection.pragma("cache_size", -65536)
    if readonly:
        connection.pragma("query_only", 1)
    return connection


def fold(connection: apsw.Connection) -> None:
    """Put everything that the write-ahead log holds into the database, both synced.

    A killed server may leave commits that it never synced, and the next one cannot tell them from
    those that it did. They must be on disk before any reader sees them.
    """
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except apsw.FullError:
        # The log was synced before the first page was copied, so nothing depends on the copying.
        log.warning("no room to fold the write-ahead log in: it stays until there is")


def make_private(file: Path) -> None:
    """Make sure that only its owner may read a file, also in a folder that all may look into.

    SQLite gives the log and its index the rights of the database.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))
        return
    # One made before, which is not opened: closing it would give up the locks of this process.
    for path in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
        try:
            if stat.S_IMODE(path.stat().st_mode) != PRIVATE:
                path.chmod(PRIVATE)
        except FileNotFoundError:
            pass
        except PermissionError:
            log.warning("%s belongs to another user: its rights stay as they are", path)


def make_folder(folder: Path) -> None:
    """Make the data folder so that it is still there after a power loss."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    # A user who may read the folder may read every stream, so only its owner may.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in made:
        parent = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def restart_log(connection: apsw.Connection) -> bool:
    """Let the next commit start the write-ahead log anew; false while a reader uses it."""
    connection.set_busy_timeout(RESTART_BUSY_MS_MAX)
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_RESTART)
    except apsw.BusyError:
        return False
    finally:
        connection.set_busy_timeout(BUSY_MS_MAX)
    return True


class SqliteConnection:
    """A connection of the embedded store, as the engine uses it; `raw` is SQLite's own."""

    after_every_text = b""
    """SQLite orders every blob behind every text."""

    def __init__(self, raw: apsw.Connection) -> None:
        self.raw = raw
        self._run = raw.execute

    def fetch(self, query: str, values: Values = (), *, rows: str | None = None) -> list[Row]:
        text = QUERIES[query]
        if rows is not None:
            text = text.replace("/*rows*/", QUERIES[rows])
        return self._run(text, values).fetchall()

    def execute(self, query: str, values: Values = ()) -> int:
        self._run(QUERIES[query], values)
        return self.raw.changes()

    def execute_many(self, query: str, rows: Sequence[Row]) -> None:
        self.raw.executemany(QUERIES[query], rows)

    def __enter__(self) -> Self:
        self.raw.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self.raw.__exit__(kind, error, trace)

    def close(self) -> None:
        self.raw.close()


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk itself failed, after which no cached page can be trusted."""
    if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHMSIZE:
        # No room for the log's index, which is not data: a full disk by another name.
        return False
    return isinstance(error, apsw.IOError | apsw.CorruptError | apsw.NotADBError)


class LedgerWriter:
    """The one connection that writes: the `Journal` of the group commit.

    It writes a sealed group with a handful of statements, whatever the number of requests.
    """

    def __init__(self, connection: SqliteConnection, rows_behind_max: int = 0) -> None:
        self.connection = connection
        self.behind = Behind(rows_behind_max)
        """Tails and batches that are left for later; its owner says when a group is on disk."""
        self.wal_pages = 0
        """How long the write-ahead log is."""
        connection.raw.set_wal_hook(self._wal_written)

    def _wal_written(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self.wal_pages = pages
        return apsw.SQLITE_OK

    def commit(self) -> None:
        try:
            self.connection.raw.execute("COMMIT")
        except apsw.FullError as error:
            # The frames that would have made it a commit did not fit, so it is none.
            raise DiskFullError(str(error)) from error

    def rollback(self) -> None:
        if self.connection.raw.in_transaction:
            self.connection.raw.execute("ROLLBACK")

    def write(self, sealed: LedgerGroup) -> None:
        self.connection.raw.execute("BEGIN IMMEDIATE")
        try:
            self._write(sealed)
        except apsw.FullError as error:
            # A large group goes to the log before its commit, as far as it fits.
            raise DiskFullError(str(error)) from error

    def _write(self, sealed: LedgerGroup) -> None:
        due = self.behind.piece(sealed)
        self._write_piece(due)
        # Slices were decided before anything else that the group holds.
        for piece in sealed.carried:
            last_id = self.write_slice(piece)
            if piece.keys:
                places = [(stream, principal, key) for stream, principal, key, *_ in piece.keys]
                sealed.numbered_keys.append((places, last_id))
        producers = sealed.producers
        opened = [producer_columns(place[0], producers[place]) for place in sealed.opened]
        self._write_rows(sealed.updates, sealed.inserts, sealed.rows, opened)
        if sealed.key_rows:
            sealed.numbered_keys.append((sealed.keys, self._write_keys(sealed.key_rows)))
        if sealed.sends:
            last_id = self._write_keys(list(sealed.sends.values()), "save_send")
            sealed.numbered_sends.append((sealed.sends, last_id))
        self._write_statements(sealed.statements)
        for statement, rows in sealed.bulk:
            self.connection.execute_many(statement, rows)
        self.connection.execute("save_counters", sealed.counters)
        if due.written_to != self.behind.written_to:
            self.connection.execute("save_written_to", (due.written_to,))

    def write_behind(self) -> None:
        """Write all that is behind, while no transaction is open."""
        if not self.behind:
            return
        connection = self.connection
        with connection:
            self._write_piece(self.behind.everything())
            connection.execute("all_is_written")
            [(written_to, _)] = connection.fetch("load_written_to")
        self.behind.everything_written(written_to)

    def _write_piece(self, piece: Piece) -> None:
        if piece.tails:
            self.connection.execute_many("move_tail", piece.tails)
        if piece.producers:
            self._advance(piece.producers)

    def _advance(self, producers: Sequence[tuple[Place, Producer]]) -> None:
        """Write the newest batches of producers into their rows."""
        rows = [(one.seq, one.position, one.updated_ms, *place) for place, one in producers]
        raw = self.connection.raw
        before = raw.total_changes()
        self.connection.execute_many("advance_producer", rows)
        if raw.total_changes() - before != len(rows):
            # A row is not there. A producer that is lost would let its retries in again.
            whole = [producer_columns(place[0], one) for place, one in producers]
            self.connection.execute_many("save_producer", whole)

    def write_slice(self, piece: Carried) -> int:
        """Write a part of a large commit in the open transaction; the last key's number."""
        self._write_rows(piece.updates, piece.inserts, piece.log, piece.producers)
        last_id = self._write_keys(piece.keys)
        self._write_statements(piece.statements)
        return last_id

    def _write_keys(self, rows: list[Row], statement: str = "save_key") -> int:
        """Write rows of keys, which get consecutive numbers; the last of these."""
        if rows:
            self.connection.execute_many(statement, rows)
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
        for statement, rows in gathered(statements):
            self.connection.execute_many(statement, rows)
