"""Rows that many actors update, each update based on the one before: the rules, without I/O.

A row is versioned under its producer id: version n + 1 is accepted only after n, so of two updates
of the same version one is stored and the other reads again. The value is an object; `epoch` and
`version` go into it beside the fields of the user, for readers that see nothing but values.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, Literal, TypeVar, get_type_hints

import msgspec

from fencepost.client import state
from fencepost.client.effects import Call, Operation, Sleep
from fencepost.client.errors import FencepostError, ResponseError
from fencepost.client.operations import Producing
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.entries import Entries, Entry, Move, make, new_move
from fencepost.coordination.rules.ids import row_id

T = TypeVar("T")

OURS = frozenset(("epoch", "version", "override"))
"""Fields that a stored value has beside the user's."""
RETRIES = 5
"""How often an update is tried again after others were first."""
PAUSE_SECONDS_MIN = 0.002
PAUSE_SECONDS_MAX = 0.25


class Row(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A row and its version; order rows of one key by (epoch, version)."""

    key: str
    value: T
    epoch: int
    version: int


class Conflict(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Another actor updated the row first."""

    key: str
    attempted: tuple[int, int]
    """The epoch and version that we wanted to write."""
    server: tuple[int, int] | None
    """The epoch and version that are there; None when the server does not show any."""
    local: T | None
    """The value that we wanted to write; None for a delete."""
    current: T | None
    """The value that is there; None when the row is deleted."""


class Merge(msgspec.Struct, Generic[T], frozen=True):
    """The answer to a conflict: write this value, made of both."""

    value: T


Resolution = Literal["retry", "abort", "last-writer-wins"] | Merge[T]
"""What to do about a conflict: `mutate` again, give up, write ours over theirs, write a merge."""
OnConflict = (
    Callable[[Conflict[T]], Resolution[T]] | Callable[[Conflict[T]], Awaitable[Resolution[T]]]
)


class UpdateContendedError(FencepostError):
    """Others were faster each time, and nothing of the update was stored. Try again later."""


class UpdateAbortedError(FencepostError):
    """The conflict handler gave up, and nothing of the update was stored."""

    def __init__(self, message: str, *, conflict: Conflict[Any]) -> None:
        super().__init__(message)
        self.conflict = conflict


class Resourcing(Generic[T]):
    """The rows of one type on one stream: what sync and async share."""

    def __init__(self, settings: ClientSettings, path: str, type: str, kind: type[T] | None):
        self.settings = settings
        self.path = path
        self._type = type
        self._kind = kind
        self._hidden = OURS - _fields(kind)
        self._entries = Entries(settings, path, self._id_of)
        self._pending: dict[str, Move] = {}

    # Reading

    def refresh(self) -> Operation[None]:
        return self._entries.refresh()

    def loaded(self) -> Operation[None]:
        """See that the rows were read once; from then on only a lost race makes us read."""
        if not self._entries.loaded:
            yield from self._entries.refresh()

    def next(self) -> Operation[list[Row[T | None]]]:
        """The next rows that change; the value of a deleted one is None."""
        entries = yield from self._entries.next()
        return [
            Row(key=e.change.key, value=self.value(e), epoch=e.epoch, version=e.version)
            for e in entries
        ]

    def get(self, key: str) -> Row[T] | None:
        entry = self.entry(key)
        return None if entry is None else self._row(entry)

    def rows(self) -> Iterator[Row[T]]:
        rows = (self._row(entry) for entry in self._entries.of(self._type))
        return (row for row in rows if row is not None)

    def entry(self, key: str) -> Entry | None:
        """The newest message about a row, be it there or deleted."""
        return self._entries.get(self._type, key)

    def entries(self) -> list[Entry]:
        return list(self._entries.of(self._type))

    def value(self, entry: Entry | None) -> T | None:
        """The user's value; None when the row is not there."""
        if entry is None or entry.change.operation == "delete":
            return None
        fields = {name: one for name, one in entry.value.items() if name not in self._hidden}
        if self._kind is None:
            plain: Any = fields
            return plain  # type: ignore[no-any-return]
        try:
            return msgspec.convert(fields, self._kind)
        except msgspec.ValidationError as error:
            change = entry.change
            raise state.StateMessageError(
                f"the value of {change.type}/{change.key} is no {self._kind.__name__}: {error}"
            ) from None

    def _row(self, entry: Entry) -> Row[T] | None:
        value = self.value(entry)
        if value is None:
            return None
        key = entry.change.key
        return Row(key=key, value=value, epoch=entry.epoch, version=entry.version)

    # Writing

    def update(
        self,
        key: str,
        mutate: Callable[[T | None], T],
        retries: int,
        on_conflict: OnConflict[T] | None,
    ) -> Operation[Row[T]]:
        def value(current: T | None) -> T:
            made = mutate(current)
            if made is None:
                raise FencepostError("mutate returned None: to remove a row, delete it")
            return made

        row = self._row((yield from self._change(key, value, retries, on_conflict)))
        assert row is not None
        return row

    def delete(self, key: str, retries: int, on_conflict: OnConflict[T] | None) -> Operation[None]:
        if self.get(key) is None:
            yield from self.refresh()
        if self.get(key) is not None:
            yield from self._change(key, lambda _value: None, retries, on_conflict)

    def _change(
        self,
        key: str,
        mutate: Callable[[T | None], T | None],
        retries: int,
        on_conflict: OnConflict[T] | None,
    ) -> Operation[Entry]:
        """Read, change and write until no update came between; `mutate` gives None to delete."""
        yield from self.loaded()
        decided: Merge[T | None] | None = None
        for attempt in range(retries + 1):
            entry = self.entry(key)
            wanted = mutate(self.value(entry)) if decided is None else decided.value
            move = self.move(key, wanted, entry)
            if (yield from self._write(key, move)):
                self._entries.put(move.entry)
                return move.entry
            yield from self._pause(attempt)
            yield from self.refresh()
            if on_conflict is not None:
                decided = yield from self._ask(on_conflict, key, move, wanted)
        raise UpdateContendedError(f"{self._type}/{key}: others were faster {retries + 1} times")

    def settle(self, key: str) -> Operation[bool | None]:
        """What became of an update that raised `OutcomeUnknownError`, by sending it again."""
        move = self._pending.pop(key, None)
        if move is None:
            return None
        stored = yield from self._write(key, move)
        if stored:
            self._entries.put(move.entry)
        return stored

    def move(
        self,
        key: str,
        value: T | None,
        after: Entry | None,
        *,
        override: dict[str, str] | None = None,
    ) -> Move:
        """The write that follows `after`; as an override, the first one of a new epoch."""
        epoch, version = (0, 0) if after is None else (after.epoch, after.version + 1)
        if after is not None and override is not None:
            epoch, version = after.epoch + 1, 0
        fields = {} if value is None else msgspec.to_builtins(value)
        if not isinstance(fields, dict):
            raise FencepostError(f"a resource is an object, not {type(value).__name__}")
        if override is not None:
            fields = fields | {"override": override}
        producer = Producing(row_id(self._type, key), epoch, version)
        gone = after is None or after.change.operation == "delete"
        operation: Literal["insert", "update", "delete"] = "insert" if gone else "update"
        if value is None:
            operation = "delete"
        return new_move(self.settings, producer, operation, self._type, key, fields)

    def put(self, move: Move) -> None:
        """A move was stored."""
        self._entries.put(move.entry)

    def _write(self, key: str, move: Move) -> Operation[bool]:
        try:
            return (yield from make(self.settings, self.path, move))
        except BaseException as error:
            refused = isinstance(error, ResponseError) and not error.uncertain
            if not refused:
                self._pending[key] = move
            raise

    def _pause(self, attempt: int) -> Operation[None]:
        """Contenders that lost together do not come back together."""
        if attempt:
            bound = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN * 2.0 ** min(attempt, 30))
            yield Sleep(bound * self.settings.clock.random())

    def _ask(
        self, on_conflict: OnConflict[T], key: str, move: Move, wanted: T | None
    ) -> Operation[Merge[T | None] | None]:
        entry = self.entry(key)
        conflict = Conflict(
            key=key,
            attempted=(move.producer.epoch, move.producer.seq),
            server=None if entry is None else entry.place,
            local=wanted,
            current=self.value(entry),
        )
        answer: Any = yield Call(lambda: on_conflict(conflict))
        if answer == "retry":
            return None
        if answer == "abort":
            raise UpdateAbortedError(f"{self._type}/{key} was updated by others", conflict=conflict)
        if answer == "last-writer-wins":
            return Merge(wanted)
        if not isinstance(answer, Merge):
            raise FencepostError(f"a conflict handler answers with a Resolution, not {answer!r}")
        return answer

    def _id_of(self, change: state.Change) -> str | None:
        return row_id(change.type, change.key) if change.type == self._type else None


def _fields(kind: type[Any] | None) -> frozenset[str]:
    """The names that a user's type has itself; it sees our fields of the same names."""
    return frozenset() if kind is None else frozenset(get_type_hints(kind))
