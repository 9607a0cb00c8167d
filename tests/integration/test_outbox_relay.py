"""A relay and a real server: order, late commits, leases, retries, deaths, requeues, wakes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import fencepost
from fencepost.client.aio import AsyncMesh
from fencepost.client.meshes import SendReceipt
from fencepost.clock import SystemClock
from fencepost.outbox import IdUsedError, Outbox, OutboxDatabaseError
from fencepost.outbox import relay as relaying
from fencepost.outbox.database import HEADS, Finished, OutboxDatabase, Wanted, open_outbox
from fencepost.outbox.relay import Counts, Relay, RelaySettings, TermsRefusedError
from fencepost.outbox.states import (
    Dropped,
    IdUsed,
    NotOpen,
    Requeued,
    Stored,
    Successor,
)
from tests.integration.outbox_support import (
    POSTGRES,
    SQLITE,
    connect,
    database_of,
    execute,
    select,
    set_up,
)
from tests.serving import ServerProcess

HOUR_MS = 3_600_000
QUICK = RelaySettings(poll_ms=20)
_names = itertools.count()


@pytest.fixture(params=[SQLITE, POSTGRES])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with database_of(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def database(address: str) -> Iterator[OutboxDatabase]:
    opened = open_outbox(address, SystemClock())
    yield opened
    opened.close()


async def at_once(_send: dict[str, Any]) -> None:
    """Nothing happens before a send."""


class Watched(AsyncMesh):
    """A mesh of the client. What the test wants to happen before a send happens there."""

    def __init__(self, mesh: AsyncMesh, shop: Shop) -> None:
        super().__init__(mesh._driver, mesh.name)
        self._shop = shop

    async def send_encoded(self, data: bytes) -> SendReceipt:
        await self._shop.before_send(msgspec.json.decode(data))
        return await super().send_encoded(data)


class Shop:
    """A mesh of its own, and an outbox table whose rows go there."""

    def __init__(self, server: ServerProcess, address: str, database: OutboxDatabase) -> None:
        self.mesh = f"shop-{next(_names)}"
        self.url = server.url
        self.address = address
        self.database = database
        self.counts = Counts()
        self.before_send: Callable[[dict[str, Any]], Awaitable[None]] = at_once
        with fencepost.connect(self.url) as client:
            mesh = client.mesh(self.mesh)
            mesh.make()
            mesh.make_member("ann")
            for name in ("orders", "slow"):
                mesh.make_topic(name, ["ann"])

    def send(self, to: str, body: Any, id: str, **more: Any) -> None:
        """Send in a transaction of its own."""
        connection = connect(self.address)
        try:
            Outbox.table(self.mesh).send(connection, to, body, id=id, **more)
            connection.commit()
        finally:
            connection.close()

    def inbox(self) -> list[Any]:
        """What ann got, in its order."""
        with fencepost.connect(self.url) as client:
            found = client.stream(f"__mesh/{self.mesh}/inbox/ann").read().messages()
            return [entry.get("json", entry.get("body")) for entry in found]

    def status(self) -> dict[str, int]:
        rows = "select status, count(*) from fencepost_outbox group by status"
        return {row[0]: row[1] for row in select(self.address, rows)}

    def is_told(self) -> bool:
        """Whether a relay waits to be told of commits; on SQLite it sees them."""
        found = select(self.address, "select waiting_until_ms from fencepost_outbox_state")
        return found[0][0] > 0 or not self.address.startswith("postgresql")

    def relay(
        self, settings: RelaySettings, client: fencepost.AsyncClient, database: OutboxDatabase
    ) -> Relay:
        meshes = {self.mesh: Watched(client.mesh(self.mesh), self)}
        return Relay(
            database,
            meshes,
            sender="shop",
            clock=SystemClock(),
            settings=settings,
            counted=self.counts,
        )

    async def deliver(self, settings: RelaySettings = QUICK) -> None:
        """What is due now."""
        async with fencepost.connect_async(self.url, retries=fencepost.NO_RETRIES) as client:
            relay = self.relay(settings, client, self.database)
            await relay.run(asyncio.Event(), once=True)

    @asynccontextmanager
    async def relaying(self, settings: RelaySettings = QUICK) -> AsyncIterator[Relay]:
        """A relay of its own while the block runs."""
        stop = asyncio.Event()
        database = open_outbox(self.address, SystemClock())
        async with fencepost.connect_async(self.url, retries=fencepost.NO_RETRIES) as client:
            relay = self.relay(settings, client, database)
            task = asyncio.create_task(relay.run(stop))
            try:
                yield relay
            finally:
                stop.set()
                await task
                database.close()


@pytest.fixture
def shop(server_process: ServerProcess, address: str, database: OutboxDatabase) -> Shop:
    return Shop(server_process, address, database)


async def until(condition: Callable[[], bool]) -> None:
    ends = asyncio.get_running_loop().time() + 60
    while not await asyncio.to_thread(condition):
        assert asyncio.get_running_loop().time() < ends, "what the test waits for did not happen"
        await asyncio.sleep(0.01)


async def test_each_send_arrives_once_and_in_its_order(shop: Shop) -> None:
    """Two relays share the work; rows of one destination and priority never overtake."""
    connection = connect(shop.address)
    for number in range(200):
        to = "topic:orders" if number % 2 else "topic:slow"
        Outbox.table(shop.mesh).send(connection, to, number, id=f"n-{number}")
    connection.commit()
    connection.close()

    async with shop.relaying(), shop.relaying():
        await until(lambda: shop.status() == {"done": 200})

    inbox = shop.inbox()
    assert [number for number in inbox if number % 2] == list(range(1, 200, 2))
    assert [number for number in inbox if number % 2 == 0] == list(range(0, 200, 2))
    assert select(shop.address, "select max(attempts) from fencepost_outbox") == [(1,)]
    assert shop.counts["delivered"] == 200
    assert shop.counts["duplicate"] == shop.counts["lost"] == 0


async def test_priorities_go_first(shop: Shop) -> None:
    for priority in ("low", "next", "now"):
        shop.send("topic:orders", priority, priority, priority=priority)

    await shop.deliver(msgspec.structs.replace(QUICK, sends_max=1))

    assert shop.inbox() == ["now", "next", "low"]


async def test_a_row_whose_transaction_commits_late_is_delivered(
    server_process: ServerProcess, tmp_path: Path
) -> None:
    """Scenario 20: a lower number that appears when higher ones are done. One writer at a time is
    all that SQLite has, so there numbers are in the order of commits."""
    with database_of(POSTGRES, tmp_path) as address:
        database = open_outbox(address, SystemClock())
        shop = Shop(server_process, address, database)
        late = psycopg.connect(address)
        Outbox.table(shop.mesh).send(late, "topic:orders", "late", id="late")
        async with shop.relaying():
            shop.send("topic:orders", "early", "early")
            await until(lambda: shop.status() == {"done": 1})
            late.commit()
            await until(lambda: shop.status() == {"done": 2})
        late.close()
        database.close()

        assert shop.inbox() == ["early", "late"]
        ids = select(address, "select client_message_id from fencepost_outbox order by id")
        assert ids == [("late",), ("early",)]


async def test_a_commit_wakes_a_relay_that_would_not_look_for_an_hour(shop: Shop) -> None:
    shop.send("topic:nowhere", 0, "dead")
    async with shop.relaying(RelaySettings(poll_ms=HOUR_MS)):
        await until(lambda: shop.status() == {"dead": 1})
        for number in range(1, 4):
            await until(shop.is_told)
            shop.send("topic:orders", number, f"n-{number}")
            await until(lambda: shop.status().get("done") == len(shop.inbox()) == number)  # noqa: B023

    assert shop.inbox() == [1, 2, 3]


async def test_a_relay_that_has_work_need_not_be_told_of_commits(
    server_process: ServerProcess, tmp_path: Path
) -> None:
    """On PostgreSQL, where it costs the caller something."""
    gate = asyncio.Event()

    async def held(_send: dict[str, Any]) -> None:
        await gate.wait()

    with database_of(POSTGRES, tmp_path) as address:
        database = open_outbox(address, SystemClock())
        shop = Shop(server_process, address, database)
        async with shop.relaying(RelaySettings(poll_ms=60_000)):
            await until(shop.is_told)
            shop.before_send = held
            shop.send("topic:orders", 1, "first")
            await until(lambda: not shop.is_told())
            gate.set()
            await until(shop.is_told)
            assert shop.status() == {"done": 1}
        database.close()


async def test_a_destination_that_does_not_answer_holds_up_its_own_rows_only(shop: Shop) -> None:
    for number in range(5):
        shop.send("topic:slow", number, f"slow-{number}")
        shop.send("topic:orders", number, f"order-{number}")
    gate = asyncio.Event()

    async def held(send: dict[str, Any]) -> None:
        if send["ref"] == "slow":
            await gate.wait()

    shop.before_send = held
    async with shop.relaying(msgspec.structs.replace(QUICK, sends_max=2)):
        await until(lambda: shop.status().get("done") == 5)

        assert shop.inbox() == [0, 1, 2, 3, 4]
        gate.set()
        await until(lambda: shop.status() == {"done": 10})


async def test_a_send_that_the_server_refuses_is_dead_and_its_id_is_never_free(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """Scenario 23: a destination that is not there. Rows behind it are delivered."""
    shop.send("topic:orders", "first", "first")
    shop.send("topic:nowhere", "lost", "lost")
    shop.send("topic:orders", "second", "second")

    await shop.deliver()

    assert shop.inbox() == ["first", "second"]
    assert shop.status() == {"done": 2, "dead": 1}
    assert "'lost' to topic:nowhere is dead: 404 destination_not_found" in caplog.text
    assert shop.counts["dead"] == 1
    with fencepost.connect(shop.url) as client:
        client.mesh(shop.mesh).make_topic("nowhere", ["ann"])
    with pytest.raises(IdUsedError) as used:
        shop.send("topic:nowhere", "lost", "lost")
    assert used.value.conflict == "outbox_dead_fingerprint_match"
    assert "destination_not_found" in str(used.value.reason)
    await shop.deliver()
    assert shop.inbox() == ["first", "second"]


async def test_a_requeued_row_arrives_under_its_new_id_and_the_old_one_stays_used(
    shop: Shop,
) -> None:
    """Scenario 14."""
    shop.send("topic:nowhere", "lost", "lost")
    await shop.deliver()
    with fencepost.connect(shop.url) as client:
        client.mesh(shop.mesh).make_topic("nowhere", ["ann"])

    requeued = shop.database.requeue("1", Successor("", "found"), by="ann")

    assert isinstance(requeued, Requeued)
    assert (requeued.old.status, requeued.old.superseded_by) == ("aborted", requeued.new.id)
    assert requeued.new.destination == "topic:nowhere"
    assert isinstance(shop.database.requeue("1", Successor("", "x"), by="ann"), NotOpen)
    assert isinstance(
        shop.database.requeue(requeued.new.id, Successor("", "lost"), by="ann"), IdUsed
    )
    assert shop.database.requeue("99", Successor("", "y"), by="ann") is None
    await shop.deliver()
    assert shop.inbox() == ["lost"]
    assert shop.status() == {"aborted": 1, "done": 1}
    with pytest.raises(IdUsedError, match="outbox_aborted_fingerprint_match"):
        shop.send("topic:nowhere", "lost", "lost")


async def test_a_row_that_was_dropped_while_it_was_sent_stays_dropped(shop: Shop) -> None:
    """A late ack revives nothing."""
    shop.send("topic:orders", 1, "one")
    gate, begun = asyncio.Event(), asyncio.Event()

    async def held(_send: dict[str, Any]) -> None:
        begun.set()
        await gate.wait()

    shop.before_send = held
    async with shop.relaying():
        await begun.wait()
        assert isinstance(shop.database.drop("1", by="ann"), Dropped)
        gate.set()
        await until(lambda: shop.counts["lost"] == 1)

    assert shop.status() == {"aborted": 1}
    assert select(shop.address, "select aborted_by from fencepost_outbox") == [("ann",)]


async def test_a_row_that_is_too_old_dies_without_another_attempt(shop: Shop) -> None:
    shop.send("topic:orders", 1, "old")
    shop.send("topic:orders", 2, "young")
    age_ms = 7884 * HOUR_MS
    execute(
        shop.address,
        f"update fencepost_outbox set enqueued_ms = enqueued_ms - {age_ms} where id = 1",
    )

    await shop.deliver()

    assert shop.inbox() == [2]
    found = select(shop.address, "select status, attempts, last_error from fencepost_outbox")
    assert ("dead", 0, "not delivered within its time, after 0 attempts") in found


async def test_a_failed_send_waits_and_those_behind_it_wait_too(shop: Shop) -> None:
    for number in range(3):
        shop.send("topic:orders", number, f"n-{number}")
    failures = iter([False, True])

    async def failing(_send: dict[str, Any]) -> None:
        if next(failures, False):
            raise fencepost.ConnectionFailedError("cut", sent=True)

    shop.before_send = failing
    async with shop.relaying():
        await until(lambda: shop.status() == {"done": 3})

    assert shop.inbox() == [0, 1, 2]
    attempts = "select attempts from fencepost_outbox order by id"
    assert select(shop.address, attempts) == [(1,), (2,), (1,)]
    assert shop.counts["retries"] == 1


async def test_a_server_that_is_away_is_said_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, ask = itertools.count(1), relaying.terms_of

    async def terms_of(mesh: AsyncMesh, max_age: int | None) -> relaying.Terms:
        if next(asked) <= 20:
            raise fencepost.ConnectionFailedError("refused")
        return await ask(mesh, max_age)

    monkeypatch.setattr(relaying, "terms_of", terms_of)
    monkeypatch.setattr(relaying, "AWAY_MS", 1)
    shop.send("topic:orders", 1, "one")

    async with shop.relaying():
        await until(lambda: shop.status() == {"done": 1})

    said = [one.message for one in caplog.records if one.name == relaying.log.name]
    assert said == [
        f"the server cannot be asked for the mesh {shop.mesh!r}, and is asked again: refused",
        f"the server answers for the mesh {shop.mesh!r}",
    ]


async def test_terms_that_the_server_refuses_end_a_relay(shop: Shop) -> None:
    shop.send("topic:orders", 1, "one")
    with pytest.raises(BaseExceptionGroup) as raised:
        await shop.deliver(RelaySettings(max_age_hours=24 * 365))
    error = raised.value.exceptions[0]
    assert isinstance(error, TermsRefusedError)
    assert "outbox_max_age_above_dedupe_window" in str(error)
    assert error.exit_code == 2
    assert shop.status() == {"pending": 1}


# The database alone


def lease(database: OutboxDatabase, mesh: str, lease_ms: int = 30_000, **more: int) -> Any:
    wanted = Wanted({mesh: 144 * HOUR_MS}, more.get("lanes", 32), 3, 20)
    return database.turn([], [], wanted, lease_ms=lease_ms, keep_done_ms=HOUR_MS)


def finish(database: OutboxDatabase, mesh: str, held: Any, event: Any) -> Any:
    wanted = Wanted({mesh: 144 * HOUR_MS}, 0, 3, 20)
    finished = [Finished(row, event, held.token) for row in held.rows]
    return database.turn(finished, [], wanted, lease_ms=1, keep_done_ms=HOUR_MS)


@pytest.fixture
def filled(address: str) -> str:
    connection = connect(address)
    for number in range(4):
        to = "topic:a" if number % 2 else "topic:b"
        Outbox.table("shop").send(connection, to, number, id=f"n-{number}")
    connection.commit()
    connection.close()
    return address


def test_two_relays_never_hold_rows_of_one_lane(filled: str, database: OutboxDatabase) -> None:
    other = open_outbox(filled, SystemClock())

    first = lease(database, "shop", lanes=1)
    second = lease(other, "shop")
    third = lease(database, "shop")

    assert [held.lane for held in first.leases] == ["shop/topic:b/1"]
    assert [held.lane for held in second.leases] == ["shop/topic:a/1"]
    assert third.leases == []
    assert [row.client_message_id for row in first.leases[0].rows] == ["n-0", "n-2"]
    assert [row.attempts for row in first.leases[0].rows] == [1, 1]
    other.close()


def test_a_relay_whose_lease_ran_out_writes_nothing(filled: str, database: OutboxDatabase) -> None:
    """It was frozen; its answers come when another relay has the rows, or has delivered them."""
    frozen = lease(database, "shop", lease_ms=0, lanes=1).leases[0]
    other = open_outbox(filled, SystemClock())
    taken = lease(other, "shop", lanes=1).leases[0]
    assert [row.id for row in taken.rows] == [row.id for row in frozen.rows]

    late = finish(database, "shop", frozen, Stored("m-frozen"))
    done = finish(other, "shop", taken, Stored("m-other"))
    later = finish(database, "shop", frozen, Stored("m-frozen"))

    assert (late.lost, done.lost, later.lost) == (2, 0, 2)
    ids = "select distinct broker_message_id from fencepost_outbox where status = 'done'"
    assert select(filled, ids) == [("m-other",)]
    other.close()


def test_rows_that_were_not_sent_are_given_back_as_they_were(
    filled: str, database: OutboxDatabase
) -> None:
    held = lease(database, "shop", lanes=1).leases[0]
    finish(database, "shop", held, None)

    state = "select distinct status, attempts, lease_token, lease_until_ms from fencepost_outbox"
    assert select(filled, state) == [("pending", 0, None, None)]


def test_done_rows_are_pruned_and_the_others_kept(filled: str, database: OutboxDatabase) -> None:
    held = lease(database, "shop", lanes=1).leases[0]
    finish(database, "shop", held, Stored("m"))
    database.drop("2", by="ann")
    execute(filled, "update fencepost_outbox set status = 'dead' where id = 4")
    assert lease(database, "shop", lanes=0).pruned == 0
    execute(filled, f"update fencepost_outbox set delivered_ms = delivered_ms - {2 * HOUR_MS}")

    pruned = lease(database, "shop", lanes=0).pruned

    assert pruned == 2
    rows = select(filled, "select id, status from fencepost_outbox order by id")
    assert rows == [(2, "aborted"), (4, "dead")]


def test_rows_of_other_meshes_are_left_alone(filled: str, database: OutboxDatabase) -> None:
    connection = connect(filled)
    for mesh in ("shop-2", "sho", "shop.x"):
        Outbox.table(mesh).send(connection, "topic:a", 1, id="one")
    connection.commit()
    connection.close()

    leases = lease(database, "shop").leases

    assert {held.rows[0].mesh for held in leases} == {"shop"}


@pytest.mark.parametrize("wrong", ["none", "newer", "other"])
def test_a_database_without_this_outbox_is_refused(
    address: str, database: OutboxDatabase, wrong: str
) -> None:
    if wrong == "newer":
        execute(address, "update fencepost_outbox_state set version = 2")
    else:
        execute(address, "drop table fencepost_outbox")
    if wrong == "none":
        execute(address, "drop table fencepost_outbox_state")

    with pytest.raises(OutboxDatabaseError, match="version 2" if wrong == "newer" else "schema"):
        database.check()


@pytest.mark.parametrize("wrong", ["mysql://host/name", "missing.db"])
def test_an_address_that_is_no_database_is_refused(wrong: str) -> None:
    with pytest.raises(OutboxDatabaseError, match="no database"):
        open_outbox(wrong, SystemClock()).check()


def test_dead_lanes_with_many_rows_do_not_make_turns_slow(
    address: str, database: OutboxDatabase
) -> None:
    """The oldest row of each lane is found along the index, and not by reading the lanes."""
    connection = connect(address)
    for number in range(3):
        Outbox.table("shop").send(connection, f"topic:t{number}", 1, id=f"n-{number}")
    copied = (
        "insert into fencepost_outbox (mesh, client_message_id, request_fingerprint, destination,"
        " lane, payload, priority, enqueued_ms, next_attempt_ms)"
        " with recursive n (i) as (select 1 union all select i + 1 from n where i < 5000)"
        " select mesh, client_message_id || '-' || i, request_fingerprint, destination, lane,"
        " payload, priority, enqueued_ms, next_attempt_ms from fencepost_outbox, n"
    )
    connection.execute(copied)
    connection.commit()
    connection.execute("analyze")
    connection.commit()
    connection.close()

    plan = plan_of(address)

    assert "fencepost_outbox_pending" in plan
    assert "Seq Scan" not in plan.replace("Seq Scan on lanes", "")
    assert "SCAN fencepost_outbox" not in plan
    assert len(lease(database, "shop").leases) == 3


def plan_of(address: str) -> str:
    """How the database finds the heads of the lanes of a mesh."""
    explain = "explain" if address.startswith("postgresql") else "explain query plan"
    text = HEADS
    for value in ("'shop/'", "'shop0'", "'shop0'"):
        text = text.replace("?", value, 1)
    return "\n".join(str(row) for row in select(address, f"{explain} {text}"))


def test_set_up_twice_fails_loudly(address: str) -> None:
    with pytest.raises(Exception, match="already exists"):
        set_up(address)


def test_a_send_of_a_leased_row_again_is_known(filled: str, database: OutboxDatabase) -> None:
    lease(database, "shop")
    connection = connect(filled)
    again = Outbox.table("shop").send(connection, "topic:b", 0, id="n-0")
    connection.close()

    assert again.duplicate
