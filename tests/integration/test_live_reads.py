"""Long-polls and events over HTTP: every message once, and an end when the stream has one.

Readers here are sockets, so that a cut, a repeated or a missing byte is seen.
"""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import engine as engine
from tests.integration.raw import Connection, Event, ask, code_of, events, request
from tests.integration.reads_support import (
    BYTES,
    JSON,
    MIB,
    ROOT,
    TEXT,
    WAIT_SECONDS,
    add,
    connected,
    flags,
    make,
    new_path,
    tail_of,
)
from tests.integration.reads_support import path as path
from tests.integration.reads_support import port as port
from tests.serving import ServerProcess

# Long-polls


def test_long_polls_across_many_appends_give_every_message_once(port: int, path: str) -> None:
    made = make(port, path, JSON)
    count = 300

    def write() -> None:
        with Connection(port) as connection:
            for number in range(count):
                connection.ask("POST", path, JSON, body=b"%d" % number)
            connection.ask("POST", path, "Stream-Closed: true")

    writer = threading.Thread(target=write)
    writer.start()
    found, offset, cursor = [], tail_of(made), ""
    with Connection(port) as connection:
        while True:
            reply = connection.ask("GET", f"{path}?offset={offset}&live=long-poll{cursor}")
            assert reply.status in (200, 204)
            if reply.status == 200:
                found += json.loads(reply.body)
            offset = tail_of(reply)
            if "stream-cursor" in reply.headers:
                cursor = f"&cursor={reply.headers['stream-cursor']}"
            if flags(reply)[1]:
                break
    writer.join()

    assert found == list(range(count))


def test_a_long_poll_without_news_ends_with_204_and_the_tail(port: int, path: str) -> None:
    made = make(port, path, TEXT, body=b"x")

    reply = ask(port, "GET", f"{path}?offset=now&live=long-poll")

    assert (reply.status, flags(reply)) == (204, (True, False))
    assert tail_of(reply) == tail_of(made)
    assert reply.headers["stream-cursor"].isdigit()


def test_a_long_poll_of_old_data_does_not_wait(tmp_path: Path) -> None:
    """With the default of half a minute, an answer within the test's patience did not wait."""
    with ServerProcess(tmp_path / "data") as server:
        make(server.port, ROOT + "s", TEXT, body=b"old")
        reply = ask(server.port, "GET", f"{ROOT}s?offset=-1&live=long-poll")

    assert (reply.status, reply.body, flags(reply)) == (200, b"old", (True, False))


def test_now_readers_miss_nothing_between_their_answer_and_their_next_request(
    port: int, path: str
) -> None:
    make(port, path, TEXT, body=b"old")
    now = ask(port, "GET", f"{path}?offset=now")
    add(port, path, TEXT, b"new")

    reply = ask(port, "GET", f"{path}?offset={tail_of(now)}&live=long-poll")

    assert (now.body, reply.body) == (b"", b"new")


def waiting(port: int, target: str) -> Connection:
    """A connection whose long-poll or SSE request the server has begun to serve."""
    before = waiters(port)
    connection = Connection(port)
    connection.send(request("GET", target))
    while waiters(port) <= before:
        pass
    return connection


def waiters(port: int) -> float:
    found = re.search(rb"^fencepost_waiters (\S+)", ask(port, "GET", "/metrics").body, re.M)
    assert found is not None
    return float(found[1])


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[int]:
    """A server whose long-polls wait for half a minute."""
    with ServerProcess(tmp_path / "data") as server:
        yield server.port


def test_a_waiting_long_poll_gets_the_next_append(patient: int) -> None:
    make(patient, ROOT + "s", TEXT, body=b"old")
    with waiting(patient, ROOT + "s?offset=now&live=long-poll") as connection:
        add(patient, ROOT + "s", TEXT, b"new")

        reply = connection.reply()

    assert (reply.status, reply.body) == (200, b"new")


def test_a_waiting_long_poll_is_told_of_the_end(patient: int) -> None:
    make(patient, ROOT + "s", TEXT)
    with waiting(patient, ROOT + "s?offset=now&live=long-poll") as connection:
        assert ask(patient, "POST", ROOT + "s", "Stream-Closed: true").status == 204

        reply = connection.reply()

    assert (reply.status, flags(reply)) == (204, (True, True))


def test_a_waiting_long_poll_is_told_of_the_deletion(patient: int) -> None:
    make(patient, ROOT + "s", TEXT)
    with waiting(patient, ROOT + "s?offset=now&live=long-poll") as connection:
        assert ask(patient, "DELETE", ROOT + "s").status == 204

        reply = connection.reply()

    assert (reply.status, code_of(reply)) == (404, "stream_not_found")


def test_a_waiting_long_poll_does_not_read_the_next_incarnation(patient: int) -> None:
    make(patient, ROOT + "s", TEXT, body=b"old")
    with waiting(patient, ROOT + "s?offset=now&live=long-poll") as connection:
        with Connection(patient) as other:  # both in one commit, or not: the answer is the same
            other.send(request("DELETE", ROOT + "s") + request("PUT", ROOT + "s", TEXT, body=b"ne"))
            assert (other.reply("DELETE").status, other.reply("PUT").status) == (204, 201)

        reply = connection.reply()

    assert reply.status == 404


def test_a_forks_reader_is_not_woken_by_its_source(port: int, path: str) -> None:
    make(port, path, TEXT, body=b"one")
    make(port, path + "/fork", f"Stream-Forked-From: {path}")
    with waiting(port, path + "/fork?offset=now&live=long-poll") as connection:
        add(port, path, TEXT, b"two")

        reply = connection.reply()

    assert reply.status == 204


# Events


def sse(connection: Connection, target: str) -> Iterator[Event]:
    connection.send(request("GET", target))
    head = connection.head()
    assert (head.status, head.headers["content-type"]) == (200, "text/event-stream")
    return events(connection.chunks())


def test_events_across_reconnects_give_every_message_once(tmp_path: Path) -> None:
    """SSE connections that last a fifth of a second, under a writer that does not stop."""
    config = tmp_path / "fencepost.toml"
    config.write_text("[server]\nsse_ms = 200\n")
    count, connections = 400, 0
    with ServerProcess(tmp_path / "data", arguments=["--config", str(config)]) as server:
        port, path = server.port, ROOT + "s"
        make(port, path, JSON)

        def write() -> None:
            with Connection(port) as connection:
                for number in range(count):
                    connection.ask("POST", path, JSON, body=b"%d" % number)
                connection.ask("POST", path, "Stream-Closed: true")

        writer = threading.Thread(target=write)
        writer.start()
        found, offset, ended = [], "-1", False
        while not ended:
            connections += 1
            with Connection(port) as connection:
                for event in sse(connection, f"{path}?offset={offset}&live=sse"):
                    if event.kind == "data":
                        found += json.loads(event.data)
                    else:
                        offset = event.control["streamNextOffset"]
                        ended = event.control.get("streamClosed", False)
        writer.join()

    assert found == list(range(count))
    assert connections >= 1


def test_every_data_event_is_followed_by_its_control_event(port: int, path: str) -> None:
    make(port, path, BYTES, body=b"\x00\xff" * MIB)
    ask(port, "POST", path, "Stream-Closed: true")

    with Connection(port) as connection:
        found = list(sse(connection, f"{path}?offset=-1&live=sse"))

    assert [event.kind for event in found] == ["data", "control"] * 2
    assert found[-1].control["streamClosed"] is True
    assert "streamClosed" not in found[1].control
    assert "upToDate" not in found[1].control


def test_events_end_when_the_stream_is_closed(patient: int) -> None:
    make(patient, ROOT + "s", TEXT, body=b"one")
    with Connection(patient) as connection:
        stream = sse(connection, ROOT + "s?offset=-1&live=sse")
        assert [next(stream).kind, next(stream).kind] == ["data", "control"]
        add(patient, ROOT + "s", TEXT, b"two", "Stream-Closed: true")

        rest = list(stream)

    assert [event.kind for event in rest] == ["data", "control"]
    assert rest[0].data == "two"
    assert rest[1].control["streamClosed"] is True
    assert "streamCursor" not in rest[1].control


def test_events_end_when_the_stream_is_deleted(patient: int) -> None:
    make(patient, ROOT + "s", TEXT, body=b"one")
    with Connection(patient) as connection:
        stream = sse(connection, ROOT + "s?offset=now&live=sse")
        assert next(stream).control["upToDate"] is True
        ask(patient, "DELETE", ROOT + "s")

        assert list(stream) == []


def test_events_of_now_begin_with_the_tail_and_then_the_new(patient: int) -> None:
    made = make(patient, ROOT + "s", TEXT, body=b"old")
    with Connection(patient) as connection:
        stream = sse(connection, ROOT + "s?offset=now&live=sse")
        first = next(stream).control
        assert (first["streamNextOffset"], first["upToDate"]) == (tail_of(made), True)
        add(patient, ROOT + "s", TEXT, b"new")

        assert next(stream) == Event("data", "new")


def test_bytes_that_are_not_text_are_sent_as_base64_and_said_to_be(port: int, path: str) -> None:
    make(port, path, BYTES, "Stream-Closed: true", body=b"\x00\x01")
    with Connection(port) as connection:
        connection.send(request("GET", f"{path}?offset=-1&live=sse"))
        head = connection.head()
        first = next(events(connection.chunks()))

    assert head.headers["stream-sse-data-encoding"] == "base64"
    assert first == Event("data", "AAE=")


@pytest.mark.parametrize("letter", ["é", "€", "😀"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_chunk_of_text_does_not_end_inside_a_character(
    port: int, path: str, letter: str, shift: int
) -> None:
    """A reader of events decodes each on its own: half a character would be lost for good."""
    text = "x" * shift + letter * (MIB // len(letter.encode()) + 10)
    make(port, path, TEXT, "Stream-Closed: true", body=text.encode())

    with Connection(port) as connection:
        found = [event.data for event in sse(connection, f"{path}?offset=-1&live=sse")]

    assert "".join(found[::2]) == text


async def test_200_readers_of_one_stream_all_see_all_of_it(server_process: ServerProcess) -> None:
    port, path = server_process.port, new_path()
    await asyncio.to_thread(make, port, path, JSON, body=b"[0]")
    count, readers = 40, 200

    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        ready = asyncio.Barrier(readers + 1)
        reading = [group.create_task(_follow(port, path, ready)) for _ in range(readers)]
        await ready.wait()
        async with connected(port) as client:
            for number in range(1, count):
                await client.send(request("POST", path, JSON, body=b"%d" % number))
                assert (await client.reply(to="POST")).status == 204
            await client.send(request("POST", path, "Stream-Closed: true"))
            assert (await client.reply(to="POST")).status == 204

    assert [task.result() for task in reading] == [list(range(count))] * readers


async def _follow(port: int, path: str, ready: asyncio.Barrier) -> list[int]:
    """All messages that a reader of events sees until the stream is closed."""
    found: list[int] = []
    async with connected(port) as client:
        await client.send(request("GET", f"{path}?offset=-1&live=sse"))
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        await ready.wait()
        waiting = b""
        while chunk := await client.chunk():
            *whole, waiting = (waiting + chunk).split(b"\n\n")
            for block in whole:
                kind, _, data = block.partition(b"\n")
                if kind == b"event: data":
                    found += json.loads(data.partition(b"\n")[0].removeprefix(b"data:"))
    assert waiting == b""
    return found
