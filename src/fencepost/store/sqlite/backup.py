"""Backups: a consistent copy of a database in use, and the way back from one.

A copy is made page by page with SQLite's online backup, from a connection that holds one read
transaction open all the while. Writers go on, because a reader of a write-ahead log does not lock
them out. The copy is what was committed when it began, because the reader sees nothing newer. (The
other way, VACUUM INTO, gives the same promise and a smaller file, but rewrites every table and
index, which costs more of the server's disk and cannot say how far it is.) The price is that the
write-ahead log cannot be cut off before the copy is done.

A copy gets its name only when it is complete and on disk. Until then it has a name that is not
taken for a backup; a killed backup leaves such a file behind, and the next one removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import apsw

from fencepost.store.check.report import Progress, UnreadableError, ignore
from fencepost.store.sqlite.check import find_file, open_to_read
from fencepost.store.sqlite.connection import FILE, FolderLock, make_private

PAGES_PER_STEP = 2_048
"""Pages copied between two looks at the progress: 8 MiB with SQLite's usual pages."""

LOCK = "lock"
_PARTIAL = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.partial(-journal)?")


class DestinationExistsError(Exception):
    """There is something at the destination, and a backup replaces nothing: name another place."""


class FolderNotEmptyError(Exception):
    """The data folder has data already: name an empty one, or move the old data aside (--force)."""


class Copied(NamedTuple):
    """A finished copy."""

    file: Path
    bytes: int


def backup(source: Path, destination: Path, *, progress: Progress = ignore) -> Copied:
    """Copy the database of the data folder `source` to the new file `destination`."""
    file = find_file(source)
    if destination.exists() or destination.is_symlink():
        raise DestinationExistsError(f"{destination} exists: a backup replaces nothing")
    with _complete_or_absent(destination) as partial:
        _copy(file, partial, progress)
    return Copied(destination, destination.stat().st_size)


def restore(
    source: Path, folder: Path, *, aside: str | None = None, progress: Progress = ignore
) -> Path | None:
    """Make `folder` the data folder that `source` is a copy of.

    `aside` is what is put behind the old folder's name to move it out of the way, without it a
    folder with data is refused. Returns where the old data went. A copy that fails puts the old
    folder back, so that no server starts on an empty one. The caller has checked `source`.
    """
    file = find_file(source)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FolderLock(folder)
    moved: Path | None = None
    try:
        if any(entry.name != LOCK for entry in folder.iterdir()):
            if aside is None:
                raise FolderNotEmptyError(
                    f"the data folder {folder} is not empty: name another one, or move its data"
                    " aside with --force"
                )
            # The folder as a whole, in one step: a database without its write-ahead log, or with
            # that of another one, would be worse than either.
            old = folder.with_name(folder.name + aside)
            os.rename(folder, old)
            moved = old
            folder.mkdir(mode=0o700)
            lock.release()
            lock = FolderLock(folder)
        with _complete_or_absent(folder / FILE) as partial:
            _copy(file, partial, progress)
        _sync(folder.parent)
    except BaseException:
        if moved is not None and not (folder / FILE).exists():
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
            os.rename(moved, folder)
        raise
    finally:
        lock.release()
    return moved


def _copy(file: Path, partial: Path, progress: Progress) -> None:
    """Raises OSError where there is no room, UnreadableError where one of the two disks fails."""
    try:
        _copy_pages(file, partial, progress)
    except apsw.FullError:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial.parent)) from None
    except apsw.Error as error:
        # The text of an error of SQLite's backup is "not an error"; its code says more.
        code = getattr(error, "extendedresult", 0)
        name = apsw.mapping_extended_result_codes.get(code, type(error).__name__)
        raise UnreadableError(f"{file} cannot be copied to {partial.parent}: {name}") from error


def _copy_pages(file: Path, partial: Path, progress: Progress) -> None:
    with open_to_read(file) as source:
        make_private(partial)
        target = apsw.Connection(str(partial))
        try:
            # The copy is not read before it is complete, so it needs no journal of its own.
            target.pragma("journal_mode", "off")
            target.pragma("synchronous", "off")
            with source:
                # Reading something is what fixes the moment of the copy.
                source.execute("SELECT next_position FROM counters").fetchall()
                with target.backup("main", source, "main") as copying:
                    while not copying.done:
                        copying.step(PAGES_PER_STEP)
                        total = copying.page_count
                        progress("pages", total - copying.remaining, total)
            # A copy is one file: without this it would want a write-ahead log beside it.
            target.pragma("journal_mode", "delete")
        finally:
            target.close()


@contextlib.contextmanager
def _complete_or_absent(destination: Path) -> Iterator[Path]:
    """A place to write to that becomes `destination` when the block ends well, durably."""
    folder = destination.absolute().parent
    _remove_stale(folder, destination.name)
    partial = folder / f".{destination.name}.{os.getpid()}.partial"
    try:
        yield partial
        _sync(partial)
        try:
            # Unlike a rename, a link does not replace a file that was put there meanwhile.
            os.link(partial, destination)
        except FileExistsError:
            raise DestinationExistsError(f"{destination} exists: nothing is replaced") from None
        except OSError:
            # Some file systems know no links; what is left is a moment between look and rename.
            if destination.exists():
                raise DestinationExistsError(f"{destination} exists") from None
            os.rename(partial, destination)
    finally:
        partial.unlink(missing_ok=True)
    _sync(folder)


def _remove_stale(folder: Path, name: str) -> None:
    """Remove what killed copies to the same destination left."""
    for entry in folder.iterdir():
        match = _PARTIAL.fullmatch(entry.name)
        if match and match["name"] == name and not _is_running(int(match["process"])):
            entry.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
