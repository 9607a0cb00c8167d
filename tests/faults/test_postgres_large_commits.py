"""Nodes that die in the middle of a large commit on PostgreSQL: it happens or it does not, and the
others go on by themselves.

Where the commit stands when its node is killed is decided by locks that the test holds in the
database, or by how much another node has got done beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from fencepost.store.postgres.check import check
from fencepost.store.settings import PostgresSettings
from fencepost.testing.postgres import PostgresServer
from tests.postgres.large_support import Database
from tests.postgres.nodes import Node, nodes, until

JSON = "application/json"
COUNT = 600
STOP = "s/0300"
"""The stream in the middle, at which a commit is stopped."""
PATHS = [f"s/{number:04}" for number in range(COUNT)]
IMPATIENT = {"FENCEPOST_STORE_TURN_IDLE_MS": "2000"}


class Ask:
    """A request on a thread of its own, which may outlive the server that it is sent to."""

    def __init__(self, node: Node, method: str, path: str, **more: Any) -> None:
        self.status: int | None = None
        self.answer: Any = None
        self._ask = (method, node.url + path, more)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        method, url, more = self._ask
        try:
            reply = httpx.request(method, url, timeout=60, **more)
            self.status, self.answer = reply.status_code, reply.content
        except httpx.HTTPError:
            self.status = None

    def done(self) -> int | None:
        """The status; None when the server went away."""
        self._thread.join(90)
        assert not self._thread.is_alive(), "nothing was answered"
        return self.status

    def is_waiting(self) -> bool:
        return self._thread.is_alive()


def commit(node: Node, key: str = "k") -> Ask:
    appends = [
        {"stream": path, "content_type": JSON, "data": 1, "auto_create": True} for path in PATHS
    ]
    body = json.dumps({"appends": appends}).encode()
    return Ask(node, "POST", "/v1/commit", content=body, headers={"Idempotency-Key": key})


def append(node: Node, path: str, data: int = 2) -> Ask:
    headers = {"Content-Type": JSON, "Stream-Auto-Create": "true"}
    return Ask(node, "POST", f"/v1/stream/{path}", content=b"%d" % data, headers=headers)


def appended(node: Node, path: str, data: int = 2) -> None:
    assert append(node, path, data).done() == 204


def held_count(database: Database) -> int:
    [(count,)] = database.rows("SELECT count(*) FROM held")
    return int(count)


def committed(database: Database) -> int:
    """How many streams of the commit hold its message."""
    [(count,)] = database.rows(
        "SELECT count(*) FROM log JOIN streams ON id = stream WHERE path LIKE 's/%' AND data = '1'"
    )
    return int(count)


def read_log(node: Node) -> list[int]:
    """The positions that a reader sees, page by page."""
    found: list[int] = []
    after = -1
    while True:
        reply = httpx.get(f"{node.url}/v1/log", params={"after": after}, timeout=60)
        assert reply.status_code == 200, reply.text
        rows = [json.loads(line) for line in reply.content.splitlines()]
        positions = [row["position"] for row in rows if "position" in row]
        if not positions:
            return found
        found += positions
        after = positions[-1]


@pytest.fixture
def database(postgres_dsn: str) -> Database:
    return Database(postgres_dsn)


@pytest.fixture(params=["leader", "follower"])
def pair(request: pytest.FixtureRequest, postgres_dsn: str) -> Iterator[tuple[Node, Node]]:
    """The node that dies, which leads or does not, and another one."""
    yield from _pair(postgres_dsn, request.param)


@pytest.fixture(params=["leader", "follower"])
def impatient(request: pytest.FixtureRequest, postgres_dsn: str) -> Iterator[tuple[Node, Node]]:
    """The same, and the database does not wait long for either."""
    yield from _pair(postgres_dsn, request.param, IMPATIENT)


def _pair(
    dsn: str, dying: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[Node, Node]]:
    with nodes(dsn, 2, environment) as (leader, follower):
        appended(leader, STOP, 0)
        yield (leader, follower) if dying == "leader" else (follower, leader)


def whole_or_not(
    database: Database, dsn: str, left: Node, *, happened: bool, beside: int = 0
) -> None:
    """Nothing is half done or left over, and the commit can be sent again to another node.

    `beside` appends of others are in its streams.
    """
    assert committed(database) == (COUNT if happened else 0)
    again = commit(left)
    assert again.done() == 200
    assert json.loads(again.answer)["duplicate"] == happened
    assert committed(database) == COUNT
    until(lambda: held_count(database) == 0, "what the dead commit held is forgotten")
    assert database.large() is None
    positions = read_log(left)
    assert positions == sorted(set(positions))
    [(rows,)] = database.rows("SELECT count(*) FROM log")
    assert len(positions) == rows
    assert rows >= COUNT + 1 + beside
    assert check(PostgresSettings(url=dsn)).findings == []


# One phase after the other


def test_a_node_that_dies_before_its_large_commit_is_under_way_leaves_nothing(
    pair: tuple[Node, Node], database: Database, postgres_dsn: str
) -> None:
    dying, left = pair
    with database.locked("SELECT 1 FROM counters FOR UPDATE"):
        sent = commit(dying)
        until(lambda: held_count(database) == COUNT + 1, "it has named what it will hold")
        dying.kill()
    assert sent.done() is None

    appended(left, PATHS[0])
    whole_or_not(database, postgres_dsn, left, happened=False, beside=1)


def test_a_node_that_dies_while_it_writes_a_large_commit_leaves_nothing(
    pair: tuple[Node, Node], database: Database, postgres_dsn: str
) -> None:
    dying, left = pair
    with database.stopping(STOP):
        sent = commit(dying)
        until(database.waits_for_a_stream, "half of it is written")
        waiting = append(left, PATHS[0])
        appended(left, "other")
        before = read_log(left)
        dying.kill()
        appended(left, "other")
        assert waiting.is_waiting()
        assert read_log(left) == before
    assert sent.done() is None

    assert waiting.done() == 204
    whole_or_not(database, postgres_dsn, left, happened=False, beside=3)


def test_a_node_that_dies_in_front_of_the_commit_itself_leaves_nothing(
    pair: tuple[Node, Node], database: Database, postgres_dsn: str
) -> None:
    dying, left = pair
    with database.stopping(STOP) as stop:
        sent = commit(dying)
        until(database.waits_for_a_stream, "half of it is written")
        with database.locked("SELECT 1 FROM counters FOR UPDATE"):
            stop.rollback()
            until(database.waits_for_its_turn, "all of it is written")
            dying.kill()
    assert sent.done() is None

    # No client writes: readers of the log are not to wait until one does.
    until(lambda: database.large() is None, "the node that leads has noticed")
    whole_or_not(database, postgres_dsn, left, happened=False)


def test_a_node_that_dies_in_the_commit_itself_leaves_all_of_it_or_nothing(
    pair: tuple[Node, Node], database: Database, postgres_dsn: str
) -> None:
    dying, left = pair
    with database.stopping(STOP) as stop:
        sent = commit(dying)
        until(database.waits_for_a_stream, "half of it is written")
        with database.locked("SELECT 1 FROM large_commits FOR UPDATE"):
            stop.rollback()
            until(database.is_in_its_commit, "its COMMIT is under way")
            dying.kill()
    assert sent.done() is None

    until(lambda: database.large() is None, "it is over")
    happened = committed(database) > 0
    whole_or_not(database, postgres_dsn, left, happened=happened)


def test_a_large_commit_that_was_answered_survives_its_node(
    pair: tuple[Node, Node], database: Database, postgres_dsn: str
) -> None:
    dying, left = pair
    sent = commit(dying)
    assert sent.done() == 200
    dying.kill()

    whole_or_not(database, postgres_dsn, left, happened=True)


def test_a_node_that_freezes_while_it_writes_a_large_commit_is_not_waited_for(
    impatient: tuple[Node, Node], database: Database, postgres_dsn: str
) -> None:
    frozen, left = impatient
    with database.stopping(STOP):
        sent = commit(frozen)
        until(database.waits_for_a_stream, "half of it is written")
        waiting = append(left, PATHS[0])
        appended(left, "other")
        frozen.freeze()

    assert waiting.done() == 204
    assert committed(database) == 0
    frozen.thaw()
    assert sent.done() == 503
    whole_or_not(database, postgres_dsn, left, happened=False, beside=2)


def test_a_database_that_is_killed_under_a_large_commit_comes_back_without_it() -> None:
    """What was held is not in its log, and is gone: so is the session that held it."""
    with PostgresServer() as server:
        dsn = server.new_database()
        database = Database(dsn)
        with nodes(dsn, 2) as (one, other):
            appended(one, STOP, 0)
            with contextlib.suppress(psycopg.Error), database.stopping(STOP):
                sent = commit(one)
                until(database.waits_for_a_stream, "half of it is written")
                server.kill()
            assert sent.done() == 503
            server.start()
            until(lambda: append(other, "other").done() == 204, "a node writes again")
            assert database.large() is None
            whole_or_not(database, dsn, other, happened=False, beside=1)


# Whenever it happens


def test_wherever_a_node_dies_a_large_commit_is_there_whole_or_not_at_all(
    postgres_dsn: str, database: Database
) -> None:
    """How far another writer has come says when: a little later each time, up to its end."""
    seed = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
    rounds = max(6, int(os.environ.get("FENCEPOST_FAULT_KILLS", "0")) // 10)
    dice = random.Random(seed)
    with nodes(postgres_dsn, 2) as (left, dying):
        appended(left, STOP, 0)
        for number in range(rounds):
            before = committed(database)
            key = f"k{number}"
            sent = commit(dying, key)
            for _ in range(dice.randrange(0, 60)):
                appended(left, "other")
            dying.kill()
            answered = sent.done() == 200
            appended(left, PATHS[number])
            happened = committed(database) - before
            assert happened in (0, COUNT), f"FENCEPOST_FAULT_SEED={seed}"
            assert happened or not answered, "it was answered, and is lost"
            again = commit(left, key)
            assert again.done() == 200
            assert json.loads(again.answer)["duplicate"] == bool(happened)
            assert committed(database) == before + COUNT
            dying.restart()
        until(lambda: held_count(database) == 0, "what dead commits held is forgotten")
        positions = read_log(left)
        assert positions == sorted(set(positions))
    assert check(PostgresSettings(url=postgres_dsn)).findings == []
