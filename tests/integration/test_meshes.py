"""Meshes and sends over HTTP, on both stores: the bodies are those of the contract."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines import engine as engine
from tests.integration.mesh_support import Shop, code
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def http(server_process: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_process.url, timeout=30) as client:
        yield client


@pytest.fixture
def shop(http: httpx.Client) -> Shop:
    return Shop(http)


def test_a_mesh_is_made_shown_listed_and_deleted(http: httpx.Client) -> None:
    made = http.put("/v1/mesh/yard", json={"dedupe_retention_days": 30})

    assert made.status_code == 201
    shown = made.json()
    assert shown["mesh"] == "yard"
    assert shown["dedupe_mode"] == "retention_scoped"
    assert shown["dedupe_retention_days"] == 30
    assert shown["default_policy"] == "prefer_newest"
    assert http.get("/v1/mesh/yard").json() == shown
    assert http.put("/v1/mesh/yard", json={"dedupe_retention_days": 30}).status_code == 200
    assert code(http.put("/v1/mesh/yard")) == (409, "mesh_exists")
    assert "yard" in [mesh["mesh"] for mesh in http.get("/v1/mesh").json()["meshes"]]
    assert http.delete("/v1/mesh/yard").status_code == 204
    assert code(http.get("/v1/mesh/yard")) == (404, "mesh_not_found")
    assert code(http.delete("/v1/mesh/yard")) == (404, "mesh_not_found")


def test_the_deletion_of_a_mesh_takes_its_streams_and_groups_along(shop: Shop) -> None:
    shop.send()

    assert shop.http.delete(shop.root).status_code == 204

    assert shop.http.get(shop.stream("topic/alerts")).status_code == 404
    group = f"/v1/groups/mesh:{shop.name}:queue:jobs"
    assert code(shop.http.get(group)) == (404, "group_not_found")
    again = Shop(shop.http, shop.name)
    assert again.held("inbox/ann") == []
    assert again.send().status_code == 201


def test_names_are_made_shown_listed_and_deleted(shop: Shop) -> None:
    member = shop.get("/members/ann")
    queue = shop.get("/queues/jobs")

    assert member["group"] == f"mesh:{shop.name}:inbox:ann"
    assert member["stream"] == f"__mesh/{shop.name}/inbox/ann"
    assert queue["group"] == f"mesh:{shop.name}:queue:jobs"
    assert shop.http.get(f"/v1/groups/{queue['group']}").json()["targets"] == "message"
    assert [row["member"] for row in shop.get("/members")["members"]] == ["ann", "bea"]
    assert [row["topic"] for row in shop.get("/topics")["topics"]] == ["alerts"]
    assert [row["queue"] for row in shop.get("/queues")["queues"]] == ["jobs"]
    members = shop.get("/topics/alerts/members", limit=1)
    assert [row["member"] for row in members["members"]] == ["ann"]
    rest = shop.get("/topics/alerts/members", limit=1, after=members["next"])
    assert [row["member"] for row in rest["members"]] == ["bea"]
    assert shop.http.put(f"{shop.root}/members/ann").status_code == 200
    assert shop.http.put(f"{shop.root}/topics/alerts/members/ann").status_code == 200
    assert shop.get("/topics/alerts/members/ann")["member"] == "ann"
    assert shop.http.delete(f"{shop.root}/members/ann").status_code == 204
    gone = shop.http.get(f"{shop.root}/topics/alerts/members/ann")
    assert code(gone) == (404, "member_not_found")
    assert code(shop.http.get(f"{shop.root}/topics/x")) == (404, "topic_not_found")
    assert code(shop.http.delete(f"{shop.root}/queues/x")) == (404, "queue_not_found")
    assert code(shop.http.put(f"{shop.root}/topics/x/members/bea")) == (404, "topic_not_found")
    assert code(shop.http.put("/v1/mesh/none/members/a")) == (404, "mesh_not_found")


def test_first_again_and_another_are_201_200_and_409_to_the_letter(shop: Shop) -> None:
    first = shop.send()
    again = shop.send()
    other = shop.send(body="other")

    assert first.status_code == 201
    body = first.json()
    assert re.fullmatch(r"m\d+\.0", body["broker_message_id"])
    assert body == {
        "broker_message_id": body["broker_message_id"],
        "client_message_id": "m-1",
        "history_id": body["history_id"],
        "duplicate": False,
    }
    assert again.status_code == 200
    seen = again.json()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", seen["first_seen_at"])
    assert seen == {
        **body,
        "duplicate": True,
        "history_available": True,
        "first_seen_at": seen["first_seen_at"],
    }
    assert code(other) == (409, "idempotency_key_reused")
    refused = other.json()
    assert refused["client_message_id"] == "m-1"
    assert refused["conflict"] == "request_fingerprint_mismatch"
    assert re.fullmatch(r"[0-9a-f]{16}", refused["broker_fingerprint_prefix"])
    [message] = shop.held("topic/alerts")
    assert message["fingerprint"].startswith(refused["broker_fingerprint_prefix"])
    assert [len(shop.held(f"inbox/{member}")) for member in ("ann", "bea")] == [1, 1]


CHANGES: dict[str, dict[str, Any]] = {
    "kind": {"kind": "queue", "ref": "jobs"},
    "ref": {"ref": "news"},
    "reply_to": {"reply_to": "m1.2"},
    "priority": {"priority": "now"},
    "meta": {"meta": {"a": 2}},
    "body": {"body": "other"},
}


@pytest.mark.parametrize("field", sorted(CHANGES))
def test_each_field_of_the_fingerprint_changed_alone_is_another_message(
    shop: Shop, field: str
) -> None:
    shop.http.put(f"{shop.root}/topics/news")
    shop.send(meta={"a": 1})

    assert code(shop.send(**{"meta": {"a": 1}, **CHANGES[field]})) == (
        409,
        "idempotency_key_reused",
    )


def test_what_means_the_same_is_the_same_send(shop: Shop) -> None:
    shop.send("a", meta={"x": 1, "y": 2})
    shop.send("b", meta={})
    shop.send("c", meta={"n": 1})

    assert shop.send("a", meta={"y": 2, "x": 1}).status_code == 200
    assert shop.send("b").status_code == 200
    assert shop.send("c", meta={"n": 1.0}).status_code == 200


def test_the_header_beats_the_body_and_without_both_an_id_is_minted(shop: Shop) -> None:
    both = shop.send("header", client_message_id="body").json()
    minted = shop.send(None).json()

    assert both["client_message_id"] == "header"
    assert re.fullmatch(r"[0-9A-HJKMNP-TV-Z]{26}", minted["client_message_id"])
    assert shop.send(None, client_message_id="header").status_code == 200


def test_two_senders_and_two_meshes_may_use_one_id(shop: Shop) -> None:
    other = Shop(shop.http)

    answers = [shop.send(), shop.send(sender="eve"), other.send()]

    assert [answer.status_code for answer in answers] == [201, 201, 201]
    assert [entry["sender"] for entry in shop.held("inbox/ann")] == ["bob", "eve"]


def test_a_send_to_nowhere_leaves_no_row(shop: Shop) -> None:
    assert code(shop.send(ref="later")) == (404, "destination_not_found")
    shop.http.put(f"{shop.root}/topics/later")

    assert shop.send(ref="later").status_code == 201
    nowhere = {"sender": "b", "kind": "dm", "ref": "a", "body": ""}
    missing = shop.http.post("/v1/mesh/none/send", json=nowhere)
    assert code(missing) == (404, "mesh_not_found")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty id": ({"message_id": ""}, "message_id_invalid"),
    "long id": ({"message_id": "x" * 257}, "message_id_invalid"),
    "control in ref": ({"ref": "a\x00b"}, "ref_invalid"),
    "control in reply_to": ({"reply_to": "a\x1fb"}, "reply_to_invalid"),
    "unknown priority": ({"priority": "soon"}, "priority_invalid"),
    "unknown kind": ({"kind": "all"}, "kind_invalid"),
    "meta no object": ({"meta": [1]}, "meta_not_object"),
    "meta number": ({"meta": {"n": 2**53}}, "meta_number_invalid"),
    "two bodies": ({"json": 1}, "body_invalid"),
    "no base64": ({"body": None, "body_base64": "!"}, "send_invalid"),
    "unknown field": ({"to": "ann"}, "send_invalid"),
    "no sender": ({"sender": ""}, "sender_invalid"),
}


@pytest.mark.parametrize("what", sorted(BAD))
def test_a_bad_send_has_a_code_of_its_own_and_leaves_its_id_free(shop: Shop, what: str) -> None:
    fields, expected = BAD[what]

    answer = shop.send(**{"message_id": "m-1", **fields})

    assert answer.status_code == 400
    if what != "no base64":
        assert answer.json()["code"] == expected
    assert shop.send().status_code == 201


RAW: dict[str, tuple[str, str]] = {
    "no JSON": ('{"kind":', "send_invalid"),
    "a name twice": ('{"kind":"topic","kind":"dm","ref":"alerts","body":"a"}', "send_invalid"),
    "NaN in meta": ('{"kind":"topic","ref":"alerts","body":"a","meta":{"n":NaN}}', "send_invalid"),
    "a deep meta": (
        '{"kind":"topic","ref":"alerts","body":"a","meta":' + '{"a":' * 600 + "1" + "}" * 601,
        "meta_too_deep",
    ),
    "a control character in the id": (
        '{"kind":"topic","ref":"alerts","body":"a","client_message_id":"a\\u0000b"}',
        "message_id_invalid",
    ),
    "a list": ("[]", "send_invalid"),
    "staged parts": ('{"kind":"topic","ref":"alerts","parts":["a"]}', "body_invalid"),
}


@pytest.mark.parametrize("what", sorted(RAW))
def test_what_is_no_send_is_refused_and_stores_nothing(shop: Shop, what: str) -> None:
    text, expected = RAW[what]

    answer = shop.http.post(
        f"{shop.root}/send", content=text.replace('{"kind', '{"sender":"bob","kind', 1)
    )

    assert code(answer) == (400, expected)
    assert shop.held("topic/alerts") == []
    assert shop.get("/dedupe")["rows"] == []


def test_a_send_to_an_unknown_member_is_404(shop: Shop) -> None:
    assert code(shop.send(kind="dm", ref="cid")) == (404, "destination_not_found")
    assert shop.get("/dedupe")["rows"] == []


def test_a_body_above_the_limit_is_413_and_nothing_is_stored(shop: Shop) -> None:
    large = shop.send(body="x" * ((1 << 20) + 1))

    assert code(large) == (413, "limit_exceeded")
    assert large.json()["limit"] == "inline_bytes"
    assert shop.send().status_code == 201


WRITES: dict[str, tuple[str, str, dict[str, str]]] = {
    "append": ("POST", "", {}),
    "put": ("PUT", "", {}),
    "delete": ("DELETE", "", {}),
    "close": ("POST", "", {"Stream-Closed": "true"}),
    "truncate": ("POST", "?truncate&before=now", {}),
}


@pytest.mark.parametrize("what", sorted(WRITES))
@pytest.mark.parametrize("path", ["topic/alerts", "topic/none"])
def test_only_sends_write_to_a_stream_of_a_mesh(shop: Shop, what: str, path: str) -> None:
    method, query, headers = WRITES[what]
    content = {"Content-Type": "application/json"}

    answer = shop.http.request(
        method,
        shop.stream(path) + query,
        headers={**content, **headers},
        content=b"" if query or method == "DELETE" or headers else b"[1]",
    )

    assert code(answer) == (403, "mesh_managed")


def test_a_fork_and_a_commit_into_a_mesh_are_refused_too(shop: Shop) -> None:
    shop.http.put("/v1/stream/plain", headers={"Content-Type": "application/json"})
    fork = shop.http.put(
        shop.stream("topic/fork"), headers={"Stream-Forked-From": "/v1/stream/plain"}
    )
    item = {"stream": f"__mesh/{shop.name}/topic/alerts", "data": 1}
    commit = shop.http.post("/v1/commit", json={"appends": [item]})

    assert code(fork) == (403, "mesh_managed")
    assert code(commit) == (403, "mesh_managed")


def test_a_batch_gives_each_send_its_own_outcome(shop: Shop) -> None:
    good = {"sender": "bob", "kind": "queue", "ref": "jobs", "body": "x"}
    sends = [
        {**good, "client_message_id": "a"},
        {**good, "client_message_id": "a"},
        {**good, "client_message_id": "a", "body": "y"},
        {**good, "client_message_id": "b", "priority": "soon"},
        {**good, "client_message_id": "c", "ref": "none"},
    ]

    answer = shop.http.post(f"{shop.root}/sends", json={"sends": sends})

    assert answer.status_code == 200
    outcomes = answer.json()["sends"]
    assert [item["status"] for item in outcomes] == [201, 200, 409, 400, 404]
    assert outcomes[2]["body"]["code"] == "idempotency_key_reused"
    assert len(shop.held("queue/jobs")) == 1
    assert code(shop.http.post(f"{shop.root}/sends", json={"sends": []})) == (400, "send_invalid")


def test_history_is_not_available_when_the_topic_was_deleted(shop: Shop) -> None:
    shop.send()
    shop.http.delete(f"{shop.root}/topics/alerts")

    again = shop.send()

    assert again.status_code == 200
    assert again.json()["history_available"] is False


def test_features_and_negotiation(shop: Shop) -> None:
    found = shop.get("/features")["supported"]

    assert set(found) == {
        "client_message_id_dedupe",
        "max_payload",
        "concurrent_connection_policy",
    }
    dedupe = {"version": 2, "dedupe_retention_days": 7, "request_fingerprint": True}
    good = shop.http.post(
        f"{shop.root}/negotiate", json={"require": {"client_message_id_dedupe": dedupe}}
    )
    assert good.status_code == 200
    assert good.json()["missing_required"] == []
    for wishes, kind, close_code in (
        ({"key_epoch": {"version": 1}}, "feature_unavailable", 4010),
        ({"client_message_id_dedupe": {"version": 1}}, "feature_unavailable", 4010),
        ({"max_payload": {"version": 9}}, "feature_param_invalid", 4011),
        (
            {"client_message_id_dedupe": {**dedupe, "dedupe_retention_days": 999}},
            "feature_param_below_floor",
            4012,
        ),
    ):
        refused = shop.http.post(f"{shop.root}/negotiate", json={"require": wishes})
        assert refused.status_code == 409
        body = refused.json()
        assert (body["kind"], body["close_code"]) == (kind, close_code)
    odd = shop.http.post(f"{shop.root}/negotiate", content=b"[1]")
    assert code(odd) == (400, "negotiation_invalid")


def test_dedupe_rows_come_in_pages(shop: Shop) -> None:
    for number in range(5):
        shop.send(f"m-{number}")

    rows: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = shop.get("/dedupe", limit=2, **after)
        rows += page["rows"]
        if page["next"] is None:
            break
        after = {"after": page["next"]}

    assert [row["client_message_id"] for row in rows] == [f"m-{number}" for number in range(5)]
    assert {row["ref"] for row in rows} == {"alerts"}
    assert rows[0]["expires_at"] > rows[0]["first_seen_at"]
    assert shop.get("/dedupe", as_of="2020-01-01T00:00:00Z")["rows"] == []
    assert code(shop.http.get(f"{shop.root}/dedupe?after=%21")) == (400, "after_invalid")


def test_the_orphan_check_of_a_sound_mesh_finds_nothing(shop: Shop) -> None:
    for number in range(3):
        shop.send(f"m-{number}")
        shop.send(f"d-{number}", kind="dm", ref="ann")

    assert shop.checked() == []
    rebuilt = shop.post("/rebuild", dry_run="")
    assert (rebuilt["missing"], rebuilt["written"]) == (0, 0)
    assert shop.post("/sweep") == {"swept": 0}
    metrics = shop.http.get("/metrics").text
    assert f'fencepost_mesh_sends_total{{mesh="{shop.name}"}} 6.0' in metrics
    assert f'fencepost_mesh_orphans{{mesh="{shop.name}"}} 0.0' in metrics
    assert "fencepost_mesh_orphan_checks_total" in metrics


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dedupe_retention_days": 6}, "mesh_invalid"),
        ({"dedupe_mode": "never"}, "mesh_invalid"),
        ({"color": "red"}, "mesh_invalid"),
    ],
)
def test_bad_settings_of_a_mesh_are_refused(
    http: httpx.Client, settings: dict[str, object], expected: str
) -> None:
    assert code(http.put("/v1/mesh/bad", json=settings)) == (400, expected)


def test_the_metrics_forget_a_mesh_that_is_gone(http: httpx.Client, shop: Shop) -> None:
    """A client that makes and deletes meshes does not crowd out those of others."""
    shop.send()
    before = http.get("/metrics").text
    assert http.delete(shop.root).status_code == 204

    assert f'{{mesh="{shop.name}"}}' in before
    assert f'{{mesh="{shop.name}"}}' not in http.get("/metrics").text


def test_bad_names_are_refused(http: httpx.Client, shop: Shop) -> None:
    assert code(http.put("/v1/mesh/a%20b")) == (400, "mesh_name_invalid")
    assert code(http.put(f"{shop.root}/members/{'x' * 65}")) == (400, "mesh_name_invalid")
