"""Rows that many actors update, each update based on the one before: the rules, without I/O.

A row is versioned under its producer id: version n + 1 is accepted only after n, so of two updates
of the same version one is stored and the other reads again. The value is an object; `epoch` and
`version` go into it beside the fields of the user, for readers that see nothing but values.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import UNSET

from fencepost.client import state
from fencepost.client.effects import Call, Operation, Sleep
from fencepost.client.errors import FencepostError, InvalidArgumentError, ResponseError, require
from fencepost.client.handlers import check_handler
from fencepost.client.operations import Producing
from fencepost.client.settings import ClientSettings
from fencepost.coordination.rules.entries import (
    Entries,
    Entry,
    Move,
    Skipped,
    instant,
    make,
    new_move,
)
from fencepost.coordination.rules.ids import escape, row_id

T = TypeVar("T")

OURS = frozenset(("epoch", "version", "override"))
"""Fields that a stored value has beside the user's."""
THEIRS = frozenset(("adminOverride",))
"""What the published patterns call `override`."""
RETRIES = 5
"""How often an update is tried again after others were first."""
PAUSE_SECONDS_MIN = 0.002
PAUSE_SECONDS_MAX = 0.25


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a row was written by an override, out of the order of its versions."""

    reason: str
    by: str | None = None
    skipped: Skipped | None = None
    """What the override was raised over and could not read."""


class Row(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A row and its version; order rows of one key by (epoch, version)."""

    key: str
    value: T
    epoch: int
    version: int
    updated: datetime | None = None
    """When the server stored it; None of a row that we wrote ourselves and did not read back."""
    override: Override | None = None
    """For a row that an override wrote: who wrote it, and why."""


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


class RowUnreadableError(FencepostError):
    """What stands under the row's producer id is no message about it, or was truncated.

    Nothing was stored. `Overrides.correct` writes over it; `skipped` says where it stands and why
    it cannot be read.
    """

    def __init__(self, row: str, skipped: Skipped) -> None:
        super().__init__(
            f"the newest message of {row} cannot be read ({skipped}):"
            " Overrides.correct writes a value over it"
        )
        self.skipped = skipped


class UpdateAbortedError(FencepostError):
    """The conflict handler gave up, and nothing of the update was stored."""

    def __init__(self, message: str, *, conflict: Conflict[Any]) -> None:
        super().__init__(message)
        self.conflict = conflict


class Rows:
    """The producer ids of the rows of one type, and the messages about them."""

    def __init__(self, type: str) -> None:
        self._type = type
        self.ids = row_id(type, "*").removesuffix(escape("*")) + "*"

    def id_of(self, key: str) -> str:
        return row_id(self._type, key)

    def goes_on(self, _change: state.Change, /) -> bool:
        return False

    def read(self, key: str, data: Any) -> state.Change | str:
        """A State message about the row.

        The published patterns also name a row by its whole id: `user:123`, of type `resource`.
        """
        try:
            change = state.parse(data)
        except state.StateMessageError as error:
            return str(error)
        if not isinstance(change, state.Change):
            return "it is no change"
        if (change.type, change.key) != (self._type, key) and change.key != f"{self._type}:{key}":
            return f"it is about {change.type}/{change.key}"
        value = {} if change.operation == "delete" and change.value is UNSET else change.value
        if not isinstance(value, dict):
            return "its value is no object"
        return msgspec.structs.replace(change, type=self._type, key=key, value=value)


class Resourcing(Generic[T]):
    """The rows of one type on one stream: what sync and async share."""

    def __init__(self, settings: ClientSettings, path: str, type: str, kind: type[T] | None):
        taken = OURS & _fields(kind)
        if taken:
            raise InvalidArgumentError(
                f"{_name(kind)} has the field {min(taken)}, which every stored row has for itself:"
                " give it another name, or read `Row.epoch`, `Row.version` and `Row.override`"
            )
        self.settings = settings
        self.path = path
        self._type = type
        self._kind = kind
        self._hidden = OURS | (THEIRS - _fields(kind))
        self._entries = Entries(settings, path, Rows(type))
        self._pending: dict[str, Move] = {}

    # Reading

    def refresh(self) -> Operation[None]:
        return self._entries.refresh()

    def explain(self) -> Operation[None]:
        """Find out where rows stand whose messages were truncated."""
        return self._entries.explain_all()

    def readable(self, key: str) -> Operation[None]:
        """See that the rows were read once; from then on only a lost race makes us read.

        A row that could not be read is looked at again: an override may have mended it.
        """
        if not self._entries.loaded or self.skipped(key) is not None:
            yield from self._entries.refresh()

    def changes(self) -> Entries:
        """The rows as far as they were read, for `next` to go on from."""
        return self._entries.copy()

    def next(self, changes: Entries) -> Operation[list[Row[T | None]]]:
        """The next rows that change; the value of a deleted one is None."""
        entries = yield from changes.next()
        for entry in entries:
            self._entries.put(entry)
        return [self._described(entry, self.value(entry)) for entry in entries]

    def get(self, key: str) -> Row[T] | None:
        """The row as far as it was read."""
        entry = self.entry(key)
        return None if entry is None else self._row(entry)

    def rows(self) -> Iterator[Row[T]]:
        """Every row that can be read, as far as they were read."""
        readable = (e for e in self._entries.all() if self.skipped(e.change.key) is None)
        rows = (self._row(entry) for entry in readable)
        return (row for row in rows if row is not None)

    def entry(self, key: str) -> Entry | None:
        """The newest message about a row, be it there or deleted; raises if it is not readable."""
        skipped = self.skipped(key)
        if skipped is not None:
            raise RowUnreadableError(f"{self._type}/{key}", skipped)
        return self._entries.get(key)

    def entries(self) -> dict[str, Entry]:
        """The newest message of every row that can be read."""
        return {entry.change.key: entry for entry in self._entries.all()}

    def place(self, key: str) -> tuple[int, int] | None:
        """Epoch and version of the newest message of a row, readable or not."""
        return self._entries.place(key)

    def skipped(self, key: str) -> Skipped | None:
        """The newest message of a row if it cannot be read; None if it can."""
        return self._entries.skipped(key)

    def all_skipped(self) -> dict[str, Skipped]:
        return self._entries.all_skipped()

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
                f"the value of {change.type}/{change.key} is no {_name(self._kind)}: {error}"
            ) from None

    def _row(self, entry: Entry) -> Row[T] | None:
        value = self.value(entry)
        return None if value is None else self._described(entry, value)

    @staticmethod
    def _described(entry: Entry, value: Any) -> Row[Any]:
        return Row(
            key=entry.change.key,
            value=value,
            epoch=entry.epoch,
            version=entry.version,
            updated=instant(entry.updated_ms) if entry.updated_ms else None,
            override=_override(entry.value),
        )

    # Writing

    def update(
        self,
        key: str,
        mutate: Callable[[T | None], T],
        retries: int,
        on_conflict: OnConflict[T] | None,
    ) -> Operation[Row[T]]:
        check_handler(mutate, ("value",))

        def value(current: T | None) -> T:
            made = mutate(current)
            if made is None:
                raise InvalidArgumentError("mutate returned None: to remove a row, delete it")
            return made

        row = self._row((yield from self._change(key, value, retries, on_conflict)))
        assert row is not None
        return row

    def delete(self, key: str, retries: int, on_conflict: OnConflict[T] | None) -> Operation[None]:
        yield from self.readable(key)
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
        require(retries >= 0, "retries is not negative")
        yield from self.readable(key)
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
            if self.place(key) == (None if entry is None else entry.place):
                yield from self._entries.explain(key)
                self.entry(key)  # which raises, if no actor was faster and it cannot be read
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

    def move(self, key: str, value: T | None, after: Entry | None) -> Move:
        """The write that follows `after`."""
        place = (0, 0) if after is None else (after.epoch, after.version + 1)
        return self._made(key, value, place, self._is_gone(after), {})

    def override(self, key: str, value: Any, *, by: str, reason: str) -> Move:
        """The first write of a new epoch, over whatever stands there."""
        place, skipped = self.place(key), self.skipped(key)
        told: dict[str, Any] = {"by": by, "reason": reason}
        if skipped is not None:
            told["skipped"] = msgspec.to_builtins(skipped)
        at = (0, 0) if place is None else (place[0] + 1, 0)
        return self._made(key, value, at, self._is_gone(self._entries.get(key)), {"override": told})

    @staticmethod
    def _is_gone(entry: Entry | None) -> bool:
        return entry is None or entry.change.operation == "delete"

    def _made(
        self, key: str, value: Any, place: tuple[int, int], gone: bool, more: dict[str, Any]
    ) -> Move:
        fields = {} if value is None else msgspec.to_builtins(value)
        if not isinstance(fields, dict):
            raise InvalidArgumentError(f"a resource is an object, not {type(value).__name__}")
        if taken := OURS & fields.keys():
            raise InvalidArgumentError(
                f"the value of {self._type}/{key} has the field {min(taken)}, which every stored"
                " row has for itself: give it another name"
            )
        producer = Producing(row_id(self._type, key), *place)
        operation: Literal["insert", "update", "delete"] = "insert" if gone else "update"
        if value is None:
            operation = "delete"
        value, after = fields | more, self._entries.after
        return new_move(self.settings, producer, operation, self._type, key, value, after=after)

    def put(self, move: Move) -> None:
        """A move was stored."""
        self._entries.put(move.entry)

    def _write(self, key: str, move: Move) -> Operation[bool]:
        try:
            return (yield from make(self.settings, self.path, move, outlasts=True))
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
            raise InvalidArgumentError(
                f"a conflict handler answers with a Resolution, not {answer!r}"
            )
        return answer


def _override(value: dict[str, Any]) -> Override | None:
    """What a value says about the override that wrote it, in our words or those of the patterns."""
    for name in ("override", *THEIRS):
        try:
            return msgspec.convert(value.get(name), Override)
        except msgspec.ValidationError:
            continue
    return None


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _fields(kind: type[Any] | None) -> frozenset[str]:
    """The names that the fields of a user's type have when they are stored."""
    if kind is None:
        return frozenset()
    encoded = getattr(kind, "__struct_encode_fields__", None)
    try:
        return frozenset(get_type_hints(kind) if encoded is None else encoded)
    except TypeError:
        return frozenset()  # a type without fields of its own, such as dict[str, int]
