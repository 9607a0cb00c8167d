"""Subscriptions on the shared store, for one term of the node that leads.

The engine decides on its own state in memory; what it writes in one stretch on the event loop goes
into one turn, behind the question whether this node still leads. When that fails in whatever way,
the engine's state is void: the term ends, and the next one loads what is really there.

Of streams that were made, ended or written to the engine hears from the turns of all nodes alike,
in their order, this node's included. How far it has followed is stored by the upkeep, so that the
next leader misses none; hearing of a stream twice does nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from fencepost.clock import Clock
from fencepost.protocol.appends import Append, Appended
from fencepost.protocol.offsets import START
from fencepost.protocol.streams import Stream
from fencepost.protocol.subscriptions import Link, Subscription
from fencepost.store import records
from fencepost.store.contract import Failure, LiveStream, Published, StoredSubscriptions, Watcher
from fencepost.store.postgres.cluster.feed import Turn
from fencepost.store.postgres.cluster.term import Following, Term
from fencepost.store.postgres.driver.connection import PostgresConnection
from fencepost.store.postgres.requests import Needs
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.sql import Row
from fencepost.store.write.decider import Decider
from fencepost.store.write.ledger import view_of

log = logging.getLogger(__name__)

Answer = Callable[[Failure | None], None]


async def secret(store: PostgresStore, name: str, fresh: bytes) -> bytes:
    """The secret called `name` that all nodes share: the stored one, else `fresh`, stored now."""

    def find(connection: PostgresConnection) -> list[Row]:
        return connection.fetch("find_secret", (name,))

    def save(decider: Decider) -> None:
        decider.group.statements.append(("save_secret", (name, fresh, decider.tick())))

    rows = await store.readers.run(find)
    if not rows:
        await store.decide(save, touches_all=False)
        # Another node may have been first.
        rows = await store.readers.run(find)
    [(value,)] = rows
    return bytes(value)


class _Stretch:
    """What was written in one stretch on the event loop, and who waits for it."""

    __slots__ = ("announced", "answers", "statements")

    def __init__(self) -> None:
        self.statements: list[tuple[str, Row]] = []
        self.announced: list[tuple[str, bytes]] = []
        self.answers: list[Answer] = []

    def needs(self) -> Needs:
        """The streams it writes to. Its lane keeps later writes from overtaking one that waits."""
        return Needs({path for path, _ in self.announced}, lanes=("subscriptions",))

    def decide(self, decider: Decider) -> list[str]:
        """Write it; the wake streams that did not take their events."""
        decider.group.statements += self.statements
        return [path for path, event in self.announced if not _announce(decider, path, event)]


class _WakeStreams:
    """Which of the streams that wakes are announced in take appends, as far as is known."""

    def __init__(self) -> None:
        self._takes: dict[str, bool] = {}
        self.unsure: set[str] = set()
        """Streams to look up before the next try."""

    def appends(self, path: str) -> bool:
        takes = self._takes.get(path, False)
        if not takes:
            self.unsure.add(path)
        return takes

    def note(self, path: str, stream: Stream | None) -> None:
        """This is what a look has found at a path."""
        self._takes[path] = stream is not None and not stream.closed and not stream.books_closed

    def made(self, stream: Stream) -> None:
        """A stream was made: wakes may wait for it."""
        if stream.path in self._takes:
            self.note(stream.path, stream)

    def refused(self, path: str) -> None:
        """A stream did not take an event."""
        self._takes[path] = False


class PostgresSubscriptions:
    """The `SubscriptionStore` of one term. `prepare` it, give it to an engine, then `follow`."""

    def __init__(self, term: Term, clock: Clock) -> None:
        self._term = term
        self._store = term.store
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._open = _Stretch()
        self._is_scheduled = False
        self._under_way = 0
        self._loaded = StoredSubscriptions([], 1, [])
        self._expected: dict[str, Stream] = {}
        self._paths: dict[int, str] = {}  # of the streams that links are to
        self._takes = _WakeStreams()
        self._watcher: Watcher | None = None
        self._published: Callable[[Sequence[Published]], None] = _ignore
        self._following = Following(term, self._tell)
        self._saved = -1  # the turn up to which following is stored

    # Loading

    async def prepare(self) -> None:
        """Read everything that `load` returns."""
        rows, links, last, followed, parts = await self._store.readers.run(_load)
        [(self._saved, _)] = followed
        self._following.turn = self._saved
        found = records.subscriptions_from_rows(rows, links)
        self._takes.unsure = {
            one.config.wake_stream for one in found if one.config.wake_stream is not None
        }
        await self._look_at_wake_streams()
        partial = [row[0] for row in parts]
        self._loaded = StoredSubscriptions(found, last[0][0] + 1 if last else 1, partial)
        for subscription in found:
            for link in subscription.links.values():
                self._note(link)

    def load(self) -> StoredSubscriptions:
        return self._loaded

    async def expect(self, paths: Iterable[str]) -> None:
        self._expected = {one.path: one for one in await self._streams(paths)}

    def find_stream(self, path: str) -> LiveStream | None:
        found = self._expected.get(path)
        return None if found is None else LiveStream(path, found.id, found.tail)

    async def _streams(self, paths: Iterable[str]) -> list[Stream]:
        """The committed streams at these paths."""
        asked = list(paths)
        if not asked:
            return []
        rows = await self._store.readers.run(
            lambda connection: connection.fetch("find_streams", (asked,))
        )
        return [records.stream_from_row(row)[0] for row in rows if row[2] == records.LIVE]

    async def live_streams(
        self, prefix: tuple[str, ...], matches: Callable[[str], bool]
    ) -> list[LiveStream]:
        return await self._store.readers.run(
            partial(records.live_streams, prefix=prefix, matches=matches)
        )

    async def secret(self, name: str, fresh: bytes) -> bytes:
        return await secret(self._store, name, fresh)

    def tick(self) -> int:
        return max(self._clock.now_ms(), self._store.turns.now_ms)

    # Writing: all of a stretch goes into one turn

    def _write(self, query: str, *values: object) -> None:
        self._open.statements.append((query, values))
        self._stir()

    def _stir(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._submit)

    def _submit(self) -> None:
        stretch, self._open = self._open, _Stretch()
        self._is_scheduled = False
        self._under_way += 1
        followed = self._following.turn
        if stretch.statements and followed > self._saved:
            # What these writes come from need not be told to the next leader again.
            stretch.statements.append(("save_followed", (followed,)))
            self._saved = followed
        self._term.submit(stretch.decide, partial(self._told, stretch), stretch.needs())

    def _told(self, stretch: _Stretch, outcome: object) -> None:
        self._under_way -= 1
        failure = outcome if isinstance(outcome, Failure) else None
        if failure is not None:
            # Whatever is decided from here on stands on something that may not have happened.
            self._term.end("what it wrote could not be stored")
        else:
            assert isinstance(outcome, list)
            for path in outcome:
                log.warning("the wake stream %s takes no appends", path)
                self._takes.refused(path)
        for answer in stretch.answers:
            try:
                answer(failure)
            except Exception:
                log.exception("a subscription could not be told what became of a write")

    def insert(self, subscription: Subscription) -> None:
        self._write("insert_subscription", *records.subscription_columns(subscription))
        wake_stream = subscription.config.wake_stream
        if wake_stream is not None:
            self._takes.note(wake_stream, self._expected.get(wake_stream))

    def begin(self, subscription_id: int) -> None:
        self._write("begin_partial", subscription_id)

    def end(self, subscription_id: int) -> None:
        self._write("end_partial", subscription_id)

    def save_wake(self, subscription: Subscription) -> None:
        self._write("save_wake", *records.wake_columns(subscription.wake), subscription.id)

    def delete(self, subscription: Subscription) -> None:
        self._write("delete_subscription", subscription.id)

    def delete_links(self, subscription_id: int, count: int | None = None) -> None:
        if count is None:
            self._write("delete_links", subscription_id)
        else:
            self._write("delete_some_links", subscription_id, count)

    async def has_links(self, subscription_id: int) -> bool:
        return bool(
            await self._store.readers.run(
                lambda connection: connection.fetch("has_links", (subscription_id,))
            )
        )

    def save_link(self, subscription: Subscription, link: Link) -> None:
        self._note(link)
        self._write("save_link", *records.link_columns(subscription, link))

    def delete_link(self, subscription: Subscription, path: str) -> None:
        self._write("delete_link", subscription.id, path)

    def announce(self, path: str, event: bytes) -> bool:
        """Append an event in the turn of the wake, if the stream takes appends as far as is known.

        When it turns out there that it does not, nothing has to be undone: a stream that is gone or
        closed takes no event before it is made anew, and then the engine announces its wakes again.
        """
        if not self._takes.appends(path):
            self._following.poke()
            return False
        self._open.announced.append((path, event))
        self._stir()
        return True

    async def _look_at_wake_streams(self) -> None:
        unsure = self._takes.unsure
        self._takes.unsure = set()
        found = {one.path: one for one in await self._streams(unsure)}
        for path in unsure:
            self._takes.note(path, found.get(path))

    def after(self, answer: Answer) -> None:
        self._open.answers.append(answer)
        self._stir()

    async def durable(self) -> Failure | None:
        told: asyncio.Future[Failure | None] = self._loop.create_future()

        def answer(failure: Failure | None) -> None:
            if not told.done():
                told.set_result(failure)

        self.after(answer)
        return await told

    # Following the turns of all nodes

    def watch(self, watcher: Watcher, published: Callable[[Sequence[Published]], None]) -> None:
        self._watcher = watcher
        self._published = published

    async def follow(self) -> None:
        """Tell the engine of every turn, in order, until cancelled."""
        await self._following.run(self._look_at_wake_streams)

    async def caught_up(self) -> Failure | None:
        """Wait until the engine knows of everything that any node has written before this."""
        return await self._following.caught_up()

    def _tell(self, turn: Turn, by_id: dict[int, Row]) -> None:
        """Tell the engine what happened in a turn; `by_id` has its streams as they are now."""
        watcher = self._watcher
        assert watcher is not None, "an engine watches before it follows"
        for stream_id in turn.created:
            row = by_id.get(stream_id)
            # One that is gone already is not worth a link.
            if row is not None and row[2] == records.LIVE:
                stream, _ = records.stream_from_row(row)
                start = START if stream.fork is None else stream.fork.at
                self._takes.made(stream)
                watcher.created(stream_id, stream.path, start)
        for stream_id in turn.removed:
            # Its row may be purged by now, but then it is known from its links.
            row = by_id.get(stream_id)
            path = self._paths.pop(stream_id, None) if row is None else row[1]
            if path is not None:
                watcher.removed(stream_id, path)
        self._published([_published(by_id[one]) for one in turn.streams if one in by_id])

    def _note(self, link: Link) -> None:
        if link.stream_id is not None:
            self._paths[link.stream_id] = link.path

    async def followed_durably(self) -> int | None:
        """The turn up to which everything that it led to is stored."""
        turn = self._following.turn
        if self._under_way or self._is_scheduled:
            failure = await self.durable()
            if failure is not None:
                return None
        return None if self._term.over.is_set() else turn


def _load(connection: PostgresConnection) -> tuple[list[Row], ...]:
    with connection:
        return (
            connection.fetch("load_subscriptions"),
            connection.fetch("load_links"),
            connection.fetch("last_subscription"),
            connection.fetch("find_followed"),
            connection.fetch("load_partial"),
        )


def _announce(decider: Decider, path: str, event: bytes) -> bool:
    entry = decider.alive(path, decider.tick())
    if entry is None or entry.stream.soft_deleted:
        return False
    batch = records.event_batch(entry.stream, event)
    return isinstance(decider.append(Append(path, batch, entry.stream.media_type)), Appended)


def _published(row: Row) -> Published:
    stream, _ = records.stream_from_row(row)
    info = view_of(stream)
    return Published(info, info.tail, None, gone=row[2] != records.LIVE)


def _ignore(_changes: Sequence[Published]) -> None:
    """Ignore a turn: the subscriptions do not follow yet."""
