"""`python -m benchmarks.sessions`: sends and deliveries of a session, beside single requests.

How many sends a second one session carries when they are pipelined, and one HTTP connection when
each waits for its answer; the processor time of the server for each; and how long a message takes
from the call of `send` to its delivery in the session of a member.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fencepost
from benchmarks import machine
from fencepost.testing.postgres import PostgresServer
from tests.serving import ServerProcess

BODY = "x" * 100


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rate(server: ServerProcess, sends: int, send: Callable[[int], None]) -> tuple[float, float]:
    """Sends a second, and milliseconds of the server's processor for each."""
    cpu, started = cpu_seconds(server.pid), time.perf_counter()
    send(sends)
    took = time.perf_counter() - started
    return sends / took, (cpu_seconds(server.pid) - cpu) / sends * 1000


def pipelined(url: str, sends: int) -> None:
    """All of them through one session."""
    with fencepost.connect(url) as client, client.mesh("shop").session() as session:
        waiting = [session.send("queue:jobs", BODY, sender="bob") for _ in range(sends)]
        for pending in waiting:
            pending.receipt()


def one_by_one(url: str, sends: int) -> None:
    """All of them over one HTTP connection, each when the one before is answered."""
    with fencepost.connect(url) as client:
        mesh = client.mesh("shop")
        for _ in range(sends):
            mesh.send("queue:jobs", BODY, sender="bob")


def delivery_times_ms(url: str, messages: int) -> list[float]:
    """From the call of `send` to the delivery, one message at a time."""
    times: list[float] = []
    arrived = threading.Event()
    with fencepost.connect(url) as client:
        mesh = client.mesh("shop")
        with mesh.session("ann") as reader, mesh.session() as sender:

            def read() -> None:
                for delivery in reader:
                    times.append((time.perf_counter() - started) * 1000)
                    arrived.set()
                    delivery.ack()
                    if len(times) == messages:
                        return

            started = 0.0
            thread = threading.Thread(target=read)
            thread.start()
            for _ in range(messages):
                arrived.clear()
                started = time.perf_counter()
                sender.send("dm:ann", BODY, sender="bob")
                arrived.wait()
            thread.join()
    return times


def measure(name: str, server: ServerProcess, options: argparse.Namespace) -> None:
    with server:
        with fencepost.connect(server.url) as client:
            mesh = client.mesh("shop")
            mesh.make()
            mesh.make_member("ann")
            mesh.make_queue("jobs")
        pipelined(server.url, 500)
        for _ in range(options.rounds):
            session, cpu = rate(server, options.sends, lambda n: pipelined(server.url, n))
            http, http_cpu = rate(server, options.sends // 4, lambda n: one_by_one(server.url, n))
            print(
                f"{name}: one session {session:,.0f} sends/s ({cpu:.2f} ms of the server's"
                f" processor each), one HTTP connection {http:,.0f} ({http_cpu:.2f} ms):"
                f" {session / http:.1f}",
                flush=True,
            )
        times = delivery_times_ms(server.url, options.messages)
        p99 = statistics.quantiles(times, n=100)[98]
        print(
            f"{name}: send to delivery: p50 {statistics.median(times):.2f} ms, p99 {p99:.2f} ms",
            flush=True,
        )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sends", type=int, default=8_000)
    parser.add_argument("--messages", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        print(machine.facts(Path(folder)))
        measure("SQLite", ServerProcess(Path(folder) / "data"), options)
        measure("PostgreSQL", ServerProcess(store=postgres.new_database()), options)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"processor time of the clients: {used.ru_utime + used.ru_stime:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
