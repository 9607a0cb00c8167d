"""What one transaction writes, collected decision by decision, and the streams that it changes.

These are values that the ledger and the deciders fill and the stores write; no rule is here. An
`Entry` outlives its groups: it is a stream as the ledger keeps it in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Parked, Target
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Producer, Stream
from fencepost.protocol.writers import Writer
from fencepost.store.contract import StreamInfo
from fencepost.store.records import (
    DELETED,
    LIVE,
    SOFT_DELETED,
)
from fencepost.store.sql import Row
from fencepost.store.write.keys import KeyPlace
from fencepost.store.write.sends import StoredMesh, Topic
from fencepost.store.write.staging import Changes
from fencepost.store.write.told import ToldChanges
from fencepost.store.write.writers import HistoryChanges


class Entry:
    """A stream in the ledger: decided state, committed view, and the producers in use."""

    __slots__ = (
        "dirty_in",
        "ended_ms",
        "gone",
        "producers",
        "reshaped_in",
        "stored_deadline_ms",
        "stream",
        "view",
    )

    def __init__(self, stream: Stream, stored_deadline_ms: int | None) -> None:
        self.stream = stream
        self.stored_deadline_ms = stored_deadline_ms
        self.producers: dict[str, Producer | None] = {}
        self.view: StreamInfo | None = None  # None until its creation is committed
        self.gone = False  # decided to be deleted
        self.ended_ms: int | None = None
        self.dirty_in = 0  # the newest group that carries a change of it
        self.reshaped_in = 0  # the newest group that makes or ends it

    @property
    def state(self) -> int:
        if self.gone:
            return DELETED
        return SOFT_DELETED if self.stream.soft_deleted else LIVE


class Carried(Protocol):
    """A slice of a large commit, as far as its group has to know: rows to be written."""

    updates: list[Row]
    inserts: list[Row]
    log: list[Row]
    producers: list[Row]
    keys: list[Row]
    statements: list[tuple[str, Row]]


class LedgerGroup:
    """What one transaction writes, collected decision by decision."""

    __slots__ = (
        "bulk",
        "bytes",
        "carried",
        "counters",
        "created",
        "entries",
        "groups",
        "histories",
        "inserts",
        "key_rows",
        "keys",
        "leases",
        "meshes",
        "moves",
        "number",
        "numbered_keys",
        "numbered_sends",
        "opened",
        "parked",
        "parts",
        "producers",
        "rows",
        "sends",
        "staging",
        "statements",
        "told",
        "topics",
        "unshown",
        "updates",
        "usage",
        "views",
        "whole",
        "writers",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.bytes = 0
        self.rows: list[Row] = []
        self.entries: dict[int, Entry] = {}
        self.created: set[int] = set()
        self.whole: set[int] = set()  # streams of which more changed than the tail
        self.opened: set[tuple[int, str]] = set()  # producers of which more changed than the batch
        self.producers: dict[tuple[int, str], Producer] = {}
        self.parts: dict[int, tuple[Offset, list[bytes]]] = {}
        self.keys: dict[KeyPlace, Row] = {}
        self.unshown: set[int] = set()  # streams that got data which is not in `parts`
        self.staging: Changes | None = None
        self.writers: dict[str, Writer | None] = {}
        self.histories: dict[str, HistoryChanges] = {}
        # Groups, targets and parked events, as this group leaves them:
        self.groups: dict[int, Group | None] = {}
        self.leases: dict[int, dict[str, Target | None]] = {}
        self.parked: dict[tuple[int, str, int], Parked | None] = {}
        self.told: dict[int, dict[str, ToldChanges]] = {}
        # Meshes, members of topics, and dedupe rows:
        self.meshes: dict[str, StoredMesh | None] = {}
        self.topics: dict[Topic, tuple[str, ...]] = {}
        self.sends: dict[KeyPlace, Row] = {}
        self.numbered_sends: list[tuple[Collection[KeyPlace], int]] = []
        self.bulk: list[tuple[str, list[Row]]] = []
        self.carried: list[Carried] = []  # slices of a large commit
        self.usage: dict[str, Counter[str]] = {}  # what principals hold more after it
        self.statements: list[tuple[str, tuple[object, ...]]] = []
        # Filled when the group is sealed:
        self.inserts: list[Row] = []
        self.updates: list[Row] = []
        self.moves: list[Row] = []
        self.views: list[tuple[Entry, StreamInfo, int]] = []
        self.key_rows: list[Row] = []
        # Filled when it is written, where rows of keys are numbered: those that were written
        # together, and the number that the last of them got.
        self.numbered_keys: list[tuple[Collection[KeyPlace], int]] = []
        self.counters: Row = ()

    def is_empty(self) -> bool:
        return not (
            self.entries
            or self.rows
            or self.statements
            or self.groups
            or self.leases
            or self.parked
            or self.bulk
            or self.sends
        )
