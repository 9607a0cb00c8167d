"""Following the log while others write: every message once, in order, nothing below the head."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import engine as engine
from tests.engines import serving_on
from tests.integration.log_support import Client
from tests.serving import ServerProcess

WRITERS = 8
STREAMS = 5
APPENDS = 60
LAST = "end"


@pytest.fixture
def server(engine: str, tmp_path: Path) -> Iterator[ServerProcess]:
    with serving_on(engine, tmp_path / "data", "--long-poll-ms", "2000") as server:
        yield server


class Writers:
    """Eight writers on five streams; what they wrote, each in its own order."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sent: list[list[str]] = [[] for _ in range(WRITERS)]
        self._threads = [
            threading.Thread(target=self._write, args=(number,)) for number in range(WRITERS)
        ]

    def __enter__(self) -> Writers:
        client = Client(self._port)
        for number in range(STREAMS):
            client.create(f"busy/{number}")
        client.close()
        for thread in self._threads:
            thread.start()
        return self

    def finish(self) -> None:
        """Wait for all of them, then write the message that tells followers to stop."""
        for thread in self._threads:
            thread.join()
        client = Client(self._port)
        client.append("busy/0", json.dumps(LAST))
        client.close()

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()

    def _write(self, number: int) -> None:
        client = Client(self._port)
        for turn in range(APPENDS):
            messages = [f"{number}.{turn}.{index}" for index in range(1 + turn % 3)]
            client.append(f"busy/{(number + turn) % STREAMS}", json.dumps(messages))
            self.sent[number] += messages
        client.close()


def check(lines: list[dict[str, Any]], sent: list[list[str]]) -> None:
    """Every message exactly once, positions growing without a gap, each writer in its order."""
    positions = [line["position"] for line in lines]
    assert positions == list(range(positions[0], positions[0] + len(positions)))
    told = [line["data"] for line in lines]
    assert told[-1] == LAST
    assert sorted(told[:-1]) == sorted(message for messages in sent for message in messages)
    for number, messages in enumerate(sent):
        assert [text for text in told if text.startswith(f"{number}.")] == messages
    for stream in {line["stream"] for line in lines}:
        versions = [line["version"] for line in lines if line["stream"] == stream]
        assert versions == list(range(len(versions)))


def test_a_long_poll_follower_sees_every_message_once_and_in_order(server: ServerProcess) -> None:
    with Writers(server.port) as writers:
        finishing = threading.Thread(target=writers.finish)
        finishing.start()
        client = Client(server.port)
        lines: list[dict[str, Any]] = []
        after = -1
        while not lines or lines[-1]["data"] != LAST:
            reply = client.log(f"live=long-poll&after={after}&limit=100")
            assert reply.status in (200, 204)
            more = reply.lines()
            assert all(line["position"] > after for line in more)
            lines += more
            after = reply.next
        finishing.join()

    check(lines, writers.sent)
    assert client.read_all() == lines
    client.close()


def test_an_sse_follower_sees_every_message_once_and_in_order(server: ServerProcess) -> None:
    with Writers(server.port) as writers:
        finishing = threading.Thread(target=writers.finish)
        finishing.start()
        lines = follow(server.port, "live=sse&limit=50")
        finishing.join()

    check(lines, writers.sent)


def test_an_sse_follower_resumes_after_its_last_event(server: ServerProcess) -> None:
    with Writers(server.port) as writers:
        writers.finish()
    seen = follow(server.port, "live=sse&limit=40", rows_max=40)

    rest = follow(server.port, "live=sse", {"Last-Event-ID": str(seen[-1]["position"])})

    check(seen + rest, writers.sent)


def test_a_follower_of_one_stream_is_told_of_that_stream_only(server: ServerProcess) -> None:
    with Writers(server.port) as writers:
        finishing = threading.Thread(target=writers.finish)
        finishing.start()
        lines = follow(server.port, "live=sse&stream=busy/0")
        finishing.join()
    client = Client(server.port)

    assert lines == client.read_all("stream=busy/0")
    assert [line["version"] for line in lines] == list(range(len(lines)))
    client.close()


def test_a_follower_stops_at_its_until(server: ServerProcess) -> None:
    client = Client(server.port)
    client.create("some")
    client.append("some", "[0,1,2,3]")

    assert [line["data"] for line in follow(server.port, "live=sse&until=2")] == [0, 1, 2]
    assert client.log("live=long-poll&after=2&until=2").status == 204
    client.close()


def test_waiting_readers_are_let_go_when_the_server_stops(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", arguments=["--long-poll-ms", "60000"]) as server:
        client, looking = Client(server.port), Client(server.port)
        client.create("quiet")
        replies: list[int] = []
        waiting = threading.Thread(
            target=lambda: replies.append(client.log("live=long-poll&after=now").status)
        )
        with events_of(server.port, "live=sse&after=now") as events:
            assert events.readline().startswith(b"event: control")
            waiting.start()
            # A request that the server has not read when it stops gets no answer.
            while b"fencepost_log_waiters 2.0\n" not in looking.ask("GET", "/metrics").body:
                assert waiting.is_alive()
            assert server.stop() == 0
            waiting.join()
            assert events.read().endswith(b"\n\n")

    assert replies == [204]
    client.close()
    looking.close()


@contextlib.contextmanager
def events_of(
    port: int, query: str, headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/v1/log?{query}", headers=headers or {})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("content-type") == "text/event-stream"
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


def follow(
    port: int, query: str, headers: dict[str, str] | None = None, rows_max: int = 10**9
) -> list[dict[str, Any]]:
    """The rows of an event stream, up to the last message, so many of them, or the end."""
    rows: list[dict[str, Any]] = []
    kind = ""
    last_id = -1
    with events_of(port, query, headers) as events:
        for raw in events:
            line = raw.rstrip(b"\n")
            if line.startswith(b"event: "):
                kind = line[7:].decode()
            elif line.startswith(b"id: "):
                assert int(line[4:]) >= last_id, "an id never goes back"
                last_id = int(line[4:])
            elif line.startswith(b"data: ") and kind == "data":
                rows.append(json.loads(line[6:]))
                if rows[-1].get("data") == LAST or len(rows) == rows_max:
                    break
    return rows
