"""Two nodes whose turns alternate decide as one, and keep what the other has not changed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import psycopg
import pytest

from fencepost.protocol.appends import Append, Appended, Conditions
from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.commits import Commit, CommitItem, Part
from fencepost.protocol.creates import Create, ForkFrom
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Lifetime, Stream
from fencepost.protocol.writers import WriterOpen
from fencepost.store.contract import Upload
from fencepost.store.postgres.cache import PRODUCERS_MAX, Changes, Seen, lists_all_changes
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.store.write.decider import Decider
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.testing.clock import SimClock
from fencepost.testing.postgres import shared_server
from tests.contract.subject import append

PATHS = ("a", "b", "c", "c/d")
PRODUCERS = ("p", "q", "r")
OPERATIONS = 120
TABLES = {
    "streams": "SELECT * FROM streams ORDER BY id",
    "log": "SELECT * FROM log ORDER BY position",
    "producers": "SELECT * FROM producers ORDER BY stream, id",
    "keys": "SELECT * FROM keys ORDER BY stream, principal, key",
    "chunks": "SELECT * FROM chunks ORDER BY id",
    "parts": "SELECT * FROM parts ORDER BY txn, part",
    "writers": "SELECT * FROM writers ORDER BY name",
    "counters": "SELECT next_position, next_stream, last_ms FROM counters",
}

Ask = Callable[[PostgresStore], "asyncio.Future[Any]"]


@asynccontextmanager
async def nodes(url: str, count: int, clock: SimClock) -> AsyncIterator[list[PostgresStore]]:
    opened = [PostgresStore(PostgresSettings(url=url), clock, simulated=True) for _ in range(count)]
    try:
        yield opened
    finally:
        for store in opened:
            await store.close()


def asked(ask: Callable[..., None], *request: Any) -> asyncio.Future[Any]:
    answer = asyncio.get_running_loop().create_future()
    ask(*request, answer.set_result)
    return answer


def plain(outcome: Any) -> Any:
    """An answer with nothing in it that is another object on every node."""
    if isinstance(outcome, Stream):
        # When a stream was last used is kept only of those that end by themselves.
        names = set(Stream.__slots__) - {"touched_ms"}
        return {name: getattr(outcome, name) for name in names}
    if isinstance(outcome, msgspec.Struct):
        return type(outcome).__name__, plain(msgspec.structs.astuple(outcome))
    if isinstance(outcome, tuple):
        return type(outcome).__name__, [plain(part) for part in outcome]
    return outcome


class Requests:
    """Requests thrown by dice, most of which make sense after what was answered before."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._tails: dict[str, Offset] = {}
        self._sent: dict[tuple[str, str], int] = {}
        self._count = 0

    def heard(self, path: str, request: Append, outcome: Any) -> None:
        if isinstance(outcome, Appended):
            self._tails[path] = outcome.tail
            if request.producer is not None:
                self._sent[path, request.producer.id] = request.producer.seq

    def append(self, path: str) -> Append:
        dice = self._dice
        self._count += 1
        producer = None
        if dice.random() < 0.7:
            name = dice.choice(PRODUCERS)
            last = self._sent.get((path, name), -1)
            seq = dice.choice((last + 1, last + 1, last + 1, max(last, 0), last + 2, 0))
            producer = (name, dice.choice((0, 0, 0, 0, 0, 1)), seq)
        body = b"%d," % self._count if dice.random() < 0.8 else b"again,"
        made = append(path, body, producer=producer, closes=dice.random() < 0.02)
        conditions = Conditions(
            if_match=self._tails.get(path) if dice.random() < 0.1 else None,
            create_as="text/plain" if dice.random() < 0.2 else None,
            key=f"key-{dice.randrange(4)}" if dice.random() < 0.2 else None,
        )
        return msgspec.structs.replace(made, conditions=conditions)

    def next(self, clock: SimClock) -> Ask:
        dice, path, other = self._dice, self._dice.choice(PATHS), self._dice.choice(PATHS)
        throw = dice.random()
        if throw < 0.55:
            request = self.append(path)

            def send(store: PostgresStore) -> asyncio.Future[Any]:
                answer = asked(store.append, request)
                answer.add_done_callback(lambda told: self.heard(path, request, told.result()))
                return answer

            return send
        if throw < 0.67:
            lifetime = Lifetime(ttl_s=3) if dice.random() < 0.3 else Lifetime()
            create = Create(path, content_type="text/plain", lifetime=lifetime)
            return lambda store: asked(store.create, create)
        if throw < 0.73:
            fork = Create(path, content_type=None, fork_from=ForkFrom(other))
            return lambda store: asked(store.create, fork)
        if throw < 0.79:
            return lambda store: asked(store.delete, path)
        if throw < 0.81:
            return lambda store: asked(store.truncate, path, None)
        if throw < 0.87:
            commit = Commit([CommitItem(self.append(path)), CommitItem(self.append(other))])
            return lambda store: asked(store.commit, commit)
        if throw < 0.90:
            return self._upload()
        if throw < 0.92:
            opening = WriterOpen(dice.choice(PRODUCERS), query="q", principal="")
            return lambda store: asked(store.open_writer, opening)
        if throw < 0.94:
            return self._forget(path, clock.now_ms())
        ms = dice.randrange(2_000)

        def wait(_store: PostgresStore) -> asyncio.Future[Any]:
            clock.advance(ms)
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

        return wait

    def _upload(self) -> Ask:
        body = b"%d" % self._dice.randrange(2)
        part, ordinal = Part("t", self._dice.choice(PRODUCERS)), self._dice.randrange(3)
        batch = bytes_batch(body)
        upload = Upload(part, ordinal, "text/plain", batch, digest("text/plain", False, body))
        return lambda store: asked(store.stage, upload)

    def _forget(self, path: str, now_ms: int) -> Ask:
        producer = self._dice.choice(PRODUCERS)

        def work(decider: Decider) -> bool:
            entry = decider.ledger.find(path)
            return entry is not None and decider.forget_producer(
                entry.stream.id, producer, now_ms, 1_000
            )

        return lambda store: asyncio.ensure_future(store.decide(work))


def contents(url: str) -> dict[str, list[Any]]:
    with psycopg.connect(url) as connection:
        return {name: connection.execute(text).fetchall() for name, text in TABLES.items()}


@pytest.mark.parametrize("seed", range(8))
async def test_two_nodes_decide_as_one_whichever_is_asked(seed: int) -> None:
    shared, single = shared_server().new_database(), shared_server().new_database()
    dice, clock = random.Random(seed), SimClock(seed=seed)
    requests = Requests(seed)
    async with nodes(shared, 2, clock) as two, nodes(single, 1, clock) as [one]:
        for number in range(OPERATIONS):
            ask = requests.next(clock)
            now_ms = clock.now_ms()
            answer = plain(await ask(dice.choice(two)))
            if clock.now_ms() == now_ms:
                assert answer == plain(await ask(one)), number
        turns = sum(node.turns.counted.turns for node in two)
        assert sum(node.turns.counted.dropped for node in two) < turns / 4
    assert contents(shared) == contents(single)


async def test_producers_stay_in_memory_while_others_write_to_their_stream() -> None:
    url = shared_server().new_database()
    async with nodes(url, 2, SimClock()) as [left, right]:
        await asked(left.create, Create("s", content_type="text/plain"))

        async def send(store: PostgresStore, name: str, seq: int) -> Any:
            return await asked(store.append, append("s", b"x", producer=(name, 0, seq)))

        for seq in range(3):
            assert isinstance(await send(left, "of-left", seq), Appended)
            assert isinstance(await send(right, "of-right", seq), Appended)
            assert isinstance(await send(left, f"both-{seq}", 0), Appended)
            assert isinstance(await send(right, f"both-{seq}", 1), Appended)
        kept = left.decider.ledger.cached("s")
        assert kept is not None
        mine = kept.producers["of-left"]
        assert isinstance(await send(left, "of-left", 3), Appended)
        again = left.decider.ledger.cached("s")
        assert again is not None
        assert mine is not None
        assert "both-2" not in again.producers
        assert left.turns.counted.dropped == right.turns.counted.dropped == 0


async def test_a_producer_that_another_node_has_forgotten_begins_anew_everywhere() -> None:
    url, clock = shared_server().new_database(), SimClock()
    async with nodes(url, 2, clock) as [left, right]:
        await asked(left.create, Create("s", content_type="text/plain"))
        for seq in range(2):
            request = append("s", b"%d" % seq, producer=("p", 0, seq))
            assert isinstance(await asked(right.append, request), Appended)
        info = await left.look("s", touch=False)
        forgotten = await left.decide(
            lambda decider: decider.forget_producer(info.id, "p", clock.now_ms(), 1_000)  # type: ignore[union-attr]
        )
        assert forgotten

        again = append("s", b"again", producer=("p", 0, 0))

        assert isinstance(await asked(right.append, again), Appended)


async def test_appends_of_many_producers_through_both_nodes_are_all_there_in_order() -> None:
    url = shared_server().new_database()
    async with nodes(url, 2, SimClock()) as both:
        await asked(both[0].create, Create("s", content_type="text/plain"))

        async def produce(number: int) -> None:
            for seq in range(30):
                store = both[(number + seq // 7) % 2]
                request = append("s", b"%d.%d," % (number, seq), producer=(f"p{number}", 0, seq))
                assert isinstance(await asked(store.append, request), Appended)

        await asyncio.gather(*(produce(number) for number in range(6)))
        info = await both[1].look("s", touch=False)
        chunk = await both[0].read(info, info.first, bytes_max=1 << 20)  # type: ignore[arg-type, union-attr]
        sent = [piece.split(b".") for piece in chunk.data.split(b",")[:-1]]  # type: ignore[union-attr]
        for number in range(6):
            mine = [int(seq) for name, seq in sent if int(name) == number]
            assert mine == list(range(30))


# What is told of turns


def test_a_turn_with_a_statement_that_nobody_knows_does_not_claim_to_list_everything() -> None:
    group = LedgerGroup(1)
    assert lists_all_changes(group)
    group.statements.append(("stir", ()))
    assert lists_all_changes(group)
    group.statements.append(("forget_producer", (1, "p", 0)))
    assert not lists_all_changes(group)


def test_a_producer_that_the_log_does_not_show_is_not_listed() -> None:
    group = LedgerGroup(1)
    group.producers[1, "p"] = None  # type: ignore[assignment]
    assert not lists_all_changes(group)
    group.rows.append((0, 1, 0, 0, 0, 1, 1, 0, "p", 0, 0, None, b"", None, None, b"x"))
    assert lists_all_changes(group)
    group.rows[0] = (0, 2, *group.rows[0][2:])
    assert not lists_all_changes(group)


@pytest.mark.parametrize(
    ("turns", "producers", "expected"),
    [
        ([(8, True, [1]), (9, True, [2])], [], True),
        ([(8, True, [1])], [], False),  # the last one is missing
        ([(9, True, [1])], [], False),  # the first one is
        ([(8, True, [1]), (9, False, [2])], [], False),
        ([(8, True, [1]), (9, True, [2])], [(1, "p")] * PRODUCERS_MAX, False),
    ],
)
def test_changes_are_known_only_when_every_turn_is_there_and_lists_them(
    turns: list[Any], producers: list[Any], expected: bool
) -> None:
    assert Changes(turns, producers, []).list_all(Seen(7, 0), 9) is expected
