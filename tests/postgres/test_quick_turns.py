"""Quick turns: a node that writes alone decides before it has the lock, and is never wrong.

In most of these tests another node writes after the first one has decided, and before it sends what
it has decided: the request itself lets it, and waits for it, while it is decided the first time.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, LiteralString, TypeVar

import msgspec
import psycopg
import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.appends import (
    Append,
    Appended,
    Conditions,
    Duplicate,
    ProducerTuple,
    Replayed,
    TailMoved,
)
from fencepost.protocol.claims import Actor, AuditEvent, NotHolder
from fencepost.protocol.commits import Commit, CommitItem, Committed
from fencepost.protocol.creates import Create, Created, ForkFrom
from fencepost.protocol.grants import IdGlob, Principal, ProducerRule, ProducerRules
from fencepost.protocol.rates import Pace, Rate, TooFast
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Chunk, Deleted, Missing, StreamInfo
from fencepost.store.postgres.cache import FORESEEN_MS_MAX, QUICK_AFTER_TURNS
from fencepost.store.postgres.requests import Needs, Request, needs_of_append
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from fencepost.store.write.decider import Decider
from tests.contract.subject import append

WAIT_SECONDS_MAX = 30.0
JSON = "application/json"
BURSTS = 12
BURSTS_SECONDS_MAX = 120.0

T = TypeVar("T")


class ShiftedClock(SystemClock):
    """The clock of a machine that is wrong by hours, and whose monotonic clock a test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() - 5 * 3_600_000

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.passed_ms * 1_000_000


class OtherNode:
    """Another node on the same database, in a thread with a loop of its own."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.store = self.run(PostgresStore.open(PostgresSettings(url=url), SystemClock()))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let it do something, and stand still until that is done."""
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(WAIT_SECONDS_MAX)

    def append(self, request: Append) -> Any:
        return self.run(asked(self.store.append, request))

    def close(self) -> None:
        self.run(self.store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS_MAX)
        self._loop.close()


async def asked(ask: Callable[..., None], *request: Any) -> Any:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ask(*request, answer.set_result)
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        return await answer


async def write_alone(store: PostgresStore, path: str = "warm") -> None:
    """Append one by one, until that takes quick turns."""
    before = store.turns.counted.quick
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        while store.turns.counted.quick < before + 2:
            assert isinstance(await asked(store.append, append(path, b".")), Appended)


async def overtaken(
    store: PostgresStore, needs: Needs, work: Callable[[Decider], T], other: Callable[[], object]
) -> tuple[T, list[T]]:
    """Have something decided, while another node writes behind the back of the first decision.

    The answer, and all that was decided on the way to it.
    """
    decided: list[T] = []

    def decide(decider: Decider) -> T:
        outcome = work(decider)
        decided.append(outcome)
        if len(decided) == 1:
            other()
        return outcome

    before = store.turns.counted.overtaken
    answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    store.turns.submit(Request(decide, answer.set_result, needs, repeatable=True))
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        outcome = await answer
    assert len(decided) == 2, "it was not overtaken"
    assert store.turns.counted.overtaken == before + 1
    assert store.turns.counted.failed == 0
    return outcome, decided


async def overtaken_append(
    store: PostgresStore, request: Append, other: Callable[[], object]
) -> tuple[Any, list[Any]]:
    """The same for an append."""
    needs = needs_of_append(request)
    return await overtaken(store, needs, lambda decider: decider.append(request), other)


async def content(store: PostgresStore, path: str) -> bytes:
    info = await store.look(path, touch=False)
    assert isinstance(info, StreamInfo), info
    chunk = await store.read(info, info.first, bytes_max=1 << 20)
    assert isinstance(chunk, Chunk)
    return chunk.data


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def store(postgres_dsn: str, clock: ShiftedClock) -> AsyncIterator[PostgresStore]:
    opened = await PostgresStore.open(PostgresSettings(url=postgres_dsn), clock)
    for path in ("warm", "s", "t"):
        created = await asked(opened.create, Create(path, content_type="text/plain"))
        assert isinstance(created, Created)
    yield opened
    await opened.close()


@pytest.fixture
def other(postgres_dsn: str, store: PostgresStore) -> Iterator[OtherNode]:
    node = OtherNode(postgres_dsn)
    yield node
    node.close()


# When a node takes them


async def test_a_node_takes_quick_turns_after_some_turns_alone(store: PostgresStore) -> None:
    await write_alone(store)

    counted = store.turns.counted
    before = counted.quick
    for number in range(10):
        assert isinstance(await asked(store.append, append("s", b"%d" % number)), Appended)

    assert counted.quick == before + 10
    assert await content(store, "s") == b"0123456789"


async def test_requests_that_come_together_share_an_ordinary_turn(store: PostgresStore) -> None:
    await write_alone(store)
    counted = store.turns.counted
    quick, turns = counted.quick, counted.turns

    await asyncio.gather(*(asked(store.append, append("s", b".")) for _ in range(20)))

    assert counted.quick == quick
    assert counted.turns - turns < 5


async def test_a_node_whose_streams_another_writes_to_waits_for_the_lock_again(
    store: PostgresStore, other: OtherNode
) -> None:
    await write_alone(store)
    before = store.turns.counted.quick

    for number in range(QUICK_AFTER_TURNS):
        assert isinstance(other.append(append("s", b"%d" % number)), Appended)
        assert isinstance(await asked(store.append, append("s", b".")), Appended)

    assert store.turns.counted.quick == before
    assert await content(store, "s") == b"0.1.2.3.4.5.6.7.8.9."


# What another node wrote meanwhile


async def test_an_append_that_was_decided_too_early_is_decided_again_behind_the_others(
    store: PostgresStore, other: OtherNode
) -> None:
    await asked(store.append, append("s", b"first,"))
    await write_alone(store)

    outcome, _ = await overtaken_append(
        store, append("s", b"last"), lambda: other.append(append("s", b"between,"))
    )

    assert isinstance(outcome, Appended)
    assert await content(store, "s") == b"first,between,last"
    assert await content(store, "warm") == b"." * len(await content(store, "warm"))


async def test_an_append_that_another_node_has_stored_meanwhile_is_a_duplicate(
    store: PostgresStore, other: OtherNode
) -> None:
    await asked(store.append, append("s", b"0", producer=("p", 0, 0)))
    await write_alone(store)
    again = append("s", b"1", producer=("p", 0, 1))

    outcome, decided = await overtaken_append(store, again, lambda: other.append(again))

    assert isinstance(decided[0], Appended)
    assert isinstance(outcome, Duplicate)
    assert await content(store, "s") == b"01"


async def test_a_condition_that_no_longer_holds_is_found_out(
    store: PostgresStore, other: OtherNode
) -> None:
    before = await asked(store.append, append("s", b"0"))
    await write_alone(store)
    request = msgspec.structs.replace(
        append("s", b"mine"), conditions=Conditions(if_match=before.tail)
    )

    outcome, decided = await overtaken_append(
        store, request, lambda: other.append(append("s", b"theirs"))
    )

    assert isinstance(decided[0], Appended)
    assert isinstance(outcome, TailMoved)
    assert await content(store, "s") == b"0theirs"


async def test_a_refusal_that_is_no_longer_right_is_not_answered(
    store: PostgresStore, other: OtherNode
) -> None:
    """What changes nothing is not written: its answer is checked all the same."""
    before = await asked(store.append, append("s", b"0"))
    await write_alone(store)
    tail = before.tail._replace(messages=before.tail.messages + 1, bytes=before.tail.bytes + 6)
    request = msgspec.structs.replace(append("s", b"mine"), conditions=Conditions(if_match=tail))

    outcome, decided = await overtaken_append(
        store, request, lambda: other.append(append("s", b"theirs"))
    )

    assert isinstance(decided[0], TailMoved)
    assert isinstance(outcome, Appended)
    assert await content(store, "s") == b"0theirsmine"


async def test_a_stream_that_was_loaded_without_the_lock_is_loaded_again(
    store: PostgresStore, other: OtherNode, postgres_dsn: str
) -> None:
    other.append(append("t", b"0", producer=("p", 0, 0)))
    await write_alone(store)
    store.decider.ledger.drop_all({"t"})
    outcome, _ = await overtaken_append(
        store,
        append("t", b"2", producer=("q", 0, 0)),
        lambda: other.append(append("t", b"1", producer=("q", 3, 0))),
    )

    assert not isinstance(outcome, Appended), "the epoch of q was raised in between"
    assert await content(store, "t") == b"01"


async def test_a_commit_happens_once_and_whole_behind_the_others(
    store: PostgresStore, other: OtherNode
) -> None:
    await write_alone(store)
    made = msgspec.structs.replace(
        append("made", b"m"), conditions=Conditions(create_as="text/plain")
    )
    commit = Commit(
        [CommitItem(append("s", b"c")), CommitItem(append("t", b"c")), CommitItem(made)]
    )
    outcome, _ = await overtaken(
        store,
        Needs({"s", "t", "made"}),
        lambda decider: decider.commit(commit),
        lambda: [other.append(append(path, b"o")) for path in ("s", "t", "warm")],
    )

    assert isinstance(outcome, Committed)
    assert [await content(store, path) for path in ("s", "t", "made")] == [b"oc", b"oc", b"m"]


async def test_what_is_decided_twice_counts_once(store: PostgresStore, other: OtherNode) -> None:
    pace = Pace(appends=Rate(0.001, 100.0))
    principal = Principal("ann", (), producers=(), rules=ProducerRules(()), pace=pace)
    request = msgspec.structs.replace(
        append("s", b"x", producer=("new", 0, 0)), actor=Actor(principal)
    )
    await write_alone(store)
    before = store.decider.counters()

    outcome, _ = await overtaken_append(store, request, lambda: other.append(append("s", b"o")))

    assert isinstance(outcome, Appended)
    after = store.decider.counters()
    assert after.appends == before.appends + 1
    assert after.messages == before.messages + 1
    [standing] = store.decider.claims.noted.values()
    assert standing.appends is not None
    assert standing.appends.tokens == pytest.approx(99, abs=0.5)


async def test_what_was_loaded_at_different_times_and_does_not_fit_is_decided_in_a_turn(
    store: PostgresStore, other: OtherNode, clock: ShiftedClock
) -> None:
    """The fork has expired, and what it was forked from is gone with it by the other node."""
    await asked(store.create, Create("source", content_type="text/plain"))
    fork = Create("fork", fork_from=ForkFrom("source"), lifetime=Lifetime(ttl_s=1))
    assert isinstance(await asked(store.create, fork), Created)
    await write_alone(store)
    store.decider.ledger.drop_all({"source"})
    clock.passed_ms += 1_100
    request, turns = append("fork", b"x"), []

    def decide(decider: Decider) -> object:
        turns.append(store.turns.turn)
        if len(turns) == 1:
            for path in ("fork", "source"):
                gone = other.run(asked(other.store.delete, path))
                assert isinstance(gone, Deleted | Missing)
        return decider.append(request)

    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    needs = needs_of_append(request)
    store.turns.submit(Request(decide, answer.set_result, needs, repeatable=True))
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        assert isinstance(await answer, Missing)

    assert turns[1] == turns[0] + 2
    assert store.turns.counted.failed == 0


async def test_a_node_that_was_overtaken_waits_for_the_lock_for_long(
    store: PostgresStore, other: OtherNode
) -> None:
    await write_alone(store)
    await overtaken_append(store, append("s", b"x"), lambda: other.append(append("s", b"o")))
    before = store.turns.counted.quick

    for _ in range(2 * QUICK_AFTER_TURNS):
        await asked(store.append, append("s", b"."))

    assert store.turns.counted.quick == before


# Time


@pytest.fixture
def database_clock(postgres_dsn: str) -> Callable[[float], None]:
    """Let the clock of the database be so many seconds ahead of the machine's."""
    name = postgres_dsn.rpartition("/")[2]
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA wrong")
        connection.execute("CREATE TABLE wrong.ahead AS SELECT interval '0' AS by")
        connection.execute(
            "CREATE FUNCTION wrong.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS"
            " 'SELECT pg_catalog.clock_timestamp() + by FROM wrong.ahead'"
        )
        connection.execute(
            f"ALTER DATABASE {name} SET search_path = public, wrong, pg_catalog".encode()
        )

    def put(seconds: float) -> None:
        with psycopg.connect(postgres_dsn, autocommit=True) as connection:
            connection.execute("UPDATE wrong.ahead SET by = make_interval(secs => %s)", (seconds,))

    return put


def database_ms(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
        ).fetchone()
        assert row is not None
        return int(row[0])


def times(url: str, path: str) -> list[int]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT at_ms FROM log JOIN streams ON id = stream WHERE path = %s AND kind = 0"
            " ORDER BY position",
            (path,),
        )
        return [at_ms for (at_ms,) in rows]


async def test_the_time_is_the_databases_and_never_ahead_of_it(
    database_clock: Callable[[float], None], store: PostgresStore, postgres_dsn: str
) -> None:
    """The machine of the node is five hours behind the database's, and that is set ahead."""
    database_clock(3600)
    await write_alone(store)
    quick = store.turns.counted.quick
    heard_ms = database_ms(postgres_dsn)
    for _ in range(30):
        await asked(store.append, append("s", b"."))
        at_ms, now_ms = times(postgres_dsn, "s")[-1], database_ms(postgres_dsn)
        assert at_ms <= now_ms
        assert at_ms >= heard_ms - 1_000, "it lags by more than the answer before was on its way"
        heard_ms = now_ms

    assert store.turns.counted.quick > quick


async def test_a_database_clock_that_is_set_back_does_not_take_the_time_back(
    database_clock: Callable[[float], None], store: PostgresStore, postgres_dsn: str
) -> None:
    database_clock(3600)
    await write_alone(store)
    await asked(store.append, append("s", b"."))
    database_clock(-3600)
    for _ in range(10):
        await asked(store.append, append("s", b"."))

    found = times(postgres_dsn, "s")
    assert found == sorted(found)
    assert found[-1] >= found[0]


async def test_after_a_while_without_a_turn_the_database_is_asked_for_the_time(
    store: PostgresStore, clock: ShiftedClock, postgres_dsn: str
) -> None:
    await write_alone(store)
    before = store.turns.counted.quick
    clock.passed_ms += 2 * FORESEEN_MS_MAX

    await asked(store.append, append("s", b"."))

    assert store.turns.counted.quick == before
    assert times(postgres_dsn, "s")[-1] <= database_ms(postgres_dsn)


async def test_a_turn_that_would_come_late_is_taken_by_the_time_that_it_is(
    store: PostgresStore, postgres_dsn: str
) -> None:
    """Its answer says what time it was when the commit began."""
    brief = Create("brief", content_type="text/plain", lifetime=Lifetime(ttl_s=1))
    assert isinstance(await asked(store.create, brief), Created)
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_sleep(1.5); RETURN NULL; END'"
        )
        connection.execute(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON log DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW WHEN (NEW.size = 4) EXECUTE FUNCTION slow()"
        )
    await write_alone(store)
    before = store.turns.counted.quick
    assert isinstance(await asked(store.append, append("s", b"slow")), Appended)
    assert store.turns.counted.quick == before + 1

    assert isinstance(await asked(store.append, append("brief", b".")), Missing)


async def test_a_decision_that_waited_for_the_lock_is_made_again(
    store: PostgresStore, postgres_dsn: str
) -> None:
    brief = Create("brief", content_type="text/plain", lifetime=Lifetime(ttl_s=2))
    assert isinstance(await asked(store.create, brief), Created)
    await asked(store.append, append("brief", b"."))
    await write_alone(store, "brief")
    with psycopg.connect(postgres_dsn) as holder:
        holder.execute("SELECT FROM counters FOR UPDATE")
        asking = asyncio.create_task(asked(store.append, append("brief", b"late")))
        await asyncio.to_thread(holder.execute, "SELECT pg_sleep(2.5)")

    assert isinstance(await asking, Missing)


# Sessions that end


async def test_a_session_that_ended_between_two_quick_turns_leaves_nothing_in_doubt(
    store: PostgresStore, postgres_dsn: str
) -> None:
    await write_alone(store)
    before = store.decider.counters()
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        ended = connection.execute(
            "SELECT pid, pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'INSERT INTO log%'"
        ).fetchall()
    assert len(ended) == 1

    assert isinstance(await asked(store.append, append("s", b".")), Appended)
    assert store.turns.counted.unknown == 0
    assert await content(store, "s") == b"."
    assert store.decider.counters().appends == before.appends + 1


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("lock", ["SELECT FROM counters FOR UPDATE", "LOCK log IN EXCLUSIVE MODE"])
async def test_a_session_that_ends_before_the_end_of_its_turn_leaves_nothing_in_doubt(
    store: PostgresStore, postgres_dsn: str, is_quick: bool, lock: LiteralString
) -> None:
    if is_quick:
        await write_alone(store)
    waiting = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with psycopg.connect(postgres_dsn) as holder:
        holder.execute(lock)
        asking = asyncio.create_task(asked(store.append, append("s", b".")))
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while not holder.execute(waiting).fetchall():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while not store.turns.counted.failed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    assert isinstance(await asking, Appended)
    assert store.turns.counted.unknown == 0
    assert await content(store, "s") == b"."


async def test_a_turn_that_comes_too_late_is_taken_again_and_counts_once(postgres_dsn: str) -> None:
    """Another session holds the lock for longer than a node waits for it."""
    settings = PostgresSettings(url=postgres_dsn, turn_wait_ms=1_500)
    store = await PostgresStore.open(settings, SystemClock())
    try:
        for path in ("warm", "s"):
            await asked(store.create, Create(path, content_type="text/plain"))
        await write_alone(store)
        before = store.decider.counters()
        with psycopg.connect(postgres_dsn) as holder:
            holder.execute("SELECT FROM counters FOR UPDATE")
            asking = asyncio.create_task(asked(store.append, append("s", b".")))
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                while not store.turns.counted.failed:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert isinstance(await asking, Appended)
        assert store.turns.counted.unknown == 0
        assert await content(store, "s") == b"."
        assert store.decider.counters().appends == before.appends + 1
    finally:
        await store.close()


# Keys


def keyed(path: str, body: bytes, key: str, **more: Any) -> Append:
    return msgspec.structs.replace(append(path, body), conditions=Conditions(key=key, **more))


async def test_a_new_key_is_not_looked_for(store: PostgresStore) -> None:
    await write_alone(store)
    before = store.turns.counted.quick

    for number in range(5):
        request = keyed("s", b"%d" % number, f"key-{number}")
        assert isinstance(await asked(store.append, request), Appended)

    assert store.turns.counted.quick == before + 5
    assert await content(store, "s") == b"01234"


@pytest.mark.parametrize("conditional", [False, True])
async def test_an_append_under_a_used_key_is_answered_as_the_first_time(
    store: PostgresStore, conditional: bool
) -> None:
    """Without the key the second would be stored, or be refused by its condition."""
    first = await asked(store.append, append("s", b"0"))
    request = keyed("s", b"1", "k", **({"if_match": first.tail} if conditional else {}))
    await write_alone(store)
    stored = await asked(store.append, request)
    await write_alone(store)

    again = await asked(store.append, request)

    assert isinstance(stored, Appended)
    assert isinstance(again, Replayed), again
    assert await content(store, "s") == b"01"
    assert store.turns.counted.failed == 0
    assert store.turns.counted.reconnects == 1


async def test_a_refusal_under_a_key_counts_once(store: PostgresStore) -> None:
    """It is decided twice: the first time it might have been a retry."""
    told: list[AuditEvent] = []
    store.decider.claims.auditor = told.append
    pace = Pace(appends=Rate(0.001, 2.0))
    rules = ProducerRules([ProducerRule(IdGlob("*"), False, False, "never", 0)])
    holder, ann = (
        Actor(Principal(name, (), producers=(), rules=rules, pace=pace)) for name in ("bob", "ann")
    )

    def by(actor: Actor, key: str) -> Append:
        request = keyed("s", b"x", key)
        return msgspec.structs.replace(
            request, producer=ProducerTuple("p", 0, len(key)), actor=actor
        )

    assert isinstance(await asked(store.append, by(holder, "")), Appended)
    await write_alone(store)
    told.clear()

    assert isinstance(await asked(store.append, by(ann, "a")), NotHolder)
    assert len(told) == 1
    assert isinstance(await asked(store.append, by(ann, "a")), NotHolder)
    assert store.decider.counters().appends_too_fast == 0
    assert isinstance(await asked(store.append, by(ann, "a")), TooFast)
    assert store.decider.counters().appends_too_fast == 1
    assert len(told) == 2


# Races


@pytest.mark.parametrize(("nodes", "at_once"), [(2, 1), (3, 1), (2, 2), (3, 3)])
async def test_versions_are_contiguous_when_nodes_write_in_bursts_to_the_same_streams(
    postgres_dsn: str, nodes: int, at_once: int
) -> None:
    """Every append is there once, at the version that its condition named.

    Where one writes at a time, it goes on until a node decides before it has heard of the burst
    before. Where all do, each waits for the lock.
    """
    dice = random.Random(f"{nodes}/{at_once}")
    may_write = asyncio.Semaphore(at_once)
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(nodes):
            opened = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
            stack.push_async_callback(opened.close)
            stores.append(opened)
        for path in ("a", "b"):
            await asked(stores[0].create, Create(path, content_type="application/json"))
        versions = {path: [-1] * nodes for path in ("a", "b")}

        async def write(node: int, label: str, path: str) -> None:
            while True:
                version = versions[path][node]
                request = append(path, json.dumps([[label, version + 1]]).encode(), JSON)
                request = msgspec.structs.replace(request, conditions=Conditions(if_match=version))
                outcome = await asked(stores[node].append, request)
                if isinstance(outcome, Appended):
                    versions[path][node] = version + 1
                    return
                assert isinstance(outcome, TailMoved)
                versions[path][node] = outcome.tail.messages - 1

        def is_overtaken() -> bool:
            return any(store.turns.counted.overtaken for store in stores)

        async def burst(node: int) -> list[str]:
            labels: list[str] = []
            bursts = 0
            while bursts < BURSTS or not (at_once > 1 or is_overtaken()):
                bursts += 1
                async with may_write:
                    for step in range(dice.choice((1, 1, 15, 40))):
                        labels.append(f"{node}/{bursts}/{step}")
                        await write(node, labels[-1], dice.choice(("a", "b")))
            return labels

        async with asyncio.timeout(BURSTS_SECONDS_MAX):
            written = await asyncio.gather(*map(burst, range(nodes)))

        found = []
        for path in ("a", "b"):
            rows = json.loads(b"[%b]" % await content(stores[0], path))
            assert [version for _, version in rows] == list(range(len(rows)))
            found += [label for label, _ in rows]
        assert sorted(found) == sorted(label for labels in written for label in labels)
        counted = [store.turns.counted for store in stores]
        assert sum(one.failed + one.unknown for one in counted) == 0
        if at_once == 1:
            assert sum(one.quick for one in counted) > 0
