"""Projections whose workers are killed and frozen: what they hold stays a fold of the log."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fencepost
from fencepost.events.projections.stores import ProjectionStore, store_at
from fencepost.testing.postgres import shared_server
from tests.faults.projection_worker import Placed, make_app
from tests.serving import ServerProcess

SECONDS_MAX = 120
ROWS = "select stream, quantity from listed order by stream, quantity"


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "shop.db")
        return
    postgres = shared_server()
    url = postgres.new_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


@contextmanager
def worker(
    server: ServerProcess, database: str, folder: Path, fate: str
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.faults.projection_worker"),
            *(server.url, database, str(folder), fate),
        ],
        cwd=Path(__file__).parents[2],
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


def place(client: fencepost.Client, database: str) -> list[tuple[str, int]]:
    """Some orders, and the rows that must come of them."""
    with make_app(database).open(client) as shop:
        for quantity in range(6):
            shop.commit(f"orders/{quantity % 2}", [Placed(quantity=quantity)])
    return fold(client)


def fold(client: fencepost.Client) -> list[tuple[str, int]]:
    placed = client.log(match="orders/*", names="Placed")
    return sorted((entry.stream, entry.data["data"]["quantity"]) for entry in placed)


def rows(store: ProjectionStore) -> list[tuple[str, int]]:
    return [(row[0], row[1]) for row in store.read(ROWS)]


@pytest.mark.parametrize("fate", ["handler", "applied"])
def test_a_killed_worker_leaves_every_event_applied_once(
    server: ServerProcess, database: str, tmp_path: Path, fate: str
) -> None:
    with fencepost.connect(server.url) as client:
        expected = place(client, database)
        with worker(server, database, tmp_path, fate) as killed:
            assert killed.wait(SECONDS_MAX) == -signal.SIGKILL

        with make_app(database).open(client, projections=database) as shop:
            shop.settle(timeout=SECONDS_MAX)

            assert rows(shop.projections.store) == expected


def test_a_frozen_worker_loses_inside_the_database(
    server: ServerProcess, database: str, tmp_path: Path
) -> None:
    store = store_at(database)
    with fencepost.connect(server.url) as client:
        expected = place(client, database)
        with worker(server, database, tmp_path, "hold") as zombie:
            until((tmp_path / "holding").exists)
            zombie.send_signal(signal.SIGSTOP)
            with worker(server, database, tmp_path, "none"):
                until(lambda: rows(store) == expected)
                (tmp_path / "gate").touch()
                zombie.send_signal(signal.SIGCONT)
                until((tmp_path / "refused").exists)

                assert rows(store) == expected
                assert not (tmp_path / "stored").exists()
    store.close()
