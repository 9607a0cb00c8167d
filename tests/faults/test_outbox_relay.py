"""Relays, servers and databases that are killed and frozen: each send is in the inbox once.

The same with a fence taken out delivers twice, and a test shows it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import fencepost
from fencepost.outbox import Outbox
from fencepost.testing.postgres import PostgresServer
from tests.faults.proxy import Proxy, Trouble
from tests.integration.outbox_support import (
    POSTGRES,
    SQLITE,
    connect,
    database_of,
    select,
    set_up,
)
from tests.serving import ServerProcess

SECONDS_MAX = 120
SENDS = 12
MESH = "shop"


@pytest.fixture(params=[SQLITE, POSTGRES])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with database_of(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        make_mesh(server.url)
        yield server


def make_mesh(url: str) -> None:
    with fencepost.connect(url) as client:
        mesh = client.mesh(MESH)
        mesh.make()
        for name in ("ann", "ben"):
            mesh.make_member(name)
        for name in ("orders", "alerts"):
            mesh.make_topic(name, ["ann", "ben"])


@contextmanager
def worker(
    url: str, address: str, folder: Path, fate: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.faults.relay_worker"),
            *(url, address, MESH, str(folder), fate),
        ],
        cwd=Path(__file__).parents[2],
        env=os.environ | dict(environment or {}),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS_MAX
    while not condition():
        assert time.monotonic() < ends, "what the test waits for did not happen"
        time.sleep(0.02)


def send(address: str, numbers: range) -> None:
    connection = connect(address)
    for number in numbers:
        to = "topic:alerts" if number % 3 == 0 else "topic:orders"
        Outbox.table(MESH).send(connection, to, number, id=f"n-{number}")
    connection.commit()
    connection.close()


def statuses(address: str) -> dict[str, int]:
    rows = "select status, count(*) from fencepost_outbox group by status"
    return {row[0]: row[1] for row in select(address, rows)}


def inbox(url: str, member: str) -> list[Any]:
    with fencepost.connect(url) as client:
        found = client.stream(f"__mesh/{MESH}/inbox/{member}").read().messages()
        return [entry["json"] for entry in found]


def check_each_once(url: str, count: int) -> None:
    """Every number is in both inboxes once, and in the order of its destination."""
    for member in ("ann", "ben"):
        found = inbox(url, member)
        assert Counter(found) == Counter(range(count))
        assert [one for one in found if one % 3 == 0] == list(range(0, count, 3))
        assert [one for one in found if one % 3] == [one for one in range(count) if one % 3]
    with fencepost.connect(url) as client:
        assert client.mesh(MESH).check().findings == []


@pytest.mark.parametrize("fate", ["leased", "sent"])
def test_a_killed_relay_leaves_every_send_delivered_once(
    server: ServerProcess, address: str, tmp_path: Path, fate: str
) -> None:
    """Scenarios 2 and 4: with rows in hand, and between the server's answer and the outcome."""
    send(address, range(SENDS))
    with worker(server.url, address, tmp_path, fate) as killed:
        assert killed.wait(SECONDS_MAX) == -signal.SIGKILL
    assert statuses(address)["inflight"] > 0
    assert (inbox(server.url, "ann") != []) == (fate == "sent")

    with worker(server.url, address, tmp_path, "none"):
        until(lambda: statuses(address) == {"done": SENDS})

    check_each_once(server.url, SENDS)


def test_a_frozen_relay_loses_its_rows_and_changes_nothing(
    server: ServerProcess, address: str, tmp_path: Path
) -> None:
    send(address, range(SENDS))
    with worker(server.url, address, tmp_path, "hold") as zombie:
        until((tmp_path / "holding").exists)
        zombie.send_signal(signal.SIGSTOP)
        with worker(server.url, address, tmp_path, "none"):
            until(lambda: statuses(address) == {"done": SENDS})
            before = select(address, "select * from fencepost_outbox order by id")
            (tmp_path / "gate").touch()
            zombie.send_signal(signal.SIGCONT)
            until((tmp_path / "refused").exists)

        assert not (tmp_path / "stored").exists()
        assert select(address, "select * from fencepost_outbox order by id") == before
    check_each_once(server.url, SENDS)


def test_a_relay_starts_without_its_server_and_delivers_when_it_is_there(
    address: str, tmp_path: Path
) -> None:
    """Scenario 16."""
    server = ServerProcess(tmp_path / "data")
    with server:
        make_mesh(server.url)
    send(address, range(SENDS))
    with worker(server.url, address, tmp_path, "none") as relay, server:
        until(lambda: statuses(address) == {"done": SENDS})
        assert relay.poll() is None
        server.kill()
        send(address, range(SENDS, 2 * SENDS))
        until(lambda: statuses(address).get("pending", 0) > 0)
        server.restart()
        until(lambda: statuses(address) == {"done": 2 * SENDS})

        check_each_once(server.url, 2 * SENDS)


def test_without_the_servers_dedupe_a_killed_relay_delivers_twice(
    address: str, tmp_path: Path
) -> None:
    """The fence is out: the same kill as above. So the test above would see it."""
    environment = {"FENCEPOST_MESH_DEDUPE": "false"}
    trusting = {"FENCEPOST_TEST_TERMS": "1"}
    with ServerProcess(tmp_path / "data", environment=environment) as server:
        make_mesh(server.url)
        send(address, range(1))
        with worker(server.url, address, tmp_path, "sent", trusting) as killed:
            assert killed.wait(SECONDS_MAX) == -signal.SIGKILL
        with worker(server.url, address, tmp_path, "none", trusting):
            until(lambda: statuses(address) == {"done": 1})

        assert inbox(server.url, "ann") == [0, 0]


def test_a_relay_refuses_a_server_whose_dedupe_is_off(address: str, tmp_path: Path) -> None:
    """Scenarios 18 and 22: rows stay, and are delivered when it is on again."""
    send(address, range(SENDS))
    off = {"FENCEPOST_MESH_DEDUPE": "false"}
    with ServerProcess(tmp_path / "data", environment=off) as server:
        make_mesh(server.url)
        done = relay_once(server.url, address)
        assert done.returncode == 10, done.stderr
        assert "refuses the mesh 'shop'" in done.stderr
    assert statuses(address) == {"pending": SENDS}
    with ServerProcess(tmp_path / "data") as server:
        assert relay_once(server.url, address).returncode == 0
        check_each_once(server.url, SENDS)


def relay_once(url: str, address: str) -> subprocess.CompletedProcess[str]:
    command = ["outbox", "relay", "--database", address, "--mesh", MESH, "--url", url, "--once"]
    return subprocess.run(
        [sys.executable, "-m", "fencepost", *command, "--as", "shop"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("leases", [True, False], ids=["with leases", "without leases"])
def test_two_relays_need_leases(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leases: bool
) -> None:
    """Without the server's dedupe: a row that is leased is sent by one relay, else by both."""
    if not leases:
        monkeypatch.setenv("FENCEPOST_TEST_NO_LEASES", "1")
    environment = {"FENCEPOST_MESH_DEDUPE": "false"}
    trusting = {"FENCEPOST_TEST_TERMS": "1"}
    with ServerProcess(tmp_path / "data", environment=environment) as server, ExitStack() as stack:
        make_mesh(server.url)
        signs = [tmp_path / "first", tmp_path / "second"]
        for sign in signs:
            sign.mkdir()
            stack.enter_context(worker(server.url, address, sign, "meet", trusting))
        until(lambda: all((sign / "ready").exists() for sign in signs))
        send(address, range(1))
        if leases:
            until(lambda: any((sign / "sending").exists() for sign in signs))
        else:
            until(lambda: all((sign / "sending").exists() for sign in signs))
        for sign in signs:
            (sign / "gate").touch()
        until(lambda: statuses(address) == {"done": 1})

        if leases:
            assert inbox(server.url, "ann") == [0]
        else:
            until(lambda: len(inbox(server.url, "ann")) > 1)


# Everything at once


class Storm:
    """Writers of the user, relays that are killed and frozen, a server that is killed."""

    def __init__(self, seed: int, sends: int, kills: int) -> None:
        self.seed, self.sends, self.kills = seed, sends, kills
        self.dice = random.Random(seed)

    def run(self, address: str, server: ServerProcess, postgres: PostgresServer | None) -> None:
        replay = f"FENCEPOST_TEST_SEED={self.seed} pytest {__file__} -k storm -m 'soak or not soak'"
        try:
            asyncio.run(self._run(address, server, postgres))
            check_storm(server.url, self.sends)
        except BaseException as error:
            error.add_note(f"replay: {replay}")
            raise

    async def _run(
        self, address: str, server: ServerProcess, postgres: PostgresServer | None
    ) -> None:
        trouble = Trouble(cut_requests=0.1, cut_answers=0.2, within_bytes=20_000, refuse=0.05)
        async with Proxy("127.0.0.1", server.port, trouble, seed=self.seed) as proxy:
            await asyncio.to_thread(self._storm, address, server, postgres, proxy.url)

    def _storm(
        self, address: str, server: ServerProcess, postgres: PostgresServer | None, url: str
    ) -> None:
        writers = [
            threading.Thread(target=self._write, args=(address, number)) for number in range(4)
        ]
        relays = [self._relay(url, address) for _ in range(3)]
        try:
            for thread in writers:
                thread.start()
            for _ in range(self.kills):
                time.sleep(self.dice.uniform(0.05, 0.4))
                self._strike(relays, url, address, server, postgres)
            for thread in writers:
                thread.join()
            until(lambda: self._is_done(address))
        finally:
            for relay in relays:
                relay.kill()
                relay.wait()

    def _strike(
        self,
        relays: list[subprocess.Popen[bytes]],
        url: str,
        address: str,
        server: ServerProcess,
        postgres: PostgresServer | None,
    ) -> None:
        roll = self.dice.random()
        number = self.dice.randrange(len(relays))
        if roll < 0.6:
            relays[number].kill()
            relays[number].wait()
            relays[number] = self._relay(url, address)
        elif roll < 0.75:
            frozen = relays[number]
            frozen.send_signal(signal.SIGSTOP)
            time.sleep(self.dice.uniform(0.5, 2.5))
            frozen.send_signal(signal.SIGCONT)
        elif roll < 0.9 or postgres is None:
            server.kill()
            server.restart()
        else:
            postgres.kill()
            postgres.start()

    def _relay(self, url: str, address: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.faults.relay_worker"),
                *(url, address, MESH, "/nowhere", "none"),
            ],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.DEVNULL,
        )

    def _write(self, address: str, writer: int) -> None:
        """Transactions of a few sends; each is repeated until its commit was answered."""
        dice = random.Random(f"{self.seed}/{writer}")
        number = writer
        while number < self.sends:
            batch = list(range(number, min(self.sends, number + 4 * dice.randint(1, 5)), 4))
            self._commit(address, batch)
            number = batch[-1] + 4

    def _commit(self, address: str, batch: list[int]) -> None:
        outbox = Outbox.table(MESH)
        while True:
            try:
                connection = connect(address)
                try:
                    for number in batch:
                        outbox.send(connection, "topic:orders", number, id=f"n-{number}")
                    connection.commit()
                    return
                finally:
                    connection.close()
            except (psycopg.OperationalError, psycopg.InterfaceError):
                time.sleep(0.05)

    def _is_done(self, address: str) -> bool:
        try:
            return statuses(address) == {"done": self.sends}
        except psycopg.OperationalError:
            return False


def check_storm(url: str, sends: int) -> None:
    for member in ("ann", "ben"):
        found = inbox(url, member)
        assert Counter(found) == Counter(range(sends))
        for writer in range(4):
            mine = [number for number in found if number % 4 == writer]
            assert mine == sorted(mine), "a writer's sends overtook each other"
    with fencepost.connect(url) as client:
        assert client.mesh(MESH).check().findings == []


def seed_of(default: int) -> int:
    return int(os.environ.get("FENCEPOST_TEST_SEED", default))


def test_a_short_storm_delivers_each_send_once(
    server: ServerProcess, tmp_path: Path, address: str
) -> None:
    Storm(seed_of(1), sends=120, kills=6).run(address, server, None)


def test_a_short_storm_with_a_dying_postgresql_delivers_each_send_once(
    server: ServerProcess,
) -> None:
    with PostgresServer() as postgres:
        address = postgres.new_database(migrated=False)
        set_up(address)
        Storm(seed_of(3), sends=120, kills=8).run(address, server, postgres)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [SQLITE, POSTGRES])
def test_a_long_storm_delivers_each_send_once(
    server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    seed = seed_of(random.randrange(1_000_000))
    storm = Storm(seed, sends=20_000, kills=100)
    if kind == SQLITE:
        with database_of(SQLITE, tmp_path) as address:
            storm.run(address, server, None)
        return
    with PostgresServer() as postgres:
        address = postgres.new_database(migrated=False)
        set_up(address)
        storm.run(address, server, postgres)
