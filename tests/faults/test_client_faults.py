"""The producer through a bad network and over a server that is killed: exactly once, in order.

`FENCEPOST_CLIENT_MESSAGES` sets how many messages each test sends; 100,000 make a long run. The
seed of a failing run is in its output, and `FENCEPOST_CLIENT_SEED` replays it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost import AsyncReading, Retries, Timeouts
from tests.faults.proxy import Proxy, Trouble
from tests.serving import ServerProcess

MESSAGES = int(os.environ.get("FENCEPOST_CLIENT_MESSAGES", "4000"))
SEED = int(os.environ.get("FENCEPOST_CLIENT_SEED", "0")) or random.randrange(1, 2**31)
QUICK = Timeouts(connect=2.0, answer=2.0)

BRISK = Retries(delay_seconds_max=0.1)

CUTS = Trouble(cut_requests=1.0, cut_answers=0.5, refuse=0.1, within_bytes=8_000)
EVERYTHING = Trouble(
    cut_requests=1.0,
    cut_answers=0.4,
    refuse=0.1,
    repeat=0.5,
    delay_seconds=0.002,
    within_bytes=8_000,
)


class ProxyThread:
    """A proxy on a loop of its own, for what must not share one with it."""

    def __init__(self, port: int, trouble: Trouble, seed: int) -> None:
        self._proxy = Proxy("127.0.0.1", port, trouble, seed=seed)
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self._proxy

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with self._proxy:
            self._ready.set()
            await self._stop.wait()


@pytest.fixture
def seed() -> int:
    """What the run is drawn from; shown when it fails."""
    print(f"replay with FENCEPOST_CLIENT_SEED={SEED}")  # noqa: T201
    return SEED


@contextlib.contextmanager
def killed_again_and_again(server: ServerProcess, seed: int) -> Iterator[list[int]]:
    """Kill the server at random moments and start it again; the list counts how often."""
    dice = random.Random(seed)
    over = threading.Event()
    kills: list[int] = []

    def work() -> None:
        while not over.wait(dice.uniform(0.05, 0.4)):
            server.kill()
            server.restart()
            kills.append(server.pid)

    thread = threading.Thread(target=work, name="killer")
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("trouble", [CUTS, EVERYTHING], ids=["cuts", "everything"])
def test_a_sync_producer_through_a_bad_network_stores_each_message_once_in_order(
    server_process: ServerProcess, trouble: Trouble, seed: int, request: pytest.FixtureRequest
) -> None:
    path = f"faults/{request.node.callspec.id}"
    with ProxyThread(server_process.port, trouble, seed) as proxy:
        with (
            fencepost.connect(proxy.url, timeouts=QUICK, retries=BRISK) as client,
            client.create(path).producer("p", batch_bytes_max=1_000) as producer,
        ):
            for number in range(MESSAGES):
                producer.append({"n": number})
            producer.close(stream=True)
        assert proxy.cuts > 3

    with fencepost.connect(server_process.url) as client:
        stored = [message["n"] for message in client.stream(path).follow()]
        assert stored == list(range(MESSAGES))
        assert sum(1 for _ in client.producers(stream=path)) == 1


async def test_an_async_producer_through_a_bad_network_stores_each_message_once_in_order(
    server_process: ServerProcess, seed: int, path: str
) -> None:
    async with Proxy("127.0.0.1", server_process.port, EVERYTHING, seed=seed) as proxy:
        async with fencepost.connect_async(proxy.url, timeouts=QUICK, retries=BRISK) as client:
            stream = await client.create(path)
            async with stream.producer("p", batch_bytes_max=1_000) as producer:
                for number in range(MESSAGES):
                    _ = await producer.append({"n": number})
                await producer.close(stream=True)
        assert proxy.cuts > 3

    async with fencepost.connect_async(server_process.url) as client:
        stored = [message["n"] async for message in client.stream(path).follow()]
        assert stored == list(range(MESSAGES))


def test_a_producer_over_a_server_that_is_killed_stores_each_message_once_in_order(
    tmp_path: Path, seed: int
) -> None:
    with ServerProcess(tmp_path / "data") as server:
        server.stop()
        server.restart()
        with (
            ProxyThread(server.port, CUTS, seed) as proxy,
            fencepost.connect(proxy.url, timeouts=QUICK, retries=BRISK) as client,
        ):
            stream = client.create("orders")
            with killed_again_and_again(server, seed) as kills:
                sent = 0
                with stream.producer("p", batch_bytes_max=4_000) as producer:
                    while sent < MESSAGES or len(kills) < 3:
                        producer.append(sent)
                        sent += 1
                        if sent % 500 == 0:
                            producer.flush()

        with fencepost.connect(server.url) as client:
            assert client.stream("orders").read(type=int).messages() == list(range(sent))


def test_a_producer_that_crashes_and_restarts_loses_nothing_to_its_predecessor(
    server_process: ServerProcess, seed: int
) -> None:
    """Each life is cut off without a word; the next one begins behind what was acknowledged."""
    dice = random.Random(seed)
    acknowledged: set[int] = set()
    total = MESSAGES // 2
    with ProxyThread(server_process.port, CUTS, seed) as proxy:
        while len(acknowledged) < total:
            with fencepost.connect(proxy.url, timeouts=QUICK, retries=BRISK) as client:
                stream = client.create("faults/lives")
                lives = dice.randrange(1, 400)
                producer = stream.producer("p", batch_bytes_max=500)
                missing = sorted(set(range(total)) - acknowledged)[:lives]
                batches = [(number, producer.append({"n": number})) for number in missing]
                # Only what was acknowledged before the crash is known; the rest is sent again.
                for number, batch in batches[: len(batches) * 3 // 4 + 1]:
                    batch.wait()
                    acknowledged.add(number)
                producer._hang_up()
                producer._closed = True  # a process that was killed says nothing either

    with fencepost.connect(server_process.url) as client:
        stored = [message["n"] for message in client.stream("faults/lives").read()]
        assert acknowledged <= set(stored)
        first = list(dict.fromkeys(stored))
        assert first == sorted(first)


async def test_a_follower_sees_each_message_once_through_a_bad_network(
    server_process: ServerProcess, seed: int, path: str
) -> None:
    total = max(300, MESSAGES // 20)
    trouble = Trouble(cut_answers=1.0, within_bytes=40_000, refuse=0.2, delay_seconds=0.001)
    async with (
        Proxy("127.0.0.1", server_process.port, trouble, seed=seed) as proxy,
        fencepost.connect_async(proxy.url, timeouts=QUICK, retries=BRISK) as far,
        fencepost.connect_async(server_process.url) as near,
    ):
        stream = await near.create(path)

        async def write() -> None:
            async with stream.producer("p", batch_bytes_max=200) as producer:
                for number in range(total):
                    _ = await producer.append(number)
            await stream.close()

        async with asyncio.TaskGroup() as both:
            both.create_task(write())
            by_events = both.create_task(_collect(far.stream(path).follow()))
            by_polls = both.create_task(_collect(far.stream(path).follow(live="long-poll")))

    assert by_events.result() == list(range(total))
    assert by_polls.result() == list(range(total))


async def _collect(following: AsyncReading[int]) -> list[int]:
    return [message async for message in following]


@pytest.fixture
async def distance(server_process: ServerProcess) -> AsyncIterator[Proxy]:
    """The same server, 20 ms away."""
    trouble = Trouble(round_trip_seconds=0.02)
    async with Proxy("127.0.0.1", server_process.port, trouble) as proxy:
        yield proxy


async def test_five_in_flight_hide_a_distance_that_one_does_not(
    distance: Proxy, path: str, record_property: Callable[[str, object], None]
) -> None:
    """The factor is reported, not asserted: a busy machine must not fail a test."""
    seconds: dict[int, float] = {}
    loop = asyncio.get_running_loop()
    async with fencepost.connect_async(distance.url) as client:
        for in_flight in (1, 5):
            stream = await client.create(f"{path}/{in_flight}")
            began = loop.time()
            async with stream.producer("p", max_in_flight=in_flight, batch_bytes_max=1) as producer:
                for number in range(100):
                    _ = await producer.append(number)
            seconds[in_flight] = loop.time() - began
            assert await stream.read(type=int).messages() == list(range(100))

    record_property("in_flight_5_against_1", round(seconds[1] / seconds[5], 2))
    print(f"in flight 5 against 1 over 20 ms: {seconds[1] / seconds[5]:.2f}x")  # noqa: T201
