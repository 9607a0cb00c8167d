"""The producers against a real server: order, epochs, errors, backpressure, forks, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fencepost
from fencepost import Client, PendingBatch, Receipt, Stream
from fencepost.client.producer.deliveries import Delivery
from tests.certificates import certificates
from tests.faults.proxy import Proxy
from tests.serving import ServerProcess
from tests.twins import Connect
from tests.twins import connect as connect


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> object:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="orders")
def _orders(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"producer/{request.node.name}")


def test_the_first_screen_of_the_documentation_works(server_process: ServerProcess) -> None:
    with fencepost.connect(server_process.url) as client:
        orders = client.create("orders")
        with orders.producer("checkout-1") as producer:
            for n in range(100_000):
                producer.append({"order": n})
        assert [m["order"] for m in orders.read()] == list(range(100_000))


async def test_its_async_twin_works_as_well(server_process: ServerProcess, path: str) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        orders = await client.create(path)
        async with orders.producer("checkout-1") as producer:
            for n in range(20_000):
                _ = await producer.append({"order": n})
        assert [m["order"] async for m in orders.read()] == list(range(20_000))


def test_every_life_of_a_producer_has_its_own_epoch(orders: Stream) -> None:
    receipts: list[Receipt] = []
    for life in range(4):
        with orders.producer("p", on_ack=receipts.append) as producer:
            producer.append({"life": life})
            producer.flush()
            producer.append({"life": life})

    assert [(receipt.epoch, receipt.seq) for receipt in receipts] == [
        (epoch, seq) for epoch in range(4) for seq in range(2)
    ]
    assert [message["life"] for message in orders.read()] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_saved_place_is_gone_on_from_without_a_new_epoch(orders: Stream) -> None:
    with orders.producer("p") as before:
        before.append(1)
    saved = before.last_acked
    assert saved is not None

    with orders.producer("p", epoch=saved.epoch, seq=saved.seq) as after:
        receipt = after.append(2).wait()

    assert (receipt.epoch, receipt.seq) == (saved.epoch, saved.seq + 1)
    assert orders.read().messages() == [1, 2]


def test_a_fenced_producer_reports_everything_with_its_data(orders: Stream) -> None:
    lost: list[tuple[Exception, list[object]]] = []

    def on_error(error: Exception, batch: PendingBatch) -> None:
        lost.append((error, batch.messages))

    old = orders.producer("p", on_error=on_error, batch_bytes_max=1)
    old.append("mine").wait()
    with orders.producer("p") as new:
        new.append("theirs")

    handles: list[Delivery] = []
    with contextlib.suppress(fencepost.ProducerFailedError):
        # The server may refuse the first before the last of them is appended.
        while len(handles) < 3:
            handles.append(old.append(len(handles)))
    with pytest.raises(fencepost.ProducerFailedError) as failed:
        old.close()

    assert isinstance(failed.value.cause, fencepost.StaleEpochError)
    assert [messages for _, messages in lost] == [[number] for number in range(len(handles))]
    with pytest.raises(fencepost.StaleEpochError):
        handles[0].wait()
    with pytest.raises(fencepost.ProducerFailedError):
        old.append("more")
    old.close()
    assert orders.read().messages() == ["mine", "theirs"]


def test_a_missing_stream_ends_the_producer(client: Client) -> None:
    producer = client.stream("producer/absent").producer("p")
    producer.append(1)
    with pytest.raises(fencepost.ProducerFailedError) as failed:
        producer.close()
    assert isinstance(failed.value.cause, fencepost.StreamNotFoundError)


def test_an_exception_in_the_block_is_not_hidden_and_what_was_appended_is_stored(
    orders: Stream,
) -> None:
    def fail() -> None:
        with orders.producer("p") as producer:
            producer.append(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert orders.read().messages() == [1]


def test_bytes_are_joined_in_order(client: Client) -> None:
    stream = client.create("producer/bytes", content_type="application/octet-stream")
    with stream.producer("p", batch_bytes_max=1000) as producer:
        for number in range(2_000):
            producer.append(b"%04d" % number)
    assert stream.read().bytes() == b"".join(b"%04d" % number for number in range(2_000))


def test_a_full_queue_makes_append_wait(orders: Stream) -> None:
    seen = 0
    with orders.producer("p", pending_bytes_max=20_000, batch_bytes_max=5_000) as producer:
        for _ in range(500):
            producer.append("x" * 1_000)
            seen = max(seen, producer.pending_bytes)
            assert producer.in_flight_count <= 5
    assert seen <= 22_000
    assert producer.pending_count == 0


def test_linger_gathers_and_flush_does_not_wait_for_it(orders: Stream) -> None:
    receipts: list[Receipt] = []
    with orders.producer("p", linger=30.0, on_ack=receipts.append) as producer:
        for number in range(10):
            producer.append(number)
        producer.flush()
        assert [receipt.messages for receipt in receipts] == [10]


def test_a_callback_that_fails_loses_nothing(
    orders: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    def on_ack(_: Receipt) -> None:
        raise RuntimeError("mine")

    with orders.producer("p", on_ack=on_ack) as producer:
        producer.append(1)
    assert "a callback of the producer failed" in caplog.text
    assert orders.read().messages() == [1]


def test_a_client_works_on_both_sides_of_a_fork(orders: Stream) -> None:
    orders.append("before")
    producer = orders.producer("p")
    producer.append("parent").wait()

    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                producer.append("never")
            except fencepost.FencepostError:
                orders.append("child")
                with orders.producer("child") as own:
                    own.append("child's producer")
                code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    producer.append("parent again").wait()
    producer.close()

    assert orders.read().messages() == [
        "before",
        "parent",
        "child",
        "child's producer",
        "parent again",
    ]


def test_a_producer_outlives_a_restart_of_its_server(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data") as server,
        fencepost.connect(server.url) as client,
        client.create("orders").producer("p") as producer,
    ):
        producer.append(1).wait()
        server.stop()
        handle = producer.append(2)
        server.restart()
        assert handle.wait(30).seq == 1
        assert client.stream("orders").read().messages() == [1, 2]


async def test_an_async_producer_that_is_cancelled_leaves_nothing_open(
    server_process: ServerProcess,
) -> None:
    unknown: list[PendingBatch] = []
    began = asyncio.Event()

    async def produce() -> None:
        async with (
            fencepost.connect_async(server_process.url) as client,
            (await client.create("producer/cancelled")).producer(
                "p", linger=60.0, on_error=lambda _, batch: unknown.append(batch)
            ) as producer,
        ):
            delivery = await producer.append("never sent")
            began.set()
            await delivery

    task = asyncio.create_task(produce())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [batch.messages for batch in unknown] == [["never sent"]]
    assert not unknown[0].maybe_stored


async def test_async_handles_can_be_awaited_and_errors_surface_once(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        stream = await client.create(path)
        producer = stream.producer("p")
        first = await producer.append(1)
        assert (await first).seq == 0
        await stream.close()
        second = await producer.append(2)
        with pytest.raises(fencepost.StreamClosedError):
            await second
        with pytest.raises(fencepost.ProducerFailedError):
            await producer.flush()
        await producer.close()


async def test_everything_works_over_tls(
    server_process: ServerProcess, tmp_path: Path, path: str
) -> None:
    here, there = certificates(tmp_path)
    async with Proxy("127.0.0.1", server_process.port, ssl=there) as proxy:
        url = proxy.url.replace("http:", "https:")

        def sync() -> list[int]:
            with fencepost.connect(url, ssl=here) as client:
                stream = client.create(f"{path}/sync")
                with stream.producer("p") as producer:
                    for number in range(5_000):
                        producer.append({"n": number, "pad": "x" * 500})
                return [message["n"] for message in stream.read()]

        assert await asyncio.to_thread(sync) == list(range(5_000))
        async with fencepost.connect_async(url, ssl=here) as client:
            stream = await client.create(f"{path}/async")
            async with stream.producer("p") as producer:
                for number in range(5_000):
                    _ = await producer.append(number)
            assert await stream.read(type=int).messages() == list(range(5_000))
        retries = fencepost.Retries(attempts_max=1)
        async with fencepost.connect_async(url, retries=retries) as suspicious:
            with pytest.raises(fencepost.ConnectionFailedError, match="certificate"):
                await suspicious.create("tls/unknown")


async def test_a_token_function_that_raises_ends_the_producer_with_it(
    connect: Connect, server_process: ServerProcess, path: str
) -> None:
    def token() -> str:
        raise KeyError("no secret")

    async with connect(server_process.url, token=token) as client:
        producer = client.stream(path).producer("p")
        delivery = await producer.append(1)
        with pytest.raises(fencepost.ProducerFailedError) as failed:
            await asyncio.wait_for(producer.flush(), 30)

        assert isinstance(failed.value.cause, KeyError)
        assert isinstance(delivery.error, fencepost.ProducerFailedError)
        await producer.close()


async def test_a_token_function_that_never_returns_does_not_outlive_the_deadline(
    server_process: ServerProcess, path: str
) -> None:
    async def token() -> str:
        await asyncio.Event().wait()
        return "never"

    async with fencepost.connect_async(server_process.url, token=token) as client:
        producer = client.stream(path).producer("p", delivery_seconds_max=0.2)
        _ = await producer.append(1)
        with pytest.raises(fencepost.ProducerFailedError):
            await asyncio.wait_for(producer.flush(), 30)
        await producer.close()


async def test_an_unexpected_exception_while_an_answer_is_read_ends_the_producer(
    connect: Connect, server_process: ServerProcess, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    async with connect(server_process.url) as client:
        stream = await client.create(path)
        producer = stream.producer("p")
        monkeypatch.setattr(producer._machine, "answered", broken)
        _ = await producer.append(1)
        with pytest.raises(fencepost.ProducerFailedError) as failed:
            await asyncio.wait_for(producer.flush(), 30)

        assert isinstance(failed.value.cause, ZeroDivisionError)
        await producer.close()


def test_threads_share_a_producer(server_process: ServerProcess, path: str) -> None:
    """As the threads of a web server do: each appends, and some wait for what they appended."""
    with fencepost.connect(server_process.url) as client:
        stream = client.create(path)
        with stream.producer("shared") as producer, ThreadPoolExecutor(16) as pool:

            def append(thread: int) -> None:
                for number in range(200):
                    delivery = producer.append([thread, number])
                    if number % 20 == 0:
                        assert delivery.wait().epoch == 0

            list(pool.map(append, range(16)))

        stored = stream.read().messages()
    assert len(stored) == 16 * 200
    for thread in range(16):
        assert [number for one, number in stored if one == thread] == list(range(200))
