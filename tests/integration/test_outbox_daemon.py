"""The daemon beside a real server: what it accepts, delivers, keeps and refuses."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.mesh_support import Shop, code
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

_numbers = itertools.count()


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def shop(http: httpx.Client) -> Shop:
    return Shop(http, "outbox-shop")


@pytest.fixture(scope="module")
def other(http: httpx.Client) -> Shop:
    return Shop(http, "outbox-other")


@pytest.fixture(scope="module")
def outbox(
    server_process: ServerProcess,
    shop: Shop,
    other: Shop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OutboxProcess]:
    """One daemon for the tests of this module: two meshes, the inbox of ann, and a port."""
    folder = tmp_path_factory.mktemp("outbox")
    meshes = (shop.name, other.name)
    arguments = ("--port", str(_free_port()))
    with OutboxProcess(folder, server_process.url, meshes, "ann", arguments=arguments) as process:
        until(lambda: process.get("/v1/health")["status"] == "ok")
        yield process


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def new_id() -> str:
    return f"id-{next(_numbers)}"


def test_a_send_is_on_disk_when_it_is_answered_and_then_delivered_once(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    accepted = outbox.send(new_id, mesh=shop.name)

    assert accepted.status_code == 202
    assert accepted.json()["status"] == "queued"
    row = outbox.settled(new_id)
    assert (row["status"], row["attempts"]) == ("done", 1)
    again = outbox.send(new_id, mesh=shop.name)
    assert (again.status_code, again.json()["broker_message_id"]) == (
        200,
        row["broker_message_id"],
    )
    until(lambda: new_id in [entry["client_message_id"] for entry in outbox.inbox()])
    assert [m["client_message_id"] for m in shop.held("inbox/bea")].count(new_id) == 1
    assert shop.held("inbox/bea")[-1]["sender"] == "ann"


def test_two_meshes_may_have_the_same_id(
    outbox: OutboxProcess, shop: Shop, other: Shop, new_id: str
) -> None:
    for mesh in (shop, other):
        assert outbox.send(new_id, mesh=mesh.name).status_code == 202

    until(lambda: all(new_id in ids_in(mesh, "inbox/bea") for mesh in (shop, other)))


def ids_in(shop: Shop, stream: str) -> list[str]:
    return [message["client_message_id"] for message in shop.held(stream)]


def test_fifty_callers_with_one_id_make_one_row(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    with ThreadPoolExecutor(25) as pool:
        answers = list(pool.map(lambda _: outbox.send(new_id, mesh=shop.name), range(50)))

    assert {answer.status_code for answer in answers} <= {200, 202}
    assert sum(not answer.json()["duplicate"] for answer in answers) == 1
    assert outbox.settled(new_id)["status"] == "done"


ORIGINAL: dict[str, Any] = {
    "kind": "topic",
    "ref": "alerts",
    "json": {"a": 1},
    "meta": {"a": 1, "b": 2},
    "priority": "next",
}


def test_each_field_of_the_fingerprint_makes_another_send(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    """What means the same is the same: the order of meta, 1.0 for 1, an empty meta for none."""
    others: list[dict[str, Any]] = [
        {"kind": "queue"},
        {"ref": "other"},
        {"reply_to": "01M7RA5Q69NC100KA8CE7MFXWH"},
        {"priority": "now"},
        {"meta": {"a": 1, "b": 3}},
        {"meta": {}},
        {"json": {"a": 2}},
    ]

    def post(message_id: str, body: dict[str, Any]) -> httpx.Response:
        headers, query = {"Idempotency-Key": message_id}, {"mesh": shop.name}
        return outbox.http.post("/v1/send", json=body, headers=headers, params=query)

    def sent(message_id: str, **fields: Any) -> int:
        return post(message_id, {**ORIGINAL, **fields}).status_code

    assert sent(new_id) == 202
    assert sent(new_id, meta={"b": 2.0, "a": 1}) in (200, 202)
    assert [sent(new_id, **other) for other in others] == [409] * len(others)
    assert sent(f"{new_id}-b", meta={}) == 202
    bare = {key: value for key, value in ORIGINAL.items() if key != "meta"}
    again = outbox.http.post(
        "/v1/send",
        json=bare,
        headers={"Idempotency-Key": f"{new_id}-b"},
        params={"mesh": shop.name},
    )
    assert again.status_code in (200, 202)
    assert again.json()["duplicate"]


def test_a_send_without_an_id_gets_one(outbox: OutboxProcess, shop: Shop) -> None:
    first, second = (outbox.send(None, mesh=shop.name).json() for _ in range(2))

    assert first["client_message_id"] != second["client_message_id"]
    assert len(first["client_message_id"]) == 26


def test_what_the_server_refuses_for_good_is_dead_and_its_id_is_used(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    assert outbox.send(new_id, mesh=shop.name, ref="nowhere").status_code == 202

    row = outbox.settled(new_id)
    assert row["status"] == "dead"
    assert "destination_not_found" in row["last_error"]
    again = outbox.send(new_id, mesh=shop.name, ref="nowhere")
    assert code(again) == (409, "idempotency_key_reused")
    assert again.json()["conflict"] == "outbox_dead_fingerprint_match"
    assert "destination_not_found" in again.json()["reason"]
    other = outbox.send(new_id, mesh=shop.name, body="another")
    assert other.json()["conflict"] == "outbox_dead_fingerprint_mismatch"


def test_a_dead_row_is_requeued_under_another_id_to_the_same_destination(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    topic = f"late-{new_id}"
    outbox.send(new_id, mesh=shop.name, ref=topic)
    dead = outbox.settled(new_id)
    shop.http.put(f"{shop.root}/topics/{topic}")

    answer = outbox.http.post(f"/v1/outbox/{dead['id']}/requeue", json={"auto": True})

    assert answer.status_code == 200, answer.text
    new = answer.json()["new"]
    assert new["client_message_id"] != new_id
    assert new["destination"] == dead["destination"]
    assert new["request_fingerprint"] == dead["request_fingerprint"]
    assert outbox.settled(new["client_message_id"])["status"] == "done"
    shown = outbox.get(f"/v1/outbox/{dead['id']}")
    assert (shown["status"], shown["superseded_by"]) == ("aborted", new["id"])
    assert [row["id"] for row in shown["successors"]] == [new["id"]]
    twice = outbox.http.post(f"/v1/outbox/{dead['id']}/requeue", json={"auto": True})
    assert code(twice) == (409, "row_not_open")


def test_a_patched_payload_gets_a_fingerprint_of_its_own(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    topic = f"patched-{new_id}"
    outbox.send(new_id, mesh=shop.name, ref=topic)
    dead = outbox.settled(new_id)
    shop.http.put(f"{shop.root}/topics/{topic}")
    root = f"/v1/outbox/{dead['id']}"
    patched = {"kind": "topic", "ref": topic, "body": "better"}

    for wrong in ({**patched, "ref": "alerts"}, {**patched, "surprise": 1}, "text"):
        body = {"new_id": f"{new_id}-b", "payload": wrong}
        assert outbox.http.post(f"{root}/requeue", json=body).status_code == 400
    broken = outbox.http.post(f"{root}/requeue", content=b'{"auto": true, "payload": {')
    assert code(broken) == (400, "body_invalid")
    assert outbox.get(root)["status"] == "dead"

    answer = outbox.http.post(f"{root}/requeue", json={"new_id": f"{new_id}-b", "payload": patched})

    assert answer.status_code == 200, answer.text
    assert answer.json()["new"]["request_fingerprint"] != dead["request_fingerprint"]
    assert outbox.settled(f"{new_id}-b")["status"] == "done"
    assert shop.held(f"topic/{topic}")[0]["body"] == "better"


def test_a_new_id_that_was_used_is_refused_and_nothing_changes(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    outbox.send(f"{new_id}-used", mesh=shop.name)
    outbox.send(new_id, mesh=shop.name, ref="nowhere")
    dead = outbox.settled(new_id)

    for used in (f"{new_id}-used", new_id):
        answer = outbox.http.post(f"/v1/outbox/{dead['id']}/requeue", json={"new_id": used})
        assert code(answer) == (409, "idempotency_key_reused")

    assert outbox.get(f"/v1/outbox/{dead['id']}")["status"] == "dead"


def test_a_dropped_row_is_aborted_and_its_id_stays_used(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    outbox.send(new_id, mesh=shop.name, ref="nowhere")
    dead = outbox.settled(new_id)

    answer = outbox.http.post(f"/v1/outbox/{dead['id']}/drop", json={"by": "ann"})

    assert (answer.json()["status"], answer.json()["aborted_by"]) == ("aborted", "ann")
    again = outbox.send(new_id, mesh=shop.name, ref="nowhere")
    assert again.json()["conflict"] == "outbox_aborted_fingerprint_match"


def test_the_order_within_a_destination_and_priority_is_kept(
    outbox: OutboxProcess, shop: Shop, new_id: str
) -> None:
    topic = f"ordered-{new_id}"
    shop.http.put(f"{shop.root}/topics/{topic}")
    for number in range(40):
        assert outbox.send(f"{new_id}-{number}", mesh=shop.name, ref=topic).status_code == 202

    until(lambda: len(shop.held(f"topic/{topic}")) == 40)

    found = [message["client_message_id"] for message in shop.held(f"topic/{topic}")]
    assert found == [f"{new_id}-{number}" for number in range(40)]


def test_events_replay_from_the_last_id(outbox: OutboxProcess, shop: Shop, new_id: str) -> None:
    outbox.send(new_id, mesh=shop.name, ref="nowhere")
    outbox.settled(new_id)

    events = read_events(outbox, "0.0", lambda found: new_id in str(found))
    dead = next(event for event in events if new_id in str(event))

    assert dead["event"] == "dead"
    assert '"detail"' in dead["data"]
    behind = read_events(outbox, dead["id"], bool, send=(new_id, shop))
    assert dead["id"] not in [event.get("id") for event in behind if event.get("event") == "dead"]


def read_events(
    outbox: OutboxProcess, last_id: str, enough: Any, send: tuple[str, Shop] | None = None
) -> list[dict[str, str]]:
    """Events behind an id, until there are enough."""
    found: list[dict[str, str]] = []
    headers = {"Last-Event-ID": last_id}
    with outbox.http.stream("GET", "/v1/events", headers=headers) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        if send is not None:
            outbox.send(f"{send[0]}-next", mesh=send[1].name, ref="nowhere")
        event: dict[str, str] = {}
        for line in answer.iter_lines():
            if line:
                name, _, value = line.partition(": ")
                event[name] = value
                continue
            if "event" in event:
                found.append(event)
                if enough(found):
                    return found
            event = {}
    return found


BAD_SENDS: list[tuple[dict[str, Any], int, str]] = [
    ({"headers": {"Host": "evil.example"}}, 403, "host_not_allowed"),
    ({"headers": {"Host": "evil.example:80"}}, 403, "host_not_allowed"),
    ({"headers": {"Origin": "http://localhost"}}, 403, "origin_not_allowed"),
    ({"headers": {"Origin": "null"}}, 403, "origin_not_allowed"),
    ({"params": {"token": "x"}}, 400, "token_in_url"),
    ({"params": {"access_token": "x"}}, 400, "token_in_url"),
    ({"params": {"mesh": "unknown"}}, 404, "mesh_not_served"),
    ({"params": {}}, 400, "mesh_required"),
    ({"params": {"mesh": "outbox-shop", "colour": "red"}}, 400, "query_invalid"),
    ({"content": b"{"}, 400, "send_invalid"),
    ({"content": b"[" * 100_000}, 400, "send_invalid"),
    ({"content": b'{"kind":"topic","ref":"alerts"}'}, 400, "body_invalid"),
    ({"content": b'{"kind":"post","ref":"alerts","body":""}'}, 400, "kind_invalid"),
    ({"content": b'{"kind":"topic","ref":"a\\u0000b","body":""}'}, 400, "ref_invalid"),
    (
        {"content": b'{"kind":"topic","ref":"a","body":"","sender":"eve"}'},
        400,
        "sender_invalid",
    ),
    ({"headers": {"Idempotency-Key": "x" * 257}}, 400, "message_id_invalid"),
    ({"content": b'{"body":"' + b"x" * 1024 * 1024 + b'"}'}, 413, "body_too_large"),
    ({"method": "PUT"}, 405, "method_not_allowed"),
    ({"url": "/v1/nowhere"}, 404, "not_found"),
    ({"method": "GET", "url": "/v1/outbox?limit=0"}, 400, "query_invalid"),
    ({"method": "GET", "url": "/v1/outbox?status=lost"}, 400, "query_invalid"),
    ({"method": "GET", "url": "/v1/inbox?after=x"}, 400, "query_invalid"),
    (
        {"method": "GET", "url": "/v1/events", "headers": {"Last-Event-ID": "x"}},
        400,
        "event_id_invalid",
    ),
    (
        {"method": "GET", "url": "/v1/outbox/01M7RA5Q69NC100KA8CE7MFXWH"},
        404,
        "row_not_found",
    ),
    ({"url": "/v1/outbox/nope/drop", "content": b"{}"}, 404, "row_not_found"),
    (
        {"url": "/v1/outbox/01M7RA5Q69NC100KA8CE7MFXWH/requeue", "content": b"{}"},
        400,
        "requeue_invalid",
    ),
]


@pytest.mark.parametrize(("request_", "status", "problem"), BAD_SENDS)
def test_bad_input_is_refused_and_nothing_is_stored(
    outbox: OutboxProcess, request_: dict[str, Any], status: int, problem: str
) -> None:
    good: dict[str, Any] = {
        "method": "POST",
        "url": "/v1/send",
        "content": b'{"kind":"topic","ref":"alerts","body":"hello","client_message_id":"bad"}',
    }
    if "url" not in request_ and "params" not in request_:
        good["params"] = {"mesh": "outbox-shop"}

    answer = outbox.http.request(**{**good, **request_})

    assert code(answer) == (status, problem)
    assert "bad" not in [row["client_message_id"] for row in outbox.rows()]


def test_the_files_are_for_their_user_alone(outbox: OutboxProcess) -> None:
    for name in ("outbox.sock", "outbox.db", "inbox.db", "token", "lock"):
        mode = stat.S_IMODE((outbox.data / name).stat().st_mode)
        assert mode == 0o600, (name, oct(mode))


def test_the_port_wants_the_token_and_takes_the_one_before_for_a_while(
    outbox: OutboxProcess,
) -> None:
    file = outbox.data / "token"
    old = file.read_text().strip()

    def asked(token: str | None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{outbox.port}", timeout=30) as client:
            return client.get("/v1/version", headers=headers).status_code

    assert (asked(None), asked("wrong"), asked(old)) == (401, 401, 200)
    new = "n" * 32
    file.write_text(new)
    assert until(lambda: asked(new) == 200)
    assert (asked(old), asked("wrong")) == (200, 401)


def test_a_second_daemon_on_the_folder_does_not_start(
    outbox: OutboxProcess, server_process: ServerProcess, shop: Shop
) -> None:
    second = OutboxProcess(outbox.data, server_process.url, [shop.name])

    with pytest.raises(AssertionError, match=r"runs on .* already \(process \d+\)"):
        second.start()

    second.http.close()
    assert outbox.get("/v1/version")["version"]


def test_a_copied_folder_loses_the_inbox_to_the_newest(
    server_process: ServerProcess, other: Shop, tmp_path: Path
) -> None:
    first = OutboxProcess(tmp_path / "one", server_process.url, [other.name], "bea")
    second = OutboxProcess(tmp_path / "two", server_process.url, [other.name], "bea")
    with second, second.http, first.http:
        first.start()
        until(lambda: first.get("/v1/health")["status"] == "ok")
        second.stop()
        second.start()

        assert first.wait() == 13

    assert "4003" in (tmp_path / "one" / "last_exit.json").read_text()
    assert os.path.exists(tmp_path / "one" / "outbox.db")
