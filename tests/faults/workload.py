"""Random requests, and a store driven through them so that one seed always gives one history.

The time at which a commit ends is the one thing that chance decides in a running store. Here a gate
holds every commit at its sync until the driver has decided what else arrives meanwhile, so the
groups, the order of writes and the order of answers follow from the seed alone.
"""

import asyncio
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fencepost.protocol.appends import Append, Conditions, ProducerTuple
from fencepost.protocol.batches import Batch, bytes_batch, digest, json_batch
from fencepost.protocol.books import BooksRequest
from fencepost.protocol.commits import Commit, CommitItem, Part
from fencepost.protocol.creates import Create, ForkFrom
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Upload
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.connection import SqliteConnection, fold
from fencepost.store.sqlite.store import SqliteStore
from fencepost.testing import DiskLog, SimClock, SyncGate, fault_vfs
from tests.faults.model import Drop, Messages, Model, Remove, Request, Truncate

JSON = "application/json"
BYTES = "application/octet-stream"
PLAIN = ("json/0", "json/1", "bytes/0", "bytes/1", "bytes/2")
FORKS = ("fork/0", "fork/1", "fork/2")
SHORT = ("short/0", "short/1")
LONG = ("long/0",)
PATHS = (*PLAIN, *FORKS, *SHORT, *LONG)
PRODUCERS = 8
SHORT_TTL_S, LONG_TTL_S = 2, 86_400
CHUNKS = 3
STEPS_PER_PART = 40


class Step(NamedTuple):
    """A request with everything the checks want to know of it."""

    number: int
    request: Request
    messages: Messages
    at_ms: int
    expected: str


class Asked(NamedTuple):
    """A mark: the request is about to be decided."""

    number: int


class Decided(NamedTuple):
    """A mark: the request was decided; nothing of it need be on disk."""

    number: int


class Answered(NamedTuple):
    """A mark: the request has its answer."""

    number: int


class History:
    """All requests of a run, the model before the first and after each, and the disk's log."""

    def __init__(self) -> None:
        self.log = DiskLog()
        self.steps: list[Step] = []
        self.models = [Model()]
        self.outcomes: dict[int, object] = {}
        self.groups_count = 0


class Chooser:
    """Makes up the next request, given what the model says is there."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice

    def next(self, model: Model, durable: Model, number: int) -> tuple[Request, Messages]:
        dice = self._dice
        roll = dice.random()
        path = dice.choice(PATHS)
        if path not in model.streams and dice.random() < 0.8:
            return self._create(model, number, path)
        if roll < 0.04 or (roll < 0.3 and self._has_closed_books(model, path)):
            return self._books(model, number, path)
        if roll < 0.54:
            request, messages = self._append(model, number, path)
            return request, (messages,)
        if roll < 0.66:
            return self._stage(model, number)
        if roll < 0.80:
            return self._commit(model, number)
        if roll < 0.88:
            return self._truncate(model, durable, path), ()
        if roll < 0.90:
            return Drop(self._part(number)), ()
        if roll < 0.95:
            return self._create(model, number, path)
        return Remove(path), ()

    def _has_closed_books(self, model: Model, path: str) -> bool:
        kept = model.streams.get(path)
        return kept is not None and kept.books_closed

    def _books(self, model: Model, number: int, path: str) -> tuple[Request, Messages]:
        """Close the books of a stream or open them, mostly beside a message that says so."""
        kept = model.streams.get(path)
        opens = self._has_closed_books(model, path)
        asked = BooksRequest("open" if opens else "close")
        content_type = BYTES if kept is None else kept.content_type
        batch: Batch | None = None
        messages: tuple[bytes, ...] = ()
        if self._dice.random() < 0.7:
            batch, messages = self._body(number, content_type)
        tail = kept.tail if opens and kept is not None else None
        append = Append(
            path,
            batch,
            None if batch is None else content_type,
            digest=digest(content_type, False, b"" if batch is None else batch.data),
            conditions=Conditions(if_match=tail, books=asked),
        )
        return Commit([CommitItem(append)]), (messages,)

    def _part(self, number: int) -> Part:
        """One of a few parts; others after some time, because none is used twice."""
        dice = self._dice
        name = f"{dice.choice(('json', 'bytes'))}-{dice.randrange(2)}"
        return Part(f"t{(number - dice.choice((0, 0, 0, 5))) // STEPS_PER_PART}", name)

    def _stage(self, model: Model, number: int) -> tuple[Request, Messages]:
        dice = self._dice
        part = self._part(number)
        content_type = JSON if part.part.startswith("json") else BYTES
        held = model.parts.get(part)
        ordinal = 0 if held is None else len(held.chunks)
        if dice.random() < 0.2:
            ordinal = dice.randrange(CHUNKS)
        batch, messages = self._body(number, content_type)
        mark = digest(content_type, False, batch.data)
        return Upload(part, ordinal, content_type, batch, mark), (messages,)

    def _truncate(self, model: Model, durable: Model, path: str) -> Request:
        """At a place that was given out: those of requests in flight are not known."""
        dice = self._dice
        kept, known = model.streams.get(path), durable.streams.get(path)
        if kept is None or known is None or dice.random() < 0.1:
            return Truncate(path, None)
        if dice.random() < 0.1:
            return Truncate(path, Offset(len(kept.messages) + 1, kept.tail.bytes + 1))
        count = min(dice.randint(0, len(known.messages)), known.dropped + 5)
        is_there = kept.messages[:count] == known.messages[:count]
        return Truncate(path, known.offset(count) if is_there else None)

    def _commit(self, model: Model, number: int) -> tuple[Request, Messages]:
        """Appends to several streams that must all be there afterwards, or none."""
        paths = self._dice.sample([*PLAIN, *FORKS, *LONG], self._dice.randint(2, 3))
        present = [path for path in paths if path in model.streams] or paths
        chosen = [self._append(model, number, path) for path in present]
        items = [CommitItem(request) for request, _ in chosen]
        kept = model.streams.get(present[0])
        fitting = [
            part
            for part, held in model.parts.items()
            if kept is not None and not held.committed and held.content_type == kept.content_type
        ]
        known = fitting if self._dice.random() < 0.9 else list(model.parts)
        if known and self._dice.random() < 0.8:
            part = self._dice.choice(known)
            items[0] = CommitItem(_of_part(items[0].append, model, part), (part,))
        return Commit(items), tuple(messages for _, messages in chosen)

    def _body(self, number: int, content_type: str) -> tuple[Batch, tuple[bytes, ...]]:
        dice = self._dice
        padding = "x" * dice.choice((0, 20, 200, 3_000, 20_000))
        if content_type != JSON:
            body = f"<{number}:{padding}>".encode()
            return bytes_batch(body), (body,)
        count = dice.randint(1, 6)
        messages = tuple(
            f'{{"n":{number},"i":{i},"of":{count},"pad":"{padding[:500]}"}}'.encode()
            for i in range(count)
        )
        batch = json_batch(b"[" + b",".join(messages) + b"]")
        assert isinstance(batch, Batch)
        return batch, messages

    def _append(self, model: Model, number: int, path: str) -> tuple[Append, tuple[bytes, ...]]:
        dice = self._dice
        kept = model.streams.get(path)
        content_type = kept.content_type if kept is not None else BYTES
        closes = dice.random() < 0.03
        batch: Batch | None = None
        messages: tuple[bytes, ...] = ()
        if not closes or dice.random() < 0.5:
            batch, messages = self._body(number, content_type)
        producer = seq = conditions = None
        if dice.random() < 0.75:
            name = f"producer-{dice.randrange(PRODUCERS)}"
            known = kept.producer(name) if kept is not None else None
            producer = self._claim(name, known)
        elif dice.random() < 0.5:
            seq = f"{number - dice.choice((0, 0, 0, 30)):08d}"
        else:
            conditions = Conditions(key=f"key-{dice.randrange(6)}")
        request = Append(
            path,
            batch,
            content_type if batch is not None else None,
            closes=closes,
            producer=producer,
            seq=seq,
            digest=digest(content_type, closes, b"" if batch is None else batch.data),
            conditions=conditions,
        )
        return request, messages

    def _claim(self, name: str, known: tuple[int, int] | None) -> ProducerTuple:
        roll = self._dice.random()
        if known is None:
            return ProducerTuple(name, self._dice.randrange(3), 0 if roll < 0.95 else 1)
        epoch, seq = known
        if roll < 0.80:
            return ProducerTuple(name, epoch, seq + 1)
        if roll < 0.88:
            return ProducerTuple(name, epoch, self._dice.randint(0, seq))
        if roll < 0.92:
            return ProducerTuple(name, epoch, seq + 2)
        if roll < 0.96 and epoch > 0:
            return ProducerTuple(name, epoch - 1, seq + 1)
        return ProducerTuple(name, epoch + 1, 0)

    def _create(self, model: Model, number: int, path: str) -> tuple[Request, Messages]:
        dice = self._dice
        fork_from = None
        lifetime = Lifetime()
        content_type = JSON if path.startswith("json") else BYTES
        if path in FORKS:
            source = dice.choice(PLAIN + FORKS)
            origin = model.streams.get(source)
            fork_from = ForkFrom(source)
            content_type = origin.content_type if origin is not None else BYTES
        elif path in SHORT:
            lifetime = Lifetime(ttl_s=SHORT_TTL_S)
        elif path in LONG:
            lifetime = Lifetime(ttl_s=LONG_TTL_S)
        batch: Batch | None = None
        messages: tuple[bytes, ...] = ()
        if dice.random() < 0.4:
            batch, messages = self._body(number, content_type)
        closed = dice.random() < 0.05
        return Create(path, content_type, lifetime, closed, batch, fork_from), (messages,)


def _of_part(append: Append, model: Model, part: Part) -> Append:
    """The same append with staged data of that type in place of its own."""
    return Append(
        append.path,
        None,
        model.parts[part].content_type,
        append.closes,
        append.producer,
        append.seq,
        conditions=append.conditions,
    )


def submit(store: SqliteStore, request: Request, done: Callable[[Any], None]) -> None:
    """Hand a request to the store, whatever its kind."""
    if isinstance(request, Append):
        store.append(request, done)
    elif isinstance(request, Create):
        store.create(request, done)
    elif isinstance(request, Commit):
        store.commit(request, done)
    elif isinstance(request, Truncate):
        store.truncate(request.path, request.before, done)
    elif isinstance(request, Upload):
        store.stage(request, done)
    elif isinstance(request, Drop):
        store.unstage(request.part, done)
    else:
        store.delete(request.path, done)


class Driver:
    """One store under one seed."""

    def __init__(self, seed: int, history: History, store: SqliteStore, clock: SimClock) -> None:
        self._dice = random.Random(seed)
        self._chooser = Chooser(self._dice)
        self._history = history
        self._store = store
        self._clock = clock

    def submit_some(self, count_max: int) -> None:
        """Several requests in one turn of the loop: they share a group."""
        for _ in range(self._dice.randint(1, count_max)):
            self._submit()

    def _submit(self) -> None:
        history = self._history
        self._clock.advance(1)
        number, now_ms = len(history.steps), self._clock.now_ms()
        model = history.models[-1].copy()
        durable = history.models[len(history.outcomes)]
        request, messages = self._chooser.next(model, durable, number)
        expected = model.apply(request, messages, now_ms)
        history.steps.append(Step(number, request, messages, now_ms, expected))
        history.models.append(model)

        def done(outcome: object) -> None:
            history.outcomes[number] = outcome
            history.log.mark(Answered(number))

        history.log.mark(Asked(number))
        submit(self._store, request, done)
        history.log.mark(Decided(number))

    async def round(self, gate: SyncGate) -> None:
        """A commit that others join behind while it waits for the disk, then both."""
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def arrive() -> None:
            if not arrived.done():
                arrived.set_result(None)

        gate.on_arrival = lambda: loop.call_soon_threadsafe(arrive)
        gate.close()
        self.submit_some(12)
        # Without syncs (synchronous=OFF) no sync comes to the gate and the commit just ends.
        ended = asyncio.ensure_future(self._store.commits.settled())
        await asyncio.wait((arrived, ended), return_when=asyncio.FIRST_COMPLETED)
        if arrived.done():
            self.submit_some(12)
            if self._dice.random() < 0.2:
                await self._store.readers.run(partial(_checkpoint, mode="PASSIVE"))
        gate.open()
        await ended
        await self._store.commits.settled()
        if self._dice.random() < 0.1:
            await self._store.between_commits(lambda connection: fold(connection.raw))
        if self._dice.random() < 0.1:
            self._clock.advance(10 * SHORT_TTL_S * 1000)


def _checkpoint(connection: SqliteConnection, mode: str) -> None:
    connection.raw.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()


async def drive(
    folder: Path, *, seed: int, rounds: int, synchronous: str = "FULL", on_loop: bool = False
) -> History:
    """Run a store from its first file operation to its last, and keep everything about it.

    With `on_loop` its commits run on the event loop, as they do while a disk is fast; else in the
    writer thread, where the gate holds them.
    """
    history = History()
    clock = SimClock(seed=seed)
    gate = SyncGate()
    with fault_vfs(log=history.log) as vfs:
        vfs.rules.append(gate)
        store = SqliteStore(
            SqliteSettings(
                folder=folder,
                vfs=vfs.name,
                synchronous=synchronous,
                # Small, so that state is forgotten and loaded again all the time.
                streams_cached_max=6,
                producers_cached_max=4,
                rows_behind_max=(1, 6, 40, 4_096)[seed % 4],
            ),
            clock,
        )
        if on_loop:
            # By this clock every commit takes no time, so the loop would take over sooner or later.
            store.commits._thread_commits_left = 0
        driver = Driver(seed, history, store, clock)
        for _ in range(rounds):
            await driver.round(gate)
        history.groups_count = store.commits.groups_count
        await store.close()
    for step in history.steps:
        assert type(history.outcomes[step.number]).__name__ == step.expected, step
    return history
