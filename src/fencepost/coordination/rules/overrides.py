"""Overrides: moves that bypass the order of claims and versions, each with a reason; no I/O here.

An override raises the epoch. It does so only over what it has seen (Producer-If) and looks again
when that has moved, so it is always the newest state that is overridden, knowingly. Actors that
still write in the old epoch are refused from then on. The reason goes to the server's audit stream,
and into the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fencepost.client import operations
from fencepost.client.effects import Operation
from fencepost.client.errors import (
    CommitPartialError,
    ContentMismatchError,
    FencepostError,
    InvalidArgumentError,
    ProducerMovedError,
    SequenceGapError,
    StaleEpochError,
)
from fencepost.client.operations import CommitAppend
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.claims import Claiming, Kind
from fencepost.coordination.rules.entries import Move, make
from fencepost.coordination.rules.resources import Resourcing, Row, UpdateContendedError
from fencepost.coordination.rules.tasks import RACES_MAX

Value = dict[str, Any]


class Overriding:
    """The overrides of one administrator on one stream: what sync and async share."""

    def __init__(self, settings: ClientSettings, path: str, by: str) -> None:
        self._settings = settings
        self._path = path
        self._by = by
        self._claims: dict[Kind, Claiming] = {}
        self._rows: dict[str, Resourcing[Value]] = {}

    def free(self, task: str, reason: str, kind: Kind) -> Operation[bool]:
        """Take a task from its holder, dead or alive or not readable, and leave it available."""
        _check(reason)
        claims = self._claims.setdefault(kind, Claiming(self._settings, self._path, self._by, kind))
        for _race in range(RACES_MAX):
            freed = yield from claims.free(task, reason)
            if freed is not None:
                return freed
        raise UpdateContendedError(f"{task}: its holder moved on {RACES_MAX} times")

    def correct(self, type: str, key: str, value: Any, reason: str) -> Operation[Row[Value]]:
        """Write a value over whatever there is, readable or not."""
        return self._force(type, key, lambda _rows: value, reason)

    def restart_versions(
        self, type: str, key: str, reason: str, migrate: Callable[[Value], Any] | None
    ) -> Operation[Row[Value]]:
        """Begin the versions of a row again at 0, with its value, migrated."""

        def value(rows: Resourcing[Value]) -> Any:
            current = rows.value(rows.entry(key))
            if current is None:
                raise FencepostError(f"there is no {type}/{key} whose versions could be restarted")
            return current if migrate is None else migrate(current)

        return self._force(type, key, value, reason)

    def baseline(self, type: str, values: Mapping[str, Any], reason: str) -> Operation[int]:
        """Make these all the rows of a type, in one commit; how many rows it changed.

        Rows whose messages cannot be read or were truncated are among those that it replaces.
        """
        _check(reason)
        rows = self._rows_of(type)
        for _race in range(RACES_MAX):
            yield from rows.refresh()
            yield from rows.explain()
            moves = self._baseline(rows, values, reason)
            if not moves:
                return 0
            if (yield from self._commit([item for _move, item in moves], reason)):
                for move, _item in moves:
                    rows.put(move)
                return len(moves)
        raise UpdateContendedError(f"{type}: others wrote in between {RACES_MAX} times")

    def _force(
        self, type: str, key: str, value: Callable[[Resourcing[Value]], Any], reason: str
    ) -> Operation[Row[Value]]:
        _check(reason)
        rows = self._rows_of(type)
        yield from rows.refresh()
        for _race in range(RACES_MAX):
            seen = rows.place(key)
            move = rows.override(key, _plain(value(rows)), by=self._by, reason=reason)
            stored = yield from make(
                self._settings, self._path, move, producer_if=seen, reason=reason, outlasts=True
            )
            if stored:
                rows.put(move)
                row = rows.get(key)
                assert row is not None
                return row
            yield from rows.refresh()
            if rows.place(key) == seen:
                yield from rows.explain()
        raise UpdateContendedError(f"{type}/{key}: others wrote in between {RACES_MAX} times")

    def _baseline(
        self, rows: Resourcing[Value], values: Mapping[str, Any], reason: str
    ) -> list[tuple[Move, CommitAppend]]:
        there = [key for key, one in rows.entries().items() if one.change.operation != "delete"]
        gone = (key for key in (*there, *rows.all_skipped()) if key not in values)
        wanted: dict[str, Any] = {**values, **dict.fromkeys(gone)}
        moves = []
        for key, value in wanted.items():
            move = rows.override(key, _plain(value), by=self._by, reason=reason)
            item = CommitAppend(
                stream=self._path,
                messages=[move.change],
                producer=move.producer,
                producer_if=rows.place(key),
                producer_strict=True,
            )
            moves.append((move, item))
        return moves

    def _commit(self, items: list[CommitAppend], reason: str) -> Operation[bool]:
        try:
            yield from operations.commit(self._settings, items, None, reason)
        except (
            CommitPartialError,
            ContentMismatchError,
            ProducerMovedError,
            SequenceGapError,
            StaleEpochError,
        ):
            return False
        return True

    def _rows_of(self, type: str) -> Resourcing[Value]:
        made: Resourcing[Value] = Resourcing(self._settings, self._path, type, None)
        return self._rows.setdefault(type, made)


def _plain(value: Any) -> Any:
    return None if value is None else msgspec.to_builtins(value)


def _check(reason: str) -> None:
    if not reason.strip() or not reason.isprintable():
        raise InvalidArgumentError("an override has a reason, in one line")
