"""Bodies that are staged before their send: over HTTP, in a batch, in a session, through clients.

The server of each store is a real process, and is killed between the upload and the send, and at
the named points of a send.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

import fencepost
from tests.engines import empty_store, engine, server_at
from tests.faults.dying import DOOMED
from tests.faults.test_messages import dying_at, send_until_answered, shop_at
from tests.integration.auth_support import ROOT, place, principal
from tests.integration.mesh_support import Shop, code
from tests.serving import ServerProcess

__all__ = ["empty_store", "engine"]

BYTES = {"Content-Type": "application/octet-stream"}
LARGE = bytes(range(256)) * (5 << 12)
"""Five mebibytes."""
PARTS = [{"txn": "t", "part": "p"}]


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=60) as client:
        yield client


@pytest.fixture
def shop(http: httpx.Client) -> Shop:
    return Shop(http)


def stage(shop: Shop, txn: str, data: bytes, chunk: int = 0, **headers: str) -> httpx.Response:
    target = f"/v1/staging/{txn}/p"
    return shop.http.post(target, content=data, params={"chunk": chunk}, headers=BYTES | headers)


def parts_send(message_id: str, txn: str, **fields: Any) -> dict[str, Any]:
    given = {"kind": "topic", "ref": "alerts", "sender": "bob", "client_message_id": message_id}
    return given | {"parts": [{"txn": txn, "part": "p"}]} | fields


def post(shop: Shop, message_id: str, txn: str, **fields: Any) -> httpx.Response:
    return shop.http.post(f"{shop.root}/send", json=parts_send(message_id, txn, **fields))


def body_of(shop: Shop, entry: dict[str, Any]) -> bytes:
    place = entry["body_at"]
    found = b""
    offset = place["offset"]
    while len(found) < place["bytes"]:
        answer = shop.http.get(f"/v1/stream/{place['stream']}", params={"offset": offset})
        assert answer.status_code == 200, answer.text
        found, offset = found + answer.content, answer.headers["stream-next-offset"]
    return found[: place["bytes"]]


def test_a_body_above_inline_bytes_is_sent_in_parts(shop: Shop) -> None:
    txn = f"{shop.name}-large"
    for chunk in range(2):
        half = LARGE[: len(LARGE) // 2] if chunk == 0 else LARGE[len(LARGE) // 2 :]
        assert stage(shop, txn, half, chunk).status_code == 201

    first = post(shop, "m-1", txn)
    again = post(shop, "m-1", txn)

    assert first.status_code == 201, first.text
    assert (again.status_code, again.json()["duplicate"]) == (200, True)
    [entry] = shop.held("inbox/ann")
    assert body_of(shop, entry) == LARGE
    assert shop.checked() == []
    assert [row["topic"] for row in shop.get("/topics")["topics"]] == ["alerts"]


def test_the_negotiation_names_the_largest_body(shop: Shop) -> None:
    params = shop.get("/features")["supported"]["max_payload"]["params"]

    assert params["inline_bytes"] == 1 << 20
    assert params["blob_bytes"] == 64 << 20
    wish = {"max_payload": {"version": 1, "blob_bytes": 8 << 20}}
    asked = shop.http.post(f"{shop.root}/negotiate", json={"require": wish})
    assert asked.status_code == 200, asked.text


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("none", (409, "part_missing")),
        ("gap", (409, "part_incomplete")),
        ("text", (409, "part_type_mismatch")),
        ("used", (409, "part_committed")),
    ],
)
def test_parts_that_do_not_make_a_body_are_refused_and_the_id_stays_free(
    shop: Shop, what: str, expected: tuple[int, str]
) -> None:
    txn = f"{shop.name}-{what}"
    if what == "gap":
        stage(shop, txn, b"x", 1)
    elif what == "text":
        shop.http.post(f"/v1/staging/{txn}/p", content=b"x", headers={"Content-Type": "text/plain"})
    elif what == "used":
        stage(shop, txn, b"x")
        assert post(shop, "before", txn).status_code == 201

    assert code(post(shop, "m-1", txn)) == expected

    ids = [row["client_message_id"] for row in shop.get("/dedupe")["rows"]]
    assert "m-1" not in ids
    assert shop.send("m-1").status_code == 201


def test_a_part_named_twice_is_refused(shop: Shop) -> None:
    txn = f"{shop.name}-twice"
    stage(shop, txn, b"x")
    part = {"txn": txn, "part": "p"}

    assert code(post(shop, "m-1", txn, parts=[part, part])) == (400, "part_repeated")
    assert code(post(shop, "m-1", txn, parts=[{"txn": "\0", "part": "p"}])) == (400, "body_invalid")
    assert shop.held("topic/alerts") == []


def test_the_streams_of_bodies_are_written_by_sends_alone(shop: Shop) -> None:
    txn = f"{shop.name}-own"
    stage(shop, txn, b"x")
    post(shop, "m-1", txn)

    path = shop.stream("body/topic/alerts")

    assert code(shop.http.post(path, content=b"y", headers=BYTES)) == (403, "mesh_managed")
    assert code(shop.http.delete(path)) == (403, "mesh_managed")
    assert shop.http.delete(f"{shop.root}/topics/alerts").status_code == 204
    assert shop.http.get(path).status_code == 404


def test_a_batch_and_a_session_take_staged_bodies(shop: Shop) -> None:
    for n in range(3):
        stage(shop, f"{shop.name}-{n}", b"body %d" % n)
    sends = [parts_send(f"m-{n}", f"{shop.name}-{n}") for n in range(2)]
    sends.append(parts_send("m-none", "none"))

    batch = shop.http.post(f"{shop.root}/sends", json={"sends": sends}).json()["sends"]
    url = str(shop.http.base_url).replace("http", "ws")
    with connect(f"{url}{shop.root}/session".replace("//v1", "/v1")) as socket:
        socket.send(json.dumps({"hello": {}}))
        assert "welcome" in json.loads(socket.recv())
        socket.send(json.dumps({"id": 1, "send": parts_send("m-2", f"{shop.name}-2")}))
        answer = json.loads(socket.recv())

    assert [one["status"] for one in batch] == [201, 201, 409]
    assert batch[2]["body"]["code"] == "part_missing"
    assert (answer["id"], answer["status"]) == (1, 201)
    bodies = {body_of(shop, entry) for entry in shop.held("inbox/bea")}
    assert bodies == {b"body 0", b"body 1", b"body 2"}


def test_the_client_stages_what_is_large_and_reads_it_back(shop: Shop) -> None:
    with fencepost.connect(str(shop.http.base_url)) as client:
        mesh = client.mesh(shop.name)
        text = "\N{SNOWMAN}" * (1 << 19)
        for number, body in enumerate((LARGE, text, "small", b"small", {"json": 1}, "x" * 5_000)):
            sent = mesh.send("topic:alerts", body, id=f"m-{number}", sender="bob")
            assert not sent.duplicate
        again = mesh.send("topic:alerts", LARGE, id="m-0", sender="bob")
        entries = client.stream(f"__mesh/{shop.name}/inbox/ann").read().messages()
        read = [mesh.body(entry) for entry in entries]

    assert again.duplicate
    assert read == [LARGE, text.encode(), "small", b"small", {"json": 1}, "x" * 5_000]


async def test_the_async_client_does_the_same(shop: Shop) -> None:
    async with fencepost.connect_async(str(shop.http.base_url)) as client:
        mesh = client.mesh(shop.name)
        await mesh.send("queue:jobs", LARGE, id="m-0", sender="bob")
        async for message in client.stream(f"__mesh/{shop.name}/queue/jobs").read():
            assert await mesh.body(message) == LARGE


@pytest.mark.parametrize(("point", "was_stored"), [("inside", False), ("after", True)])
def test_a_server_that_is_killed_at_a_staged_send_stores_it_once(
    empty_store: Path | str, point: str, was_stored: bool
) -> None:
    server = dying_at(empty_store, point).start()
    answers: list[fencepost.SendReceipt] = []
    with shop_at(server) as shop:
        assert stage(shop, "doomed", LARGE).status_code == 201

    def send() -> None:
        with fencepost.connect(server.url) as client:
            mesh = client.mesh("shop")
            answers.append(send_until_answered(mesh, DOOMED, "bob", parts="doomed"))

    sending = threading.Thread(target=send)
    sending.start()
    assert server.wait() == -signal.SIGKILL
    again = server_at(empty_store)
    again.port = server.port
    with again:
        sending.join(60)

        [receipt] = answers
        assert receipt.duplicate is was_stored
        with shop_at(again, made=True) as shop:
            [entry] = shop.held("inbox/ann")
            assert body_of(shop, entry) == LARGE
            assert shop.checked() == []
    where = "--data" if isinstance(empty_store, Path) else "--store"
    command = [sys.executable, "-m", "fencepost", "check", where, str(empty_store)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_sender_uses_its_own_parts_only(tmp_path: Path) -> None:
    grants = ("__mesh/shop/topic/alerts", ["append"]), ("uploads", ["append"])
    with place(tmp_path, ROOT, principal("ann", *grants), principal("eve", *grants)) as found:
        Shop(found("root").client, "shop")
        target = "/v1/staging/t/p"
        assert found("ann").client.post(target, content=b"x", headers=BYTES).status_code == 201
        send = {"kind": "topic", "ref": "alerts", "parts": PARTS}

        stolen = found("eve").client.post("/v1/mesh/shop/send", json=send)
        own = found("ann").client.post("/v1/mesh/shop/send", json=send)

        assert code(stolen) == (409, "part_missing")
        assert "t/p" in stolen.json()["detail"]
        assert own.status_code == 201, own.text
