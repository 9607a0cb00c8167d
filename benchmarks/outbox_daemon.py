"""`python -m benchmarks.outbox_daemon`: accepts, drains and latency of the outbox daemon.

Durable accepts at 16 local clients stand beside the same rows inserted in a plain loop, a commit
each, with synchronous=FULL, and beside procrastinate's `defer` on 16 connections to PostgreSQL. A
drain goes to 16 topics of a real server; the same with a destination that is dead. The latency is
from the send of a client to the event of its message in the inbox on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import uvloop

import fencepost
from benchmarks import machine
from fencepost.testing.postgres import PostgresServer
from tests.outboxing import OutboxProcess, until
from tests.serving import ServerProcess

PEER = ("procrastinate==3.10.0", "psycopg[binary,pool]")
CLIENTS = 16
TOPICS = 16
PEER_PROGRAM = """
import asyncio, sys, time
import procrastinate

async def main(url, jobs, clients):
    pool = {"min_size": clients, "max_size": clients}
    connector = procrastinate.PsycopgConnector(conninfo=url, **pool)
    app = procrastinate.App(connector=connector)

    @app.task(name="nothing")
    async def nothing(body):
        pass

    async with app.open_async():
        await app.schema_manager.apply_schema_async()

        async def client(count):
            for _ in range(count):
                await nothing.defer_async(body="x" * 100)

        await asyncio.gather(*(client(20) for _ in range(clients)))
        started = time.perf_counter()
        await asyncio.gather(*(client(jobs // clients) for _ in range(clients)))
        print(jobs / (time.perf_counter() - started))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def request(number: int, ref: str) -> bytes:
    body = b'{"kind":"topic","ref":"%b","body":"%b"}' % (ref.encode(), b"x" * 100)
    head = (
        f"POST /v1/send?mesh=shop HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: {number}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def accepts(socket: str, first: int, count: int, refs: list[str]) -> float:
    """Seconds that so many durable accepts take, from so many clients at once."""

    async def client(name: int) -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        for number in range(name, count, CLIENTS):
            writer.write(request(first + number, refs[number % len(refs)]))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 202"):
                raise SystemExit(f"a send was answered {head!r}")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(client(name) for name in range(CLIENTS)))
    return time.perf_counter() - started


def plain_loop(folder: Path, count: int) -> float:
    """Rows a second, a commit each, with the same durability."""
    database = sqlite3.connect(folder / "plain.db", isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(
        "CREATE TABLE plain (id TEXT PRIMARY KEY, mesh TEXT, message_id TEXT, print BLOB, payload"
        " BLOB, status TEXT, UNIQUE (mesh, message_id))"
    )
    started = time.perf_counter()
    for number in range(count):
        row = (f"{number:026}", "shop", str(number), b"p" * 32, b"x" * 140, "pending")
        database.execute("INSERT INTO plain VALUES (?, ?, ?, ?, ?, ?)", row)
    took = time.perf_counter() - started
    database.close()
    return count / took


def peer_rate(jobs: int) -> float:
    """`defer`s a second of procrastinate, on as many connections."""
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *PEER]
        subprocess.run(install, check=True)
        done = subprocess.run(
            [sys.executable, "-c", PEER_PROGRAM, postgres.new_database(), str(jobs), str(CLIENTS)],
            env=os.environ | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"procrastinate failed: {done.stderr[-2000:]}")
        return float(done.stdout.split()[-1])


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metric(outbox: OutboxProcess, name: str) -> float:
    lines = outbox.http.get("/v1/metrics").text.splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith(name)]
    return float(found)


def drained(outbox: OutboxProcess, first: int, count: int, refs: list[str]) -> float:
    """Seconds until so many sends are delivered, counted from the first one.

    Those to destinations that are gone are accepted too, and not waited for.
    """
    before = outbox.counts().get("done", 0)
    gone = [ref for ref in refs if ref.startswith("gone")]
    wanted = before + count - count * len(gone) // len(refs)
    started = time.perf_counter()
    uvloop.run(accepts(str(outbox.data / "outbox.sock"), first, count, refs))
    until(lambda: outbox.counts().get("done", 0) >= wanted, 600)
    return time.perf_counter() - started


class Drains:
    """What drains took: seconds, and processor time of the daemon and the server for a send."""

    def __init__(self, outbox: OutboxProcess, server: ServerProcess) -> None:
        self._outbox, self._server = outbox, server
        self.seconds: list[float] = []
        self._busy: list[tuple[float, float]] = []

    def add(self, first: int, count: int, refs: list[str]) -> None:
        before = processor_seconds(self._outbox.pid), processor_seconds(self._server.pid)
        self.seconds.append(drained(self._outbox, first, count, refs))
        after = processor_seconds(self._outbox.pid), processor_seconds(self._server.pid)
        here, there = ((b - a) / count * 1e6 for a, b in zip(before, after, strict=True))
        self._busy.append((here, there))

    def shown(self, count: int) -> str:
        rates = ", ".join(f"{count / seconds:,.0f}" for seconds in self.seconds)
        here, there = (statistics.median(busy) for busy in zip(*self._busy, strict=True))
        return f"{rates} sends/s; processor {here:.0f} us here, {there:.0f} us at the server each"


def latencies_ms(outbox: OutboxProcess, count: int) -> list[float]:
    """From each send to its event in the inbox here."""
    sent: dict[str, float] = {}
    found: list[float] = []
    ready = threading.Event()

    def listen() -> None:
        with outbox.http.stream("GET", "/v1/events") as answer:
            ready.set()
            for line in answer.iter_lines():
                if line.startswith("data: ") and '"client_message_id":"latency-' in line:
                    name = line.partition('"client_message_id":"')[2].partition('"')[0]
                    found.append((time.perf_counter() - sent[name]) * 1000)
                    if len(found) == count:
                        return

    listener = threading.Thread(target=listen)
    listener.start()
    ready.wait()
    for number in range(count):
        name = f"latency-{number}"
        sent[name] = time.perf_counter()
        outbox.send(name, mesh="shop", kind="dm", ref="ann")
        until(lambda number=number: len(found) > number)
    listener.join()
    return found


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accepts", type=int, default=16_000)
    parser.add_argument("--drain", type=int, default=8_000)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.data) as name:
        folder = Path(name)
        print(machine.facts(folder))
        plain = plain_loop(folder, options.accepts // 4)
        print(f"plain loop, synchronous=FULL: {plain:,.0f} rows/s")
        # A server that is away: what is accepted waits.
        with OutboxProcess(folder / "away", "http://127.0.0.1:9", ["shop"]) as outbox:
            refs = [f"t{number}" for number in range(TOPICS)]
            uvloop.run(accepts(str(outbox.data / "outbox.sock"), 0, 1_600, refs))
            busy = processor_seconds(outbox.pid)
            took = uvloop.run(accepts(outbox.url, 10_000, options.accepts, refs))
            busy = processor_seconds(outbox.pid) - busy
            commits = metric(outbox, "fencepost_outbox_commits_total")
            jobs = metric(outbox, "fencepost_outbox_jobs_total")
        rate = options.accepts / took
        print(
            f"durable accepts, {CLIENTS} clients: {rate:,.0f}/s, {rate / plain:.1f}x the loop,"
            f" {busy / options.accepts * 1e6:.0f} us of processor each,"
            f" {jobs / commits:.1f} in a commit"
        )
        if not options.no_peer:
            peer = peer_rate(options.accepts // 4)
            print(
                f"procrastinate's defer, {CLIENTS} connections: {peer:,.0f}/s; {rate / peer:.1f}x"
            )
        drain(folder, options.drain)
    return 0


def drain(folder: Path, count: int) -> None:
    """Drains to a server, with and without a destination that is dead; the latency."""
    with ServerProcess(folder / "server") as server:
        with fencepost.connect(server.url) as client:
            mesh = client.mesh("shop")
            mesh.make()
            mesh.make_member("ann")
            for number in range(TOPICS):
                mesh.make_topic(f"t{number}")
        with OutboxProcess(folder / "near", server.url, ["shop"], "ann") as outbox:
            until(lambda: outbox.get("/v1/health")["status"] == "ok")
            refs = [f"t{number}" for number in range(TOPICS)]
            drained(outbox, 0, count // 4, refs)
            alone, dead = Drains(outbox, server), Drains(outbox, server)
            more = count * (TOPICS + 1) // TOPICS
            for number in range(5):
                # In turns, so that what else the machine does falls on both.
                alone.add(10**6 * (2 * number + 1), count, refs)
                dead.add(10**6 * (2 * number + 2), more, [*refs, "gone"])
            print(f"accept and drain to {TOPICS} topics: {alone.shown(count)}")
            slower = statistics.median(
                beside / lone for lone, beside in zip(alone.seconds, dead.seconds, strict=True)
            )
            print(
                f"the same beside a dead one: {dead.shown(count)}; the others take"
                f" {slower:.2f} times as long (median of pairs)"
            )
            one = count // 8 / drained(outbox, 10**8, count // 8, ["t1"])
            print(f"accept and drain to one topic: {one:,.0f} sends/s")
            times = latencies_ms(outbox, 300)
            p99 = statistics.quantiles(times, n=100)[98]
            print(f"send to inbox: p50 {statistics.median(times):.1f} ms, p99 {p99:.1f} ms")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.TransportError as error:
        sys.exit(f"the daemon does not answer: {error}")
