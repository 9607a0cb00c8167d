"""The broker killed at named points of a send, on both stores: one message, one row, one answer.

The Python client sends and goes on by itself until it has its answer, as the daemon does. What is
left is held against what was sent: each message once in its topic and once in every inbox, and the
orphan check finds nothing. FENCEPOST_SEED replays what is left to chance.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import httpx
import psycopg
import pytest

import fencepost
from fencepost.client.group_worker import AWAY
from fencepost.store.sqlite.connection import FILE
from tests.engines import POSTGRES, emptied, server_at
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.faults.dying import DIES, DOOMED
from tests.integration.mesh_support import Shop
from tests.serving import ServerProcess

SECONDS_MAX = 60.0


class Dying(ServerProcess):
    """A server that kills itself at a point of the send with the id `doomed`."""

    def _command(self) -> list[str]:
        command = super()._command()
        return ["tests.faults.dying" if part == "fencepost" else part for part in command]


def dying_at(store: Path | str, point: str) -> Dying:
    environment = {DIES: point}
    if isinstance(store, Path):
        return Dying(store, environment=environment)
    return Dying(store=store, environment=environment)


def send_until_answered(
    mesh: fencepost.Mesh, message_id: str, sender: str, *, parts: str | None = None
) -> fencepost.SendReceipt:
    """Send as the daemon does: the same send again and again, until there is an answer.

    `parts` names what was staged as the body.
    """
    deadline = time.monotonic() + SECONDS_MAX
    fields = {"kind": "topic", "ref": "alerts", "client_message_id": message_id, "sender": sender}
    staged = fields | {"parts": [{"txn": parts, "part": "p"}]}
    while True:
        try:
            if parts is not None:
                return mesh.send_encoded(json.dumps(staged).encode())
            return mesh.send("topic:alerts", "hello", id=message_id, sender=sender)
        except AWAY:
            assert time.monotonic() < deadline, "the broker did not come back"


def ids_in(shop: Shop, path: str) -> Counter[str]:
    return Counter(message["client_message_id"] for message in shop.held(path))


def check_mesh(shop: Shop, sent: Counter[str]) -> None:
    """Each message once in the topic and in every inbox, and rows and messages agree."""
    for path in ("topic/alerts", "inbox/ann", "inbox/bea"):
        assert ids_in(shop, path) == sent
    assert shop.checked() == []


@contextmanager
def shop_at(server: ServerProcess, *, made: bool = False) -> Iterator[Shop]:
    with httpx.Client(base_url=server.url, timeout=SECONDS_MAX) as http:
        if made:
            shop = Shop.__new__(Shop)
            shop.http, shop.name, shop.root = http, "shop", "/v1/mesh/shop"
            yield shop
        else:
            yield Shop(http, "shop")


@pytest.mark.parametrize(
    ("point", "was_stored"), [("inside", False), ("after", True)], ids=["inside", "after"]
)
def test_a_send_whose_broker_is_killed_is_stored_once(
    empty_store: Path | str, point: str, was_stored: bool
) -> None:
    server = dying_at(empty_store, point).start()
    answers: list[fencepost.SendReceipt] = []

    def send() -> None:
        with fencepost.connect(server.url) as client:
            answers.append(send_until_answered(client.mesh("shop"), DOOMED, "bob"))

    with shop_at(server) as shop:
        assert shop.send("before").status_code == 201
    sending = threading.Thread(target=send)
    sending.start()
    assert server.wait() == -signal.SIGKILL
    again = server_at(empty_store)
    again.port = server.port
    with again:
        sending.join(SECONDS_MAX)

        [receipt] = answers
        assert receipt.duplicate is was_stored
        with shop_at(again, made=True) as shop:
            later = shop.send(DOOMED)
            assert (later.status_code, later.json()["duplicate"]) == (200, True)
            assert later.json()["broker_message_id"] == receipt.broker_message_id
            assert shop.send(DOOMED, body="other").status_code == 409
            check_mesh(shop, Counter(["before", DOOMED]))


def plant(store: Path | str) -> None:
    """Let the database refuse the dedupe row of the doomed send."""
    if isinstance(store, Path):
        connection = apsw.Connection(str(store / FILE))
        connection.execute(
            f"CREATE TRIGGER refused BEFORE INSERT ON sends WHEN new.client_id = '{DOOMED}'"
            " BEGIN SELECT RAISE(ABORT, 'planted'); END"
        )
        connection.close()
        return
    with psycopg.connect(store, autocommit=True) as database:
        database.execute(
            f"ALTER TABLE sends ADD CONSTRAINT refused CHECK (client_id <> '{DOOMED}')"
        )


def weed(store: Path | str) -> None:
    if isinstance(store, Path):
        connection = apsw.Connection(str(store / FILE))
        connection.execute("DROP TRIGGER refused")
        connection.close()
        return
    with psycopg.connect(store, autocommit=True) as database:
        database.execute("ALTER TABLE sends DROP CONSTRAINT refused")


def test_a_send_whose_row_the_database_refuses_leaves_nothing(empty_store: Path | str) -> None:
    with server_at(empty_store) as server, shop_at(server) as shop:
        assert shop.send("before").status_code == 201
    plant(empty_store)
    with server_at(empty_store) as server, shop_at(server, made=True) as shop:
        refused = shop.send(DOOMED)

        assert refused.status_code == 503, refused.text
        assert shop.send("after").status_code == 201, "others go on"
        check_mesh(shop, Counter(["before", "after"]))
        assert [row["client_message_id"] for row in shop.get("/dedupe")["rows"]] == [
            "after",
            "before",
        ]
    weed(empty_store)
    with server_at(empty_store) as server, shop_at(server, made=True) as shop:
        assert shop.send(DOOMED).status_code == 201
        check_mesh(shop, Counter(["before", "after", DOOMED]))


def test_of_fifty_sends_with_one_id_through_two_nodes_one_is_stored(tmp_path: Path) -> None:
    with (
        emptied(POSTGRES, tmp_path) as store,
        server_at(store) as one,
        server_at(store) as two,
        shop_at(one) as shop,
        shop_at(two, made=True) as other,
    ):
        shops = [shop, other]
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(shops[n % 2].send, "race") for n in range(50)]
            replies = [future.result() for future in asked]

        assert Counter(reply.status_code for reply in replies) == {201: 1, 200: 49}
        assert len({reply.json()["broker_message_id"] for reply in replies}) == 1
        check_mesh(shop, Counter(["race"]))


def test_a_storm_of_sends_and_kills_leaves_each_message_once(empty_store: Path | str) -> None:
    """Senders never give up, the broker is killed again and again under them."""
    each, senders = 40, 4

    def work(url: str, name: str) -> None:
        with fencepost.connect(url) as client:
            for n in range(each):
                receipt = send_until_answered(client.mesh("shop"), f"{name}-{n}", name)
                assert receipt.client_message_id == f"{name}-{n}"

    with server_at(empty_store) as server, ThreadPoolExecutor(senders) as pool:
        with shop_at(server):
            pass
        working = [pool.submit(work, server.url, f"s{n}") for n in range(senders)]
        for kill in range(3):
            _wait_for_messages(server, (kill + 1) * each)
            server.kill()
            server.start()
        for sender in working:
            sender.result()

        with shop_at(server, made=True) as shop:
            check_mesh(shop, Counter(f"s{n}-{m}" for n in range(senders) for m in range(each)))


def _wait_for_messages(server: ServerProcess, count: int) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    stored: Any = -1
    while stored < count:
        assert time.monotonic() < deadline, f"only {stored} messages were stored in time"
        answer = httpx.head(f"{server.url}/v1/stream/__mesh/shop/topic/alerts")
        stored = int(answer.headers["stream-version"]) + 1
