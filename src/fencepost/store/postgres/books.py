"""Books in a turn: what the requests of a turn ask about books is loaded in one round trip.

A turn must not wait for single lookups, because all nodes wait for the turn. What is loaded here is
asked for again while the requests are decided, and forgotten after that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Target
from fencepost.protocol.offsets import Offset
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.sql import Connection
from fencepost.store.write.books import (
    BooksRows,
    LastRow,
    Place,
    Waiting,
    named_from_rows,
    pattern_ranges,
)
from fencepost.store.write.groups import group_from_row
from fencepost.store.write.ledger import Ledger

WAITING_MAX = 64
"""Waiting targets that are loaded of a source; more are needed only if the turn acks so many."""

BooksNeed = tuple[str, Offset | None]
"""A stream, and the place that it is to be cut at; None is its tail."""


class TurnBooksRows(BooksRows):
    """What a turn has loaded about books; other things are looked for one by one."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._last_rows: dict[tuple[int, int], LastRow | None] = {}
        self._groups: list[Group] | None = None
        self.loaded = False
        """Whether there is something to forget."""
        self._named: dict[str, dict[Place, Target]] = {}
        self._waiting: dict[str, list[Waiting]] = {}
        self._patterns: list[Waiting] = []

    async def load(
        self, connection: WritingConnection, ledger: Ledger, needs: Collection[BooksNeed]
    ) -> None:
        """Have at hand what some requests ask about books; their streams are loaded already."""
        places = []
        for path, before in needs:
            entry = ledger.cached(path)
            if entry is not None:
                cut = entry.stream.tail if before is None else before
                places.append((entry.stream.id, cut.bytes))
        paths = sorted({path for path, _ in needs})
        ranges = sorted({pair for path in paths for pair in pattern_ranges(path)})
        queries: list[tuple[str, Sequence[Any]]] = [
            ("every_group", ()),
            ("leases_of_targets", (paths,)),
            ("waiting_on_sources", (paths, WAITING_MAX)),
            ("waiting_on_all_patterns", [list(column) for column in zip(*ranges, strict=True)]),
        ]
        if places:
            columns = [list(column) for column in zip(*places, strict=True)]
            queries.append(("last_appends_before", columns))
        groups, named, waiting, patterns, *rows = await connection.fetch_all(queries)
        self.loaded = True
        self._groups = [group_from_row(row) for row in groups]
        self._named = {path: {} for path in paths}
        for place, target in named_from_rows(named).items():
            self._named[place[1]][place] = target
        self._waiting = {path: [] for path in paths}
        for row in waiting:
            self._waiting[row[2]].append(Waiting(*row))
        self._patterns = [Waiting(*row) for row in patterns]
        self._last_rows = dict.fromkeys(places)
        for row in rows[0] if rows else ():
            self._last_rows[row[0], row[1]] = LastRow(*row[2:])

    def forget(self) -> None:
        """A turn is over."""
        self._last_rows.clear()
        self._groups = None
        self.loaded = False
        self._named.clear()
        self._waiting.clear()
        self._patterns.clear()

    # Finding

    def last_row(self, stream_id: int, before_bytes: int) -> LastRow | None:
        place = (stream_id, before_bytes)
        if place in self._last_rows:
            return self._last_rows[place]
        return super().last_row(stream_id, before_bytes)

    def groups(self) -> list[Group]:
        return super().groups() if self._groups is None else self._groups

    def named(self, path: str) -> Mapping[Place, Target]:
        return self._named[path] if path in self._named else super().named(path)

    def waiting(self, path: str, rows_max: int) -> Sequence[Waiting]:
        loaded = self._waiting.get(path)
        if loaded is None or WAITING_MAX == len(loaded) < rows_max:
            return super().waiting(path, rows_max)
        return loaded[:rows_max]

    def patterns(self, path: str) -> Sequence[Waiting]:
        return self._patterns if path in self._named else super().patterns(path)
