"""`python -m benchmarks.client`: the Python client end to end, beside its neighbours.

Three questions, each answered in one run on one machine: how many 100-byte JSON messages per second
our producer makes durable, beside the batching appends of the `durable-streams` package on PyPI;
how long a message takes from `append` to a follower; and what a request costs through the HTTP
libraries we could have used instead of a connection of our own (those that are installed).
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fencepost
from benchmarks.subjects import OURS, running
from fencepost.coordination import AsyncTaskClaims

ACTORS = 16
MESSAGE = {"order": 1234567, "pad": "x" * 74}
assert len(json.dumps(MESSAGE, separators=(",", ":"))) == 100


def main() -> int:
    """Run everything, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.client")
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--peer-messages", type=int, default=100_000)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    table = Table("what", "result", "note")
    with (
        tempfile.TemporaryDirectory(dir=options.data) as folder,
        running(OURS, Path(folder) / "data") as server,
    ):
        url = f"http://127.0.0.1:{server.port}"
        ours = _sync_producer(url, options.messages)
        table.add_row("producer, sync", f"{ours:,.0f} messages/s", "durable")
        rate = asyncio.run(_async_producer(url, options.messages))
        table.add_row("producer, async", f"{rate:,.0f} messages/s", "durable")
        peer = asyncio.run(_peer(url, options.peer_messages))
        table.add_row("durable-streams 0.1.0", f"{peer:,.0f} messages/s", "same server")
        table.add_row("ours against it", f"{ours / peer:.1f}x", "")
        for live in ("sse", "long-poll"):
            p50, p99 = _latency(url, live, 1_000)
            table.add_row(f"append to follower, {live}", f"{p50:.2f} / {p99:.2f} ms", "p50/p99")
        tried, won = asyncio.run(_claims(url, options.tasks))
        table.add_row(
            f"claims, {ACTORS} actors compete", f"{won:,.0f} claims/s", f"{tried:,.0f} tries/s"
        )
        _make_asked(url)
        for name, measure in _libraries().items():
            each = measure(url, options.requests)
            table.add_row(f"one HEAD: {name}", f"{each * 1e6:,.0f} us", "no disk")
    Console().print(table)
    return 0


async def _claims(url: str, tasks: int) -> tuple[float, float]:
    """Actors who all want every task, in the same order: tries and won claims per second."""
    async with fencepost.connect_async(url) as client:
        stream = await client.create("bench/claims")

        async def act(actor: int) -> int:
            claims = AsyncTaskClaims(stream, f"actor-{actor}")
            won = [await claims.claim(f"task-{task}") for task in range(tasks)]
            return sum(claim is not None for claim in won)

        began = time.perf_counter()
        won = sum(await asyncio.gather(*(act(actor) for actor in range(ACTORS))))
        took = time.perf_counter() - began
    assert won == tasks, f"{won} claims on {tasks} tasks"
    return ACTORS * tasks / took, won / took


def _sync_producer(url: str, count: int) -> float:
    with fencepost.connect(url) as client:
        stream = client.create("bench/sync")
        began = time.perf_counter()
        with stream.producer("bench") as producer:
            for _ in range(count):
                producer.append(MESSAGE)
        took = time.perf_counter() - began
        assert stream.head().next_offset.startswith(f"{count:016}")
    return count / took


async def _async_producer(url: str, count: int) -> float:
    async with fencepost.connect_async(url) as client:
        stream = await client.create("bench/async")
        began = time.perf_counter()
        async with stream.producer("bench") as producer:
            for _ in range(count):
                await producer.append(MESSAGE)
        took = time.perf_counter() - began
        assert (await stream.head()).next_offset.startswith(f"{count:016}")
    return count / took


async def _peer(url: str, count: int) -> float:
    """The published package (0.1.0) has no idempotent producer: its batching appends instead.

    They wait for their answer, so a thousand at a time are under way.
    """
    from durable_streams import AsyncDurableStream

    with fencepost.connect(url) as client:
        client.create("bench/peer")
    target = f"{url}/v1/stream/bench/peer"
    async with AsyncDurableStream(target, content_type="application/json") as stream:
        began = time.perf_counter()
        left = iter(range(count))

        async def append() -> None:
            for _ in left:
                await stream.append(MESSAGE)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(1_000):
                tasks.create_task(append())
        took = time.perf_counter() - began
    with fencepost.connect(url) as client:
        assert client.stream("bench/peer").head().next_offset.startswith(f"{count:016}")
    return count / took


def _latency(url: str, live: Any, count: int) -> tuple[float, float]:
    """Milliseconds from before an append to its message in a follower on another thread."""
    taken: list[float] = []
    arrived = threading.Event()
    with fencepost.connect(url) as client:
        stream = client.create(f"bench/latency-{live}")

        def follow() -> None:
            with (
                fencepost.connect(url) as other,
                other.stream(stream.path).follow(live=live) as following,
            ):
                for sent in following:
                    taken.append((time.perf_counter() - sent) * 1000)
                    arrived.set()
                    if len(taken) == count:
                        return

        reader = threading.Thread(target=follow)
        reader.start()
        for _ in range(count):
            arrived.clear()
            stream.append(time.perf_counter(), retry=False)
            arrived.wait()
        reader.join()
    ordered = sorted(taken)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)]


def _make_asked(url: str) -> None:
    with fencepost.connect(url) as client:
        client.create("bench/asked")


def _libraries() -> dict[str, Callable[[str, int], float]]:
    found: dict[str, Callable[[str, int], float]] = {"fencepost": _with_ours}
    for name, measure in (
        ("httpx", _with_httpx),
        ("urllib3", _with_urllib3),
        ("niquests", _with_niquests),
        ("aiohttp", _with_aiohttp),
    ):
        try:
            __import__(name)
        except ImportError:
            continue
        found[name] = measure
    return found


ASKED = "/v1/stream/bench/asked"
"""All clients send the same request, a HEAD of this stream, after the same warm-up."""
WARM_UP = 50


def _timed(count: int, ask: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        ask()
    began = time.perf_counter()
    for _ in range(count):
        ask()
    return (time.perf_counter() - began) / count


def _with_ours(url: str, count: int) -> float:
    with fencepost.connect(url) as client:
        return _timed(count, client.stream("bench/asked").head)


def _with_httpx(url: str, count: int) -> float:
    import httpx

    with httpx.Client() as http:
        return _timed(count, lambda: http.head(url + ASKED).headers)


def _with_urllib3(url: str, count: int) -> float:
    import urllib3

    pool = urllib3.PoolManager()
    return _timed(count, lambda: pool.request("HEAD", url + ASKED).headers)


def _with_niquests(url: str, count: int) -> float:
    import niquests

    with niquests.Session() as session:
        return _timed(count, lambda: session.head(url + ASKED).headers)


def _with_aiohttp(url: str, count: int) -> float:
    import aiohttp

    async def measure() -> float:
        async with aiohttp.ClientSession() as session:
            began = 0.0
            for index in range(WARM_UP + count):
                if index == WARM_UP:
                    began = time.perf_counter()
                async with session.head(url + ASKED) as answer:
                    await answer.read()
            return (time.perf_counter() - began) / count

    return asyncio.run(measure())


if __name__ == "__main__":
    raise SystemExit(main())
