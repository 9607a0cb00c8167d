"""Reading over HTTP: chunks, long-polls and events give every byte once, at a bounded cost.

Readers here are sockets, so that a cut, a repeated or a missing byte is seen. Times that matter are
a SimClock's, inside a server of the test's own process; the rest talks to a real process.
"""

import asyncio
import itertools
import json
import re
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fencepost.server.settings import ServerSettings
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.testing import SimClock, TestServer
from tests.engines import engine as engine
from tests.integration.raw import Connection, Event, ask, code_of, events, request
from tests.serving import ServerProcess
from tests.unit.server.rawhttp import Client, Reply

ROOT = "/v1/stream/"
MIB = 1 << 20
WAIT_SECONDS = 30.0
TEXT = "Content-Type: text/plain"
BYTES = "Content-Type: application/octet-stream"
JSON = "Content-Type: application/json"

_numbers = itertools.count()


@pytest.fixture
def port(server_process: ServerProcess) -> int:
    return server_process.port


@pytest.fixture
def path() -> str:
    """A stream of the test's own."""
    return f"{ROOT}reads/{next(_numbers)}"


def make(port: int, path: str, *headers: str, body: bytes = b"") -> Reply:
    reply = ask(port, "PUT", path, *headers, body=body)
    assert reply.status == 201, reply
    return reply


def add(port: int, path: str, kind: str, body: bytes, *headers: str) -> Reply:
    reply = ask(port, "POST", path, kind, *headers, body=body)
    assert reply.status in (200, 204), reply
    return reply


def tail_of(reply: Reply) -> str:
    return reply.headers["stream-next-offset"]


def flags(reply: Reply) -> tuple[bool, bool]:
    """Whether an answer says that this was all, and that it was the end."""
    return "stream-up-to-date" in reply.headers, "stream-closed" in reply.headers


# Catching up


def test_catching_up_goes_in_chunks_and_only_the_last_is_up_to_date(port: int, path: str) -> None:
    whole = bytes(range(256)) * (10 * MIB // 256 // 4)  # two and a half MiB
    make(port, path, BYTES)
    for at in range(0, len(whole), 700_000):
        add(port, path, BYTES, whole[at : at + 700_000])

    found, offset, seen = b"", "-1", []
    with Connection(port) as connection:
        while True:
            reply = connection.ask("GET", f"{path}?offset={offset}")
            assert reply.status == 200
            found += reply.body
            seen.append((len(reply.body), *flags(reply)))
            offset = tail_of(reply)
            if flags(reply)[0]:
                break

    assert found == whole
    assert seen == [(MIB, False, False), (MIB, False, False), (MIB // 2, True, False)]


def test_json_is_cut_between_messages(port: int, path: str) -> None:
    messages = [{"n": number, "pad": "x" * 3000} for number in range(1000)]
    make(port, path, JSON, body=json.dumps(messages).encode())

    found, offset, answers = [], "-1", 0
    with Connection(port) as connection:
        while True:
            reply = connection.ask("GET", f"{path}?offset={offset}")
            assert len(reply.body) <= MIB + 1000
            found += json.loads(reply.body)
            offset = tail_of(reply)
            answers += 1
            if flags(reply)[0]:
                break

    assert found == messages
    assert answers == 3


def test_a_closed_stream_says_so_with_its_last_chunk_only(port: int, path: str) -> None:
    make(port, path, BYTES, "Stream-Closed: true", body=b"x" * (MIB + 10))

    first = ask(port, "GET", path)
    last = ask(port, "GET", f"{path}?offset={tail_of(first)}")
    after = ask(port, "GET", f"{path}?offset={tail_of(last)}")

    assert (len(first.body), *flags(first)) == (MIB, False, False)
    assert (len(last.body), *flags(last)) == (10, True, True)
    assert (after.status, after.body, *flags(after)) == (200, b"", True, True)


def test_an_empty_read_of_json_is_an_empty_array(port: int, path: str) -> None:
    made = make(port, path, JSON)

    for offset in ("-1", "now", tail_of(made)):
        reply = ask(port, "GET", f"{path}?offset={offset}")
        assert (reply.status, reply.body, flags(reply)) == (200, b"[]", (True, False))


def memory_peak_bytes(pid: int) -> int:
    """The most memory a process has had; where the system does not tell, what it has now."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1]) * 1024
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True, text=True
    )
    return int(shown.stdout) * 1024


def test_reading_64_mib_does_not_take_64_mib(tmp_path: Path) -> None:
    part = bytes(range(256)) * (4 * MIB // 256)
    with ServerProcess(tmp_path / "data") as server:
        make(server.port, ROOT + "big", BYTES)
        for _ in range(16):
            add(server.port, ROOT + "big", BYTES, part)
        assert server.stop() == 0
        server.restart()  # so that what writing took does not count
        before = memory_peak_bytes(server.pid)

        size, offset = 0, "-1"
        with Connection(server.port) as connection:
            while True:
                reply = connection.ask("GET", f"{ROOT}big?offset={offset}")
                assert part[size % len(part) :][: len(reply.body)] == reply.body
                size += len(reply.body)
                offset = tail_of(reply)
                if flags(reply)[0]:
                    break
        with Connection(server.port) as connection:
            connection.send(request("GET", f"{ROOT}big?offset=-1&live=sse"))
            connection.head()
            for event in events(connection.chunks()):
                if event.kind == "control" and event.control.get("upToDate"):
                    break
        grown = memory_peak_bytes(server.pid) - before

    assert size == 64 * MIB
    assert grown < 32 * MIB, f"reading took {grown / MIB:.0f} MiB"


# Caching


def test_an_etag_names_the_bytes_and_a_match_sends_none_again(port: int, path: str) -> None:
    make(port, path, TEXT, body=b"one")
    first = ask(port, "GET", f"{path}?offset=-1")
    etag = first.headers["etag"]

    for header in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = ask(port, "GET", f"{path}?offset=-1", f"If-None-Match: {header}")
        assert (again.status, again.body) == (304, b"")
        assert again.headers["etag"] == etag
    other = ask(port, "GET", f"{path}?offset=-1", 'If-None-Match: "other"')
    assert (other.status, other.body) == (200, b"one")


def test_an_etag_changes_with_data_with_closing_and_with_the_incarnation(
    port: int, path: str
) -> None:
    def etag() -> str:
        return ask(port, "GET", f"{path}?offset=-1").headers["etag"]

    make(port, path, TEXT, body=b"one")
    seen = [etag()]
    add(port, path, TEXT, b"two")
    seen.append(etag())
    assert ask(port, "POST", path, "Stream-Closed: true").status == 204
    seen.append(etag())
    assert ask(port, "DELETE", path).status == 204
    make(port, path, TEXT, body=b"one")
    seen.append(etag())

    assert len(set(seen)) == 4


def test_what_can_change_is_not_cached(port: int, path: str) -> None:
    make(port, path, TEXT, body=b"one")

    assert "etag" not in ask(port, "GET", f"{path}?offset=now").headers
    assert ask(port, "GET", f"{path}?offset=now").headers["cache-control"] == "no-store"
    assert ask(port, "HEAD", path).headers["cache-control"] == "no-store"
    assert "public" in ask(port, "GET", f"{path}?offset=-1").headers["cache-control"]


# HEAD


def test_head_tells_all_about_a_stream_and_sends_none_of_it(port: int, path: str) -> None:
    made = make(
        port, path, "Content-Type: text/plain; charset=utf-8", "Stream-TTL: 60", body=b"abc"
    )

    reply = ask(port, "HEAD", path)

    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert (tail_of(reply), reply.headers["stream-ttl"]) == (tail_of(made), "60")
    assert flags(reply)[1] is False
    ask(port, "POST", path, "Stream-Closed: true")
    assert ask(port, "HEAD", path).headers["stream-closed"] == "true"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("2999-01-01T00:00:00Z", "2999-01-01T00:00:00.000Z"),
        ("2999-01-01T00:00:00.001Z", "2999-01-01T00:00:00.001Z"),
        ("2999-06-01T12:34:56.789+02:00", "2999-06-01T10:34:56.789Z"),
        ("2031-07-19t03:14:07.999999999z", "2031-07-19T03:14:07.999Z"),
        ("9999-12-31T23:59:59.999Z", "9999-12-31T23:59:59.999Z"),
    ],
)
def test_head_shows_the_end_of_a_stream_to_the_millisecond(
    port: int, path: str, sent: str, shown: str
) -> None:
    make(port, path, TEXT, f"Stream-Expires-At: {sent}")

    assert ask(port, "HEAD", path).headers["stream-expires-at"] == shown


def test_head_of_nothing_is_404_without_a_body(port: int, path: str) -> None:
    reply = ask(port, "HEAD", path)

    assert (reply.status, reply.body) == (404, b"")


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
    port, path = server_process.port, f"{ROOT}reads/{next(_numbers)}"
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
                    found += json.loads(data.removeprefix(b"data:"))
    assert waiting == b""
    return found


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    client = Client(reader, writer)
    try:
        yield client
    finally:
        await client.close()


# Time to live, on a clock that the test moves


@asynccontextmanager
async def timed(tmp_path: Path) -> AsyncIterator[tuple[SimClock, Client]]:
    clock = SimClock()
    settings = ServerSettings(long_poll_ms=20)
    store = SqliteSettings(folder=tmp_path / "data")
    async with (
        TestServer(store, settings=settings, clock=clock) as server,
        connected(server.port) as client,
    ):
        yield clock, client


async def asked(client: Client, method: str, target: str, *headers: str, body: bytes = b"") -> Any:
    await client.send(request(method, target, *headers, body=body))
    return await client.reply(to=method)


@pytest.mark.parametrize(
    ("method", "query", "headers", "slides"),
    [
        ("GET", "", (), True),
        ("GET", "?offset=-1", (), True),
        ("GET", "?offset=now", (), True),
        ("GET", "?offset=now&live=long-poll", (), True),
        ("POST", "", ("Content-Type: text/plain",), True),
        ("HEAD", "", (), False),
        ("OPTIONS", "", (), False),
    ],
)
async def test_reads_and_writes_prolong_a_life_and_head_does_not(
    tmp_path: Path, method: str, query: str, headers: tuple[str, ...], slides: bool
) -> None:
    async with timed(tmp_path) as (clock, client):
        await asked(client, "PUT", ROOT + "s", TEXT, "Stream-TTL: 10", body=b"x")
        for _ in range(3):
            clock.advance(6_000)
            body = b"y" if method == "POST" else b""
            await asked(client, method, f"{ROOT}s{query}", *headers, body=body)

        found = await asked(client, "HEAD", ROOT + "s")

        assert found.status == (200 if slides else 404)


async def test_an_expired_stream_is_404_and_its_path_is_free(tmp_path: Path) -> None:
    async with timed(tmp_path) as (clock, client):
        await asked(client, "PUT", ROOT + "s", TEXT, "Stream-TTL: 10", body=b"x")
        clock.advance(10_000)

        assert (await asked(client, "GET", ROOT + "s")).status == 404
        assert (await asked(client, "POST", ROOT + "s", TEXT, body=b"y")).status == 404
        assert (await asked(client, "PUT", ROOT + "s", TEXT)).status == 201


async def test_a_close_of_a_closed_stream_prolongs_its_life(tmp_path: Path) -> None:
    async with timed(tmp_path) as (clock, client):
        await asked(client, "PUT", ROOT + "s", TEXT, "Stream-TTL: 10", "Stream-Closed: true")
        for _ in range(2):
            clock.advance(6_000)
            again = await asked(client, "POST", ROOT + "s", "Stream-Closed: true")
            assert again.status == 204
