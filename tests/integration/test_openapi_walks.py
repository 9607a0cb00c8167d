"""Deliberate requests, one after the other, whose answers are as expected and as documented.

Made-up requests seldom get past the first check; these reach what comes behind it, accepted and
refused.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.openapi import HOME, Walk, serving


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    with serving(tmp_path_factory.mktemp("walks")) as process:
        yield Walk(process)


STREAM = "/v1/stream/{path}"
EMPTY, ONE = "0000000000000000_0000000000000000", "0000000000000001_0000000000000001"


def sent(epoch: int, seq: int, **more: str) -> dict[str, str]:
    """Producer headers, and others named with underscores."""
    headers = {"Producer-Id": "w", "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}
    return headers | {name.replace("_", "-"): value for name, value in more.items()}


def test_a_walk_along_a_stream_is_as_documented(walk: Walk) -> None:
    walk("201", "PUT", STREAM, path="walk", body=[], headers={"Stream-Retention-Messages": "100"})
    walk("200", "PUT", STREAM, path="walk", body=[], headers={"Stream-Retention-Messages": "100"})
    walk("409 stream_exists", "PUT", STREAM, path="walk", body="x", media_type="text/plain")
    walk("200", "POST", STREAM, path="walk", body=1, headers=sent(1, 0))
    walk("204", "POST", STREAM, path="walk", body=1, headers=sent(1, 0))
    walk("204", "POST", STREAM, path="walk", body=2, headers=sent(1, 0))
    strict = sent(1, 0, Producer_Strict="true")
    walk("409 producer_content_mismatch", "POST", STREAM, path="walk", body=2, headers=strict)
    walk("403 producer_epoch_stale", "POST", STREAM, path="walk", body=1, headers=sent(0, 0))
    walk("409 producer_sequence_gap", "POST", STREAM, path="walk", body=1, headers=sent(1, 7))
    walk("400 producer_epoch_start", "POST", STREAM, path="walk", body=1, headers=sent(2, 7))
    moved = sent(2, 0, Producer_If="0.0")
    walk("412 producer_moved", "POST", STREAM, path="walk", body=1, headers=moved)
    tail = {"If-Match": f'"{EMPTY}"'}
    walk("412 tail_moved", "POST", STREAM, path="walk", body=1, headers=tail)
    walk("412 tail_moved", "POST", STREAM, path="walk", body=1, headers={"If-None-Match": "*"})
    walk("204", "POST", STREAM, path="walk", body=1, headers={"If-Match": f'"{ONE}"'})
    walk("204", "POST", STREAM, path="walk", body=1, headers={"Stream-Seq": "b"})
    seq = {"Stream-Seq": "a"}
    walk("409 stream_seq_regression", "POST", STREAM, path="walk", body=1, headers=seq)
    key = {"Idempotency-Key": "k"}
    walk("204", "POST", STREAM, path="walk", body=1, headers=key)
    walk("200", "POST", STREAM, path="walk", body=1, headers=key)
    walk("409 idempotency_key_reused", "POST", STREAM, path="walk", body=2, headers=key)
    both = sent(1, 1, Idempotency_Key="k")
    walk("409 idempotency_key_conflict", "POST", STREAM, path="walk", body=1, headers=both)
    text: dict[str, Any] = {"body": "x", "media_type": "text/plain"}
    walk("409 content_type_mismatch", "POST", STREAM, path="walk", **text)
    walk("400 batch_empty", "POST", STREAM, path="walk", body=[])
    walk("400 json_invalid", "POST", STREAM, path="walk", body=b"{", media_type="application/json")
    walk("204", "POST", STREAM, path="walk", headers={"Stream-Closed": "true"})
    walk("204", "POST", STREAM, path="walk", headers={"Stream-Closed": "true"})
    walk("204", "POST", STREAM, path="walk", body=1, headers=sent(1, 0))
    walk("409 stream_closed", "POST", STREAM, path="walk", body=1)
    walk("404 stream_not_found", "POST", STREAM, path="nowhere", body=1)
    created = {"Stream-Auto-Create": "true"}
    walk("204", "POST", STREAM, path="made", body=1, headers=created)


def test_a_walk_of_readers_is_as_documented(walk: Walk) -> None:
    walk("201", "PUT", STREAM, path="read", body=[1, 2, 3])
    whole = walk("200", "GET", STREAM, path="read")
    tag, tail = whole.headers["etag"][0], whole.headers["stream-next-offset"][0]
    walk("304", "GET", STREAM, path="read", headers={"If-None-Match": tag})
    walk("200", "GET", STREAM, path="read", offset="now")
    walk("204", "GET", STREAM, path="read", offset=tail, live="long-poll")
    walk("200", "GET", STREAM, path="read", offset="-1", live="long-poll", cursor="1")
    walk("200", "GET", STREAM, path="read", offset="-1", live="sse")
    walk("400 offset_missing", "GET", STREAM, path="read", live="sse")
    walk("400 offset_invalid", "GET", STREAM, path="read", offset="9" * 16 + "_" + "9" * 16)
    walk("200", "HEAD", STREAM, path="read")
    walk("204", "POST", STREAM, path="read", truncate="", before=ONE)
    walk("410 offset_truncated", "GET", STREAM, path="read", offset=EMPTY)
    walk("400 before_missing", "POST", STREAM, path="read", truncate="")
    walk("400 body_unexpected", "POST", STREAM, path="read", truncate="", before="now", body=1)
    fork = {"Stream-Forked-From": "/v1/stream/read"}
    walk("201", "PUT", STREAM, path="fork", headers=fork)
    walk("204", "DELETE", STREAM, path="read")
    for method in ("GET", "DELETE"):
        walk("410 stream_deleted", method, STREAM, path="read")
    walk("410", "HEAD", STREAM, path="read")
    walk("410 stream_deleted", "POST", STREAM, path="read", body=1)
    walk("409 path_blocked", "PUT", STREAM, path="read", body=[])
    walk("409 fork_source_deleted", "PUT", STREAM, path="fork2", headers=fork)
    gone = {"Stream-Forked-From": "/v1/stream/none"}
    walk("404 fork_source_not_found", "PUT", STREAM, path="fork2", headers=gone)
    walk("204", "DELETE", STREAM, path="fork")
    walk("404 stream_not_found", "GET", STREAM, path="read")


def test_a_walk_of_books_is_as_documented(walk: Walk) -> None:
    def commit(expected: str, stream: str = "books/a", **fields: Any) -> Any:
        item = {"stream": stream, "content_type": "application/json", **fields}
        return walk(expected, "POST", "/v1/commit", body={"appends": [item]}).json()

    walk(
        "200", "POST", STREAM, path="books/a", body=1, headers=sent(0, 0, Stream_Auto_Create="true")
    )
    assert commit("200", data=2, books="close")["appends"][0]["books"] == "closed"
    walk("200", "HEAD", STREAM, path="books/a")
    walk("409 books_closed", "POST", STREAM, path="books/a", body=1)
    walk("204", "POST", STREAM, path="books/a", body=1, headers=sent(0, 0))
    commit("409 books_closed", data=1)
    commit("409 books_closed", books="open")
    commit("412 tail_moved", books="open", if_match="7")
    commit("400 offset_invalid", truncate_before="9" * 16 + "_" + "9" * 16)
    commit("400 body_empty")
    commit("200", truncate_before="now")
    commit("200", books="open", if_match="1")
    group = {"sources": ["books/*"]}
    walk("201", "PUT", "/v1/groups/{group}", group="books", body=group)
    assert commit("409 books_pending", books="close")["group"] == "books"
    commit("200", "books/new", auto_create=True, books="close")


def test_a_walk_of_commits_is_as_documented(walk: Walk) -> None:
    def item(stream: str, data: Any = 1, **more: Any) -> dict[str, Any]:
        kind = {"stream": stream, "content_type": "application/json", "auto_create": True}
        return kind | ({} if data is None else {"data": data}) | more

    def commit(expected: str, *items: dict[str, Any], key: str | None = None) -> Any:
        headers = {} if key is None else {"Idempotency-Key": key}
        body = {"appends": list(items)}
        return walk(expected, "POST", "/v1/commit", headers=headers, body=body).json()

    def stage(
        expected: str, part: str, chunk: str, body: Any, media: str = "application/json"
    ) -> None:
        path = "/v1/staging/{txn}/{part}"
        walk(expected, "POST", path, txn="t", part=part, chunk=chunk, body=body, media_type=media)

    first, second = ({"id": "w", "epoch": 0, "seq": seq} for seq in (0, 1))
    assert not commit("200", item("c1"), item("c2", producer=first), key="k")["duplicate"]
    assert commit("200", item("c1"), item("c2", producer=first), key="k")["duplicate"]
    commit("409 idempotency_key_reused", item("c1", 2), key="k")
    close = item("c2", None, close=True)
    commit("409 commit_partial", item("c2", producer=first), close)
    commit("200", close)
    assert commit("200", item("c2", producer=first))["duplicate"]
    commit("409 stream_closed", item("c1"), item("c2", producer=second))
    assert commit("404 stream_not_found", item("c1"), item("c3", auto_create=False))["item"] == 1
    commit("412 tail_moved", item("c1", if_none_match="*"))
    commit("412 producer_moved", item("c1", producer=first, producer_if="3.4"))
    commit("409 producer_sequence_gap", item("c1", producer=second))
    commit("409 content_type_mismatch", item("c1", None, data_base64="eA==", content_type="a/b"))
    commit("400 base64_invalid", item("c1", None, data_base64="?"))
    commit("400 commit_empty")
    stage("201", "p", "0", [1])
    stage("200", "p", "0", [1])
    stage("409 chunk_conflict", "p", "0", [2])
    stage("201", "p", "2", [3])
    parts = [{"txn": "t", "part": "p"}]
    commit("409 part_incomplete", item("c4", None, parts=parts))
    stage("201", "p", "1", [2])
    commit("409 part_overfull", item("c4", None, parts=[{**parts[0], "chunks": 2}]))
    commit("400 part_repeated", item("c4", None, parts=parts * 2))
    commit("200", item("c4", None, parts=parts))
    commit("409 part_committed", item("c5", None, parts=parts))
    stage("409 part_committed", "p", "3", [4])
    stage("201", "q", "0", "x", "text/plain")
    commit("409 part_type_mismatch", item("c4", None, parts=[{"txn": "t", "part": "q"}]))
    commit("409 part_missing", item("c4", None, parts=[{"txn": "t", "part": "none"}]))


def test_a_walk_of_writers_is_as_documented(walk: Walk) -> None:
    writer, part = "/v1/writers/{name}", "/v1/staging/{txn}/{part}"

    def publish(expected: str, batch: int, *items: dict[str, Any], **more: Any) -> Any:
        who = {"name": "w", "query": "q", "epoch": 2, "batch": batch, "digest": "d", **more}
        body = {"appends": list(items), "writer": who}
        return walk(expected, "POST", "/v1/commit", body=body).json()

    walk("404 writer_not_found", "GET", writer, name="w")
    publish("409 writer_not_found", 0)
    assert walk("200", "POST", writer, name="w", body={"query": "q"}).json()["batch"] is None
    assert walk("200", "POST", writer, name="w", body={"query": "q"}).json()["epoch"] == 2
    item = {"stream": "pub", "content_type": "application/json", "data": 1, "auto_create": True}
    assert publish("200", 0, item)["batch"] == 0
    assert publish("200", 0, item)["match"] is True
    assert publish("200", 0, item, digest="e")["match"] is False
    assert publish("200", 3)["batch"] == 3
    assert publish("409 writer_history_gone", 1)["batch"] == 3
    read = {"after": 7, "until": 9}
    assert publish("200", 4, range=read)["batch"] == 4
    assert publish("200", 4, range=read)["range"] == read
    other = publish("409 writer_range_mismatch", 4, range={"until": 12})
    assert (other["published"], other["sent"]) == (read, {"after": None, "until": 12})
    publish("400 writer_invalid", 5, range={"after": 7, "until": 6})
    history = "/v1/writer-history/{name}"
    shown = walk("200", "GET", history, name="w", limit="2").json()
    assert [one["batch"] for one in shown["batches"]] == [4, 3]
    rest = walk("200", "GET", history, name="w", after=shown["next"]).json()
    assert [one["batch"] for one in rest["batches"]] == [0]
    walk("400 after_invalid", "GET", history, name="w", after="x")
    walk("404 writer_not_found", "GET", history, name="none")
    assert publish("409 writer_fenced", 5, epoch=1)["epoch"] == 2
    assert publish("409 writer_query_changed", 5, query="r")["batch"] == 4
    publish("400 writer_invalid", 5, query="")
    changed = walk("409 writer_query_changed", "POST", writer, name="w", body={"query": "r"})
    assert changed.json()["query"] == "q"
    body = {"query": "r", "allow_new": True}
    assert walk("200", "POST", writer, name="w", body=body).json()["batch"] is None
    walk("400 writer_invalid", "POST", writer, name="w", body={"query": ""})
    walk("200", "GET", writer, name="w")
    page = walk("200", "GET", "/v1/writers", match="*", limit="1").json()
    assert page["writers"][0]["name"] == "w"
    walk("400 limit_invalid", "GET", "/v1/writers", limit="0")
    walk("204", "DELETE", writer, name="w")
    walk("404 writer_not_found", "DELETE", writer, name="w")
    walk("201", "POST", part, txn="u", part="p", body=[1])
    walk("204", "DELETE", part, txn="u", part="p")
    walk("404 part_missing", "DELETE", part, txn="u", part="p")


def test_a_walk_of_workers_is_as_documented(walk: Walk) -> None:
    root = "/v1/stream/__ds/subscriptions/{id}"
    walk("201", "PUT", STREAM, path="wakes", body=[])
    config = {"type": "pull-wake", "pattern": "jobs-*", "wake_stream": "wakes"}
    walk("201", "PUT", root, id="s", body=config)
    walk("200", "PUT", root, id="s", body=config)
    walk("409 subscription_exists", "PUT", root, id="s", body=config | {"pattern": "x"})
    hook = {"type": "webhook", "pattern": "none", "webhook": {"url": HOME}}
    walk("201", "PUT", root, id="hooked", body=hook)
    walk("200", "GET", root, id="hooked")
    listed = walk("200", "GET", "/v1/subscriptions", limit="1").json()
    assert ([one["id"] for one in listed["subscriptions"]], listed["next"]) == (
        ["hooked"],
        "hooked",
    )
    walk("200", "GET", "/v1/subscriptions", after="hooked")
    walk("400 limit_invalid", "GET", "/v1/subscriptions", limit="none")
    inside = {"type": "webhook", "pattern": "none", "webhook": {"url": "http://10.0.0.1/"}}
    walk("400 webhook_url_rejected", "PUT", root, id="other", body=inside)
    claim = {"worker": "ann"}
    walk("409 not_claimable", "POST", root + "/claim", id="hooked", body=claim)
    walk("409 no_pending_work", "POST", root + "/claim", id="s", body=claim)
    walk("201", "PUT", STREAM, path="jobs-1", body=[1])
    wake = walk("200", "POST", root + "/claim", id="s", body=claim).json()
    walk("409 already_claimed", "POST", root + "/claim", id="s", body={"worker": "ben"})
    name = {"wake_id": wake["wake_id"], "generation": wake["generation"]}
    token = {"Authorization": f"Bearer {wake['token']}"}
    acks = {"acks": [{"stream": "jobs-1", "offset": wake["streams"][0]["tail_offset"]}]}
    walk("401 token_missing", "POST", root + "/ack", id="s", body=name | acks)
    walk("401 token_invalid", "POST", root + "/ack", id="hooked", body=name, headers=token)
    walk("200", "POST", root + "/ack", id="s", body=name | acks, headers=token)
    walk("204", "POST", root + "/release", id="s", body=name, headers=token)
    walk("409 fenced", "POST", root + "/release", id="s", body=name, headers=token)
    walk(
        "409 fenced", "POST", root + "/callback", id="s", body=name | {"done": True}, headers=token
    )
    walk("204", "POST", root + "/streams", id="s", body={"streams": ["extra"]})
    walk("204", "DELETE", root + "/streams/{path}", id="s", path="extra")
    walk("204", "DELETE", root, id="s")
    walk("404 subscription_not_found", "GET", root, id="s")


def test_a_walk_along_the_log_is_as_documented(walk: Walk) -> None:
    walk("201", "PUT", STREAM, path="logged", body=[1, 2])
    walk("200", "POST", STREAM, path="logged", body=3, headers=sent(0, 0, Idempotency_Key="k"))
    walk("200", "GET", "/v1/log", stream="logged")
    for live in ("sse", "long-poll"):
        walk("200", "GET", "/v1/log", stream="logged", live=live)
    arrow = {"Accept": "application/vnd.apache.arrow.stream"}
    walk("200", "GET", "/v1/log", stream="logged", headers=arrow)
    walk("406 not_acceptable", "GET", "/v1/log", headers={"Accept": "image/png"})
    walk("400 after_beyond_head", "GET", "/v1/log", after=str(2**53 - 1))
    plan = walk("200", "GET", "/v1/log/plan", match="log*", rows_max="2", parts="2", at="0").json()
    assert plan["rows"] == 2
    for path, key in (
        ("/v1/streams", "streams"),
        ("/v1/producers", "producers"),
        ("/v1/keys", "keys"),
    ):
        page = walk("200", "GET", path, limit="1").json()
        assert len(page[key]) == 1
        walk("200", "GET", path, limit="1", after=page["next"])
