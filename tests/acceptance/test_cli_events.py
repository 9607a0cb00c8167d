"""`fencepost events run` as an operator runs it: workers, several processes, a graceful stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost.cli.events import one_process
from fencepost.events import App
from tests.serving import ServerProcess
from tests.unit.events.shop import Order, Stock, make_app

ROOT = Path(__file__).parents[2]
MODULE = """
from tests.unit.events.shop import make_app

shop = make_app("shop")
other = 3
"""
WAIT_S = 90


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "goods.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_module_at_all\n")
    return tmp_path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as found:
        yield found


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fencepost", "events", "run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(folder: Path, *arguments: str) -> tuple[int, str]:
    process = start(folder, *arguments)
    _out, said = process.communicate(timeout=WAIT_S)
    return process.returncode, said


def reserve(url: str, orders: int) -> int:
    """Place orders, wait until a worker has reserved the last one, and say what is left."""
    app = App("shop", entities=[Order, Stock])
    with fencepost.connect(url) as client, app.open(client) as shop:
        for n in range(orders):
            shop.do(Order.place, f"o{n}", sku="tea", quantity=1)
        following = client.stream("stock/tea").follow(timeout=WAIT_S)
        for _reservation in range(orders):
            next(following)
        return shop.load(Stock, "tea").state.left


def stock_exists(url: str) -> None:
    with fencepost.connect(url) as client:
        client.create("stock/tea")


@pytest.mark.parametrize("processes", [1, 2])
def test_workers_run_reactions_and_stop_when_asked(
    folder: Path, server: ServerProcess, processes: int
) -> None:
    stock_exists(server.url)
    arguments = ("goods:shop", "--url", server.url, "--processes", str(processes))
    running = start(folder, *arguments, "--worker", "w")
    try:
        assert running.stderr is not None
        for _process in range(processes):
            assert "runs the reactions of shop" in running.stderr.readline()
        left = reserve(server.url, 5)
    finally:
        running.send_signal(signal.SIGTERM)
        _out, said = running.communicate(timeout=WAIT_S)

    assert left == 95
    assert running.returncode == 0
    assert said.count("has stopped") == processes
    with fencepost.connect(server.url) as client:
        assert client.group("shop").stats()["leased"] == 0


def close_books(folder: Path, url: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fencepost", "close-books", *arguments, "--url", url],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_whose_server_is_away_stops_when_asked(folder: Path, stop: signal.Signals) -> None:
    """It does not go on asking until the client gives up, which is an error."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with start(folder, "goods:shop", "--url", f"http://127.0.0.1:{port}") as worker:
        assert worker.stderr is not None
        said = ""
        while "trying again" not in said:
            said = worker.stderr.readline()
            assert said

        worker.send_signal(stop)

        _, rest = worker.communicate(timeout=WAIT_S)
    assert worker.returncode == 0
    assert rest.endswith("has stopped\n")


def test_an_operator_closes_books_and_is_told_who_lags(folder: Path, server: ServerProcess) -> None:
    with fencepost.connect(server.url) as client:
        shop = make_app("shop").open(client)
        shop.do(Order.place, "7", sku="tea", quantity=2)
        client.group("shop").make(targets="computed", sources=["**"])

        lagging = close_books(folder, server.url, "goods:shop", "Order", "7")
        shop.group.delete()
        shop.settle()
        done = close_books(folder, server.url, "goods:shop", "Order", "7")
        retired = close_books(folder, server.url, "goods:shop", "Order", "7", "--retire", "--json")
        nothing = close_books(folder, server.url, "goods:shop")
        old = close_books(
            folder, server.url, "goods:shop", "Stock", "tea", "--before", "2020-01-01"
        )

        assert lagging[:2] == (
            1,
            "orders/7\tpending\tversion 0\tthe group shop has work left on it\n",
        )
        assert done[:2] == (0, "orders/7\trestarted\tversion 0\n")
        assert retired[0] == 0, retired
        shown = json.loads(retired[1])
        assert (shown["stream"], shown["outcome"], shown["version"]) == ("orders/7", "retired", 2)
        assert nothing == (0, "", "")
        assert old[:2] == (0, "stock/tea\tunchanged\tversion -1\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("Order",), "or neither"),
        (("--retire",), "give an entity"),
        (("Order", "7", "--retire", "--reopen"), "one of --retire"),
        (("Nothing", "7"), "the app has no entity 'Nothing': it has Order, Stock"),
    ],
)
def test_books_that_cannot_be_closed_so_are_refused_in_one_sentence(
    folder: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _out, said = close_books(folder, "http://127.0.0.1:9", "goods:shop", *arguments)

    assert code == 2
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("goods", "not of the form MODULE:APP"),
        ("missing:app", "there is no module 'missing'"),
        ("goods:app", "its apps are shop"),
        ("goods:other", "has no App"),
    ],
)
def test_what_cannot_run_is_said_in_one_sentence(folder: Path, target: str, sentence: str) -> None:
    code, said = refused(folder, target)

    assert code == 2
    assert sentence in said
    assert "Traceback" not in said


def test_a_module_that_fails_by_itself_shows_where(folder: Path) -> None:
    code, said = refused(folder, "broken:app")

    assert code == 1
    assert "no_such_module_at_all" in said
    assert "Traceback" in said


def test_one_process_of_several_has_its_own_name() -> None:
    given = ["events", "run", "m:a", "--processes=3", "--worker", "w", "--lane", "x"]

    assert one_process(given, "w-2") == [
        *("events", "run", "m:a", "--lane", "x", "--processes", "1", "--worker", "w-2"),
    ]
