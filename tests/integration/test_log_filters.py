"""Events of the log by name and correlation, and the log from its end, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.engines import engine as engine
from tests.integration.log_support import ARROW, Client
from tests.serving import ServerProcess


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[Client]:
    client = Client(server_process.port)
    yield client
    client.close()


@pytest.fixture
def folder() -> str:
    """Where the streams of one test lie: the server is shared."""
    return f"filtered/{next(_NUMBERS)}"


_NUMBERS = count()


def event(name: str, correlation: str | None = None, **data: Any) -> dict[str, Any]:
    return {"name": name, "data": data, "meta": {"correlation": correlation}, "schema": 1}


def furnish(client: Client, folder: str) -> list[dict[str, Any]]:
    """Batches of events, other messages, bytes and a marker; every line of them in order."""
    for stream in ("a", "b"):
        client.create(f"{folder}/{stream}")
    client.create(f"{folder}/bytes", "text/plain")
    for number in range(20):
        kind = ("Ordered", "Paid", "Refunded")[number % 3]
        batch = [event(kind, f"c{number % 4}", n=number), number, event("Paid", n=number)]
        client.append(
            f"{folder}/{'ab'[number % 2]}",
            json.dumps(batch),
            Producer_Id="p",
            Producer_Epoch=str(number),
            Producer_Seq="0",
        )
    client.append(f"{folder}/bytes", '{"name":"Paid"}', "text/plain")
    client.append(f"{folder}/b", "[0]", Stream_Closed="true")
    return client.read_all(f"match={folder}/**")


def downwards(client: Client, query: str, **headers: str) -> list[dict[str, Any]]:
    """Every line from the end to the beginning, page by page."""
    lines: list[dict[str, Any]] = []
    until = ""
    while True:
        reply = client.log(f"{query}&order=desc{until}", **headers)
        assert reply.status == 200, reply.body
        lines += reply.lines()
        assert not reply.at_head
        if reply.next < 0:
            return lines
        assert until != f"&until={reply.next}"
        until = f"&until={reply.next}"


def test_the_log_is_read_from_its_end(client: Client, folder: str) -> None:
    lines = furnish(client, folder)

    for limit in (1, 2, 7, 1000):
        assert downwards(client, f"match={folder}/**&limit={limit}") == lines[::-1]


def test_the_whole_log_is_the_same_from_both_ends(client: Client, folder: str) -> None:
    furnish(client, folder)

    assert downwards(client, "limit=13") == client.read_all()[::-1]


def test_the_newest_message_of_a_stream_takes_one_request(client: Client, folder: str) -> None:
    lines = furnish(client, folder)

    reply = client.log(f"stream={folder}/a&order=desc&limit=1")

    newest = [line for line in lines if line["stream"] == f"{folder}/a"][-1]
    assert reply.lines() == [newest]
    assert reply.next < newest["position"]


def test_a_range_is_read_from_its_end(client: Client, folder: str) -> None:
    lines = furnish(client, folder)
    after, until = lines[4]["position"], lines[50]["position"]  # both inside an append

    reply = client.log(f"match={folder}/**&order=desc&after={after}&until={until}")

    assert reply.lines() == lines[5:51][::-1]
    assert reply.next == after


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize(
    ("query", "names", "correlation"),
    [
        ("name=Paid", {"Paid"}, None),
        ("name=Paid&name=Refunded", {"Paid", "Refunded"}, None),
        ("correlation=c2", None, "c2"),
        ("name=Ordered&correlation=c2", {"Ordered"}, "c2"),
        ("name=Nothing", {"Nothing"}, None),
    ],
)
def test_events_are_found_by_name_and_correlation(
    client: Client,
    folder: str,
    order: str,
    query: str,
    names: set[str] | None,
    correlation: str | None,
) -> None:
    lines = furnish(client, folder)

    def is_wanted(line: dict[str, Any]) -> bool:
        data = line.get("data")
        return (
            isinstance(data, dict)
            and (names is None or data["name"] in names)
            and (correlation is None or data["meta"]["correlation"] == correlation)
        )

    expected = [line for line in lines if is_wanted(line)]
    for limit in (3, 1000):
        asked = f"match={folder}/**&{query}&limit={limit}"
        if order == "desc":
            assert downwards(client, asked) == expected[::-1]
        else:
            assert client.read_all(asked) == expected


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_filtered_rows_are_the_same_in_arrow(client: Client, folder: str, order: str) -> None:
    furnish(client, folder)
    query = f"match={folder}/**&name=Paid&order={order}"

    lines = client.log(query).lines()
    table = pa.ipc.open_stream(client.log(query, Accept=ARROW).body).read_all()

    assert lines
    assert table["position"].to_pylist() == [line["position"] for line in lines]
    assert table["offset"].to_pylist() == [line["offset"] for line in lines]
    assert table["version"].to_pylist() == [line["version"] for line in lines]
    assert [json.loads(value) for value in table["value"].to_pylist()] == [
        line["data"] for line in lines
    ]
    assert table["producer_epoch"].to_pylist() == [line["producer"]["epoch"] for line in lines]


def test_markers_are_there_from_the_end_in_arrow_too(client: Client, folder: str) -> None:
    lines = furnish(client, folder)

    body = client.log(f"match={folder}/**&order=desc", Accept=ARROW).body

    table = pa.ipc.open_stream(body).read_all()
    assert table["marker"].to_pylist() == [line.get("marker") for line in lines[::-1]]


def test_a_waiting_reader_gets_the_event_that_it_waits_for(client: Client, folder: str) -> None:
    client.create(f"{folder}/a")
    after = int(client.ask("HEAD", "/v1/log").headers["log-head"])
    client.append(f"{folder}/a", json.dumps([event("Other"), 1]))
    client.append(f"{folder}/a", json.dumps([event("Wanted")]))

    reply = client.log(f"match={folder}/**&name=Wanted&after={after}&live=long-poll")

    assert [line["data"]["name"] for line in reply.lines()] == ["Wanted"]


def test_an_empty_log_has_no_end_to_read_from(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        client = Client(server.port)

        reply = client.log("order=desc")

        assert (reply.status, reply.lines(), reply.next) == (200, [], -1)
        client.close()


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_an_answer_looks_at_log_scan_max_positions(tmp_path: Path, order: str) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text("[limits]\nlog_scan_max = 10\n")
    with ServerProcess(tmp_path / "data", arguments=("--config", str(config))) as server:
        client = Client(server.port)
        client.create("long")
        client.append("long", json.dumps([event("Other")] * 25 + [event("Wanted")] * 2))

        reply = client.log(f"name=Nothing&order={order}")

        assert reply.lines() == []
        assert reply.next == (9 if order == "asc" else 16)
        client.close()


def test_large_messages_are_read_from_the_end_in_answers_that_fit(tmp_path: Path) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text("[limits]\nlog_bytes_max = 10000\n")
    with ServerProcess(tmp_path / "data", arguments=("--config", str(config))) as server:
        client = Client(server.port)
        client.create("large")
        texts = ["x" * (3_000 if number % 7 else 30_000) for number in range(30)]
        for text in texts:
            client.append("large", json.dumps([text]))

        found = [line["data"] for line in downwards(client, "stream=large")]

        assert found == texts[::-1]
        client.close()
