"""`fencepost bench`: a small load on a server, and the rates it took; it judges nothing.

One stream, one producer, one reader, one follower, all in this process: what a first program would
see, not what the server can do under many clients. The stream has a random name and is deleted.
"""

from __future__ import annotations

import queue
import statistics
import threading
from typing import Annotated, Any

import msgspec
import typer

import fencepost
from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.render import CommandError, progress, show_facts, show_lines, talking
from fencepost.clock import Clock, SystemClock

FOLLOW_SECONDS_MAX = 30.0
BAR_STEPS = 100


def bench(
    messages: Annotated[int, typer.Option(help="Messages to append and read.", min=1)] = 100_000,
    size: Annotated[int, typer.Option(help="Bytes of a message, about.", min=16)] = 100,
    follows: Annotated[
        int, typer.Option(help="Appends whose way to a follower is timed.", min=2)
    ] = 200,
    under: Annotated[
        str, typer.Option(help="Path below which the stream gets a random name.")
    ] = "bench",
    keep: Annotated[bool, typer.Option("--keep", help="Close the stream, not delete it.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Put a small load on a server: durable appends, reads, latency to a follower; prints rates.

    Examples:

      fencepost bench
      fencepost bench --messages 1000000 --size 1000
    """
    clock = SystemClock()
    path = f"{under}/{clock.token(8).hex()}"
    with talking(url, token, as_json=as_json) as client:
        stream = client.create(path)
        try:
            appending = _append(clock, stream, messages, size, hidden=as_json)
            reading, read_bytes = _read(clock, stream)
            delays = _follow(clock, stream, follows)
        finally:
            if not keep:
                stream.delete()
        result: dict[str, Any] = {
            "messages": messages,
            "appends_per_s": round(messages / appending),
            "append_mb_per_s": round(read_bytes / appending / 1e6, 1),
            "reads_per_s": round(messages / reading),
            "read_mb_per_s": round(read_bytes / reading / 1e6, 1),
            "follow_p50_ms": round(statistics.median(delays) * 1000, 2),
            "follow_p99_ms": round(statistics.quantiles(delays, n=100)[98] * 1000, 2),
        }
        if keep:
            result["path"] = path
        _say(result, as_json)


def _append(
    clock: Clock, stream: fencepost.Stream, messages: int, size: int, *, hidden: bool
) -> float:
    """Seconds until every message is on the server's disk."""
    padding = "x" * max(0, size - 16)
    step = max(1, messages // BAR_STEPS)
    with progress(hidden=hidden) as bars:
        task = bars.add_task("appending", total=messages)
        begun_ns = clock.monotonic_ns()
        with stream.producer("bench") as producer:
            for number in range(messages):
                producer.append({"n": number, "p": padding})
                if number % step == 0:
                    bars.update(task, completed=number)
        return _seconds_since(clock, begun_ns)


def _read(clock: Clock, stream: fencepost.Stream) -> tuple[float, int]:
    """Seconds to read it all back, and how many bytes it was."""
    begun_ns = clock.monotonic_ns()
    read = sum(len(batch.data) for batch in stream.read(type=msgspec.Raw).batches())
    return _seconds_since(clock, begun_ns), read


def _follow(clock: Clock, stream: fencepost.Stream, follows: int) -> list[float]:
    """Seconds from sending an append to having it on the follower's side."""
    arrivals: queue.Queue[int | fencepost.FencepostError] = queue.Queue()
    tail = stream.head().next_offset

    def follow() -> None:
        try:
            for _ in stream.follow(offset=tail, patience=FOLLOW_SECONDS_MAX):
                arrivals.put(clock.monotonic_ns())
        except fencepost.FencepostError as error:
            arrivals.put(error)

    threading.Thread(target=follow, daemon=True, name="bench-follower").start()
    delays: list[float] = []
    # The first one also waits for the follower to connect and is not counted.
    for number in range(follows + 1):
        begun_ns = clock.monotonic_ns()
        stream.append(number)
        try:
            arrived = arrivals.get(timeout=FOLLOW_SECONDS_MAX)
        except queue.Empty:
            raise CommandError("a follower did not see an append: look at the server") from None
        if isinstance(arrived, fencepost.FencepostError):
            raise arrived
        if number:
            delays.append((arrived - begun_ns) / 1e9)
    stream.close()
    return delays


def _seconds_since(clock: Clock, begun_ns: int) -> float:
    return (clock.monotonic_ns() - begun_ns) / 1e9


def _say(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_lines([result])
        return
    show_facts(
        {
            "appends": f"{result['appends_per_s']:,} messages/s, {result['append_mb_per_s']} MB/s",
            "reads": f"{result['reads_per_s']:,} messages/s, {result['read_mb_per_s']} MB/s",
            "append to follower": (
                f"p50 {result['follow_p50_ms']} ms, p99 {result['follow_p99_ms']} ms"
            ),
            "stream": result.get("path"),
        }
    )
