"""One node leads: who it is, what it may write, and what ends its term. In this process, so that a
test can look at both sides of a takeover."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import psycopg
import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.creates import Create
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Failed, StoreAwayError
from fencepost.store.postgres.cluster.leader import Leading
from fencepost.store.postgres.cluster.term import DatabaseClock, NotLeadingError, Term
from fencepost.store.postgres.maintain import PostgresUpkeep
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.postgres.subscriptions import PostgresSubscriptions, secret
from fencepost.store.settings import PostgresSettings
from fencepost.store.write.decider import Decider
from fencepost.testing.clock import SimClock
from tests.postgres.nodes import rows

WAIT_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.01


def settings_for(dsn: str) -> PostgresSettings:
    return PostgresSettings(url=dsn, poll_interval_ms=50, sweep_interval_ms=50, reader_threads=1)


@asynccontextmanager
async def node(settings: PostgresSettings) -> AsyncIterator[tuple[PostgresStore, Leading]]:
    """A store that takes part in leading."""
    clock = SystemClock()
    store = await PostgresStore.open(settings, clock)
    leading = Leading(store, clock)
    leading.url = f"http://{store.node}"
    running = asyncio.create_task(leading.run())
    try:
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            await leading.first_look.wait()
        yield store, leading
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def until(holds: Callable[[], bool], what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + WAIT_SECONDS_MAX
    while not holds():
        assert loop.time() < deadline, f"waited too long until {what}"
        await asyncio.wait([asyncio.create_task(asyncio.sleep(LOOK_SECONDS))])


def leader_of(dsn: str) -> object:
    [(leader,)] = rows(dsn, "SELECT leader FROM counters")
    return leader


def cut_lock_holder(dsn: str) -> None:
    """End the session that holds the lock of the leader, as a broken network would."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        ended = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks"
            " WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ).fetchall()
    assert ended == [(True,)]


async def take_lead(store: PostgresStore) -> Term:
    """Lead without asking anybody."""
    await store.decide(
        lambda decider: decider.group.statements.append(("take_lead", (store.node,)))
    )
    return Term(store)


def stir(decider: Decider) -> str:
    decider.group.statements.append(("stir", ()))
    return "written"


async def test_of_two_nodes_the_first_leads_and_the_other_knows_where_it_is(
    postgres_dsn: str,
) -> None:
    settings = settings_for(postgres_dsn)
    async with node(settings) as (first, one), node(settings) as (_, two):
        await until(lambda: two.leader is not None, "the other has looked")

        assert one.is_reigning
        assert not two.is_reigning
        assert two.leader == (first.node, f"http://{first.node}")
        assert leader_of(postgres_dsn) == first.node


async def test_a_node_that_leaves_is_forgotten_and_another_leads(postgres_dsn: str) -> None:
    settings = settings_for(postgres_dsn)
    async with node(settings) as (first, _):
        second_context = node(settings)
        second, two = await second_context.__aenter__()
        assert leader_of(postgres_dsn) == first.node
    try:
        await until(lambda: two.is_reigning, "the other node leads")
        await until(lambda: leader_of(postgres_dsn) == second.node, "that is written down")
        # A node that cannot say in time that it leaves is forgotten when it has been silent.
        listed = "SELECT node FROM nodes"
        await until(lambda: rows(postgres_dsn, listed) == [(second.node,)], "it is forgotten")
    finally:
        await second_context.__aexit__(None, None, None)


async def test_a_node_whose_session_is_cut_leads_no_more_until_it_has_the_lock_again(
    postgres_dsn: str,
) -> None:
    settings = settings_for(postgres_dsn)
    async with node(settings) as (first, one), node(settings) as (second, two):
        cut_lock_holder(postgres_dsn)

        await until(lambda: two.is_reigning, "the other node leads")
        await until(lambda: leader_of(postgres_dsn) == second.node, "that is written down")
        await until(lambda: one.leader == (second.node, two.url), "the first node knows")
        assert not one.is_reigning
        assert first.node != second.node


async def test_a_node_that_no_longer_leads_cannot_write_as_if_it_did(postgres_dsn: str) -> None:
    settings = settings_for(postgres_dsn)
    old = await PostgresStore.open(settings, SystemClock())
    new = await PostgresStore.open(settings, SystemClock())
    try:
        term = await take_lead(old)
        assert await term.decide(stir) == "written"
        await term.between_commits(lambda connection: connection.fetch("clock_ms"))

        current = await take_lead(new)
        with pytest.raises(StoreAwayError):
            await term.decide(stir)
        with pytest.raises(NotLeadingError):
            await term.between_commits(lambda connection: connection.fetch("clock_ms"))

        assert term.over.is_set()
        assert await current.decide(stir) == "written"
        assert await old.decide(stir) == "written", "who does not lead writes for its clients"
    finally:
        await old.close()
        await new.close()


async def test_what_is_decided_on_top_of_a_failed_write_is_void(postgres_dsn: str) -> None:
    store = await PostgresStore.open(settings_for(postgres_dsn), SystemClock())
    try:
        term = await take_lead(store)
        subscriptions = PostgresSubscriptions(term, DatabaseClock(SystemClock()))
        await subscriptions.prepare()

        subscriptions._write("save_wake", "nonsense")
        first = subscriptions.durable()
        failure = await first
        later = await subscriptions.durable()

        assert isinstance(failure, Failed)
        assert isinstance(later, Failed)
        assert term.over.is_set()
        assert await store.decide(stir) == "written", "others are not touched by it"
    finally:
        await store.close()


async def test_a_secret_is_the_same_for_nodes_that_ask_for_it_at_once(postgres_dsn: str) -> None:
    settings = settings_for(postgres_dsn)
    stores = [await PostgresStore.open(settings, SystemClock()) for _ in range(3)]
    try:
        found = await asyncio.gather(
            *(secret(store, "key", bytes([number])) for number, store in enumerate(stores))
        )

        assert len(set(found)) == 1
        assert await secret(stores[0], "key", b"another") == found[0]
    finally:
        for store in stores:
            await store.close()


async def test_only_the_leader_ends_streams_whose_time_is_over(postgres_dsn: str) -> None:
    settings = settings_for(postgres_dsn)
    async with node(settings) as (first, _), node(settings) as (second, _):
        made: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        lifetime = Lifetime(ttl_s=1, expires_at_ms=None)
        second.create(Create("brief", "text/plain", lifetime=lifetime), made.set_result)
        await made

        await until(
            lambda: rows(postgres_dsn, "SELECT state FROM streams") == [(2,)], "it has expired"
        )

        by = rows(postgres_dsn, "SELECT node FROM turns WHERE removed <> '{}'")
        assert by == [(first.node,)]


class FollowedTo:
    """Subscriptions that have followed so far."""

    def __init__(self) -> None:
        self.turn = -1

    async def followed_durably(self) -> int | None:
        return self.turn


async def test_turns_are_kept_until_they_are_old_and_followed(postgres_dsn: str) -> None:
    clock = SimClock()
    settings = replace(settings_for(postgres_dsn), turns_kept_s=60)
    store = PostgresStore(settings, clock, simulated=True)
    try:
        term = await take_lead(store)
        followed = FollowedTo()
        upkeep = PostgresUpkeep(term, clock, followed)
        for _ in range(5):
            await term.decide(_write_at)
        [(newest,)] = rows(postgres_dsn, "SELECT turn FROM counters")
        assert isinstance(newest, int)

        await upkeep.follow()
        clock.advance(61_000)
        assert await upkeep.drop_turns() == 0, "nobody has followed them"
        followed.turn = newest - 2
        await upkeep.follow()
        dropped = await upkeep.drop_turns()

        assert dropped == newest - 2
        assert rows(postgres_dsn, "SELECT turn FROM turns ORDER BY turn") == [
            (newest - 1,),
            (newest,),
        ]
        assert rows(postgres_dsn, "SELECT turn FROM followed") == [(newest - 2,)]
        assert await upkeep.drop_turns() == 0
    finally:
        await store.close()


def _write_at(decider: Decider) -> None:
    decider.tick()
    decider.group.statements.append(("stir", ()))


async def test_a_node_that_is_silent_for_long_is_forgotten(postgres_dsn: str) -> None:
    settings = replace(settings_for(postgres_dsn), node_silence_ms=60_000)
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("INSERT INTO nodes VALUES ('old', 'http://old', 0, 0)")
    async with node(settings) as (store, _):
        await until(
            lambda: rows(postgres_dsn, "SELECT node FROM nodes") == [(store.node,)],
            "the silent one is forgotten",
        )


def test_the_clock_is_the_databases_and_never_goes_back() -> None:
    here = SimClock()
    clock = DatabaseClock(here)

    clock.set(here.now_ms() + 7_000)
    ahead_ms = clock.now_ms() - here.now_ms()
    before_ms = clock.now_ms()
    clock.set(here.now_ms() - 60_000)

    assert ahead_ms == 7_000
    assert clock.now_ms() == before_ms


def test_the_databases_time_goes_on_while_this_machines_clock_is_set() -> None:
    here = SimClock()
    clock = DatabaseClock(here)
    clock.set(here.now_ms())
    before_ms = clock.now_ms()

    for set_ms in (3_600_000, -7_200_000):
        here.jump(set_ms)
        assert clock.now_ms() == before_ms
    here.advance(5)

    assert clock.now_ms() == before_ms + 5
    assert clock.wall_ms() == here.wall_ms()


def test_an_answer_that_took_long_does_not_put_the_clock_ahead_of_the_databases() -> None:
    """A lease must not end early because the database stood still for a while."""
    here, ahead_ms = SimClock(), 7_000
    clock = DatabaseClock(here)

    here.advance(20_000)  # and only then it looked
    clock.set(here.now_ms() + ahead_ms)
    looked_late_ms = clock.now_ms() - here.now_ms()
    said_ms = here.now_ms() + ahead_ms
    here.advance(20_000)  # after it had looked
    clock.set(said_ms)
    looked_early_ms = clock.now_ms() - here.now_ms()

    assert looked_late_ms == ahead_ms
    assert looked_early_ms <= ahead_ms


async def test_a_node_that_stops_in_the_middle_of_its_turn_does_not_keep_the_others_waiting(
    postgres_dsn: str,
) -> None:
    """The server's timeout for idle transactions does not see it: it waits for what follows."""
    settings = replace(settings_for(postgres_dsn), turn_idle_ms=500)
    stopped = psycopg.connect(postgres_dsn)
    pipeline = stopped.pipeline()
    pipeline.__enter__()
    stopped.execute("SELECT turn FROM counters FOR UPDATE")
    stopped.pgconn.send_flush_request()
    stopped.pgconn.flush()
    locked = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'ClientRead' AND state = 'active'"
    await until(lambda: bool(rows(postgres_dsn, locked)), "the turn is taken and not ended")
    try:
        async with node(settings) as (store, _):
            assert await store.decide(stir) == "written"
    finally:
        stopped.close()
