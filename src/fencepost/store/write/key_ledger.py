"""The keys of the ledger: what each stands for, and keeping those that are used.

A key is asked for in the order of what it costs: the filter, which calls most new keys new; the
groups that are not on disk; the keys that are not in the index; the index.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from fencepost.protocol.appends import Appended, KeyRecord
from fencepost.store import records
from fencepost.store.database import Connection, Row
from fencepost.store.write.key_filter import KeyFilter
from fencepost.store.write.recent_keys import KeyPlace

COMMITS = 0
"""The stream id under which the keys of whole commits are kept; no stream has it."""


class KeyGroup(Protocol):
    """A group, as far as keys go."""

    keys: dict[KeyPlace, Row]
    numbered_keys: list[tuple[Collection[KeyPlace], int]]


class KeyLedger:
    """What a ledger knows of keys."""

    def __init__(
        self, connection: Connection, pending: Sequence[KeyGroup], key_retention_ms: int | None
    ) -> None:
        self._connection = connection
        self._keyed = pending
        self.key_retention_ms = key_retention_ms
        self.key_filter: KeyFilter | None = None
        """Tells most new keys from used ones without a look at the disk, where there is one."""

    def filter_keys(self) -> KeyFilter:
        """Have a filter of keys, which is to learn those on disk."""
        self.key_filter = KeyFilter()
        self.key_filter.load(self._connection.fetch("unindexed_keys"))
        return self.key_filter

    def reset_keys(self) -> None:
        """Find out again which keys are not in the index: nobody knows what came to disk."""
        if self.key_filter is not None:
            self.key_filter.load(self._connection.fetch("unindexed_keys"))

    def keys_committed(self, group: KeyGroup) -> None:
        """The keys of a group are on disk."""
        if self.key_filter is not None:
            for places, last_id in group.numbered_keys:
                self.key_filter.recent.add(places, last_id)

    def find_key(self, place: KeyPlace) -> KeyRecord | None:
        """What an Idempotency-Key of a stream and a principal stands for."""
        if self.key_filter is not None and self.key_filter.is_new(place):
            return None
        found = self._find_key(place)
        return None if found is None else found[0]

    def find_commit_key(self, principal: str, key: str) -> tuple[KeyRecord, bytes] | None:
        """What the key of a whole commit stands for, and what was answered."""
        place = (COMMITS, principal, key)
        if self.key_filter is not None and self.key_filter.is_new(place):
            return None
        return self._find_key(place)

    def _find_key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        kept = self._kept_key(place)
        if kept is not None:
            return kept
        rows: list[Row] = []
        if self.key_filter is not None:
            rows = self.key_filter.recent.find(self._connection, place)
        rows = rows or self._connection.fetch("find_key", place)
        return records.key_from_row(rows[0]) if rows else None

    def _kept_key(self, place: KeyPlace) -> tuple[KeyRecord, bytes] | None:
        """A key whose row is not on disk yet."""
        for group in self._keyed:
            row = group.keys.get(place)
            if row is not None:
                return records.key_from_columns(row)
        return None

    def kept_keys(self) -> list[KeyPlace]:
        """The keys whose rows are not on disk yet."""
        return [place for group in self._keyed for place in group.keys]

    def keep_key(
        self,
        group: KeyGroup,
        place: KeyPlace,
        record: KeyRecord,
        answer: bytes = b"",
    ) -> None:
        """Remember what the key of a commit was used for, in the transaction of the commit."""
        retention_ms = self.key_retention_ms
        expires_ms = None if retention_ms is None else record.created_ms + retention_ms
        group.keys[place] = records.key_columns(*place, record, answer, expires_ms)
        if self.key_filter is not None:
            self.key_filter.add(place)

    def keep_append_key(
        self,
        group: KeyGroup,
        place: KeyPlace,
        digest: bytes,
        outcome: Appended,
        now_ms: int,
    ) -> None:
        """The same for the key of an append. Its row is made at once, value by value: what it says
        is asked for only by the few that come again, and this is done for each."""
        stream_id, principal, key = place
        start_messages, start_bytes = outcome.start
        tail_messages, tail_bytes = outcome.tail
        retention_ms = self.key_retention_ms
        group.keys[place] = (
            stream_id,
            principal,
            key,
            digest,
            start_messages,
            start_bytes,
            tail_messages,
            tail_bytes,
            outcome.closed,
            outcome.position,
            now_ms,
            None if retention_ms is None else now_ms + retention_ms,
            None,
        )
        if self.key_filter is not None:
            self.key_filter.add(place)
