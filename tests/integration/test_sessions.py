"""Sessions over a real server, on both stores: frames, negotiation, deliveries, limits."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Close
from websockets.sync.client import ClientConnection, connect

from tests.engines import engine as engine
from tests.engines import server_at
from tests.integration.mesh_support import Shop, code
from tests.serving import ServerProcess

SECONDS_MAX = 30.0


class Raw:
    """A session that is spoken by hand, through the client of `websockets`."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self._ids = itertools.count(1)

    def say(self, **frame: Any) -> None:
        self.socket.send(json.dumps(frame))

    def hear(self) -> dict[str, Any]:
        """The next frame that is no ping."""
        while True:
            frame: dict[str, Any] = json.loads(self.socket.recv(timeout=SECONDS_MAX))
            if "ping" not in frame:
                return frame

    def hello(self, member: str | None = None, **more: Any) -> dict[str, Any]:
        self.say(hello={**({} if member is None else {"member": member}), **more})
        return self.hear()

    def ask(self, **frame: Any) -> dict[str, Any]:
        """The answer to a frame; deliveries that come before it are left out."""
        number = next(self._ids)
        self.say(id=number, **frame)
        while True:
            heard = self.hear()
            if heard.get("id") == number:
                return heard

    def send(self, message_id: str, **fields: Any) -> dict[str, Any]:
        send = {"sender": "bob", "kind": "topic", "ref": "alerts", "body": "hello", **fields}
        return self.ask(send={**send, "client_message_id": message_id})

    def delivery(self) -> tuple[str, list[str], int]:
        """The token, the ids and the last position of the next delivery."""
        while True:
            delivered = self.hear().get("deliver")
            if delivered is not None:
                entries = delivered["entries"]
                ids = [entry["data"]["client_message_id"] for entry in entries]
                return delivered["token"], ids, entries[-1]["position"]

    def end(self) -> tuple[int, str, dict[str, Any]]:
        """The code and reason of the close, and what was said before it."""
        said: dict[str, Any] = {}
        while True:
            try:
                said = self.hear()
            except ConnectionClosed as closed:
                close = closed.rcvd or Close(1006, "the connection was cut")
                return close.code, close.reason, said.get("refused", {})


@contextlib.contextmanager
def session(shop: Shop, **options: Any) -> Iterator[Raw]:
    url = str(shop.http.base_url).replace("http", "ws", 1).rstrip("/")
    with connect(f"{url}{shop.root}/session", compression=None, proxy=None, **options) as socket:
        yield Raw(socket)


@contextlib.contextmanager
def served(folder: Path, environment: dict[str, str]) -> Iterator[httpx.Client]:
    """A server of its own, with other settings."""
    with (
        server_at(folder, environment=environment) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield client


@pytest.fixture
def shop(http: httpx.Client) -> Shop:
    return Shop(http)


# Sends


def test_a_send_has_the_status_and_the_body_of_http(shop: Shop) -> None:
    with session(shop) as raw:
        welcome = raw.hello()
        first, again, other = raw.send("m-1"), raw.send("m-1"), raw.send("m-1", body="other")
        missing = raw.send("m-2", ref="none")
        bad = raw.send("m-3", kind="letter")

    assert welcome["welcome"] == shop.http.post(f"{shop.root}/negotiate").json()
    assert (first["status"], again["status"], other["status"]) == (201, 200, 409)
    over_http = shop.send("m-1").json()
    assert again["body"] == over_http
    assert {**first["body"], "duplicate": True} == {key: over_http[key] for key in first["body"]}
    refused = shop.send("m-1", body="other").json()
    assert other["body"].items() <= refused.items()
    assert other["body"]["conflict"] == "request_fingerprint_mismatch"
    assert (missing["status"], missing["body"]["code"]) == (404, "destination_not_found")
    assert (bad["status"], bad["body"]["code"]) == (
        400,
        shop.send("m-3", kind="letter").json()["code"],
    )
    assert shop.send("m-2").status_code == 201


def test_sends_are_pipelined_and_answered_under_their_ids(shop: Shop) -> None:
    with session(shop) as raw:
        raw.hello()
        for number in range(200):
            send = {"sender": "bob", "kind": "queue", "ref": "jobs", "body": str(number)}
            raw.say(id=f"f-{number}", send={**send, "client_message_id": f"m-{number}"})
        answers = [raw.hear() for _ in range(200)]

    assert [answer["id"] for answer in answers] == [f"f-{number}" for number in range(200)]
    assert {answer["status"] for answer in answers} == {201}
    assert [message["body"] for message in shop.held("queue/jobs")] == [str(n) for n in range(200)]


# Negotiation: scenario 18


@pytest.mark.parametrize(
    ("require", "close", "kind"),
    [
        ({"key_epoch": {"version": 1}}, 4010, "feature_unavailable"),
        ({"client_message_id_dedupe": {"version": 1}}, 4010, "feature_unavailable"),
        ({"client_message_id_dedupe": {"version": 3}}, 4011, "feature_param_invalid"),
        ({"max_payload": {"version": 1, "inline_bytes": -1}}, 4011, "feature_param_invalid"),
        (
            {"client_message_id_dedupe": {"version": 2, "dedupe_retention_days": 10_000}},
            4012,
            "feature_param_below_floor",
        ),
    ],
)
def test_a_requirement_that_is_not_met_closes_with_its_code(
    shop: Shop, require: dict[str, Any], close: int, kind: str
) -> None:
    with session(shop) as raw:
        said = raw.hello("ann", require=require)["refused"]
        ended = raw.end()

    assert ended[:2] == (close, kind)
    assert said["kind"] == kind
    assert said["feature"] == next(iter(require))
    over_http = shop.http.post(f"{shop.root}/negotiate", json={"require": require}).json()
    assert (over_http["close_code"], over_http["detail"]) == (close, said["detail"])


# Deliveries


def test_an_inbox_is_delivered_and_acknowledged(shop: Shop) -> None:
    shop.send("m-1")
    with session(shop) as raw:
        raw.hello("ann")
        token, ids, at = raw.delivery()
        shop.send("m-2")
        also = raw.delivery()
        assert (ids, also[1]) == (["m-1"], ["m-2"])
        assert raw.ask(ack={"token": token, "at": at}) == {"id": 1, "status": 200}

    with session(shop) as raw:
        raw.hello("ann")
        assert raw.delivery()[1] == ["m-2"]


def test_what_an_ack_may_not_say_is_refused(shop: Shop) -> None:
    shop.send("m-1")
    with session(shop) as raw:
        raw.hello("ann")
        token, _, at = raw.delivery()
        beyond = raw.ask(ack={"token": token, "at": at + 1000})
        foreign = raw.ask(ack={"token": "x" + token, "at": at})
    with session(shop) as raw:
        raw.hello()
        nothing = raw.ask(ack={"token": token, "at": at})

    assert (beyond["status"], beyond["body"]["code"]) == (400, "ack_invalid")
    assert (foreign["status"], foreign["body"]["code"]) == (409, "lease_lost")
    assert (nothing["status"], nothing["body"]["code"]) == (400, "ack_invalid")


def test_no_more_deliveries_wait_for_an_ack_than_may(shop: Shop) -> None:
    sends = [
        {"sender": "bob", "kind": "dm", "ref": "ann", "body": "x" * 1_000_000} for _ in range(20)
    ]
    for batch in range(0, 20, 5):
        sent = shop.http.post(f"{shop.root}/sends", json={"sends": sends[batch : batch + 5]})
        assert sent.status_code == 200
    with session(shop, max_size=None) as raw:
        raw.hello("ann")
        seen = [raw.delivery() for _ in range(16)]
        # The 17th comes when one of the others is acknowledged, not before: an answer overtakes it.
        raw.say(ping=7)
        assert raw.hear() == {"pong": 7}
        raw.say(id=1, ack={"token": seen[0][0], "at": seen[0][2]})
        assert {"deliver", "id"} == {next(iter(raw.hear())) for _ in range(2)}


def test_a_member_that_does_not_exist_ends_the_session(shop: Shop) -> None:
    with session(shop) as raw:
        raw.say(hello={"member": "nemo"})
        code_, reason, said = raw.end()

    assert (code_, reason) == (1008, "member_not_found")
    assert "nemo" in said["detail"]


def test_the_deletion_of_a_member_ends_its_session(tmp_path: Path) -> None:
    quick = {"FENCEPOST_SESSIONS_LEASE_MS": "1000"}
    with (
        server_at(tmp_path, environment=quick) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        shop = Shop(http)
        with session(shop) as raw:
            raw.hello("ann")
            assert http.delete(f"{shop.root}/members/ann").status_code == 204
            assert raw.end()[:2] == (1008, "member_not_found")


# Policies


def test_a_newer_session_takes_the_inbox_and_the_old_one_is_closed(shop: Shop) -> None:
    with session(shop) as old, session(shop) as new:
        old.hello("ann")
        shop.send("m-1")
        token, _, at = old.delivery()
        new.hello("ann")
        ended = old.end()
        assert new.delivery()[1] == ["m-1"]
        stale = new.ask(ack={"token": token, "at": at})

    assert ended[:2] == (4003, "replaced_by_newer_connection")
    assert ended[2]["kind"] == "replaced_by_newer_connection"
    assert stale["status"] == 409


def test_a_claim_over_http_takes_the_inbox_from_a_session(shop: Shop) -> None:
    with session(shop) as raw:
        raw.hello("ann")
        shop.send("m-1")
        token, _, at = raw.delivery()
        group = f"/v1/groups/mesh:{shop.name}:inbox:ann"
        taken = shop.http.post(f"{group}/claim", json={"worker": "w", "take": True})
        assert len(taken.json()["leases"]) == 1
        answer = raw.ask(ack={"token": token, "at": at})
        assert (answer["status"], answer["body"]["code"]) == (409, "lease_lost")
        assert raw.end()[:2] == (4003, "replaced_by_newer_connection")


def test_with_prefer_oldest_the_newer_session_is_closed(http: httpx.Client) -> None:
    shop = Shop(http, default_policy="prefer_oldest")
    with session(shop) as old, session(shop) as new:
        old.hello("ann", worker="daemon-1")
        new.say(hello={"member": "ann"})
        assert new.end()[:2] == (4004, "member_already_connected")
        shop.send("m-1")
        assert old.delivery()[1] == ["m-1"]
        with session(shop) as same:
            assert "welcome" in same.hello("ann", worker="daemon-1")
            assert old.end()[0] == 4003

    with session(shop) as later:
        assert "welcome" in later.hello("ann"), "the end of a session frees its inbox"


def test_with_allow_concurrent_each_session_reads_from_its_own_offset(http: httpx.Client) -> None:
    shop = Shop(http, default_policy="allow_concurrent")
    shop.send("m-1")
    shop.send("m-2")
    with session(shop) as one, session(shop) as two, session(shop) as three:
        one.hello("ann")
        two.hello("ann")
        token, ids, at = one.delivery()
        assert (token, ids) == ("", ["m-1", "m-2"])
        assert two.delivery()[1] == ids
        assert one.ask(ack={"token": "", "at": at})["status"] == 200
        three.hello("ann", after=at)
        shop.send("m-3")
        assert [raw.delivery()[1] for raw in (one, two, three)] == [["m-3"]] * 3

    group = f"/v1/groups/mesh:{shop.name}:inbox:ann"
    take = shop.http.post(f"{group}/claim", json={"worker": "w", "take": True})
    assert code(take) == (400, "group_invalid")
    assert "allow_concurrent" in take.json()["detail"]


def test_a_worker_that_acks_and_takes_keeps_its_inbox(http: httpx.Client) -> None:
    shop = Shop(http, default_policy="prefer_oldest")
    group = f"/v1/groups/mesh:{shop.name}:inbox:ann"
    take = {"worker": "w", "take": True}
    [lease] = http.post(f"{group}/claim", json=take).json()["leases"]

    item = {"token": lease["token"], "at": lease["read_to"]}
    acked = http.post(f"{group}/ack", json={"items": [item], "claim": take}).json()
    stale = http.post(f"{group}/ack", json={"items": [item], "claim": take}).json()

    assert [found["outcome"] for found in acked["items"]] == ["acked"]
    assert len(acked["leases"]) == 1
    assert [found["outcome"] for found in stale["items"]] == ["lost"]
    assert stale["leases"] == []


# The request


def test_a_request_that_asks_for_no_websocket_is_told_so(shop: Shop) -> None:
    plain = shop.http.get(f"{shop.root}/session")
    nowhere = shop.http.get("/v1/mesh/none/session")

    assert code(plain) == (426, "upgrade_required")
    assert plain.headers["Upgrade"] == "websocket"
    assert code(nowhere) == (404, "mesh_not_found")


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 101)],
)
def test_a_page_of_a_foreign_origin_is_refused_before_the_upgrade(
    shop: Shop, origin: str, status: int
) -> None:
    if status == 101:
        with session(shop, origin=origin) as raw:
            assert "welcome" in raw.hello()
        return
    with pytest.raises(InvalidStatus) as refused, session(shop, origin=origin):
        pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["code"] == "origin_not_allowed"


# Frames that are none


@pytest.mark.parametrize(
    ("data", "close"),
    [
        ("hello", 1007),
        ("[]", 1007),
        ('{"hello":{},"hello":{}}', 1007),
        ('{"id":1,"send":{}}', 1002),
        (b"{}", 1003),
        ('{"hello":{"require":7}}', 1007),
    ],
)
def test_what_is_no_frame_closes_with_a_reason(shop: Shop, data: str | bytes, close: int) -> None:
    with session(shop) as raw:
        raw.socket.send(data)
        code_, reason, _ = raw.end()

    assert code_ == close
    assert reason


def test_a_second_hello_closes(shop: Shop) -> None:
    with session(shop) as raw:
        raw.hello()
        raw.say(hello={})
        assert raw.end()[:2] == (1002, "frame_unexpected")


# Limits


TIGHT = {
    "FENCEPOST_SESSIONS_FRAME_BYTES_MAX": "4096",
    "FENCEPOST_SESSIONS_IN_FLIGHT_MAX": "4",
    "FENCEPOST_SESSIONS_ENTRIES_MAX": "2",
    "FENCEPOST_SESSIONS_HELLO_MS_MAX": "1000",
    "FENCEPOST_SESSIONS_PING_MS": "100",
    "FENCEPOST_SESSIONS_PONG_MS_MAX": "1000",
    "FENCEPOST_SESSIONS_SESSIONS_PER_PRINCIPAL_MAX": "2",
}


def test_each_bound_of_a_session_is_a_setting(tmp_path: Path) -> None:
    with (
        server_at(tmp_path, environment=TIGHT) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        shop = Shop(http)
        with session(shop) as raw:
            raw.hello()
            raw.say(id=1, send={"body": "x" * 4096})
            assert raw.end()[0] == 1009
        with session(shop) as silent:
            assert silent.end()[:2] == (1008, "hello_missing")
        with session(shop) as deaf:
            deaf.hello()
            assert deaf.end()[:2] == (1008, "pong_missing")
        for number in range(5):
            shop.send(f"m-{number}")
        with session(shop) as one, session(shop):
            with pytest.raises(InvalidStatus) as refused, session(shop):
                pass
            assert refused.value.response.status_code == 429
            assert json.loads(refused.value.response.body)["code"] == "too_many_sessions"
            one.hello("ann")
            assert [one.delivery()[1] for _ in range(2)] == [["m-0", "m-1"], ["m-2", "m-3"]]
            # Past four frames it waits its turn, and none is lost.
            for number in range(40):
                send = {"sender": "b", "kind": "queue", "ref": "jobs", "body": ""}
                one.say(id=number, send={**send, "client_message_id": f"q-{number}"})
            answers = [one.hear() for _ in range(41)]
            assert sum(answer.get("status") == 201 for answer in answers) == 40
        metrics = http.get("/metrics").text
        assert "fencepost_sessions_open 0.0" in metrics
        assert 'fencepost_sessions_closed_total{kind="hello_missing"} 1.0' in metrics
        assert "fencepost_session_deliveries_total 5.0" in metrics
