"""A ledger for one large commit: a copy of the state it touches, taken while that stands still.

Everything that the commit names is held while it is under way, and on disk before it begins. So it
can be decided apart from everybody else's requests, a slice at a time, on copies that are thrown
away if it comes to nothing. What a slice names is fetched in a handful of queries, and what was not
found then is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fencepost.protocol.commits import CommitItem, Part
from fencepost.protocol.streams import Stream
from fencepost.store import records
from fencepost.store.database import Connection
from fencepost.store.write.ledger import Entry, Ledger, LedgerGroup
from fencepost.store.write.staging import ChunkRow, StagedPart, Staging, StagingGroup

STREAMS_MAX = 1 << 30
"""None is let go: what an earlier slice decided is nowhere else."""


class StagingCopy(Staging):
    """The parts that the slice in hand names."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, ())
        self._parts: dict[Part, StagedPart] = {}
        self._chunks: dict[Part, list[ChunkRow]] = {}

    def fetch(self, parts: Iterable[Part]) -> None:
        """Have these parts at hand, and no others."""
        self._parts.clear()
        self._chunks.clear()
        named = json.dumps(list(dict.fromkeys(parts)))
        if named == "[]":
            return
        for txn, part, media_type, committed in self._connection.fetch(
            "find_parts", {"parts": named}
        ):
            self._parts[Part(txn, part)] = StagedPart(media_type, committed)
        for txn, part, *row in self._connection.fetch("chunks_of_parts", {"parts": named}):
            self._chunks.setdefault(Part(txn, part), []).append(ChunkRow(*row))

    def find(self, part: Part) -> StagedPart | None:
        return self._parts.get(part)

    def use(self, group: StagingGroup, part: Part, position: int) -> None:
        # Nothing is counted here, and no part is looked for twice.
        group.statements.append(("commit_part", (position, *part)))

    def chunks(self, part: Part) -> list[ChunkRow]:
        return sorted(self._chunks.get(part, ()), key=lambda chunk: chunk.ordinal)


class Numbers(NamedTuple):
    """Where a commit counts from: its first position and new stream, and its time."""

    position: int
    stream_id: int
    now_ms: int


class CommitLedger(Ledger):
    """The streams and producers that a commit touches, as its slices so far leave them."""

    def __init__(
        self, connection: Connection, numbers: Numbers, key_retention_ms: int | None
    ) -> None:
        super().__init__(
            connection,
            streams_max=STREAMS_MAX,
            producers_max=STREAMS_MAX,
            key_retention_ms=key_retention_ms,
        )
        self.next_position, self.next_stream, self.last_ms = numbers
        self._earlier = LedgerGroup(0)

    def leftovers(self) -> list[dict[Any, Any] | set[Any]]:
        """What there is to let go of when nothing more is to be decided."""
        return [self._by_path, self._by_id, self._earlier.keys]

    def sealed(self, group: LedgerGroup) -> LedgerGroup:
        """A slice is complete: `group` with its rows, of which only the keys are needed again."""
        self.seal(group)
        self._earlier.keys.update(group.keys)
        self._pending[:] = [self._earlier]
        return group


class LedgerCopy(CommitLedger):
    """The same where a look at the disk is at hand: what each slice names is fetched before it."""

    def __init__(
        self, connection: Connection, numbers: Numbers, key_retention_ms: int | None
    ) -> None:
        super().__init__(connection, numbers, key_retention_ms)
        self.copied = self.staging = StagingCopy(connection)
        self._known: set[str] = set()

    def fetch(self, items: Sequence[CommitItem]) -> None:
        """Have at hand what these appends name."""
        paths = {item.append.path for item in items} - self._known
        self._known |= paths
        rows = self._connection.fetch("find_streams", {"paths": json.dumps(list(paths))})
        for row in rows:
            self.take_in(row)
        self.copied.fetch(part for item in items for part in item.parts)

    def find(self, path: str) -> Entry | None:
        return self._by_path.get(path)

    def leftovers(self) -> list[dict[Any, Any] | set[Any]]:
        return [*super().leftovers(), self._known]


def streams_at(connection: Connection, paths: Sequence[str]) -> list[Stream]:
    """Streams as they are on disk."""
    rows = connection.fetch("find_streams", {"paths": json.dumps(paths)})
    return [records.stream_from_row(row)[0] for row in rows]
