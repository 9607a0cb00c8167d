"""Closing the books: end a period of an entity's stream, and begin the next one or none.

Operations without I/O. `close_books` looks at the stream and takes the next step: guard it with
`$closed`, archive the period, and end it in one commit. What it did so far is seen in the stream,
so a close that was killed anywhere goes on when it is called again. The server decides, in the same
transaction, that no group has work left on what goes; what lags is reported, never cut off.

`drop_before` keeps the stream live: it stores the state at a date beside the stream, and drops the
events before it in the same commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

import msgspec

from fencepost.client import operations
from fencepost.client.effects import Call, Operation, Sleep
from fencepost.client.errors import (
    BooksClosedError,
    BooksPendingError,
    ForbiddenError,
    GroupNotFoundError,
    StreamDeletedError,
    StreamNotFoundError,
    TailMovedError,
    require,
)
from fencepost.client.operations import CommitAppend, query_of
from fencepost.client.reading import LogReader
from fencepost.client.results import Head, LogEntry, StreamInfo
from fencepost.events import loading
from fencepost.events.codec import CLOSED, OPENED
from fencepost.events.commits import is_event, meta_of
from fencepost.events.correlating import Correlating
from fencepost.events.deciding import Deciding
from fencepost.events.errors import ArchiveError, ConcurrencyError
from fencepost.events.loading import Loaded, Snapshot
from fencepost.events.types import Entity, Recorded

Then = Literal["restart", "retire", "window"]
Archive = Callable[["Period"], Any]
Outcome = Literal["restarted", "retired", "dropped", "reopened", "pending", "unchanged"]


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive callback is given: the events that are about to go, and the state behind.

    The callback may be called again for the same period, after a kill or beside another process:
    store what it archives under `key`.
    """

    stream: str
    state: Any
    version: int
    """The number of the last event."""
    events: list[Recorded[Any]]
    then: Then

    @property
    def key(self) -> str:
        """A name of the period: the same on every attempt."""
        return f"{self.stream}@{self.version}"


class ClosedBooks(msgspec.Struct, frozen=True, kw_only=True):
    """What closing a stream came to.

    `pending`: nothing went, because `group` has work left on the stream, or because of `error`;
    close it again later. With `guarded` the stream takes no events until then.
    """

    stream: str
    outcome: Outcome
    version: int = -1
    """The last event that the close was about."""
    group: str | None = None
    guarded: bool = False
    error: str | None = None
    """After `close_due`: the error of the archive callback."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """When the books of an entity are closed, and what becomes of the stream."""

    entity: type[Entity]
    then: Then
    final: tuple[str, ...] = ()
    """Names of events: a stream whose newest event is one of them is due."""
    age: timedelta | None = None
    """A stream whose newest event is as old is due; of a window, the age of what goes."""
    archive: Archive | None = None

    def __post_init__(self) -> None:
        require(self.then in ("restart", "retire", "window"), "then is restart, retire or window")
        require(self.age is None or self.age >= timedelta(0), "age is not negative")
        if self.then == "window":
            require(self.age is not None and not self.final, "a window has an age and no final")

    def may_be_due(self, info: StreamInfo, now: datetime) -> bool:
        """Whether a stream of a list is worth a look."""
        if self.then == "window":
            return self.age is not None and info.created <= now - self.age
        if not self.final and self.age is None:
            return False
        return self.age is None or info.updated <= now - self.age

    def is_due(self, newest: Recorded[Any] | None, now: datetime) -> bool:
        """Whether a stream is due, by its newest event."""
        if newest is None:
            return False
        if newest.name == CLOSED:
            return True  # a close has begun, and is to be ended
        if self.then == "window":
            return True
        if newest.name == OPENED and (self.then == "restart" or self.final):
            return False
        created = newest.created
        old = self.age is None or (created is not None and created <= now - self.age)
        return old and (not self.final or newest.name in self.final)


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """What a close needs beside the stream."""

    deciding: Deciding
    correlating: list[Correlating]
    """Of the app's own groups, which may be caught up by any process of it."""
    call: Callable[[Archive, Period], Exception | Awaitable[Exception | None] | None]
    """Calls an archive callback, in the way of the client that is used, and gives its error."""
    wait_ms: int
    """How long a guarded stream waits for groups that lag: it takes no events until then."""


def close_books(
    run: Closing, kind: type[Entity], path: str, then: Then, archive: Archive | None
) -> Operation[ClosedBooks]:
    """Close the books of one stream; `then` counts unless a close has begun with another one."""
    require(then in ("restart", "retire"), "then is restart or retire")
    clock = run.deciding.settings.clock
    guarded = False
    conflicts = 0
    waits = _Waits(clock.monotonic_ms() + run.wait_ms)
    archived: int | None = None
    while True:
        yield from _catch_up(run)
        newest = yield from newest_event(run.deciding, path)
        loaded = yield from _load(run.deciding, kind, path)
        if newest is None and (yield from _is_retired(run, path)):
            return ClosedBooks(stream=path, outcome="retired", version=loaded.version)
        name = OPENED if newest is None else newest.name
        ended = guarded and name != CLOSED  # by another process
        if ended or loaded.version == -1 or (name == OPENED and then == "restart"):
            return ClosedBooks(stream=path, outcome="unchanged", version=loaded.version)
        guarded = name == CLOSED
        try:
            if newest is not None and loaded.version != newest.version:
                raise ConcurrencyError(path, newest.version, loaded.version, ())
            if newest is not None and guarded:
                if archive is not None and archived != newest.position:
                    yield from _archive_period(run, loaded, newest, archive)
                    archived = newest.position
                return (yield from _end(run, loaded, newest))
            yield from _guard(run, loaded, then)
            guarded = True
        except BooksPendingError as error:
            if guarded and (pause_s := waits.next_s(clock.monotonic_ms())):
                yield Sleep(pause_s)
                continue
            return ClosedBooks(
                stream=path,
                outcome="pending",
                version=loaded.version,
                group=error.group,
                guarded=guarded,
            )
        except (ConcurrencyError, TailMovedError, BooksClosedError) as error:
            conflicts += 1
            if conflicts > run.deciding.conflicts_max:
                raise ConcurrencyError(path, loaded.version, None, ()) from error


def _guard(run: Closing, loaded: Loaded[Any], then: Then) -> Operation[None]:
    """Let the stream take no more events; the server refuses while a group lags on it."""
    if then == "restart":
        loading.state_data(loaded)  # else the close could not be ended
    data = {"entity": loaded.state.__entity__.name, "version": loaded.version, "then": then}
    guard = CommitAppend(
        stream=loaded.stream,
        messages=[_message(run, CLOSED, data)],
        if_match=loaded.offset,
        books="close",
    )
    yield from operations.commit(run.deciding.settings, [guard], None)


class _Waits:
    """Longer and longer waits, until a time."""

    def __init__(self, until_ms: float) -> None:
        self._until_ms = until_ms
        self._next_s = 0.05

    def next_s(self, now_ms: float) -> float:
        """How long to wait now; 0: the time is over."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, 1.0)
        return max(0.0, min(pause_s, (self._until_ms - now_ms) / 1000))


def _archive_period(
    run: Closing, loaded: Loaded[Any], closed: Recorded[Any], archive: Archive
) -> Operation[None]:
    events = yield from _events(run, loaded.stream, closed.position - 1)
    period = Period(
        stream=loaded.stream,
        state=loaded.state,
        version=closed.data["version"],
        events=events,
        then=closed.data["then"],
    )
    yield from _archive(run, archive, period)
    yield from _catch_up(run)


def _end(run: Closing, loaded: Loaded[Any], closed: Recorded[Any]) -> Operation[ClosedBooks]:
    """End a period in one commit."""
    settings, path = run.deciding.settings, loaded.stream
    retires = closed.data["then"] == "retire"
    version: int = closed.data["version"]
    end = CommitAppend(stream=path, if_match=loaded.offset, truncate_before="now")
    if not retires:
        data = {
            "entity": loaded.state.__entity__.name,
            "version": version,
            "state": loading.state_data(loaded),
        }
        end = msgspec.structs.replace(end, messages=[_message(run, OPENED, data)], books="open")
    done = yield from operations.commit(settings, [end], None)
    run.deciding.cache.drop(type(loaded.state), path)
    if retires:
        yield from _forget_beside(run, path)
        return ClosedBooks(stream=path, outcome="retired", version=version)
    if run.deciding.snapshots:
        offset = done.appends[0].next_offset
        opened = msgspec.structs.replace(loaded, version=loaded.version + 1, offset=offset)
        yield from loading.write_snapshot(settings, opened)
    return ClosedBooks(stream=path, outcome="restarted", version=version)


def _is_retired(run: Closing, path: str) -> Operation[bool]:
    """Whether a stream that holds nothing has ended for good."""
    head = yield from _head(run.deciding, path)
    if head is None or not head.books_closed:
        return False
    yield from _forget_beside(run, path)
    return True


def reopen_books(run: Closing, kind: type[Entity], path: str) -> Operation[ClosedBooks]:
    """Give up a close that has begun: the stream takes events again, and keeps all it holds."""
    newest = yield from newest_event(run.deciding, path)
    if newest is None or newest.name != CLOSED:
        version = -1 if newest is None else newest.version
        return ClosedBooks(stream=path, outcome="unchanged", version=version)
    loaded = yield from _load(run.deciding, kind, path)
    if loaded.version != newest.version:
        raise ConcurrencyError(path, newest.version, loaded.version, ())
    data = {
        "entity": kind.__entity__.name,
        "version": newest.data["version"],
        "state": loading.state_data(loaded),
    }
    opened = CommitAppend(
        stream=path,
        messages=[_message(run, OPENED, data)],
        if_match=loaded.offset,
        books="open",
    )
    yield from operations.commit(run.deciding.settings, [opened], None)
    return ClosedBooks(stream=path, outcome="reopened", version=newest.data["version"])


def drop_before(
    run: Closing, kind: type[Entity], path: str, before: datetime, archive: Archive | None
) -> Operation[ClosedBooks]:
    """Drop the events before a time; the state that they led to is kept as the stream's base."""
    require(before.tzinfo is not None, "the time of a window has a time zone")
    settings = run.deciding.settings
    if (yield from _head(run.deciding, path)) is None:
        return ClosedBooks(stream=path, outcome="unchanged", version=-1)
    conflicts = 0
    while True:
        yield from _catch_up(run)
        tail = yield from _tail_of_base(run, path)
        past = yield from loading.past_of(settings, run.deciding.codec, kind, path, before)
        kept = past.loaded
        base = yield from loading.read_base(settings, kind, path)
        if kept.version <= (-1 if base is None else base.version):
            return ClosedBooks(stream=path, outcome="unchanged", version=kept.version)
        offset = yield from _offset_behind(run, kind, path, past)
        if offset is None:
            continue
        head = yield from operations.head(settings, path)
        if offset <= (head.first_offset or ""):
            return ClosedBooks(stream=path, outcome="unchanged", version=kept.version)
        if archive is not None:
            events = yield from _events(run, path, past.position)
            period = Period(
                stream=path,
                state=kept.state,
                version=kept.version,
                events=events,
                then="window",
            )
            yield from _archive(run, archive, period)
        stored = Snapshot(
            entity=kind.__entity__.name,
            snapshot=kind.__entity__.snapshot,
            version=kept.version,
            offset=offset,
            state=loading.state_data(kept),
            position=past.position,
            timestamp_ms=past.timestamp_ms,
        )
        kept_base = CommitAppend(
            stream=loading.base_path(path),
            messages=[{"name": "$base", "data": stored}],
            if_match=tail,
        )
        cut = CommitAppend(stream=path, truncate_before=offset)
        try:
            yield from operations.commit(settings, [kept_base, cut], None)
        except BooksPendingError as error:
            version, group = kept.version, error.group
            return ClosedBooks(stream=path, outcome="pending", version=version, group=group)
        except TailMovedError as error:
            conflicts += 1
            if conflicts > run.deciding.conflicts_max:
                raise ConcurrencyError(path, kept.version, None, ()) from error
            continue
        return ClosedBooks(stream=path, outcome="dropped", version=kept.version)


def _offset_behind(
    run: Closing, kind: type[Entity], path: str, past: loading.Past
) -> Operation[str | None]:
    """Where the first event that is kept begins; None: the stream has changed meanwhile."""
    settings = run.deciding.settings
    query = query_of({"stream": path, "limit": 1, "pruned": "skip"})
    reader = LogReader(settings, query, after=past.position, until=None, live=False)
    while (page := (yield from reader.next())) is not None:
        for entry in page.entries:
            if entry.marker is None:
                return entry.offset
    loaded = yield from _load(run.deciding, kind, path)
    return loaded.offset if loaded.version == past.loaded.version else None


def _tail_of_base(run: Closing, path: str) -> Operation[str]:
    """Where the stream of the base ends; it is made if there is none."""
    settings, path = run.deciding.settings, loading.base_path(path)
    try:
        head = yield from operations.head(settings, path)
    except (StreamNotFoundError, StreamDeletedError):
        yield from loading.make_beside(settings, path)
        head = yield from operations.head(settings, path)
    return head.next_offset


def newest_event(app: Deciding, path: str) -> Operation[Recorded[Any] | None]:
    """The newest event that a stream holds; None: it holds none."""
    query = query_of({"stream": path, "limit": 1, "order": "desc", "pruned": "skip"})
    found = yield from _held(app, path, query, backward=True)
    return found[0] if found else None


def _events(run: Closing, path: str, until: int) -> Operation[list[Recorded[Any]]]:
    """What a stream holds up to a position."""
    query = query_of({"stream": path, "pruned": "skip"})
    found = yield from _held(run.deciding, path, query)
    return [event for event in found if event.position <= until]


def _held(
    app: Deciding, path: str, query: list[tuple[str, str]], *, backward: bool = False
) -> Operation[list[Recorded[Any]]]:
    """Events of the log that their stream still holds: the log keeps dropped ones for a while."""
    settings = app.settings
    reader = LogReader(settings, query, after=-1, until=None, live=False, descending=backward)
    found: list[LogEntry] = []
    while (page := (yield from reader.next())) is not None:
        found += [entry for entry in page.entries if entry.marker is None and is_event(entry.data)]
        if found and backward:
            break
    head = yield from _head(app, path)
    if head is None:
        return []
    first = head.first_offset or ""
    return [app.codec.recorded(at) for at in found if first <= at.offset < head.next_offset]


def _head(app: Deciding, path: str) -> Operation[Head | None]:
    """The stream as it stands; None: no event ever happened to the entity, or it was deleted."""
    try:
        return (yield from operations.head(app.settings, path))
    except (StreamNotFoundError, StreamDeletedError):
        return None


def _load(app: Deciding, kind: type[Entity], path: str) -> Operation[Loaded[Any]]:
    """The entity from its stream alone: what ends a period must not rest on a shortcut."""
    began: Loaded[Any] = Loaded(state=kind(), stream=path)
    return (yield from loading.catch_up(app.settings, app.codec, began))


def _archive(run: Closing, archive: Archive, period: Period) -> Operation[None]:
    error: Exception | None = yield Call(partial(run.call, archive, period))
    if error is not None:
        raise ArchiveError(period.stream, error) from error


def _catch_up(run: Closing) -> Operation[None]:
    """Note whom the events so far concern: what is not known yet counts as work left."""
    for correlating in run.correlating:
        try:
            yield from correlating.catch_up()
        except GroupNotFoundError:
            continue  # no worker has run yet


def _forget_beside(run: Closing, path: str) -> Operation[None]:
    """Delete what lies beside a stream that holds nothing any more."""
    for beside in (loading.snapshot_path(path), loading.base_path(path)):
        try:
            yield from operations.delete(run.deciding.settings, beside)
        except (StreamNotFoundError, StreamDeletedError, ForbiddenError):
            continue


def _message(run: Closing, name: str, data: dict[str, Any]) -> dict[str, Any]:
    meta = meta_of(run.deciding.settings, None, None)
    return {"name": name, "data": data, "meta": meta, "schema": 1}


def now_of(run: Closing) -> datetime:
    """The time by which policies judge."""
    return datetime.fromtimestamp(run.deciding.settings.clock.wall_ms() / 1000, UTC)
