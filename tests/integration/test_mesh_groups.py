"""Queues and inboxes are consumed through groups, on both stores; the client and the switch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import fencepost
from tests.engines import engine as engine
from tests.engines import server_at
from tests.integration.mesh_support import Shop, code
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield client


@pytest.fixture
def shop(http: httpx.Client) -> Shop:
    return Shop(http)


def claim(shop: Shop, group: str, worker: str = "w1", **more: Any) -> httpx.Response:
    path = f"/v1/groups/mesh:{shop.name}:{group}/claim"
    return shop.http.post(path, json={"worker": worker, **more})


def ids(answer: httpx.Response) -> list[str]:
    """The ids of the messages that a claim got."""
    assert answer.status_code == 200, answer.text
    return [
        event["data"]["client_message_id"]
        for lease in answer.json()["leases"]
        for event in lease["events"]
    ]


def ack(shop: Shop, group: str, lease: dict[str, Any]) -> str:
    path = f"/v1/groups/mesh:{shop.name}:{group}/ack"
    body = {"items": [{"token": lease["token"], "at": lease["read_to"]}]}
    answer = shop.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    outcome: str = answer.json()["items"][0]["outcome"]
    return outcome


def test_each_message_of_a_queue_goes_to_one_worker(shop: Shop) -> None:
    for number in range(4):
        shop.send(f"q-{number}", kind="queue", ref="jobs")

    first = ids(claim(shop, "queue:jobs", "w1", streams_max=2))
    second = ids(claim(shop, "queue:jobs", "w2", streams_max=10))

    assert sorted(first + second) == [f"q-{number}" for number in range(4)]


def test_the_priority_of_a_message_is_that_of_its_lease(shop: Shop) -> None:
    for name, priority in (("a", "low"), ("b", "next"), ("c", "now"), ("d", "low")):
        shop.send(name, kind="queue", ref="jobs", priority=priority)
    claim(shop, "queue:jobs", streams_max=1)  # has the server look at the queue

    rows = shop.http.get(f"/v1/groups/mesh:{shop.name}:queue:jobs/streams").json()["streams"]

    assert [row["priority"] for row in rows] == [-1, 0, 1, -1]


def test_an_urgent_message_overtakes_those_that_wait(shop: Shop) -> None:
    for number in range(20):
        shop.send(f"low-{number}", kind="queue", ref="jobs", priority="low")
    shop.send("next", kind="queue", ref="jobs")
    shop.send("urgent", kind="queue", ref="jobs", priority="now")
    shop.send("newest", kind="queue", ref="jobs", priority="low")

    first = ids(claim(shop, "queue:jobs", streams_max=4))

    # One of four is the oldest of all, one the newest: no message waits for ever.
    assert {"urgent", "low-0", "newest"} <= set(first)
    assert "next" in [*first, *ids(claim(shop, "queue:jobs", streams_max=4))]


def test_a_message_that_cannot_be_handled_is_parked_and_replayed(shop: Shop) -> None:
    root = f"/v1/groups/mesh:{shop.name}:queue:jobs"
    shop.send("poison", kind="queue", ref="jobs")
    shop.send("good", kind="queue", ref="jobs")
    leases = claim(shop, "queue:jobs").json()["leases"]
    items = []
    for lease in leases:
        [event] = lease["events"]
        item = {"token": lease["token"], "at": lease["read_to"]}
        if event["data"]["client_message_id"] == "poison":
            failure = {"position": event["position"], "error": "bad", "permanent": True}
            item = {"token": lease["token"], "failure": failure}
        items.append(item)
    acked = shop.http.post(f"{root}/ack", json={"items": items}).json()

    assert sorted(item["outcome"] for item in acked["items"]) == ["acked", "parked"]
    assert ids(claim(shop, "queue:jobs")) == []
    [parked] = shop.http.get(f"{root}/parked").json()["parked"]
    assert parked["error"] == "bad"
    assert shop.http.post(f"{root}/replay", json={"filter": {}}).json()["changed"] == 1
    [lease] = claim(shop, "queue:jobs").json()["leases"]
    [event] = lease["events"]
    assert (event["data"]["client_message_id"], event["replayed"]) == ("poison", True)
    done = {"token": lease["token"], "replayed": [{"position": event["position"]}]}
    assert shop.http.post(f"{root}/ack", json={"items": [done]}).status_code == 200
    assert shop.http.get(f"{root}/parked").json()["parked"] == []


def test_a_message_is_done_when_it_is_acked(shop: Shop) -> None:
    shop.send("q-1", kind="queue", ref="jobs")
    [lease] = claim(shop, "queue:jobs").json()["leases"]

    assert ack(shop, "queue:jobs", lease) == "acked"
    assert ids(claim(shop, "queue:jobs")) == []


def test_an_inbox_is_leased_as_a_whole_and_in_order(shop: Shop) -> None:
    shop.send("m-1")
    shop.send("d-1", kind="dm", ref="ann")

    assert ids(claim(shop, "inbox:ann")) == ["m-1", "d-1"]
    assert ids(claim(shop, "inbox:ann", "w2")) == []


def test_the_newest_worker_takes_an_inbox_and_the_old_one_is_fenced_off(shop: Shop) -> None:
    shop.send("m-1")
    [old] = claim(shop, "inbox:ann", "w1").json()["leases"]

    taken = claim(shop, "inbox:ann", "w2", take=True)

    assert ids(taken) == ["m-1"]
    assert ack(shop, "inbox:ann", old) == "lost"
    [new] = taken.json()["leases"]
    assert ack(shop, "inbox:ann", new) == "acked"


def test_an_empty_inbox_can_be_taken_too(shop: Shop) -> None:
    [lease] = claim(shop, "inbox:bea", take=True).json()["leases"]

    assert lease["events"] == []
    assert code(claim(shop, "queue:jobs", take=True)) == (400, "group_invalid")


def test_with_prefer_oldest_the_first_worker_keeps_the_inbox(http: httpx.Client) -> None:
    shop = Shop(http, default_policy="prefer_oldest")
    claim(shop, "inbox:ann", "w1", take=True)

    refused = claim(shop, "inbox:ann", "w2", take=True)

    assert code(refused) == (409, "member_already_connected")
    assert refused.json()["close_code"] == 4004
    assert claim(shop, "inbox:ann", "w1", take=True).status_code == 200


def test_the_client_sends_lists_and_consumes(server_process: ServerProcess) -> None:
    with fencepost.connect(server_process.url) as client:
        mesh = client.mesh("from-python")
        mesh.make(dedupe_retention_days=30)
        mesh.make_member("ann")
        mesh.make_topic("news", ["ann"])
        mesh.make_queue("jobs")

        first = mesh.send("topic:news", {"n": 1}, id="a", sender="me", meta={"x": 1})
        again = mesh.send("topic:news", {"n": 1}, id="a", sender="me", meta={"x": 1})
        mesh.send("queue:jobs", b"\x00\xff", sender="me", priority="now")

        assert (first.duplicate, again.duplicate) == (False, True)
        with pytest.raises(fencepost.KeyReusedError):
            mesh.send("topic:news", "other", id="a", sender="me")
        with pytest.raises(fencepost.DestinationNotFoundError):
            mesh.send("topic:none", "x", sender="me")
        with pytest.raises(fencepost.FeatureRefusedError) as refused:
            mesh.negotiate({"key_epoch": {"version": 1}})
        assert refused.value.close_code == 4010
        [lease] = mesh.queue("jobs").claim("w").leases
        assert lease.events[0].data["body_base64"] == "AP8="
        [inbox] = mesh.inbox("ann").claim("w").leases
        assert inbox.events[0].data["json"] == {"n": 1}
        assert [row.name for row in mesh.members()] == ["ann"]
        assert "a" in [row.client_message_id for row in mesh.dedupe()]
        assert mesh.check().findings == []
        assert mesh.rebuild().missing == 0
        assert mesh.sweep() == 0
        outcomes = mesh.send_all([{"kind": "dm", "ref": "ann", "body": "x", "sender": "me"}])
        assert [outcome.status for outcome in outcomes] == [201]
        mesh.delete()
        with pytest.raises(fencepost.MeshNotFoundError):
            mesh.info()


async def test_the_async_client_does_the_same(server_process: ServerProcess) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        mesh = client.mesh("from-asyncio")
        await mesh.make()
        await mesh.make_member("ann")

        receipt = await mesh.send("dm:ann", "hello", sender="me")

        assert not receipt.duplicate
        assert [row.mesh async for row in client.meshes() if row.mesh == mesh.name] == [mesh.name]


def test_dedupe_switched_off_and_on_keeps_the_rows(tmp_path: Path) -> None:
    with server_at(tmp_path) as server, httpx.Client(base_url=server.url) as http:
        assert Shop(http, "shop").send().status_code == 201
    off = {"FENCEPOST_MESH_DEDUPE": "false"}
    with server_at(tmp_path, environment=off) as server, httpx.Client(base_url=server.url) as http:
        features = http.get("/v1/mesh/shop/features").json()["supported"]
        assert "client_message_id_dedupe" not in features
        required = {"require": {"client_message_id_dedupe": {"version": 2}}}
        refused = http.post("/v1/mesh/shop/negotiate", json=required)
        assert (refused.status_code, refused.json()["close_code"]) == (409, 4010)
        body = {"sender": "bob", "kind": "topic", "ref": "alerts", "body": "hello"}
        sent = http.post("/v1/mesh/shop/send", json=body, headers={"Idempotency-Key": "m-1"})
        assert sent.status_code == 201
    with server_at(tmp_path) as server, httpx.Client(base_url=server.url) as http:
        again = http.post("/v1/mesh/shop/send", json=body, headers={"Idempotency-Key": "m-1"})
        assert again.json()["duplicate"] is True
        found = http.post("/v1/mesh/shop/check").json()
        assert found["findings"] == []


LIMITS = {
    "FENCEPOST_MESH_SENDS_PER_S": "0.001",
    "FENCEPOST_MESH_SENDS_BURST_S": "2000",
    "FENCEPOST_MESH_MESHES_MAX": "1",
    "FENCEPOST_MESH_MESH_NAMES_MAX": "4",
    "FENCEPOST_MESH_BATCH_SENDS_MAX": "2",
    "FENCEPOST_MESH_INLINE_BYTES_MAX": "2000",
    "FENCEPOST_MESH_RECIPIENTS_MAX": "2",
}


def test_each_limit_has_a_name_and_a_retry_spends_nothing(tmp_path: Path) -> None:
    with (
        server_at(tmp_path, environment=LIMITS) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        shop = Shop(http, "shop")
        for path, limit in (
            ("/v1/mesh/other", "meshes_max"),
            ("/v1/mesh/shop/members/cleo", "mesh_names_max"),
        ):
            refused = http.put(path)
            assert code(refused) == (413, "limit_exceeded")
            assert refused.json()["limit"] == limit
        batch = [{"kind": "dm", "ref": "ann", "body": "", "sender": "b"}] * 3
        assert code(http.post("/v1/mesh/shop/sends", json={"sends": batch})) == (
            400,
            "send_invalid",
        )
        assert shop.send("large", body="x" * 2_001).json()["limit"] == "inline_bytes"
        # Two sends are in the bucket; a send that is refused gives its unit back.
        assert shop.send("m-1").status_code == 201
        assert shop.send("m-2", ref="none").status_code == 404
        assert shop.send("m-2").status_code == 201
        slow = shop.send("m-3")
        assert code(slow) == (429, "too_fast")
        assert int(slow.headers["Retry-After"]) > 0
        assert shop.send("m-1").status_code == 200
        assert code(shop.send("m-1", body="other")) == (409, "idempotency_key_reused")
        assert shop.send("m-3").status_code == 429
        assert shop.send("other", sender="eve").status_code == 201
