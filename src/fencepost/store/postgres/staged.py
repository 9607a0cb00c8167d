"""Staged parts in a turn: those that its requests name are loaded at once, before any is decided.

A commit may name thousands of parts, and uploads come by the hundred: to ask for each by itself
would be as many round trips while everybody waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fencepost.protocol.commits import Part
from fencepost.store.database import Connection, Row
from fencepost.store.write.staging import ChunkRow, StagedPart, Staging, StagingGroup


class TurnStaging(Staging):
    """The parts of a turn; others are looked for one by one."""

    def __init__(self, connection: Connection, pending: Sequence[StagingGroup]) -> None:
        super().__init__(connection, pending)
        self._parts: dict[Part, StagedPart | None] = {}
        self._chunks: dict[Part, dict[int, ChunkRow]] = {}
        self._digests: dict[tuple[Part, int], bytes | None] = {}

    # All that is taken in is forgotten after the turn.

    def take_parts(self, asked: Iterable[Part], rows: Iterable[Row]) -> None:
        """Take in what was found of some parts."""
        self._parts = dict.fromkeys(asked)
        for txn, name, media_type, committed in rows:
            self._parts[Part(txn, name)] = StagedPart(media_type, committed)

    def take_chunks(self, asked: Iterable[Part], rows: Iterable[Row]) -> None:
        """Take in all the chunks of some parts."""
        self._chunks = {part: {} for part in asked}
        for txn, name, *row in rows:
            self._chunks[Part(txn, name)][row[1]] = ChunkRow(*row)

    def take_digests(self, asked: Iterable[tuple[Part, int]], rows: Iterable[Row]) -> None:
        """Take in what was uploaded before of some chunks."""
        self._digests = dict.fromkeys(asked)
        for txn, name, ordinal, digest in rows:
            self._digests[Part(txn, name), ordinal] = digest

    def forget(self) -> None:
        """A turn is over."""
        self._parts.clear()
        self._chunks.clear()
        self._digests.clear()

    def _on_disk(self, part: Part) -> StagedPart | None:
        return self._parts[part] if part in self._parts else super()._on_disk(part)

    def _chunks_on_disk(self, part: Part) -> dict[int, ChunkRow]:
        return self._chunks[part] if part in self._chunks else super()._chunks_on_disk(part)

    def _digest_on_disk(self, part: Part, ordinal: int) -> bytes | None:
        place = (part, ordinal)
        return self._digests[place] if place in self._digests else super()._digest_on_disk(*place)
