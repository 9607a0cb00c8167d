"""Clients of a simulated store: they send at random, retry what got no answer, and remember.

A client outlives the store. What it was told, or has read, must be true for ever; `checks.py` holds
the store against it. None of them knows a rule of the product: they count for themselves.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from fencepost.protocol.appends import (
    Append,
    Appended,
    Conditions,
    Duplicate,
    ProducerTuple,
    Replayed,
)
from fencepost.protocol.batches import Batch, digest, json_batch
from fencepost.protocol.commits import Commit, CommitDuplicate, CommitItem, Committed
from fencepost.protocol.groups import GroupMade, GroupSettings
from fencepost.protocol.leases import Claim, Correlated, LeaseLost, LeaseRef
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Remembered
from fencepost.store.contract import Chunk, StreamInfo
from fencepost.store.group_contract import ClaimDone, ClaimTargets, Correlate, MakeGroup
from tests.simulation.world import World, is_failure

STREAMS = ("s/0", "s/1", "s/2")
JSON = "application/json"
GROUP, FENCED = "workers", "fenced"
LEASE_MS = 300


class BrokenPromiseError(AssertionError):
    """The store did what it must never do."""


class Receipt(NamedTuple):
    """An append that was answered."""

    stream: str
    message: str
    place: int | None
    """The number that the message has in its stream, if the answer said it."""


def append(
    stream: str,
    message: str,
    *,
    producer: ProducerTuple | None = None,
    key: str | None = None,
    lease: LeaseRef | None = None,
) -> Append:
    body = json.dumps(message).encode()
    batch = json_batch(body)
    assert isinstance(batch, Batch)
    conditions = Conditions(create_as=JSON, key=key, lease=lease)
    sent = digest(JSON, False, batch.data)
    return Append(stream, batch, JSON, False, producer, None, sent, conditions)


class Client:
    """One that sends requests one after the other, and each again until it has an answer."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.receipts: list[Receipt] = []
        self.sent: set[str] = set()
        """Messages that were sent at least once; those without a receipt may be there or not."""
        self.is_ending = False
        self._waits: tuple[Any, Any] | None = None
        self._count = 0

    async def run(self) -> None:
        """Send until the power goes; or, at the end, until what is under way has an answer."""
        while self._waits is not None or not self.is_ending:
            if self._waits is None:
                self._waits = self.next()
            request, facts = self._waits
            outcome = await self.send(request)
            if is_failure(outcome):
                self.world.note(f"{self.name} {type(outcome).__name__}")
                await self.world.rest(0.5)
                continue
            self.world.note(f"{self.name} {facts} {_shown(outcome)}")
            self._waits = None
            self.told(request, facts, outcome)
            await self.world.rest()

    async def send(self, request: Any) -> Any:
        return await self.world.ask(self.world.store.append, request)

    def next(self) -> tuple[Any, Any]:
        """Another request, and what to remember with it."""
        raise NotImplementedError

    def told(self, request: Any, facts: Any, outcome: Any) -> None:
        """The answer to it."""
        raise NotImplementedError

    def fail(self, detail: str) -> None:
        raise BrokenPromiseError(f"{self.name}: {detail}")

    def _message(self, stream: str) -> str:
        self._count += 1
        padding = "x" * self.world.dice.choice((0, 0, 30, 900))
        message = f"{self.name}:{stream}:{self._count}:{padding}"
        self.sent.add(message)
        return message

    def keep(self, stream: str, message: str, outcome: Any) -> None:
        """An append was answered: this is where its message is, for ever."""
        place: int | None = None
        match outcome:
            case Appended(start):
                place = start.messages
            case Duplicate(original=Remembered(at)):
                place = at.messages
            case Replayed(original):
                place = original.start.messages
            case _:
                pass
        self.receipts.append(Receipt(stream, message, place))


def _shown(outcome: Any) -> str:
    tail = getattr(outcome, "tail", "")
    return f"{type(outcome).__name__} {tail}"


class Producer(Client):
    """A producer with numbers of its own in each stream."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._seqs = dict.fromkeys(STREAMS, 0)

    def next(self) -> tuple[Append, Any]:
        stream = self.world.dice.choice(STREAMS)
        message = self._message(stream)
        claim = ProducerTuple(self.name, 0, self._seqs[stream])
        return append(stream, message, producer=claim), (stream, message)

    def told(self, request: Append, facts: Any, outcome: Any) -> None:
        stream, message = facts
        match outcome:
            case Appended() | Duplicate():
                if isinstance(outcome, Duplicate) and outcome.matches is False:
                    self.fail(f"{message} is called another message that was stored before")
                self._seqs[stream] += 1
                self.keep(stream, message, outcome)
            case _:
                self.fail(f"{message} (seq {self._seqs[stream]}) came to {outcome}")


class KeyedWriter(Client):
    """A writer without an order of its own: each request has a key."""

    def next(self) -> tuple[Append, Any]:
        stream = self.world.dice.choice(STREAMS)
        message = self._message(stream)
        return append(stream, message, key=message), (stream, message)

    def told(self, request: Append, facts: Any, outcome: Any) -> None:
        match outcome:
            case Appended() | Replayed():
                stream, message = facts
                self.keep(stream, message, outcome)
            case _:
                self.fail(f"{facts[1]} came to {outcome}")


class Committer(Client):
    """Appends to all streams at once: both are there, or none."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._seq = 0
        self.pairs: list[tuple[str, str]] = []

    async def send(self, request: Any) -> Any:
        return await self.world.ask(self.world.store.commit, request)

    def next(self) -> tuple[Commit, Any]:
        first, second = STREAMS[:2]
        messages = self._message(first), self._message(second)
        self.pairs.append(messages)
        claim = ProducerTuple(self.name, 0, self._seq)
        items = [
            CommitItem(append(stream, message, producer=claim))
            for stream, message in zip((first, second), messages, strict=True)
        ]
        return Commit(items), messages

    def told(self, request: Commit, facts: Any, outcome: Any) -> None:
        if not isinstance(outcome, Committed | CommitDuplicate):
            self.fail(f"commit {self._seq} came to {outcome}")
        self._seq += 1
        for stream, message, one in zip(STREAMS, facts, outcome.outcomes, strict=False):
            self.keep(stream, message, one)


class Worker(Client):
    """Takes a lease on one target, and writes with its number, sometimes long after it ended."""

    highest = 0
    """The newest number that any worker was told it holds."""

    def __init__(self, world: World, name: str, newest: list[int]) -> None:
        super().__init__(world, name)
        self._newest = newest
        self._lease: LeaseRef | None = None

    async def run(self) -> None:
        while self._waits is not None or not self.is_ending:
            if self._lease is None:
                self._waits = None
                if not await self._claim():
                    await self.world.rest(0.3)
                    continue
            lease = self._lease
            assert lease is not None
            if self.world.dice.random() < 0.3:
                await self.world.rest(3 * LEASE_MS / 1000)
            message = f"{lease.number}:{self._message(FENCED)}"
            self.sent.add(message)
            before = self._newest[0]
            outcome = await self.send(append(FENCED, message, lease=lease))
            self.world.note(f"{self.name} lease {lease.number} {_shown(outcome)}")
            if isinstance(outcome, Appended):
                if lease.number < before:
                    self.fail(f"lease {lease.number} wrote although {before} was given out")
                self.keep(FENCED, message, outcome)
                await self.world.rest()
                continue
            if not is_failure(outcome) and not isinstance(outcome, LeaseLost):
                self.fail(f"an append with a lease came to {outcome}")
            self._lease = None

    async def _claim(self) -> bool:
        world, store = self.world, self.world.store
        made = await world.ask(
            store.work, MakeGroup(GROUP, GroupSettings(sources=("s/**",), lost_max=1_000))
        )
        if not isinstance(made, GroupMade):
            return False
        if not made.group.targets_count and store.ledger.next_position > 1:
            found = [Correlated("target", "s/0", 0)]
            request = Correlate(GROUP, made.group.watermark, made.group.watermark + 1, found)
            await world.ask(store.work, request)
        claim = Claim(self.name, 1, LEASE_MS)
        done = await world.ask(store.work, ClaimTargets(GROUP, claim))
        if not isinstance(done, ClaimDone) or not done.leases:
            return False
        row = done.leases[0].row
        if row.token <= self._newest[0]:
            self.fail(f"lease {row.token} was given out after {self._newest[0]}")
        self._newest[0] = row.token
        self._lease = LeaseRef(GROUP, done.group.id, row.target, row.token)
        return True


class Reader(Client):
    """Follows the streams, and remembers every byte that it was shown."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.shown: dict[str, bytes] = dict.fromkeys((*STREAMS, FENCED), b"")
        self._at: dict[str, Offset] = dict.fromkeys((*STREAMS, FENCED), START)

    async def run(self) -> None:
        world = self.world
        while not self.is_ending:
            path = world.dice.choice((*STREAMS, FENCED))
            info = await world.seen(world.store.look(path, touch=False))
            if isinstance(info, StreamInfo):
                await self._read(path, info)
            elif self._at[path] != START and not is_failure(info):
                self.fail(f"{path} was read, and is not there: {info}")
            await world.rest()

    async def _read(self, path: str, info: StreamInfo) -> None:
        at = self._at[path]
        if info.tail.bytes < at.bytes:
            self.fail(f"{path} was read up to {at}, and ends at {info.tail}")
        if info.tail == at:
            return
        size = self.world.dice.choice((64, 4_096, 1 << 20))
        found = await self.world.seen(self.world.store.read(info, at, bytes_max=size))
        if not isinstance(found, Chunk):
            self.fail(f"{path} at {at}: {found}")
        self.shown[path] += (b"," if at != START else b"") + found.data
        self._at[path] = found.next
        self.world.note(f"{self.name} read {path} up to {found.next}")
