"""Kills while a subscription over many streams comes or goes: it is there whole, or not at all."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import apsw
import httpx
import psycopg

from fencepost.store.sqlite.connection import FILE
from tests.attacks.attacking import make_streams
from tests.engines import emptied, server_at
from tests.engines import engine as engine
from tests.integration.subscriptions_support import Client

STREAMS = 4_000
CONFIG = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}
PATH = "__ds/subscriptions/all"
LINKS = "SELECT count(*) FROM links"
OWNED = "SELECT count(*) FROM links WHERE subscription IN (SELECT id FROM subscriptions)"
PARTIAL = "SELECT count(*) FROM partial_subscriptions"
WAIT_S_MAX = 60.0


def count(store: Path | str, query: str) -> int:
    """A number that is on disk."""
    if isinstance(store, Path):
        connection = apsw.Connection(str(store / FILE), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            [(number,)] = connection.execute(query)
            return int(str(number))
        finally:
            connection.close()
    with psycopg.connect(store) as database:
        row = database.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])


def reached(store: Path | str, links: int) -> Callable[[], bool]:
    """Whether so many links are on disk."""
    return lambda: count(store, LINKS) >= links


def until(happens: Callable[[], bool]) -> None:
    """Wait for something, looking again and again."""
    ends = time.monotonic() + WAIT_S_MAX
    while not happens():
        assert time.monotonic() < ends, "it did not happen"
        threading.Event().wait(0.001)


def check(store: Path | str) -> None:
    """`fencepost check` finds nothing wrong."""
    where = ["--data", str(store)] if isinstance(store, Path) else ["--store", store]
    command = [sys.executable, "-m", "fencepost", "check", *where]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_kill_leaves_a_subscription_whole_or_nothing_of_it(engine: str, tmp_path: Path) -> None:
    with emptied(engine, tmp_path) as store, server_at(store) as server:
        make_streams(server.port, "ann", [f"events/{number}" for number in range(STREAMS)])

        def asking(method: str, body: object = None) -> threading.Thread:
            """Ask without waiting for the answer, which a kill may cut off."""

            def ask() -> None:
                with Client(server.url) as client, contextlib.suppress(httpx.HTTPError):
                    client.http.request(method, PATH, json=body)

            thread = threading.Thread(target=ask)
            thread.start()
            return thread

        for links in (1, STREAMS // 2, STREAMS):
            thread = asking("PUT", CONFIG)
            until(reached(store, links))
            server.kill()
            thread.join()
            check(store)
            server.restart()
            with Client(server.url) as client:
                status = client.http.get(PATH).status_code
                assert (status, count(store, OWNED)) in ((200, STREAMS), (404, 0))
                client.http.delete(PATH)
            until(lambda: count(store, LINKS) == count(store, PARTIAL) == 0)

        with Client(server.url) as client:
            assert client.subscribe("all", **CONFIG).status_code == 201
            assert client.subscribe("all", **CONFIG).status_code == 200
        assert count(store, OWNED) == STREAMS
        asking("DELETE").join()
        server.kill()
        check(store)
        server.restart()
        with Client(server.url) as client:
            assert client.http.get(PATH).status_code == 404
        until(lambda: count(store, LINKS) == count(store, PARTIAL) == 0)
