"""Subscriptions through the client, sync and async: make, be woken, claim, ack, release, work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import fencepost
from tests.odd_server import Asked, OddServer, response
from tests.serving import ServerProcess
from tests.twins import Connect, Threaded
from tests.twins import connect as connect

WAIT_SECONDS_MAX = 60


async def pulling(client: Any, path: str, **given: Any) -> Any:
    """A pull-wake subscription of the streams below a path."""
    await client.create(f"{path}-wakes")
    subscription = client.subscription(path)
    await subscription.create(pattern=f"{path}/*", wake_stream=f"{path}-wakes", **given)
    return subscription


async def offer(client: Any, path: str, *messages: Any) -> None:
    for message in messages:
        await client.stream(path).append(message, auto_create=True)


def handler(client: Any, does: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """A function for `work`, of the kind that the client takes."""
    if not isinstance(client, Threaded):
        return does

    def run(wake: fencepost.Wake) -> Any:
        return asyncio.run(does(Threaded(wake)))

    return run


async def test_a_subscription_is_made_shown_listed_changed_and_deleted(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = client.subscription(f"{path} with / and %")
        config = {"pattern": f"{path}/*", "webhook": "http://127.0.0.1:9/hook"}
        made = await subscription.create(**config, lease_ttl_ms=5_000, description="for a test")
        again = await subscription.create(**config, lease_ttl_ms=5_000, description="for a test")

        assert (made.is_new, again.is_new) == (True, False)
        assert made.webhook is not None
        assert (made.type, made.webhook.url) == ("webhook", "http://127.0.0.1:9/hook")
        await subscription.add_streams("a/b", "c")
        await subscription.remove_stream("c")
        shown = await subscription.info()
        assert [(one.path, one.link_type) for one in shown.streams] == [("a/b", "explicit")]
        assert (shown.lease_ttl_ms, shown.description) == (5_000, "for a test")
        listed = {one.id: one async for one in client.subscriptions()}
        assert listed[subscription.id].streams_total == 1
        with pytest.raises(fencepost.SubscriptionExistsError):
            await subscription.create(pattern="other/*", wake_stream="w")
        await subscription.delete()
        with pytest.raises(fencepost.SubscriptionNotFoundError):
            await subscription.info()
        with pytest.raises(fencepost.SubscriptionNotFoundError):
            await subscription.delete()


@pytest.mark.parametrize(
    "config",
    [
        {"wake_stream": "w"},
        {"pattern": "a/*"},
        {"pattern": "a/*", "wake_stream": "w", "webhook": "https://x.example"},
    ],
)
async def test_what_no_subscription_can_be_is_refused_before_it_is_sent(
    connect: Connect, config: Any
) -> None:
    async with connect("http://localhost:1") as client:
        with pytest.raises(fencepost.InvalidArgumentError):
            await client.subscription("s").create(**config)
        with pytest.raises(fencepost.InvalidArgumentError):
            client.subscription("")


async def test_a_worker_claims_reads_acks_and_is_done(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = await pulling(client, path)
        with pytest.raises(fencepost.NoPendingWorkError):
            await subscription.claim("ann")
        await offer(client, f"{path}/a", 1, 2)

        wake = await subscription.claim("ann")
        assert [stream.path for stream in wake.streams] == [f"{path}/a"]
        with pytest.raises(fencepost.AlreadyClaimedError) as claimed:
            await subscription.claim("bob")
        assert (claimed.value.holder, claimed.value.generation) == ("ann", wake.generation)
        await wake.heartbeat()
        [batch] = [one async for one in wake.read(f"{path}/a").batches()]
        assert batch.messages == [1, 2]
        assert not (await wake.ack({f"{path}/a": batch.next_offset})).next_wake
        await offer(client, f"{path}/a", 3)
        assert (await wake.done()).next_wake
        assert wake.is_over
        with pytest.raises(fencepost.WakeFencedError) as fenced:
            await wake.heartbeat()
        assert fenced.value.generation is not None

        rest = await subscription.claim("ann")
        assert rest.generation > wake.generation
        assert await rest.read(f"{path}/a").messages() == [3]
        assert not (await rest.done()).next_wake


async def test_done_acknowledges_what_was_read_behind_the_tail_of_the_wake(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = await pulling(client, path)
        await offer(client, f"{path}/a", 1)
        wake = await subscription.claim("ann")
        await offer(client, f"{path}/a", 2)

        assert await wake.read(f"{path}/a").messages() == [1, 2]
        assert not (await wake.done()).next_wake
        with pytest.raises(fencepost.InvalidArgumentError, match="no work"):
            wake.read("elsewhere")


async def test_released_work_is_claimed_again(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = await pulling(client, path)
        await offer(client, f"{path}/a", 1)

        await (await subscription.claim("ann")).release()
        with pytest.raises(RuntimeError, match="boom"):
            async with await subscription.claim("ann"):
                raise RuntimeError("boom")
        async with await subscription.claim("bob") as wake:
            assert await wake.read(f"{path}/a", type=int).messages() == [1]

        with pytest.raises(fencepost.NoPendingWorkError):
            await subscription.claim("ann")


async def test_a_worker_handles_wake_after_wake_until_it_is_idle(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = await pulling(client, path)
        await offer(client, f"{path}/a", 1, 2)
        await offer(client, f"{path}/b", 3)
        seen: list[int] = []

        async def handle(wake: Any) -> None:
            for stream in wake.streams:
                seen.extend(await wake.read(stream.path).messages())
            if seen == [1, 2, 3]:
                await offer(client, f"{path}/a", 4)

        await subscription.work(handler(client, handle), worker="ann", until_idle=True)

        assert seen == [1, 2, 3, 4]
        assert (await subscription.info()).pending_streams == 0


async def test_a_worker_waits_for_wakes_and_stops(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = await pulling(client, path)
        seen: list[int] = []
        woken: list[asyncio.Event] = [asyncio.Event() for _ in range(3)]
        loop = asyncio.get_running_loop()

        async def handle(wake: Any) -> None:
            for stream in wake.streams:
                seen.extend(await wake.read(stream.path).messages())
            loop.call_soon_threadsafe(woken[len(seen) - 1].set)

        async with asyncio.timeout(WAIT_SECONDS_MAX):
            working = asyncio.create_task(subscription.work(handler(client, handle), worker="ann"))
            for number in range(3):
                await offer(client, f"{path}/a", number)
                await woken[number].wait()
            await subscription.stop()
            await working

        assert seen == [0, 1, 2]


async def test_a_worker_whose_wake_stream_was_closed_asks_less_and_less_often(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    asked: list[object] = []

    def on_error(error: fencepost.FencepostError) -> None:
        asked.append(error)

    async with connect(server_process.url, on_error=on_error) as client:
        subscription = await pulling(client, path)
        await client.stream((await subscription.info()).wake_stream).close()

        working = asyncio.create_task(subscription.work(lambda _: None, worker="ann"))
        await asyncio.wait([working], timeout=1)
        await subscription.stop()
        await working

    assert 2 < len(asked) < 40


async def test_a_handler_that_raises_gives_the_work_back(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = await pulling(client, path)
        await offer(client, f"{path}/a", 1)
        seen: list[Any] = []

        async def handle(wake: Any) -> None:
            if len(seen) < 2:
                raise RuntimeError("boom")
            seen.append(await wake.read(f"{path}/a").messages())

        with pytest.raises(RuntimeError, match="boom"):
            await subscription.work(handler(client, handle), worker="ann", until_idle=True)
        await subscription.work(
            handler(client, handle),
            worker="ann",
            until_idle=True,
            on_error=lambda error, wake: seen.append((str(error), wake.subscription_id)),
        )

        assert seen == [("boom", path), ("boom", path), [1]]


async def test_a_worker_of_a_webhook_is_refused(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    async with connect(server_process.url) as client:
        subscription = client.subscription(path)
        await subscription.create(pattern=f"{path}/*", webhook="http://127.0.0.1:9/")

        with pytest.raises(fencepost.InvalidArgumentError, match="webhook"):
            await subscription.work(lambda _: None, worker="ann")
        await subscription.delete()


async def test_a_block_over_a_wake_keeps_the_lease_and_is_told_when_it_is_lost(
    connect: Connect,
) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def answer(asked: Asked) -> bytes:
        if asked.path.endswith("/claim"):
            body = b'{"wake_id":"w","generation":1,"token":"t","streams":[],"lease_ttl_ms":30}'
            return response(200, body)
        assert asked.headers["authorization"] == "Bearer t"
        beats = sum(1 for one in server.asked if one.path.endswith("/ack"))
        if beats < 3:
            return response(200, b'{"ok":true,"next_wake":false}')
        loop.call_soon_threadsafe(over.set)
        return response(409, b'{"error":{"code":"FENCED","generation":2}}')

    with OddServer(answer) as server:
        async with connect(server.url, token="mine") as client:
            wake = await client.subscription("s").claim("ann")

            async def block() -> None:
                async with wake:
                    await over.wait()
                    await asyncio.sleep(0 if isinstance(client, Threaded) else 3600)

            with pytest.raises(fencepost.WakeFencedError) as fenced:
                await asyncio.wait_for(block(), WAIT_SECONDS_MAX)

    assert fenced.value.generation == 2
    assert not any(one.path.endswith("/release") for one in server.asked)


async def test_an_ack_whose_answer_was_lost_counts_as_done(connect: Connect) -> None:
    def answer(asked: Asked) -> bytes:
        if asked.path.endswith("/claim"):
            body = b'{"wake_id":"w","generation":1,"token":"t","streams":[],"lease_ttl_ms":30000}'
            return response(200, body)
        if sum(1 for one in server.asked if one.path == asked.path) == 1:
            return b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
        return response(409, b'{"error":{"code":"FENCED","generation":2}}')

    with OddServer(answer) as server:
        async with connect(server.url) as client:
            done = await (await client.subscription("s").claim("ann")).done()
            assert done == fencepost.WakeAcked(uncertain=True)
            await (await client.subscription("other").claim("ann")).release()
