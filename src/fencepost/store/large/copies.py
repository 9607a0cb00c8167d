"""The ledger of one large commit: a copy of the state that it touches, while that stands still.

A large commit holds everything that it names while it is under way, and all of that is on disk
before it begins. So it can be decided apart from all other requests, a slice at a time, on copies
that are thrown away if the commit is refused. What a slice names is fetched in a few queries before
the slice is decided, and what these queries do not find does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from fencepost.protocol.commits import CommitItem, Part
from fencepost.protocol.streams import Stream
from fencepost.store import records
from fencepost.store.sql import Connection, Row
from fencepost.store.write.behind import Behind
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.store.write.loader import DiskLoader, Loader
from fencepost.store.write.staging import ChunkRow, StagedPart

STREAMS_MAX = 1 << 30
"""No stream is evicted: what an earlier slice decided about it is nowhere else."""


class Numbers(NamedTuple):
    """Where a commit counts from: its first position and new stream, and its time."""

    position: int
    stream_id: int
    now_ms: int


class CommitCopy:
    """A ledger with the streams and producers that a commit touches, as its slices leave them."""

    def __init__(self, loader: Loader, numbers: Numbers, *, like: Ledger) -> None:
        """Count from `numbers` on, with the keys and deadlines of the store's own ledger."""
        self.ledger = Ledger(
            loader,
            streams_max=STREAMS_MAX,
            producers_max=STREAMS_MAX,
            key_retention_ms=like.key_retention_ms,
            writer_history_max=like.writers.history_max,
            exact_deadlines=like.exact_deadlines,
            counters=numbers,
        )
        self.ledger.key_filter = like.key_filter
        self._earlier = LedgerGroup(0)

    def leftovers(self) -> list[dict[Any, Any]]:
        """The collections to empty, a few objects at a time, when nothing more is to be decided."""
        return [*self.ledger.collections(), self._earlier.keys]

    def sealed(self, group: LedgerGroup) -> LedgerGroup:
        """A slice is complete: `group` with its rows, of which only the keys are needed again."""
        # Slices keep whole rows.
        group.whole.update(group.entries)
        self.ledger.seal(group)
        self._earlier.keys.update(group.keys)
        self.ledger.continue_after(self._earlier)
        return group


class SnapshotLoader(DiskLoader):
    """Finds streams and parts among those that were fetched for the slice, and nowhere else."""

    def __init__(self, connection: Connection, behind: Behind) -> None:
        super().__init__(connection, behind)
        self.asked: set[str] = set()
        """The paths that were looked for so far."""
        self._streams: dict[str, Row] = {}
        self._parts: dict[Part, StagedPart] = {}
        self._chunks: dict[Part, dict[int, ChunkRow]] = {}

    def fetch(self, items: Sequence[CommitItem]) -> None:
        """Fetch what these appends name: streams that were not fetched before, and parts."""
        paths = {item.append.path for item in items} - self.asked
        self.asked |= paths
        rows = self.connection.fetch("find_streams", {"paths": json.dumps(list(paths))})
        self._streams = {row[1]: row for row in rows}  # by path
        self._fetch_parts({part: None for item in items for part in item.parts})

    def _fetch_parts(self, parts: dict[Part, None]) -> None:
        self._parts.clear()
        self._chunks.clear()
        if not parts:
            return
        named = {"parts": json.dumps(list(parts))}
        for txn, part, media_type, committed in self.connection.fetch("find_parts", named):
            self._parts[Part(txn, part)] = StagedPart(media_type, committed)
        for txn, part, *row in self.connection.fetch("chunks_of_parts", named):
            self._chunks.setdefault(Part(txn, part), {})[row[1]] = ChunkRow(*row)

    def stream(self, path: str) -> Row | None:
        return self._streams.get(path)

    def part(self, part: Part) -> StagedPart | None:
        return self._parts.get(part)

    def chunks(self, part: Part) -> dict[int, ChunkRow]:
        return self._chunks.get(part, {})


def streams_at(connection: Connection, paths: Sequence[str]) -> list[Stream]:
    """Streams as they are on disk."""
    rows = connection.fetch("find_streams", {"paths": json.dumps(paths)})
    return [records.stream_from_row(row)[0] for row in rows]
