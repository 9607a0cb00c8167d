"""The whole outbox under kills: clients, daemon, table, relay, server and network between them.

Some clients send through the daemon, others write into a table that a relay delivers. A hand kills
the daemon, the relay, the server and PostgreSQL at random, and cuts every connection. After that
each message is in every inbox once, none is dead, and the orphan check finds nothing.

FENCEPOST_FAULT_SEED=S runs seed S; FENCEPOST_FAULT_KILLS=N is the number of kills of the soak.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psycopg
import pytest

from fencepost.outbox import Outbox
from fencepost.testing.postgres import PostgresServer
from tests.engines import SQLITE, server_at
from tests.engines import engine as engine
from tests.gatekeeper import Gatekeeper
from tests.integration.mesh_support import Shop
from tests.integration.outbox_support import connect, select, set_up
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

SEED = int(os.environ.get("FENCEPOST_FAULT_SEED", "7"))
KILLS = int(os.environ.get("FENCEPOST_FAULT_KILLS", "100"))
DESTINATIONS = (("topic", "alerts"), ("dm", "ann"), ("queue", "jobs"))
VICTIMS = ("daemon", "relay", "server", "network")
STREAMS = ("inbox/ann", "inbox/bea", "topic/alerts", "queue/jobs")
SECONDS_MAX = 1_800
# httpcore leaves a unix socket that could not be connected to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket.* family=1:pytest.PytestUnraisableExceptionWarning"
)


class Stores(NamedTuple):
    """Where the server and the clients with a table keep everything."""

    server: Path | str
    table: str
    postgres: PostgresServer | None = None


@pytest.fixture
def stores(engine: str, tmp_path: Path) -> Iterator[Stores]:
    """Two files; or two databases of a PostgreSQL of its own, which is killed too."""
    if engine == SQLITE:
        table = str(tmp_path / "shop.db")
        set_up(table)
        yield Stores(tmp_path / "data", table)
        return
    with PostgresServer() as postgres:
        table = postgres.new_database(migrated=False)
        set_up(table)
        yield Stores(postgres.new_database(), table, postgres)


def test_every_send_arrives_once_through_a_few_kills(stores: Stores, tmp_path: Path) -> None:
    with Soak(stores, tmp_path, clients=4, sends=40) as soak:
        soak.run(kills=6)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_50_000_sends_arrive_once_through_many_kills(stores: Stores, tmp_path: Path) -> None:
    with Soak(stores, tmp_path, clients=8, sends=6_250) as soak:
        soak.run(kills=KILLS)


class RelayProcess(ServerProcess):
    """`fencepost outbox relay` on a database."""

    ready_line = re.compile(r"relaying \S+ to (http://[^:]+:(\d+))")

    def __init__(self, table: str, mesh: str, url: str) -> None:
        # A relay that was killed holds its rows for as long as their lease lasts.
        super().__init__(arguments=("--lease-seconds", "2"))
        self._options = ["--database", table, "--mesh", mesh, "--as", "till", "--url", url]

    def _command(self) -> list[str]:
        relay = [sys.executable, "-m", "fencepost", "outbox", "relay"]
        return [*relay, *self._options, *self.arguments]


class Soak:
    """Clients that send until each send is taken, and a hand that kills what it finds."""

    def __init__(self, stores: Stores, folder: Path, *, clients: int, sends: int) -> None:
        self.dice = random.Random(SEED)
        self.clients, self.sends = clients, sends
        self.table, self.postgres = stores.table, stores.postgres
        self.victims = VICTIMS if self.postgres is None else (*VICTIMS, "database")
        self.taken = 0
        self.errors: list[BaseException] = []
        self.killed: Counter[str] = Counter()
        self.ended = threading.Event()
        self._counting = threading.Lock()
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(server_at(stores.server))
        with httpx.Client(base_url=self.server.url, timeout=30) as client:
            self.mesh = Shop(client, "soak").name
        self.gate = self._stack.enter_context(Gatekeeper(self.server.port))
        url = self.gate.url
        self.relay = self._stack.enter_context(RelayProcess(self.table, self.mesh, url))
        outbox = OutboxProcess(folder / "outbox", url, [self.mesh], "ann")
        self.outbox = self._stack.enter_context(outbox)

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: Any) -> None:
        self.ended.set()
        if error is not None:
            error.add_note(f"replay: FENCEPOST_FAULT_SEED={SEED} ./test {Path(__file__).name}")
        self._stack.__exit__(kind, error, trace)

    def run(self, kills: int) -> None:
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._client, args=(number,)) for number in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        total = self.clients * self.sends
        for number in range(kills):
            # At a random moment of the piece of work that belongs to this kill.
            goal = int((number + self.dice.random()) * total / (kills + 1))
            self._await(goal)
            self._kill(self.dice.choice(self.victims))
        for thread in threads:
            thread.join()
        assert not self.errors, self.errors
        self._check()
        seconds = time.monotonic() - began
        figures = f"{total} sends, {dict(self.killed)}, {seconds:.0f} s, seed {SEED}"
        sys.stdout.write(f"{figures}\n")

    def _await(self, goal: int) -> None:
        until(lambda: self.taken >= goal or self.errors, SECONDS_MAX)

    # The hand

    def _kill(self, victim: str) -> None:
        self.killed[victim] += 1
        if victim == "network":
            self.gate.cut()
            return
        if victim == "database":
            assert self.postgres is not None
            self.postgres.kill()
            self.postgres.start()
            return
        named = {"daemon": self.outbox, "relay": self.relay, "server": self.server}
        process: ServerProcess = named[victim]
        process.kill()
        process.restart()

    # The clients

    def _client(self, client: int) -> None:
        """Even ones send through the daemon, odd ones in transactions of their own."""
        try:
            if client % 2:
                self._write(client)
                return
            for number in range(self.sends):
                until(partial(self._send, client, number), 300)
                self._took(1)
        except BaseException as error:
            self.errors.append(error)

    def _took(self, count: int) -> None:
        with self._counting:
            self.taken += count

    def _send(self, client: int, number: int) -> bool:
        assert not self.ended.is_set(), "the soak is over"
        kind, ref = DESTINATIONS[number % 3]
        with contextlib.suppress(httpx.TransportError):
            answer = self.outbox.send(f"{client}-{number}", kind=kind, ref=ref)
            assert answer.status_code in (200, 202, 429, 503), answer.text
            return answer.status_code in (200, 202)
        return False

    def _write(self, client: int) -> None:
        dice = random.Random(f"{SEED}/{client}")
        number = 0
        while number < self.sends:
            until_number = min(self.sends, number + dice.randint(1, 20))
            numbers, keeps = range(number, until_number), dice.random() < 0.9
            until(partial(self._commit, client, numbers, keeps=keeps), 300)
            self._took(until_number - number)
            number = until_number

    def _commit(self, client: int, numbers: range, *, keeps: bool) -> bool:
        """A transaction of a few sends, at times one that is rolled back before.

        False: the database went away, and the transaction is to be repeated.
        """
        assert not self.ended.is_set(), "the soak is over"
        outbox = Outbox.table(self.mesh)
        try:
            connection = connect(self.table)
        except psycopg.OperationalError:
            return False
        try:
            for commits in (True,) if keeps else (False, True):
                for number in numbers:
                    kind, ref = DESTINATIONS[number % 3]
                    body = "hello" if commits else "rolled back"
                    outbox.send(connection, f"{kind}:{ref}", body, id=f"{client}-{number}")
                if commits:
                    connection.commit()
                else:
                    connection.rollback()
        except (psycopg.OperationalError, psycopg.InterfaceError):
            return False
        finally:
            connection.close()
        return True

    # What must be true then

    def _wanted(self, *kinds: int) -> set[str]:
        return {
            f"{client}-{number}"
            for client in range(self.clients)
            for number in range(self.sends)
            if number % 3 in kinds
        }

    def _check(self) -> None:
        through_table = self.clients // 2 * self.sends
        through_daemon = self.clients * self.sends - through_table
        until(lambda: self.outbox.counts() == {"done": through_daemon}, SECONDS_MAX)
        until(lambda: statuses(self.table) == {"done": through_table}, SECONDS_MAX)
        wanted = {
            "inbox/ann": self._wanted(0, 1),
            "inbox/bea": self._wanted(0),
            "topic/alerts": self._wanted(0),
            "queue/jobs": self._wanted(2),
        }
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            for name in STREAMS:
                found = messages(client, self.mesh, name)
                assert {message["body"] for message in found} == {"hello"}
                check_once([message["client_message_id"] for message in found], wanted[name], name)
            shop = httpx.URL(f"/v1/mesh/{self.mesh}/check")
            after: str | None = None
            while True:
                query = {} if after is None else {"after": after}
                report = client.post(shop, params=query).json()
                assert report["findings"] == []
                after = report["next"]
                if after is None:
                    break
        until(lambda: len(inbox_ids(self.outbox)) >= len(wanted["inbox/ann"]), SECONDS_MAX)
        check_once(inbox_ids(self.outbox), wanted["inbox/ann"], "the inbox of the daemon")


def check_once(ids: list[str], wanted: set[str], name: str) -> None:
    """Each id once, and those of a client in the order in which it sent them."""
    repeated = [one for one, count in Counter(ids).items() if count > 1]
    assert not repeated, (name, repeated[:5])
    assert set(ids) == wanted, (name, list(set(ids) ^ wanted)[:5])
    newest: dict[tuple[int, int], int] = {}
    for client, number in (map(int, one.split("-")) for one in ids):
        lane = client, number % 3
        assert newest.get(lane, -1) < number, (name, client, number)
        newest[lane] = number


def statuses(address: str) -> dict[str, int]:
    try:
        query = "select status, count(*) from fencepost_outbox group by status"
        return {row[0]: row[1] for row in select(address, query)}
    except psycopg.OperationalError:
        return {}


def messages(client: httpx.Client, mesh: str, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        answer = client.get(f"/v1/stream/__mesh/{mesh}/{name}", params={"offset": offset})
        page = answer.json()
        found += page
        if not page or answer.headers.get("stream-up-to-date") == "true":
            return found
        offset = answer.headers["stream-next-offset"]


def inbox_ids(outbox: OutboxProcess) -> list[str]:
    found: list[str] = []
    after: str | None = "0"
    while after is not None:
        page = outbox.get("/v1/inbox", after=after, limit=1000)
        found += [message["message"]["client_message_id"] for message in page["messages"]]
        after = page["next"]
    return found
