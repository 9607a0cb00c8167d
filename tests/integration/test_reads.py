"""Reading over HTTP: chunks give every byte once, at a bounded cost.

Readers here are sockets, so that a cut, a repeated or a missing byte is seen. Times that matter are
a SimClock's, inside a server of the test's own process; the rest talks to a real process.
"""

import json
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fencepost.server.settings import ServerSettings
from fencepost.store.settings import SqliteSettings
from fencepost.testing import SimClock, TestServer
from tests.engines import engine as engine
from tests.integration.raw import Connection, ask, events, request
from tests.integration.reads_support import (
    BYTES,
    JSON,
    MIB,
    ROOT,
    TEXT,
    add,
    connected,
    flags,
    make,
    tail_of,
)
from tests.integration.reads_support import path as path
from tests.integration.reads_support import port as port
from tests.serving import ServerProcess
from tests.unit.http.rawhttp import Client

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
    # The stream is read twice, so its chunks stay in memory as far as they may.
    kept = {"FENCEPOST_STORE_CHUNK_CACHE_BYTES": str(12 * MIB)}
    with ServerProcess(tmp_path / "data", environment=kept) as server:
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
    # A few chunks of 4 MiB and the pages of the database: 27 to 33 MiB were seen.
    assert grown < 48 * MIB, f"reading took {grown / MIB:.0f} MiB"


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
    assert ask(port, "GET", f"{path}?offset=-1").headers["cache-control"] == "no-cache"


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
