"""Nothing is said before it is on disk: a real server on a disk whose syncs wait at a gate.

While the gate is closed a commit is decided, written, and not durable. Every kind of answer that
stands on it has to wait, refusals included, and no reader may see it.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fencepost.server.settings import ServerSettings
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.store import StoreBrokenError
from fencepost.testing import FailingDisk, SyncGate, TestServer, fault_vfs
from fencepost.testing.vfs import WAL
from tests.faults.wire import HttpRequest, Reply, Wire, asked, get, head, post, put, remove


class SlowServer:
    """A server, its gate, and a disk that can be told to fail."""

    def __init__(self, server: TestServer, gate: SyncGate, disk: FailingDisk) -> None:
        self.server = server
        self.gate = gate
        self.disk = disk
        self._wires: list[Wire] = []

    async def ask(self, request: HttpRequest) -> Reply:
        return await asked(self.server.port, request)

    async def ask_at_the_gate(self, request: HttpRequest) -> "asyncio.Task[Reply]":
        """Send a request whose commit then waits at the closed gate."""
        self.gate.close()
        task = asyncio.create_task(self.ask(request))
        await asyncio.to_thread(self.gate.await_arrival)
        return task

    async def ask_behind(self, request: HttpRequest) -> "asyncio.Task[Reply]":
        """Send a request and return once the server has decided it."""
        wire = await Wire.connect(self.server.port)
        self._wires.append(wire)
        wire.send(request)
        await wire.drain()
        await self.turned()
        return asyncio.create_task(wire.receive())

    async def turned(self) -> None:
        """Let the server take in everything that was sent so far.

        It shares this loop and has the bytes in its sockets already; a connection of its own that
        asks for something without the disk is answered only after several turns of the loop.
        """
        for _ in range(3):
            assert (await asked(self.server.port, HttpRequest("OPTIONS", "s"))).status == 204

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[SlowServer]:
    gate = SyncGate()
    disk = FailingDisk("sync", WAL, times=0)
    with fault_vfs() as vfs:
        vfs.rules += [gate, disk]
        server = TestServer(
            # Always the thread: a commit on the loop would hold this test up at the gate too.
            SqliteSettings(folder=tmp_path, vfs=vfs.name, loop_commit_us_max=0),
            settings=ServerSettings(long_poll_ms=20_000),
        )
        await server.start()
        slow = SlowServer(server, gate, disk)
        try:
            yield slow
        finally:
            gate.open()
            slow.close()
            try:
                await server.stop()
            except StoreBrokenError:
                assert disk.failed_count, "only a test that broke the disk may end like this"


async def test_every_kind_of_answer_waits_for_the_commit_that_it_stands_on(
    slow: SlowServer,
) -> None:
    for path in ("s", "doomed", "closing"):
        assert (await slow.ask(put(path))).status == 201
    await slow.ask(post("s", b"opening", producer="p", epoch=1))

    first = await slow.ask_at_the_gate(post("s", b"one", producer="p", epoch=1, seq=1))
    behind = {
        "append on top": (200, post("s", b"two", producer="p", epoch=1, seq=2)),
        "append without a producer": (204, post("s", b"three")),
        "duplicate": (204, post("s", b"one", producer="p", epoch=1, seq=1)),
        "gap": (409, post("s", b"far", producer="p", epoch=1, seq=9)),
        "stale epoch": (403, post("s", b"old", producer="p", epoch=0, seq=5)),
        "wrong type": (409, post("s", b"{}", content_type="application/json")),
        "create": (201, put("new")),
        "create again": (200, put("new")),
        "conflicting create": (409, put("s", "text/plain")),
        "delete": (204, remove("doomed")),
        "append to the deleted": (404, post("doomed", b"late")),
        "close": (204, post("closing", b"last", closes=True)),
        "append to the closed": (409, post("closing", b"late")),
    }
    waiting = {name: await slow.ask_behind(request) for name, (_, request) in behind.items()}
    await slow.turned()

    assert not first.done()
    assert [name for name, task in waiting.items() if task.done()] == []
    slow.gate.open()
    assert (await first).status == 200
    for name, (status, _) in behind.items():
        assert (await waiting[name]).status == status, name


async def test_no_reader_sees_what_is_not_on_disk(slow: SlowServer) -> None:
    await slow.ask(put("s", "text/plain"))
    await slow.ask(post("s", b"old.", content_type="text/plain"))
    tail = (await slow.ask(head("s"))).headers["stream-next-offset"]
    long_poll = await slow.ask_behind(get("s", f"offset={tail}&live=long-poll"))
    events = await Wire.connect(slow.server.port)
    events.send(get("s", f"offset={tail}&live=sse"))
    await events.receive_head()
    assert b"control" in await events.receive_chunk()
    next_event = asyncio.create_task(events.receive_chunk())

    append = await slow.ask_at_the_gate(post("s", b"new.", content_type="text/plain"))
    seen = await slow.ask(get("s"))
    looked = await slow.ask(head("s"))
    now = await slow.ask(get("s", "offset=now"))
    await slow.turned()

    assert seen.body == b"old."
    assert looked.headers["stream-next-offset"] == tail
    assert now.headers["stream-next-offset"] == tail
    assert not append.done()
    assert not long_poll.done()
    assert not next_event.done()
    slow.gate.open()
    assert (await append).status == 204
    assert (await long_poll).body == b"new."
    assert b"new." in await next_event
    assert (await slow.ask(get("s"))).body == b"old.new."
    events.close()


async def test_a_stream_is_neither_there_nor_gone_before_that_is_on_disk(slow: SlowServer) -> None:
    await slow.ask(put("doomed"))

    create = await slow.ask_at_the_gate(put("new"))
    delete = await slow.ask_behind(remove("doomed"))
    reads = [await slow.ask_behind(get(path)) for path in ("new", "doomed")]
    await slow.turned()

    assert not any(task.done() for task in (create, delete, *reads))
    slow.gate.open()
    assert (await create).status == 201
    assert (await delete).status == 204
    assert [(await read).status for read in reads] == [200, 404]


async def test_a_failed_commit_turns_what_stood_on_it_into_503_and_the_server_stops(
    slow: SlowServer,
) -> None:
    await slow.ask(put("s"))
    first = await slow.ask_at_the_gate(post("s", b"zero", producer="p", seq=0))
    behind = [
        await slow.ask_behind(request)
        for request in (
            post("s", b"one", producer="p", seq=1),
            post("s", b"zero", producer="p", seq=0),
            post("s", b"far", producer="p", seq=9),
            put("new"),
            remove("s"),
        )
    ]
    await slow.turned()

    slow.disk.left = 1
    slow.gate.open()

    unknown = await first
    assert (unknown.status, unknown.code) == (503, "outcome_unknown")
    for task in behind:
        reply = await task
        assert (reply.status, reply.code) == (503, "storage_unavailable")
    with pytest.raises(StoreBrokenError):
        await slow.server.ended()


async def test_a_server_started_after_a_failed_commit_has_all_of_it_or_nothing(
    slow: SlowServer, tmp_path: Path
) -> None:
    await slow.ask(put("s", "application/json"))
    slow.disk.left = 1
    batch = post("s", b"[1,2,3]", producer="p", content_type="application/json")
    assert (await slow.ask(batch)).code == "outcome_unknown"
    with pytest.raises(StoreBrokenError):
        await slow.server.ended()

    async with TestServer(SqliteSettings(folder=tmp_path)) as server:
        assert (await asked(server.port, get("s"))).body in (b"[]", b"[1,2,3]")
        assert (await asked(server.port, batch)).status in (200, 204)
        assert (await asked(server.port, get("s"))).body == b"[1,2,3]"
