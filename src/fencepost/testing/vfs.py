"""A SQLite VFS to watch and to make fail: power loss, full disks, broken disks, slow ones.

`FaultVfs` passes everything on to the real file system. On the way it records each change into a
`DiskLog` and asks its rules before each operation. A rule may raise one of apsw's errors, which
SQLite then sees as the disk's, or block, which is a slow disk. The shared-memory file of the
write-ahead log is memory, not data, and never comes through here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Literal, Protocol

import apsw

from fencepost.testing.disk import Delete, DiskLog, Sync, Truncate, Write

Kind = Literal["read", "write", "truncate", "sync", "delete"]
WAL = "-wal"
DATABASE = ".db"

_numbers = count(1)


class Rule(Protocol):
    """Asked before every operation on a file: returns to let it through, raises to fail it."""

    def __call__(self, kind: Kind, file: str, size: int, end: int) -> None:
        """`size` bytes are about to move; the file would be at least `end` bytes long after it."""
        ...


class FaultVfs(apsw.VFS):
    """The default VFS with a log of what it did and rules about what it may do."""

    def __init__(self, *, log: DiskLog | None = None) -> None:
        # SQLite knows a VFS by name, process-wide.
        self.name = f"fencepost-fault-{next(_numbers)}"
        self.log = log or DiskLog()
        self.rules: list[Rule] = []
        super().__init__(self.name, base="")

    def xOpen(  # noqa: N802  the name is SQLite's
        self, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> apsw.VFSFile:
        return _FaultFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        file = Path(filename).name
        self.ask("delete", file, 0, 0)
        upto = len(self.log.operations) + 1
        super().xDelete(filename, syncdir)
        self.log.record(Delete(file))
        if syncdir:
            self.log.record(Sync(file, upto, folder=True))

    def ask(self, kind: Kind, file: str, size: int, end: int) -> None:
        """Let every rule have its say."""
        for rule in list(self.rules):
            rule(kind, file, size, end)


_LOGS = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL


class _FaultFile(apsw.VFSFile):
    def __init__(
        self, vfs: FaultVfs, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> None:
        # SQLite's own VFS syncs the folder together with the first sync of a log that it made.
        self._syncs_folder = bool(flags[0] & _LOGS and flags[0] & apsw.SQLITE_OPEN_CREATE)
        super().__init__("", name, flags)
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._name = Path(path).name if path else ""
        self._vfs = vfs

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self._vfs.ask("read", self._name, amount, 0)
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        self._vfs.ask("write", self._name, len(data), offset + len(data))
        # Recorded before it happens: from here on the disk may have any part of it.
        self._vfs.log.record(Write(self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._vfs.ask("truncate", self._name, 0, newsize)
        self._vfs.log.record(Truncate(self._name, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        # Only what came before the sync began is promised, and only once it has returned.
        upto = len(self._vfs.log.operations)
        self._vfs.ask("sync", self._name, 0, 0)
        super().xSync(flags)
        self._vfs.log.record(Sync(self._name, upto, folder=self._syncs_folder))
        self._syncs_folder = False


@contextmanager
def fault_vfs(*, log: DiskLog | None = None) -> Iterator[FaultVfs]:
    """A registered `FaultVfs`; its `name` goes into `SqliteSettings.vfs`."""
    vfs = FaultVfs(log=log)
    try:
        yield vfs
    finally:
        vfs.rules.clear()
        vfs.unregister()


class FailingDisk:
    """Fails matching operations with `error` while `left` is above zero."""

    def __init__(
        self, kind: Kind, suffix: str, *, error: type[apsw.Error] = apsw.IOError, times: int = 1
    ) -> None:
        self._kind = kind
        self._suffix = suffix
        self._error = error
        self.left = times
        self.failed_count = 0

    def __call__(self, kind: Kind, file: str, size: int, end: int) -> None:
        del size, end
        if self.left > 0 and kind == self._kind and file.endswith(self._suffix):
            self.left -= 1
            self.failed_count += 1
            raise self._error(f"{kind} of {file}: the disk failed, as the test asked")


class FullDisk:
    """A disk of limited size: a write that makes all files together longer does not fit."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.refused_count = 0
        self._sizes: dict[str, int] = {}

    def __call__(self, kind: Kind, file: str, size: int, end: int) -> None:
        del size
        if kind == "delete":
            self._sizes.pop(file, None)
        elif kind == "truncate":
            self._sizes[file] = end
        elif kind == "write" and end > self._sizes.get(file, 0):
            others = sum(length for name, length in self._sizes.items() if name != file)
            if others + end > self.bytes_max:
                self.refused_count += 1
                raise apsw.FullError("no space left, as the test asked")
            self._sizes[file] = end


class SyncGate:
    """A slow disk: while closed, the writer's syncs of matching files wait at the gate.

    Only the thread of the group commit waits, so that readers and checkpoints beside it go on.
    """

    WAIT_S_MAX = 60.0

    def __init__(self, suffix: str = WAL, *, thread: str = "fencepost-writer") -> None:
        self._suffix = suffix
        self._thread = thread
        self._open = threading.Event()
        self._open.set()
        self._arrived = threading.Semaphore(0)
        self.waiting_count = 0
        self.on_arrival: Callable[[], object] = lambda: None
        """Called in the waiting thread when it reaches the closed gate."""

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def await_arrival(self) -> None:
        """Block until a caller stands at the gate. Not for the event loop: use a thread."""
        if not self._arrived.acquire(timeout=self.WAIT_S_MAX):
            raise AssertionError("no sync came to the gate")

    def __call__(self, kind: Kind, file: str, size: int, end: int) -> None:
        del size, end
        if kind != "sync" or not file.endswith(self._suffix) or self._open.is_set():
            return
        if not threading.current_thread().name.startswith(self._thread):
            return
        self.waiting_count += 1
        self._arrived.release()
        self.on_arrival()
        if not self._open.wait(self.WAIT_S_MAX):
            raise AssertionError("the gate was never opened")
