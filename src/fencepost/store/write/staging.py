"""Staged parts, as they stand after all decisions made so far.

What is on disk lies in the tables `parts` and `chunks`; what open groups change about it lies on
top, so that a commit may follow right behind the chunks that it names. Chunks are numbered here and
not by the database, because a commit refers to them by number before they are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

from fencepost.protocol.checksums import payload_checksum
from fencepost.protocol.commits import Part
from fencepost.store.contract import Upload
from fencepost.store.sql import Connection, Row

ROW_BYTES = 512
"""What a small row counts for when a group's work is weighed: writing it takes time as well."""


ChunkPlace = tuple[Part, int]
"""A chunk: its part, and its number there."""


class ChunkRow(NamedTuple):
    """What is kept of a staged chunk beside its data."""

    id: int
    ordinal: int
    messages: int
    size: int
    digest: bytes


class StagedPart(NamedTuple):
    """A part that was staged: its type, and the position it was committed at, if it was."""

    media_type: str
    committed: int | None


class Changes:
    """What one group changes about staged parts."""

    __slots__ = ("chunks", "dropped", "made", "used")

    def __init__(self) -> None:
        self.made: dict[Part, str] = {}  # new parts and their types
        self.chunks: dict[Part, dict[int, ChunkRow]] = {}
        self.used: dict[Part, int] = {}  # parts that became messages, and where
        self.dropped: set[Part] = set()  # before anything else that the group has of them


class StagingGroup(Protocol):
    """A group as far as this module writes to it."""

    bytes: int
    staging: Changes | None
    statements: list[tuple[str, tuple[object, ...]]]


class PartLoader(Protocol):
    """Finds parts as they are on disk."""

    @property
    def connection(self) -> Connection: ...

    def part(self, part: Part) -> StagedPart | None: ...

    def parts(self, parts: Collection[Part]) -> dict[Part, StagedPart]: ...

    def chunks(self, part: Part) -> dict[int, ChunkRow]: ...

    def digest(self, part: Part, ordinal: int) -> bytes | None: ...

    def digests(self, chunks: Collection[ChunkPlace]) -> dict[ChunkPlace, bytes]: ...


class Staging:
    """The decided state of staged parts. `pending` are the groups not yet on disk, oldest first."""

    def __init__(self, loader: PartLoader, pending: Sequence[StagingGroup]) -> None:
        self._loader = loader
        self._pending = pending
        self._next_chunk: int | None = None
        self._waiting: int | None = None

    def reset(self) -> None:
        """Forget everything that is not on disk; the next question counts again."""
        self._waiting = self._next_chunk = None

    @property
    def waiting_count(self) -> int:
        """Parts that wait for their commit."""
        if self._waiting is None:
            [(self._waiting,)] = self._loader.connection.fetch("count_waiting_parts")
        return self._waiting

    @waiting_count.setter
    def waiting_count(self, count: int) -> None:
        self._waiting = count

    def _number(self) -> int:
        """The number of the next chunk."""
        if self._next_chunk is None:
            [(self._next_chunk,)] = self._loader.connection.fetch("next_chunk")
        number = self._next_chunk
        self._next_chunk += 1
        return number

    def find(self, part: Part) -> StagedPart | None:
        """A part that was staged, committed ones included."""
        return _changed(part, list(self._changes()), self._loader.part)

    def find_all(self, parts: Collection[Part]) -> dict[Part, StagedPart]:
        """Those of some parts that were staged, committed ones included."""
        on_disk, changes = self._loader.parts(parts), list(self._changes())
        found = {part: _changed(part, changes, on_disk.get) for part in parts}
        return {part: staged for part, staged in found.items() if staged is not None}

    def chunks(self, part: Part) -> list[ChunkRow]:
        """The chunks of a part, in order."""
        found: dict[int, ChunkRow] = {}
        for changes in self._changes():
            found.update(changes.chunks.get(part, {}))
            if part in changes.dropped:
                break
        else:
            found.update(self._loader.chunks(part))
        return [found[ordinal] for ordinal in sorted(found)]

    def find_chunk(self, part: Part, ordinal: int) -> bytes | None:
        """The digest of a chunk that was uploaded before."""
        on_disk = self._loader.digest
        return _changed_chunk((part, ordinal), list(self._changes()), lambda at: on_disk(*at))

    def find_chunks(self, chunks: Collection[ChunkPlace]) -> dict[ChunkPlace, bytes]:
        """The digests of those of some chunks that were uploaded before."""
        if not chunks:
            return {}
        on_disk, changes = self._loader.digests(chunks), list(self._changes())
        found = {place: _changed_chunk(place, changes, on_disk.get) for place in chunks}
        return {place: digest for place, digest in found.items() if digest is not None}

    def _changes(self) -> Iterator[Changes]:
        """What is on its way to disk, the newest first."""
        for group in reversed(self._pending):
            if group.staging is not None:
                yield group.staging

    # Deciding: each of these changes the state and the open group together

    def add(self, group: StagingGroup, upload: Upload, *, new: bool, now_ms: int) -> None:
        """Keep a chunk, of a `new` part or of one that is there already."""
        part, batch = upload.part, upload.batch
        changes = _changes_of(group)
        if new:
            changes.made[part] = upload.media_type
            values: tuple[object, ...] = (*part, upload.media_type, now_ms)
            group.statements.append(("save_part", values))
            self.waiting_count += 1
        row = ChunkRow(self._number(), upload.ordinal, batch.messages, batch.size, upload.digest)
        changes.chunks.setdefault(part, {})[upload.ordinal] = row
        checksum = payload_checksum(batch.lengths, batch.data)
        content = (batch.lengths, batch.data, row.digest, checksum)
        values = (row.id, *part, *row[1:4], now_ms, *content)
        group.statements.append(("save_chunk", values))
        group.bytes += batch.size

    def use(self, group: StagingGroup, part: Part, position: int) -> None:
        """A commit makes a part messages: it can do so once."""
        _changes_of(group).used[part] = position
        group.statements.append(("commit_part", (position, *part)))
        group.bytes += ROW_BYTES
        self.waiting_count -= 1

    def drop(self, group: StagingGroup, part: Part) -> None:
        """Drop a part that was not committed, also its chunks that are not on disk yet."""
        found = self.find(part)
        if found is None or found.committed is not None:
            return
        size = sum(chunk.size for chunk in self.chunks(part))
        changes = _changes_of(group)
        changes.made.pop(part, None)
        changes.chunks.pop(part, None)
        changes.dropped.add(part)
        group.statements.append(("drop_part", part))
        group.statements.append(("drop_chunks", part))
        group.bytes += size
        self.waiting_count -= 1


def _changed(
    part: Part, changes: Sequence[Changes], on_disk: Callable[[Part], StagedPart | None]
) -> StagedPart | None:
    """A part as it is when all changes, the newest of which come first, are on disk."""
    committed = None
    for one in changes:
        committed = one.used.get(part) if committed is None else committed
        if part in one.made:
            return StagedPart(one.made[part], committed)
        if part in one.dropped:
            return None
    found = on_disk(part)
    if found is not None and committed is not None:
        return StagedPart(found.media_type, committed)
    return found


def _changed_chunk(
    place: ChunkPlace, changes: Sequence[Changes], on_disk: Callable[[ChunkPlace], bytes | None]
) -> bytes | None:
    """The digest of a chunk as it is when all changes are on disk."""
    part, ordinal = place
    for one in changes:
        chunk = one.chunks.get(part, {}).get(ordinal)
        if chunk is not None:
            return chunk.digest
        if part in one.dropped:
            return None
    return on_disk(place)


_STAGING = ("save_part", "save_chunk", "commit_part")
"""Statements that may be gathered as long as none of the others comes between, in this order: a
chunk belongs to a part, and a part is committed after it was made."""


def gathered(
    statements: Iterable[tuple[str, tuple[object, ...]]],
) -> Iterator[tuple[str, Sequence[Row]]]:
    """The statements of a group in fewer, each with more rows."""
    for is_staging, stretch in groupby(statements, key=lambda pair: pair[0] in _STAGING):
        if is_staging:
            rows: dict[str, list[Row]] = {name: [] for name in _STAGING}
            for name, values in stretch:
                rows[name].append(values)
            yield from ((name, found) for name, found in rows.items() if found)
        else:
            for name, run in groupby(stretch, key=itemgetter(0)):
                yield name, [values for _, values in run]


def _changes_of(group: StagingGroup) -> Changes:
    if group.staging is None:
        group.staging = Changes()
    return group.staging
