"""Simulate a power loss: record file operations, and make what a disk may hold afterwards.

A write that returned is in the page cache, not on the disk. Killing a process keeps the page cache;
losing power does not: of everything written to a file since its last sync, any part may be there
and any part may not, down to single sectors of a write. `DiskLog` records the operations in order,
with the test's own marks between them; `Disk` is advanced along such a log and cuts an `Image` at
any point, under one of several assumptions about what became of the unsynced rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

SECTOR_BYTES = 512
"""What a drive writes as a whole or not at all."""

Image = dict[str, bytes]
"""Files by name, as they would be found after a crash."""


class Write(NamedTuple):
    """Bytes went to a place of a file."""

    file: str
    offset: int
    data: bytes


class Truncate(NamedTuple):
    """A file got another length."""

    file: str
    size: int


class Delete(NamedTuple):
    """A file was removed; until its folder is synced it may come back."""

    file: str


class Sync(NamedTuple):
    """A sync of a file returned: what the log held of it before `upto` is on the disk.

    With `folder` the folder was synced as well: files deleted before that stay deleted.
    """

    file: str
    upto: int
    folder: bool = False


class Mark(NamedTuple):
    """Something happened that is no file operation: the test says what."""

    label: object


Change = Write | Truncate | Delete
Operation = Change | Sync | Mark


class DiskLog:
    """File operations and marks in the order in which they happened, whatever the thread."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def record(self, operation: Operation) -> None:
        self.operations.append(operation)

    def mark(self, label: object) -> None:
        """Note that something happened just now."""
        self.operations.append(Mark(label))


class _File:
    """One file: what is on the disk for certain, and what came since."""

    def __init__(self, content: bytes | None) -> None:
        self.durable = content
        self.pending: list[tuple[int, Change]] = []

    def settle(self, upto: int) -> None:
        """Everything before place `upto` of the log is on the disk now."""
        kept = [(at, change) for at, change in self.pending if at >= upto]
        done = [change for at, change in self.pending if at < upto]
        self.pending = kept
        # A file that was made and synced is there even if nothing was ever written to it.
        self.durable = _applied(self.durable, done)


class Disk:
    """A disk that is moved along a log. Begin with an `image` for one that is not empty."""

    def __init__(self, image: Image | None = None) -> None:
        self._files = {name: _File(content) for name, content in (image or {}).items()}
        self._at = 0

    def advance(self, operations: Sequence[Operation], upto: int) -> None:
        """Take the operations up to place `upto` of the log in."""
        for at in range(self._at, upto):
            operation = operations[at]
            if isinstance(operation, Mark):
                continue
            file = self._files.setdefault(operation.file, _File(None))
            if isinstance(operation, Sync):
                file.settle(operation.upto)
                if operation.folder:
                    self._settle_deletes(operation.upto)
            else:
                file.pending.append((at, operation))
        self._at = upto

    def _settle_deletes(self, upto: int) -> None:
        for file in self._files.values():
            gone = [at for at, change in file.pending if isinstance(change, Delete) and at < upto]
            if gone:
                file.settle(gone[-1] + 1)

    def cut(self, survives: Callable[[Sequence[Change]], Sequence[Change]]) -> Image:
        """The files after a crash here; `survives` chooses among the unsynced changes."""
        image: Image = {}
        for name, file in sorted(self._files.items()):
            changes = [change for _, change in file.pending]
            content = _applied(file.durable, survives(changes))
            if content is not None:
                image[name] = content
        return image

    def unsynced_count(self) -> int:
        """How many changes a power loss could take."""
        return sum(len(file.pending) for file in self._files.values())


def nothing(changes: Sequence[Change]) -> Sequence[Change]:
    """Power loss: all that was not synced is gone."""
    return changes[:0]


def everything(changes: Sequence[Change]) -> Sequence[Change]:
    """SIGKILL: the page cache lives on."""
    return changes


def some_prefix(dice: random.Random) -> Callable[[Sequence[Change]], Sequence[Change]]:
    """Power loss on a disk that writes in order: the first changes made it, the last one torn."""

    def survives(changes: Sequence[Change]) -> Sequence[Change]:
        whole = dice.randint(0, len(changes))
        return [*changes[:whole], *_torn(changes[whole : whole + 1], dice)]

    return survives


def some_sectors(dice: random.Random) -> Callable[[Sequence[Change]], Sequence[Change]]:
    """Power loss on a disk that writes as it likes: any sector of any change may be there."""

    def survives(changes: Sequence[Change]) -> Sequence[Change]:
        return _torn(changes, dice)

    return survives


def _torn(changes: Sequence[Change], dice: random.Random) -> list[Change]:
    kept: list[Change] = []
    for change in changes:
        if not isinstance(change, Write):
            if dice.random() < 0.5:
                kept.append(change)
            continue
        kept.extend(part for part in _sectors(change) if dice.random() < 0.5)
    return kept


def _sectors(write: Write) -> list[Write]:
    """A write, cut where the drive's sectors begin."""
    end = write.offset + len(write.data)
    cuts = [write.offset, *range(write.offset // SECTOR_BYTES * SECTOR_BYTES, end, SECTOR_BYTES)]
    starts = sorted({cut for cut in cuts if cut >= write.offset})
    return [
        Write(write.file, start, write.data[start - write.offset : stop - write.offset])
        for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]


def _applied(content: bytes | None, changes: Sequence[Change]) -> bytes | None:
    if not changes:
        return content
    data: bytearray | None = None if content is None else bytearray(content)
    for change in changes:
        if isinstance(change, Delete):
            data = None
            continue
        if data is None:
            data = bytearray()
        if isinstance(change, Truncate):
            del data[change.size :]
            data.extend(bytes(change.size - len(data)))
            continue
        data.extend(bytes(max(0, change.offset - len(data))))
        data[change.offset : change.offset + len(change.data)] = change.data
    return None if data is None else bytes(data)


def write_image(image: Image, folder: Path) -> None:
    """Put an image into a folder, as the disk of the machine that comes up again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in image.items():
        (folder / name).write_bytes(content)
