"""The files of the daemon: opening and checking them, the lock, and one thread that writes.

Every change of a file is a job for its writer. Jobs that come while a commit is under way share the
next transaction, and each learns its result when that is on disk: sixteen callers at once cost one
fsync. A job sees what the jobs before it in the transaction did.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, TextIO, TypeVar

import apsw

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 1
"""The newest layout of the files that this program knows."""
JOBS_MAX = 512
"""Jobs that share a transaction."""
WAL_PAGES_MAX = 2_000
"""The write-ahead log is folded in when it has this many pages."""
PRIVATE = 0o600
_SYNCHRONOUS = "FULL"
"""COMMIT returns when the log is synced: what answers rest on."""

Rows = list[tuple[Any, ...]]


class FileRefusedError(Exception):
    """A file of the daemon cannot be used: the message says which, why, and what to do."""


class InUseError(Exception):
    """Another daemon has this folder."""


class WriteFailedError(Exception):
    """A transaction failed. Nothing of it was stored, unless the error is of a kind below."""


class DiskFullError(WriteFailedError):
    """There was no room for a transaction: nothing of it was stored."""


class OutcomeUnknownError(WriteFailedError):
    """A commit failed half-way: the same request again finds out what was stored."""


class Lock:
    """The operating system's lock on a folder; it goes with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        file = folder / "lock"
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, PRIVATE))
        self._file: TextIO = open(file, "r+")  # noqa: SIM115  held open on purpose
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = self._file.read().strip()
            self._file.close()
            raise InUseError(
                f"an outbox runs on {folder} already"
                + (f" (process {holder})" if holder else "")
                + ": one daemon serves every mesh of a user; stop it, or use --data"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def make_folder(folder: Path) -> None:
    """Make the folder so that it is still there after a power loss; only its user may enter."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for found in (folder.lstat(), folder.stat()):
        is_link = stat.S_ISLNK(found.st_mode)
        if found.st_uid != os.geteuid() or (not is_link and found.st_mode & 0o022):
            raise FileRefusedError(
                f"{folder} belongs to another user, or others may write to it: they could put"
                " files of their own in place of the outbox; make a folder with mode 0700"
            )
    for path in made:
        parent = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def load_queries(file: str) -> dict[str, str]:
    """The named queries of a .sql file of this package."""
    text = resources.files(__package__).joinpath(file).read_text()
    found = {}
    for part in text.split("-- name: ")[1:]:
        name, _, body = part.partition("\n")
        lines = (line for line in body.splitlines() if not line.startswith("--"))
        found[name.strip()] = "\n".join(lines).strip().removesuffix(";")
    return found


class File:
    """A connection to one of the files, with its queries by name."""

    def __init__(self, raw: apsw.Connection, queries: dict[str, str]) -> None:
        self.raw = raw
        self.queries = queries

    def fetch(self, query: str, *values: object) -> Rows:
        found: Rows = self.raw.execute(self.queries[query], values or None).fetchall()
        return found

    def each(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """The rows that a query finds, read from the file one by one."""
        found: Iterator[tuple[Any, ...]] = self.raw.execute(self.queries[query], values)
        return found

    def execute(self, query: str, *values: object) -> int:
        self.raw.execute(self.queries[query], values)
        return self.raw.changes()


def open_file(
    path: Path, queries: dict[str, str], *, vfs: str | None, first: Callable[[File], None]
) -> File:
    """Open a file, or make it; `first` puts in it what a new one needs.

    Raises `FileRefusedError` for a file that is damaged, of a newer version, or no database.
    """
    if vfs is None:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, PRIVATE))
        path.chmod(PRIVATE)
    try:
        raw = _connect(path, vfs)
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise FileRefusedError(f"{path} is no database of an outbox: {error}") from None
    file = File(raw, queries)
    try:
        _check(path, file)
        if raw.pragma("user_version") == 0:
            with raw:
                raw.execute(queries["schema"])
                first(file)
                raw.pragma("user_version", VERSION)
        # A killed daemon may leave commits in the log that were never synced, and which answers
        # depend on them cannot be told: all of it is synced before anything is read.
        with contextlib.suppress(apsw.FullError):
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raw.close()
        raise FileRefusedError(f"{path} is damaged: {error}") from None
    except BaseException:
        raw.close()
        raise
    return file


def _connect(path: Path, vfs: str | None) -> apsw.Connection:
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    raw = apsw.Connection(str(path), flags=flags, vfs=vfs)
    try:
        raw.set_busy_timeout(10_000)
        if sys.platform == "darwin":
            raw.pragma("fullfsync", 1)
            raw.pragma("checkpoint_fullfsync", 1)
        # EXTRA syncs the folder when turning to WAL deletes a rollback journal.
        raw.pragma("synchronous", "EXTRA")
        if raw.pragma("page_count") == 0:
            raw.execute("PRAGMA auto_vacuum = INCREMENTAL")
        mode = raw.pragma("journal_mode", "wal")
        assert mode == "wal", f"SQLite would not use WAL here but {mode}"
        raw.pragma("synchronous", _SYNCHRONOUS)
        raw.pragma("wal_autocheckpoint", 0)
        raw.pragma("temp_store", "memory")
    except BaseException:
        raw.close()
        raise
    return raw


def _check(path: Path, file: File) -> None:
    version = file.raw.pragma("user_version")
    if isinstance(version, int) and version > VERSION:
        raise FileRefusedError(
            f"{path} was written by a newer fencepost (version {version}; this one knows"
            f" {VERSION}): run that one"
        )
    tables = file.raw.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    if version == 0 and tables:
        raise FileRefusedError(f"{path} is a database of another program: nothing was changed")
    found = file.raw.execute("PRAGMA integrity_check(1)").fetchall()
    if found != [("ok",)]:
        raise FileRefusedError(f"{path} fails its integrity check: {found[0][0]}")


Told = Callable[[Any, Exception | None], None]
"""Called on the loop with the result of a job, or why there is none."""
Job = Callable[[File], Any]


class Writer:
    """The one thread that writes a file, and another that reads it."""

    def __init__(self, file: File, path: Path, vfs: str | None) -> None:
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Job, Told] | None] = queue.SimpleQueue()
        self.failure: asyncio.Future[Exception] = self._loop.create_future()
        """Done when the disk failed: after that no page in memory can be trusted."""
        self.commits = 0
        self.jobs = 0
        self._broken: Exception | None = None
        self._pages = self._folded = 0
        file.raw.set_wal_hook(self._grown)
        flags = apsw.SQLITE_OPEN_READWRITE
        self._readonly = File(apsw.Connection(str(path), flags=flags, vfs=vfs), file.queries)
        self._readonly.raw.set_busy_timeout(10_000)
        self._readonly.raw.pragma("query_only", 1)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="outbox-reader")
        self._thread = threading.Thread(target=self._run, name=f"outbox-{path.name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, told: Told) -> None:
        """Have a job done in the next transaction, and tell its result once that is on disk."""
        if self._broken is not None:
            told(None, self._broken)
            return
        self._jobs.put((job, told))

    async def write(self, job: Callable[[File], T]) -> T:
        """The result of a job, once it is on disk."""
        future: asyncio.Future[T] = self._loop.create_future()

        def told(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.submit(job, told)
        return await future

    async def read(self, query: Callable[[File], T]) -> T:
        """What a query finds in what is committed."""
        return await self._loop.run_in_executor(self._reader, query, self._readonly)

    async def close(self) -> None:
        """Finish what waits, and close the file."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._reader.shutdown)
        self._readonly.raw.close()
        if self._broken is None:
            with contextlib.suppress(apsw.Error):
                self._file.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with contextlib.suppress(apsw.Error):
            self._file.raw.close()

    # In the thread.

    def _run(self) -> None:
        ending = False
        while not ending:
            batch = []
            taken = self._jobs.get()
            while taken is not None:
                batch.append(taken)
                if len(batch) >= JOBS_MAX:
                    break
                try:
                    taken = self._jobs.get_nowait()
                except queue.Empty:
                    break
            ending = taken is None
            if batch:
                self._commit(batch)
                self._fold()

    def _commit(self, batch: Sequence[tuple[Job, Told]]) -> None:
        raw = self._file.raw
        results: list[tuple[Told, Any, Exception | None]] = []
        committing = False
        try:
            if self._broken is not None:
                raise self._broken
            raw.execute("BEGIN IMMEDIATE")
            for job, told in batch:
                results.append((told, job(self._file), None))
            committing = True
            raw.execute("COMMIT")
            self.commits += 1
            self.jobs += len(batch)
        except Exception as error:
            failure = self._failed(error, committing=committing)
            results = [(told, None, failure) for _, told in batch]
        self._loop.call_soon_threadsafe(_tell, results)

    def _failed(self, error: Exception, *, committing: bool) -> Exception:
        """Undo the transaction; what its jobs are told."""
        raw = self._file.raw
        if isinstance(error, apsw.FullError):
            self._undo()
            return DiskFullError(str(error))
        if isinstance(error, apsw.Error) and not isinstance(error, apsw.BusyError):
            # After a sync that failed, another one that succeeds proves nothing.
            log.critical("outbox: the disk failed: %s", error)
            self._broken = OutcomeUnknownError(str(error)) if committing else _failure(error)
            self._loop.call_soon_threadsafe(self._stop, error)
            return self._broken
        if not isinstance(error, WriteFailedError):
            log.error("outbox: a transaction failed", exc_info=error)
        if raw.in_transaction:
            self._undo()
        return error if isinstance(error, WriteFailedError) else _failure(error)

    def _undo(self) -> None:
        with contextlib.suppress(apsw.Error):
            if self._file.raw.in_transaction:
                self._file.raw.execute("ROLLBACK")

    def _stop(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_result(error)

    def _grown(self, _raw: apsw.Connection, _name: str, pages: int) -> int:
        if pages < self._pages:
            self._folded = 0  # the log was begun anew
        self._pages = pages
        return apsw.SQLITE_OK

    def _fold(self) -> None:
        """Fold the write-ahead log in when it is long, between two commits."""
        if self._broken is not None:
            return
        if self._pages < self._folded + WAL_PAGES_MAX:
            return
        self._folded = self._pages
        try:
            self._file.raw.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (apsw.BusyError, apsw.FullError):
            pass  # there is no room: later
        except apsw.Error as error:
            log.critical("outbox: the disk failed: %s", error)
            self._broken = _failure(error)
            self._loop.call_soon_threadsafe(self._stop, error)


def _failure(error: Exception) -> WriteFailedError:
    failed = WriteFailedError(str(error))
    failed.__cause__ = error
    return failed


def _tell(results: Sequence[tuple[Told, Any, Exception | None]]) -> None:
    for told, result, error in results:
        told(result, error)
