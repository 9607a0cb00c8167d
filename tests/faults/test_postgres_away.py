"""A database that stops, freezes or cannot be trusted, and a node that freezes in its turn.

Requests get 503 with Retry-After and no client waits for ever: the one of these tests gives up on
an answer after half a minute, which is far more than the waits that the servers are given here.
When the database is there again everything goes on by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from fencepost.store.postgres.migrate import STEPS
from fencepost.testing.postgres import PostgresServer, shared_server
from tests.acceptance.test_serve_command import metrics, refusal
from tests.faults.cluster import Cluster
from tests.faults.killing import SharedProducer, check_shared, create_shared
from tests.faults.test_postgres_kills import check_database
from tests.integration.raw import Connection, ask, code_of, events, request
from tests.serving import ServerProcess

ROOT = "/v1/stream/"
TEXT = "Content-Type: text/plain"
WAIT_SECONDS = 60.0
IMPATIENT = {
    "FENCEPOST_STORE_CONNECT_TIMEOUT_S": "2",
    "FENCEPOST_STORE_READ_TIMEOUT_MS": "1000",
    "FENCEPOST_STORE_TURN_WAIT_MS": "1000",
    "FENCEPOST_STORE_TURN_IDLE_MS": "1000",
}
TARGETS = (
    ROOT + "s",
    ROOT + "s?offset=-1&live=sse",
    "/v1/log",
    "/v1/log/plan",
    "/v1/streams",
    "/readyz",
)


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    """A PostgreSQL of this test's own, to be frozen and stopped."""
    with PostgresServer() as server:
        yield server


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition, and say which one when it does not come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited too long until {what}"


def is_ready(server: ServerProcess) -> bool:
    return ask(server.port, "GET", "/readyz").status == 200


def processes_of(database: PostgresServer) -> list[int]:
    """The server and everything that it has started, itself first."""
    pid = database.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


@contextmanager
def frozen(database: PostgresServer) -> Iterator[None]:
    """The database does nothing at all; its machine goes on taking what it is sent."""
    stopped = processes_of(database)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


# The database does not answer


def test_while_the_database_is_frozen_every_request_is_answered_503_and_none_hangs(
    database: PostgresServer,
) -> None:
    with ServerProcess(store=database.new_database(), environment=IMPATIENT) as server:
        assert ask(server.port, "PUT", ROOT + "s", TEXT, body=b"kept").status == 201
        for target in TARGETS:
            assert ask(server.port, "HEAD", target.partition("?")[0]).status == 200

        with frozen(database):
            lanes = [Connection(server.port) for _ in range(len(TARGETS) + 1)]
            for lane, target in zip(lanes[1:], TARGETS, strict=True):
                lane.send(request("GET", target))
            lanes[0].send(request("POST", ROOT + "s", TEXT, body=b" and not stored"))
            write, *rest = [lane.reply() for lane in lanes]
            refused = dict(zip(TARGETS, rest, strict=True))
            alive = ask(server.port, "GET", "/healthz")

        for lane in lanes:
            lane.close()
        until(lambda: is_ready(server), "the server is ready")
        for target, reply in refused.items():
            assert reply.status == 503, (target, reply)
            assert int(reply.headers["retry-after"]) >= 1, target
        assert (write.status, code_of(write)) == (503, "storage_unavailable")
        assert write.headers["retry-after"]
        assert alive.status == 200
        assert ask(server.port, "POST", ROOT + "s", TEXT, body=b"!").status == 204
        assert ask(server.port, "GET", ROOT + "s").body == b"kept!", "nothing was stored means it"


def test_a_decision_that_waits_for_a_locked_table_does_not_hold_up_the_server(
    database: PostgresServer,
) -> None:
    url = database.new_database()
    soon = {"FENCEPOST_STORE_LOOKUP_WAIT_MS": "300"}
    with (
        ServerProcess(store=url, environment=soon) as server,
        Connection(server.port) as writer,
        Connection(server.port) as probe,
        psycopg.connect(url) as holding,
    ):
        opened = request("POST", "/v1/writers/w", body=b'{"query": "q"}')
        holding.execute("LOCK TABLE writers IN ACCESS EXCLUSIVE MODE")
        writer.send(opened)
        until(lambda: waiting_for_table(url) == 1, "the decision waits for the table")
        probe.socket.settimeout(5)  # half of turn_wait_ms, for which it stood still before
        alive = probe.ask("GET", "/healthz")
        refused = writer.reply("POST")
        holding.rollback()
        writer.send(opened)
        stored = writer.reply("POST")

    assert alive.status == 200
    assert (refused.status, code_of(refused)) == (503, "storage_unavailable")
    assert stored.status == 200


def waiting_for_table(url: str) -> int:
    with psycopg.connect(url) as looking:
        [row] = looking.execute(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'writers'::regclass"
        ).fetchall()
    return int(row[0])


async def test_a_freeze_under_load_loses_nothing_and_doubles_nothing(
    database: PostgresServer,
) -> None:
    """Answers are held up in the middle of turns: some are unknown, all are true."""
    url = database.new_database()
    servers = [ServerProcess(store=url, environment=IMPATIENT) for _ in range(2)]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        cluster = Cluster(servers, seed=0)
        await create_shared(cluster)
        seats = [cluster.seat(number) for number in range(6)]
        producers = [SharedProducer(number, seat) for number, seat in enumerate(seats)]
        async with asyncio.TaskGroup() as clients:
            for producer in producers:
                clients.create_task(producer.run())
            for _ in range(3):
                await cluster.more_answers(100)
                with frozen(database):
                    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as moves:
                        for seat in seats:
                            moves.create_task(seat.next_move())
            await cluster.more_answers(100)
            cluster.done.set()
        for server in servers:
            await check_shared(server.port, producers, [])
    finally:
        for server in servers:
            await asyncio.to_thread(server.stop)
    checked = await asyncio.to_thread(check_database, url)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("how", ["in order", "by a crash"])
def test_readers_who_wait_are_woken_after_a_restart_of_the_database(
    database: PostgresServer, how: str
) -> None:
    """Nothing is restarted: the servers find back by themselves."""
    url = database.new_database()
    arguments = ["--long-poll-ms", "60000"]
    with (
        ServerProcess(store=url, arguments=arguments) as writer,
        ServerProcess(store=url, arguments=arguments) as reader,
        Connection(reader.port) as poll,
        Connection(reader.port) as log,
    ):
        ask(writer.port, "PUT", ROOT + "s", TEXT)
        poll.send(request("GET", ROOT + "s?offset=-1&live=long-poll"))
        log.send(request("GET", "/v1/log?after=-1&live=sse"))
        log.head()
        rows = events(log.chunks())
        assert next(rows).kind == "control"
        until(lambda: metrics(reader.port)["fencepost_waiters"] == 1, "the long-poll waits")

        if how == "in order":
            database.stop()
        else:
            database.kill()
        database.start()
        until(lambda: is_ready(writer), "the server is ready")
        assert ask(writer.port, "POST", ROOT + "s", TEXT, body=b"woken").status == 204

        # Both go on waiting, unless they were reading when the database went: then they are told to
        # come back.
        reply = poll.reply()
        if reply.status == 503:
            reply = ask(reader.port, "GET", ROOT + "s?offset=-1&live=long-poll")
        assert reply.body == b"woken"
        woken = next((row.data for row in rows if row.kind == "data"), None)
        if woken is None:
            woken = ask(reader.port, "GET", "/v1/log?after=-1&live=long-poll").body.decode()
        assert json.loads(woken)["stream"] == "s"


# A node that freezes in its turn


def test_a_node_that_freezes_in_its_turn_is_freed_by_the_database(database: PostgresServer) -> None:
    url = database.new_database()
    with (
        ServerProcess(store=f"{url}{FROZEN}", environment=IMPATIENT | LASTING) as frozen_node,
        ServerProcess(store=url, environment=IMPATIENT | LASTING) as other,
        Connection(frozen_node.port) as late,
        psycopg.connect(url) as holding,
    ):
        assert ask(other.port, "PUT", ROOT + "s", TEXT).status == 201
        # Its turn is made to wait for ours, so that it comes when the node is frozen already.
        holding.execute("SELECT * FROM counters FOR UPDATE")
        late.send(request("POST", ROOT + "s", TEXT, body=b"late"))
        until(lambda: frozen_waits(database, url), "the node waits for its turn")
        os.kill(frozen_node.pid, signal.SIGSTOP)
        try:
            holding.commit()
            until(lambda: frozen_has_turn(database, url), "the frozen node has its turn")

            after = ask(other.port, "POST", ROOT + "s", TEXT, body=b"first;")
        finally:
            os.kill(frozen_node.pid, signal.SIGCONT)
        answered = late.reply("POST")

        assert after.status == 204, after
        # Its turn was undone, and it knows: it took another one.
        assert answered.status == 204, answered
        assert ask(other.port, "GET", ROOT + "s").body == b"first;late"


LASTING = {
    "FENCEPOST_STORE_TURN_WAIT_MS": "20000",
    "FENCEPOST_STORE_READ_TIMEOUT_MS": "20000",
}
"""Who waits for its turn may wait: the frozen one does not keep it for that long."""

FROZEN = "?application_name=frozen"
"""Tells the sessions of the node that freezes from those of the other, which has turns as well."""


def frozen_waits(database: PostgresServer, url: str) -> bool:
    return frozen_has_session(database, url, "wait_event_type = 'Lock'")


def frozen_has_turn(database: PostgresServer, url: str) -> bool:
    return frozen_has_session(database, url, "state = 'idle in transaction'")


def frozen_has_session(database: PostgresServer, url: str, condition: str) -> bool:
    with psycopg.connect(database.dsn) as connection:
        query = (
            "SELECT FROM pg_stat_activity"
            f" WHERE application_name = 'frozen' AND datname = %s AND {condition}"
        ).encode()
        return connection.execute(query, (url.rpartition("/")[2],)).fetchone() is not None


# A database that is not to be trusted, or not to be understood


@pytest.mark.parametrize("setting", ["fsync", "synchronous_commit"])
def test_a_database_that_loses_commits_is_refused_at_the_start(setting: str) -> None:
    with PostgresServer(settings={setting: "off"}) as database:
        said = refusal("--port", "0", "--store", database.new_database(migrated=False))

    assert "cannot be used" in said
    assert setting in said


def test_a_role_that_turns_synchronous_commit_off_is_refused_as_well() -> None:
    postgres = shared_server()
    url = postgres.new_database()
    with psycopg.connect(url, autocommit=True) as connection:
        name = url.rpartition("/")[2]
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())

    said = refusal("--port", "0", "--store", url)

    postgres.drop_database(url)
    assert "synchronous_commit is off" in said


def test_a_database_of_a_newer_schema_is_refused(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO migrations VALUES (9999, 'of tomorrow', now())")

    said = refusal("--port", "0", "--store", postgres_dsn)

    assert "schema version 9999" in said
    assert "run the newer version" in said


async def test_servers_that_start_at_once_on_an_empty_database_agree(
    empty_postgres_dsn: str,
) -> None:
    servers = [ServerProcess(store=empty_postgres_dsn) for _ in range(3)]
    await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
    try:
        for number, server in enumerate(servers):
            assert ask(server.port, "PUT", f"{ROOT}{number}", TEXT, body=b"x").status == 201
        for server in servers:
            assert [ask(server.port, "GET", f"{ROOT}{n}").body for n in range(3)] == [b"x"] * 3
    finally:
        for server in servers:
            await asyncio.to_thread(server.stop)
    with psycopg.connect(empty_postgres_dsn) as connection:
        taken = connection.execute("SELECT number FROM migrations ORDER BY number").fetchall()
    assert [number for (number,) in taken] == [number for number, _, _ in STEPS]
    checked = await asyncio.to_thread(check_database, empty_postgres_dsn)
    assert checked.returncode == 0, checked.stdout
