"""Books over HTTP and through the client: refusals by name, races, and who may do it."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import BooksClosedError, BooksPendingError, CommitAppend
from tests.engines import engine as engine
from tests.integration.auth_support import ALL, ROOT, place, principal
from tests.integration.groups_support import Team
from tests.integration.raw import Connection, code_of
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Reply

JSON = "application/json"
_names = itertools.count()


@pytest.fixture
def wire(server_process: ServerProcess) -> Iterator[Connection]:
    with Connection(server_process.port) as connection:
        yield connection


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[fencepost.Client]:
    with fencepost.connect(server_process.url) as found:
        yield found


def fresh() -> str:
    """A path that no other test uses."""
    return f"books-{next(_names)}"


def commit(wire: Connection, **item: Any) -> Reply:
    body = json.dumps({"appends": [{"content_type": JSON, **item}]}).encode()
    return wire.ask("POST", "/v1/commit", body=body)


def post(wire: Connection, path: str, *headers: str) -> Reply:
    return wire.ask("POST", f"/v1/stream/{path}", f"Content-Type: {JSON}", *headers, body=b"1")


def test_closed_books_are_shown_and_refuse_every_append(wire: Connection) -> None:
    path = fresh()
    producer = ("Producer-Id: p", "Producer-Epoch: 0", "Producer-Seq: 0")
    key = "Idempotency-Key: k"
    assert post(wire, path, "Stream-Auto-Create: true", *producer).status == 200
    assert post(wire, path, key).status == 204

    closed = commit(wire, stream=path, data={"name": "$closed"}, books="close")

    [append] = json.loads(closed.body)["appends"]
    assert append["books"] == "closed"
    head = wire.ask("HEAD", f"/v1/stream/{path}")
    assert head.headers["stream-books"] == "closed"
    assert "stream-closed" not in head.headers
    [listed] = json.loads(wire.ask("GET", f"/v1/streams?match={path}").body)["streams"]
    assert (listed["books"], listed["closed"]) == ("closed", False)
    late = post(wire, path)
    assert (late.status, code_of(late)) == (409, "books_closed")
    assert late.headers["stream-books"] == "closed"
    assert late.headers["stream-next-offset"] == head.headers["stream-next-offset"]
    for again in (post(wire, path, *producer), post(wire, path, key)):
        assert again.status in (200, 204)
        assert again.headers["stream-books"] == "closed"
    refused = commit(wire, stream=path, data=1)
    assert (refused.status, code_of(refused)) == (409, "books_closed")
    assert json.loads(refused.body)["item"] == 0


def test_a_period_ends_and_the_next_one_begins_in_one_append(wire: Connection) -> None:
    path = fresh()
    post(wire, path, "Stream-Auto-Create: true")
    commit(wire, stream=path, data={"name": "$closed"}, books="close")
    opened = {"name": "$opened"}

    by_accident = commit(wire, stream=path, data=opened, books="open")
    done = commit(wire, stream=path, data=opened, books="open", truncate_before="now", if_match="1")

    assert (by_accident.status, code_of(by_accident)) == (409, "books_closed")
    assert done.status == 200
    head = wire.ask("HEAD", f"/v1/stream/{path}")
    assert "stream-books" not in head.headers
    assert head.headers["stream-version"] == "2"
    assert json.loads(wire.ask("GET", f"/v1/stream/{path}").body) == [opened]


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"books": "shut"}, "commit_invalid"),
        ({"books": True}, "commit_invalid"),
        ({"truncate_before": "soon"}, "offset_invalid"),
        ({"truncate_before": ""}, "offset_invalid"),
        ({"truncate_before": "1\u0000"}, "offset_invalid"),
        ({"truncate_before": 7}, "commit_invalid"),
        ({"truncate_before": "9" * 16 + "_" + "9" * 16}, "offset_invalid"),
        ({"truncate_before": "0" * 15 + "1_" + "9" * 16}, "offset_invalid"),
        ({"books": "close", "producer": {"id": "p", "epoch": 0, "seq": 0}}, "commit_invalid"),
        ({}, "body_empty"),
    ],
)
def test_what_is_not_about_books_is_refused_and_changes_nothing(
    wire: Connection, item: dict[str, Any], code: str
) -> None:
    path = fresh()
    post(wire, path, "Stream-Auto-Create: true")
    before = wire.ask("HEAD", f"/v1/stream/{path}").headers

    reply = commit(wire, stream=path, **item)

    assert (reply.status, code_of(reply)) == (400, code)
    after = wire.ask("HEAD", f"/v1/stream/{path}").headers
    assert after["stream-first-offset"] == before["stream-first-offset"]
    assert "stream-books" not in after


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("__audit", (400, "path_reserved")),
        ("__groups/x", (400, "path_reserved")),
        ("__ds/x", (400, "path_reserved")),
        ("__mesh/x/y", (403, "mesh_managed")),
    ],
)
def test_the_servers_own_streams_have_no_books(
    wire: Connection, path: str, refused: tuple[int, str]
) -> None:
    for item in ({"books": "close"}, {"truncate_before": "now"}):
        reply = commit(wire, stream=path, **item)

        assert (reply.status, code_of(reply)) == refused


def test_a_group_with_work_left_is_named_until_it_is_done(wire: Connection) -> None:
    team = Team(wire)
    team.fill("a")
    path = f"{team.name}/a"

    for item in ({"books": "close"}, {"truncate_before": "now"}):
        pending = commit(wire, stream=path, **item)
        assert (pending.status, code_of(pending)) == (409, "books_pending")
        assert json.loads(pending.body)["group"] == team.name
    [lease] = team.claim()
    assert code_of(commit(wire, stream=path, books="close")) == "books_pending"
    team.ack(lease)

    assert commit(wire, stream=path, books="close").status == 200
    assert commit(wire, stream=path, truncate_before="now").status == 200
    assert team.get("streams")["streams"] == [], "the stream is retired, and its target with it"


def test_appends_that_race_a_close_are_before_it_or_refused(
    server_process: ServerProcess, wire: Connection
) -> None:
    path = fresh()
    post(wire, path, "Stream-Auto-Create: true")
    begun = threading.Barrier(5)
    statuses: list[list[int]] = [[] for _ in range(4)]

    def write(own: list[int]) -> None:
        with Connection(server_process.port) as connection:
            begun.wait()
            while not own or own[-1] == 204:
                own.append(post(connection, path).status)

    writers = [threading.Thread(target=write, args=(own,)) for own in statuses]
    for writer in writers:
        writer.start()
    begun.wait()
    closed = commit(wire, stream=path, data={"name": "$closed"}, books="close")
    for writer in writers:
        writer.join()

    assert closed.status == 200
    assert {own[-1] for own in statuses} == {409}
    accepted = sum(own.count(204) for own in statuses)
    messages = json.loads(wire.ask("GET", f"/v1/stream/{path}").body)
    assert messages == [1] * (accepted + 1) + [{"name": "$closed"}]


def test_of_many_that_open_the_same_books_one_does(
    server_process: ServerProcess, wire: Connection
) -> None:
    path = fresh()
    post(wire, path, "Stream-Auto-Create: true")
    commit(wire, stream=path, books="close")
    begun = threading.Barrier(6)
    replies: list[Reply] = []

    def open_books() -> None:
        with Connection(server_process.port) as connection:
            begun.wait()
            item: dict[str, Any] = {"data": {"name": "$opened"}, "truncate_before": "now"}
            replies.append(commit(connection, stream=path, books="open", if_match="0", **item))

    threads = [threading.Thread(target=open_books) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(reply.status for reply in replies) == [200, 412, 412, 412, 412, 412]
    messages = json.loads(wire.ask("GET", f"/v1/stream/{path}").body)
    assert messages == [{"name": "$opened"}]


def test_a_close_that_races_the_last_ack_cuts_no_work_off(
    server_process: ServerProcess, wire: Connection
) -> None:
    team = Team(wire)
    team.fill(*(f"s{n}" for n in range(8)))
    leases = team.claim(streams_max=8)
    replies: dict[str, list[Reply]] = {lease["target"]: [] for lease in leases}

    def close(path: str) -> None:
        with Connection(server_process.port) as connection:
            while not replies[path] or replies[path][-1].status == 409:
                replies[path].append(commit(connection, stream=path, books="close"))

    closers = [threading.Thread(target=close, args=(path,)) for path in replies]
    for closer in closers:
        closer.start()
    for lease in leases:
        assert team.ack(lease)["outcome"] == "acked"
    for closer in closers:
        closer.join()

    for path, found in replies.items():
        assert found[-1].status == 200, path
        assert {code_of(reply) for reply in found[:-1]} <= {"books_pending"}
    assert {row["state"] for row in team.get("streams")["streams"]} == {"idle"}


def test_the_client_closes_opens_and_shows_books(client: fencepost.Client) -> None:
    name = fresh()
    group = client.group(name)
    group.make([f"{name}/**"])
    stream = client.stream(f"{name}/a")
    stream.append({"n": 1}, auto_create=True)
    closing = CommitAppend(stream=stream.path, messages=[{"name": "$closed"}], books="close")

    with pytest.raises(BooksPendingError) as pending:
        client.commit([closing])
    [lease] = group.claim("ann").leases
    group.ack(fencepost.LeaseAck(token=lease.token, at=lease.read_to))
    closed = client.commit([closing])

    assert pending.value.group == name
    assert closed.appends[0].books == "closed"
    assert stream.head().books_closed
    with pytest.raises(BooksClosedError) as refused:
        stream.append({"n": 2})
    tail = stream.head().next_offset
    assert refused.value.next_offset == tail
    [lease] = group.claim("ann").leases
    group.ack(fencepost.LeaseAck(token=lease.token, at=lease.read_to))
    client.commit(
        [CommitAppend(stream=stream.path, books="open", if_match=tail, truncate_before="now")]
    )
    assert not stream.head().books_closed
    assert stream.head().first_offset == tail
    stream.append({"n": 3})


VERBS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "closer": ({"books": "close"}, ["close"]),
    "opener": ({"books": "open", "if_match": "0"}, ["close"]),
    "cutter": ({"truncate_before": "now"}, ["delete"]),
    "both": ({"books": "open", "if_match": "0", "truncate_before": "now"}, ["close", "delete"]),
    "writer": ({"books": "open", "if_match": "0", "data": 1}, ["close", "append"]),
}


def test_books_need_close_and_a_cut_needs_delete(tmp_path: Path) -> None:
    people = [
        principal(f"{name}-{left_out}", ("**", [v for v in ALL if v != left_out]))
        for name, (_, verbs) in VERBS.items()
        for left_out in verbs
    ]
    people += [principal(name, ("**", verbs)) for name, (_, verbs) in VERBS.items()]
    with place(tmp_path, ROOT, *people) as here:
        for name, (fields, verbs) in VERBS.items():
            here("root").append(name, stream_auto_create="true")
            item = {"stream": name, "content_type": JSON, **fields}
            for left_out in verbs:
                reply = here(f"{name}-{left_out}").commit(item)
                assert (reply.status_code, reply.json()["code"]) == (403, "forbidden")
            assert here(name).commit(item).status_code == 200
