"""Ending a follower from elsewhere, and what a reading tells about how far it came."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import fencepost
from fencepost import coordination
from fencepost.client import state
from tests.odd_server import OddServer, response, tail
from tests.serving import ServerProcess
from tests.twins import Connect, Threaded
from tests.twins import connect as connect

LIVES = pytest.mark.parametrize("live", ["sse", "long-poll"])
SECONDS_MAX = 10


async def waiting(reading: Any) -> asyncio.Task[list[Any]]:
    """A task that has taken the first message and waits for the second one."""
    first = asyncio.Event()

    async def take() -> list[Any]:
        seen = []
        async for message in reading:
            seen.append(message)
            first.set()
        return seen

    task = asyncio.create_task(take())
    await asyncio.wait_for(first.wait(), SECONDS_MAX)
    return task


@pytest.fixture(params=["reading", "client"])
def closed_by(request: pytest.FixtureRequest) -> str:
    """Whose `close` is called."""
    return str(request.param)


@LIVES
async def test_a_follower_that_waits_ends_when_it_is_closed_elsewhere(
    connect: Connect, server_process: ServerProcess, path: str, live: Any, closed_by: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        await stream.append(1)
        reading = stream.follow(live=live)
        task = await waiting(reading)

        await (reading if closed_by == "reading" else client).close()

        assert await asyncio.wait_for(task, SECONDS_MAX) == [1]
        assert not reading.closed


async def test_a_follower_that_waits_for_a_server_ends_when_it_is_closed_elsewhere(
    connect: Connect, closed_by: str
) -> None:
    def answer(asked: Any) -> bytes:
        return response(503, retry_after="60") if asked.live else tail(b"[1]")

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            reading = client.stream("s").follow(live="sse")
            task = await waiting(reading)

            await (reading if closed_by == "reading" else client).close()

            assert await asyncio.wait_for(task, SECONDS_MAX) == [1]


async def test_a_follower_of_the_log_ends_when_it_is_closed_elsewhere(
    connect: Connect, server_process: ServerProcess, path: str, closed_by: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        await stream.append(1)
        reading = client.log(streams=[path], follow=True)
        task = await waiting(reading)

        await (reading if closed_by == "reading" else client).close()

        assert len(await asyncio.wait_for(task, SECONDS_MAX)) == 1


@LIVES
async def test_a_follower_ends_at_its_deadline(
    connect: Connect, server_process: ServerProcess, path: str, live: Any
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        await stream.append(1)
        reading = stream.follow(live=live, timeout=0.3)

        assert await asyncio.wait_for(reading.messages(), SECONDS_MAX) == [1]
        assert (reading.up_to_date, reading.closed) == (True, False)


async def test_a_client_that_was_closed_before_says_so(
    connect: Connect, server_process: ServerProcess
) -> None:
    async with connect(server_process.url) as client:
        await client.close()
        with pytest.raises(fencepost.ClientClosedError):
            await client.stream("s").follow().messages()
        with pytest.raises(fencepost.ClientClosedError, match="the client was closed"):
            client.stream("s").producer("p")


async def test_a_reading_tells_how_far_it_came(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        reading = stream.read()
        assert (reading.up_to_date, reading.closed) == (False, False)
        assert await reading.messages() == []
        assert (reading.up_to_date, reading.closed) == (True, False)
        assert reading.offset == (await stream.head()).next_offset

        await stream.append_many([1, 2], close=True)
        reading = stream.follow()
        seen = [(message, reading.up_to_date, reading.closed) async for message in reading]
        assert seen == [(1, False, False), (2, True, True)]

        empty = await client.create(f"{path}/empty", closed=True)
        reading = empty.follow()
        assert await reading.messages() == []
        assert (reading.up_to_date, reading.closed) == (True, True)


async def test_the_offset_after_now_is_a_real_one(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        tail = (await stream.append(1)).next_offset
        reading = stream.read(offset="now")

        assert await reading.messages() == []
        assert reading.offset == tail
        following = stream.follow(offset="now", timeout=0.2)
        assert await following.messages() == []
        assert following.offset == tail


async def test_a_text_that_is_split_inside_a_character_is_read_whole(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path, content_type="text/plain")
        reading = stream.follow(live="long-poll")
        seen = asyncio.create_task(reading.messages())
        for byte in "a\u00e9\u20ac\U0001f389z".encode():
            await stream.append(bytes([byte]))
        await stream.close()

        assert "".join(await asyncio.wait_for(seen, 60)) == "a\u00e9\u20ac\U0001f389z"


async def test_closing_inside_the_loop_ends_it(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        await stream.append(1)
        reading = stream.follow()
        async for _ in reading:
            await reading.close()


def test_the_threaded_client_is_the_sync_one(server_process: ServerProcess) -> None:
    with fencepost.connect(server_process.url) as client:
        assert Threaded(client).stream("s").path == "s"


FOLLOWED = {
    "state": (state.Materialized, state.AsyncMaterialized, ()),
    "rows": (coordination.Resources, coordination.AsyncResources, ("price",)),
    "claims": (coordination.TaskClaims, coordination.AsyncTaskClaims, ("ann",)),
}


@pytest.mark.parametrize("kind", [*FOLLOWED])
async def test_what_follows_a_stream_for_rows_or_tasks_ends_when_it_is_closed_elsewhere(
    connect: Connect, server_process: ServerProcess, path: str, kind: str, closed_by: str
) -> None:
    plain, asynchronous, given = FOLLOWED[kind]
    async with connect(server_process.url) as client:
        stream = await client.create(path)
        view: Any
        if isinstance(client, Threaded):
            view = Threaded(plain(stream._wrapped, *given))
            task = asyncio.create_task(asyncio.to_thread(lambda: list(view._wrapped.follow())))
        else:
            view = asynchronous(stream, *given)
            task = asyncio.create_task(everything(view.follow()))
        # It waits once its request for news is out on a connection.
        for _ in range(SECONDS_MAX * 100):
            if any(stop._waited_for for stop in list(client._driver._stops)):
                break
            await asyncio.sleep(0.01)

        await (client if closed_by == "client" or kind == "claims" else view).close()

        assert await asyncio.wait_for(task, SECONDS_MAX) == []


async def everything(follower: Any) -> list[Any]:
    return [one async for one in follower]
