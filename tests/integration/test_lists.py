"""Lists of streams, producers and keys: complete and stable page by page, narrowed by patterns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.engines import engine as engine
from tests.integration.log_support import Client
from tests.serving import ServerProcess


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[Client]:
    client = Client(server_process.port)
    yield client
    client.close()


def pages(client: Client, name: str, query: str = "") -> Iterator[list[dict[str, Any]]]:
    after = ""
    while True:
        reply = client.ask(
            "GET", f"/v1/{name}?{query}" + (f"&after={quote(after)}" if after else "")
        )
        assert reply.status == 200, reply.body
        page = reply.json()
        yield page[name]
        if page["next"] is None:
            return
        assert page["next"] != after
        after = page["next"]


def everything(client: Client, name: str, query: str = "") -> list[dict[str, Any]]:
    return [entry for page in pages(client, name, query) for entry in page]


def test_a_stream_is_listed_with_what_there_is_to_know(client: Client) -> None:
    client.create("listed/full", "application/json; charset=utf-8", Stream_TTL="3600")
    tail = client.append("listed/full", "[1,22]", Stream_Closed="true").headers[
        "stream-next-offset"
    ]
    client.create("listed/fork", Stream_Forked_From="/v1/stream/listed/full")
    client.create("listed/plain", "text/plain", Stream_Expires_At="2100-01-01T00:00:00Z")

    fork, full, plain = everything(client, "streams", "match=listed/*")

    assert full["path"] == "listed/full"
    assert full["content_type"] == "application/json; charset=utf-8"
    assert (full["tail"], full["version"], full["size_bytes"]) == (tail, 1, 3)
    assert (full["closed"], full["ttl_seconds"], full["expires_at"]) == (True, 3600, None)
    assert full["created"] <= full["updated"]
    assert "forked_from" not in full
    assert fork["forked_from"] == "listed/full"
    assert fork["version"] == 1
    assert (plain["version"], plain["tail"]) == (-1, "0000000000000000_0000000000000000")
    assert plain["expires_at"] == "2100-01-01T00:00:00.000Z"
    assert full["id"] < fork["id"] < plain["id"]


def test_pages_hold_every_stream_once_in_the_order_of_paths(client: Client) -> None:
    paths = [*sorted(f"paged/{number % 5}/{number}" for number in range(23)), "paged0", "päged"]
    for path in paths:
        client.create(path)

    listed = [
        [entry["path"] for entry in page] for page in pages(client, "streams", "match=p*&limit=4")
    ]
    nested = [entry["path"] for entry in everything(client, "streams", "match=paged/**&limit=4")]

    assert all(len(page) <= 4 for page in listed)
    assert nested == sorted(path for path in paths if path.startswith("paged/"))
    assert [path for page in listed for path in page] == ["paged0", "päged"]
    assert [entry["path"] for entry in everything(client, "streams", "match=*/3/*")] == sorted(
        path for path in paths if path.startswith("paged/3/")
    )
    exact = everything(client, "streams", "match=paged/0/0")
    assert [entry["path"] for entry in exact] == ["paged/0/0"]


def test_streams_made_and_removed_between_pages_disturb_no_other(client: Client) -> None:
    for number in range(6):
        client.create(f"moving/{number}")
    following = pages(client, "streams", "match=moving/*&limit=2")
    first = next(following)

    client.ask("DELETE", "/v1/stream/moving/1")
    client.ask("DELETE", "/v1/stream/moving/4")
    client.create("moving/0x")
    rest = [entry["path"] for page in following for entry in page]

    assert [entry["path"] for entry in first] == ["moving/0", "moving/1"]
    assert rest == ["moving/2", "moving/3", "moving/5"]


def test_deleted_streams_are_not_listed(client: Client) -> None:
    client.create("away/a")
    client.create("away/b")
    client.create("away/fork", Stream_Forked_From="/v1/stream/away/b")
    client.ask("DELETE", "/v1/stream/away/a")
    client.ask("DELETE", "/v1/stream/away/b")

    assert [e["path"] for e in everything(client, "streams", "match=away/*")] == ["away/fork"]


def send(client: Client, path: str, producer: str, epoch: int, seq: int) -> str:
    reply = client.append(
        path,
        '"x"',
        Producer_Id=producer,
        Producer_Epoch=str(epoch),
        Producer_Seq=str(seq),
    )
    return reply.headers["stream-next-offset"]


def test_producers_are_listed_by_stream_and_id_with_where_they_are(client: Client) -> None:
    for path in ("held/b", "held/a", "held/none"):
        client.create(path)
    send(client, "held/b", "task:2", 0, 0)
    send(client, "held/a", "task:1", 0, 0)
    before = send(client, "held/a", "worker", 3, 0)
    send(client, "held/a", "worker", 3, 1)

    listed = everything(client, "producers", "stream=held/*&limit=1")

    assert [(entry["stream"], entry["id"]) for entry in listed] == [
        ("held/a", "task:1"),
        ("held/a", "worker"),
        ("held/b", "task:2"),
    ]
    assert (listed[1]["epoch"], listed[1]["seq"], listed[1]["offset"]) == (3, 1, before)
    tasks = everything(client, "producers", "match=task:*&stream=held/**")
    assert [entry["id"] for entry in tasks] == ["task:1", "task:2"]
    only = everything(client, "producers", "stream=held/b")
    assert [entry["id"] for entry in only] == ["task:2"]


def test_many_producers_of_one_stream_come_in_pages(client: Client) -> None:
    client.create("crowd")
    for number in range(25):
        send(client, "crowd", f"p{number:03d}", 0, 0)

    listed = list(pages(client, "producers", "stream=crowd&limit=10"))

    assert [len(page) for page in listed] == [10, 10, 5]
    assert [e["id"] for page in listed for e in page] == [f"p{n:03d}" for n in range(25)]
    some = everything(client, "producers", "stream=crowd&match=p*5&limit=2")
    assert [entry["id"] for entry in some] == ["p005", "p015"]


def test_keys_are_listed_with_what_they_stand_for(client: Client) -> None:
    client.create("keyed")
    positions = [
        int(client.append("keyed", f'"{n}"', Idempotency_Key=f"k{n}").headers["stream-position"])
        for n in range(5)
    ]

    listed = everything(client, "keys", "limit=2")

    mine = [entry for entry in listed if entry["stream"] == "keyed"]
    assert [entry["key"] for entry in mine] == [f"k{n}" for n in range(5)]
    assert [entry["position"] for entry in mine] == positions
    assert everything(client, "keys", "as_of=1") == []


def test_a_key_that_outlives_the_calendar_is_listed_without_an_end(tmp_path: Path) -> None:
    retention = {"FENCEPOST_STORE_KEY_RETENTION_S": str(10**12)}
    with ServerProcess(tmp_path, environment=retention) as server:
        client = Client(server.port)
        client.create("s")
        client.append("s", "1", Idempotency_Key="k")

        [entry] = everything(client, "keys")

        client.close()
    assert (entry["key"], entry["expires"]) == ("k", None)


BAD = [
    ("streams?limit=0", "limit_invalid"),
    ("streams?limit=1001", "limit_invalid"),
    ("streams?limit=x", "limit_invalid"),
    ("streams?match=a//b", "match_invalid"),
    ("streams?match=", "match_invalid"),
    ("streams?prefix=a", "parameter_unknown"),
    ("streams?match=a&match=b", "query_repeated"),
    ("streams?match=%ff", "query_invalid"),
    ("producers?after=%21", "after_invalid"),
    ("producers?after=e30", "after_invalid"),
    ("producers?after=WyJhIl0", "after_invalid"),
    ("producers?stream=/", "match_invalid"),
    ("producers?limit=-1", "limit_invalid"),
    ("keys?after=WyJ4IiwiIiwiIl0", "after_invalid"),
    ("keys?as_of=soon", "as_of_invalid"),
    ("keys?match=a", "parameter_unknown"),
]


@pytest.mark.parametrize(("target", "code"), BAD)
def test_a_bad_parameter_of_a_list_is_refused_by_name(
    client: Client, target: str, code: str
) -> None:
    reply = client.ask("GET", f"/v1/{target}")

    assert (reply.status, reply.json()["code"]) == (400, code)
