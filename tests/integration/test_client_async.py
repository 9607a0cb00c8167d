"""The async client against a real server: the same as the sync one, and what only async has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import fencepost
from fencepost import AsyncClient, AsyncStream
from tests.faults.proxy import Proxy
from tests.serving import ServerProcess


@pytest.fixture(name="client")
async def _client(server_process: ServerProcess) -> AsyncIterator[AsyncClient]:
    async with fencepost.connect_async(server_process.url) as client:
        yield client


@pytest.fixture(name="orders")
async def _orders(client: AsyncClient, request: pytest.FixtureRequest) -> AsyncStream:
    return await client.create(f"async/{request.node.name}")


async def test_a_stream_lives_its_life(client: AsyncClient, orders: AsyncStream) -> None:
    tail = (await orders.append({"n": 0})).next_offset
    await orders.append_many([{"n": 1}, {"n": 2}], if_match=tail)
    fork = await orders.fork(orders.path + "-fork")
    await fork.append({"n": 3}, close=True)

    assert [message["n"] async for message in orders.read()] == [0, 1, 2]
    assert [message["n"] async for message in fork.follow()] == [0, 1, 2, 3]
    assert await orders.read(offset=tail).bytes() == b'[{"n":1},{"n":2}]'
    assert (await fork.head()).closed
    paths = [info.path async for info in client.streams(match=orders.path)]
    assert paths == [orders.path]
    await fork.delete()
    with pytest.raises(fencepost.StreamNotFoundError):
        await fork.head()


async def test_commits_staging_and_the_log(
    client: AsyncClient, orders: AsyncStream, path: str
) -> None:
    before = await client.log_head()
    staged = await client.stage(path, "0", [1, 2])
    assert staged.messages == 2
    done = await client.commit([fencepost.CommitAppend(stream=orders.path, parts=[(path, "0")])])
    assert not done.duplicate

    entries = [entry async for entry in client.log(after=before, streams=[orders.path])]
    assert [entry.data for entry in entries] == [1, 2]
    plan = await client.plan(after=before, streams=[orders.path])
    assert plan.rows == 2
    pages = [page async for page in client.log(after=before, streams=[orders.path]).pages()]
    assert pages[-1].up_to_date


async def test_many_requests_run_at_once(orders: AsyncStream) -> None:
    answers = await asyncio.gather(*(orders.append(number) for number in range(50)))

    assert len({answer.next_offset for answer in answers}) == 50
    assert sorted(await orders.read(type=int).messages()) == list(range(50))


@pytest.mark.parametrize("live", ["sse", "long-poll"])
async def test_following_waits_and_can_be_cancelled(
    orders: AsyncStream, live: fencepost.client.reading.Live
) -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def follow() -> None:
        async for message in orders.follow(type=int, live=live):
            seen.put_nowait(message)

    following = asyncio.create_task(follow())
    for number in range(3):
        await orders.append(number)
        assert await seen.get() == number
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following

    await orders.append(3)
    assert await orders.read(type=int).messages() == [0, 1, 2, 3]


async def test_a_follower_goes_on_when_the_server_ends_its_connections(tmp_path: Path) -> None:
    """A server ends an SSE connection after a minute; here after 50 ms."""
    config = tmp_path / "fencepost.toml"
    config.write_text("[server]\nsse_ms = 50\n")
    seen: list[int] = []
    with ServerProcess(tmp_path / "data", arguments=["--config", str(config)]) as server:
        async with (
            Proxy("127.0.0.1", server.port) as proxy,
            fencepost.connect_async(proxy.url) as far,
            fencepost.connect_async(server.url) as near,
        ):
            stream = await near.create("brief")

            async def follow() -> None:
                seen.extend([number async for number in far.stream("brief").follow(type=int)])

            sent = 0
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(follow())
                while proxy.connections < 6:
                    await stream.append(sent)
                    sent += 1
                await stream.close()

    assert seen == list(range(sent))


async def test_values_may_be_async_functions(server_process: ServerProcess) -> None:
    async def token() -> str:
        await asyncio.sleep(0)
        return "secret"

    async with fencepost.connect_async(server_process.url, token=token) as client:
        stream = await client.create("async/token")
        async with stream.producer("p") as producer:
            delivery = await producer.append(1)
            assert (await delivery).seq == 0


async def test_a_closed_client_says_so(server_process: ServerProcess) -> None:
    client = fencepost.connect_async(server_process.url)
    await client.close()
    with pytest.raises(fencepost.ClientClosedError):
        await client.create("late")


async def test_a_server_that_is_not_there_is_said_not_to_be(unused_tcp_port: int) -> None:
    retries = fencepost.Retries(attempts_max=2, delay_seconds_max=0.01)
    async with fencepost.connect_async(
        f"http://127.0.0.1:{unused_tcp_port}", retries=retries
    ) as client:
        with pytest.raises(fencepost.ConnectionFailedError, match="cannot connect"):
            await client.create("nowhere")
