"""Processes that close books are killed at every step, and another one ends what they began."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost.events import OpenApp
from tests.engines import emptied, server_at
from tests.engines import engine as engine
from tests.faults.books_worker import PAYMENTS, Account, app, archive_into, close
from tests.serving import ServerProcess

TOTAL = sum(range(1, PAYMENTS + 1))
OUTCOMES = {"restart": "restarted", "retire": "retired", "window": "dropped"}


@pytest.fixture
def server(engine: str, tmp_path: Path) -> Iterator[ServerProcess]:
    with emptied(engine, tmp_path / "data") as store, server_at(store) as running:
        yield running


def test_a_close_that_was_killed_anywhere_goes_on(server: ServerProcess, tmp_path: Path) -> None:
    """At every point: what was paid is in the state or the archive, and the books end closed."""
    archives = tmp_path / "archives"
    archives.mkdir()
    command = [sys.executable, "-m", "tests.faults.books_worker", server.url, str(archives)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    victims = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(victims) == 13
    assert all(victim["killed"] for victim in victims)

    with fencepost.connect(server.url) as client, app.open(client) as bank:
        for victim in victims:
            check(bank, client, victim["name"], victim["way"], victim["point"], archives)


def check(
    bank: OpenApp, client: fencepost.Client, name: str, way: str, point: str, archives: Path
) -> None:
    path = f"accounts/{name}"
    ended_before = point == "after 1" or (way == "window" and point == "after 0")
    if not ended_before:
        assert bank.load(Account, name).state.balance == TOTAL

    outcome = close(bank, name, way, archive_into(archives)).outcome

    already = "unchanged" if way != "retire" else "retired"
    assert outcome == (already if ended_before else OUTCOMES[way]), (name, outcome)
    kept = list(client.stream(path).read())
    assert [event["name"] for event in kept] == (["$opened"] if way == "restart" else [])
    expected = list(range(1, PAYMENTS + 1))
    [archived] = archives.glob(f"accounts-{name}@*")
    assert json.loads(archived.read_text()) == expected
    if way == "retire":
        with pytest.raises(fencepost.BooksClosedError):
            bank.do(Account.pay, name, amount=1)
        return
    # The state is whole for a program that knows nothing of what happened.
    with app.open(client) as other:
        assert other.load(Account, name).state.balance == TOTAL
        assert other.do(Account.pay, name, amount=10).state.balance == TOTAL + 10
