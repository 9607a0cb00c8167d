"""`python -m benchmarks.groups`: groups over HTTP on both stores, beside procrastinate.

How many events a second workers drain with the defaults (10 targets, 10 events in a claim, the ack
claims the next) and with wide claims; the same with all events on one target, and with many
computed targets over one source; how many plain appends the same connections store; and how long a
claim takes when a group has many targets. procrastinate runs on the same PostgreSQL server, with as
many workers of ten jobs at a time, installed for the run into a temporary folder (`--no-peer`
leaves it out). How fast anything was decides nothing.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine
from fencepost.testing.postgres import PostgresServer
from tests.serving import ServerProcess

JSON_HEADERS = {"Content-Type": "application/json"}
WORKERS = 4
PEER = ("procrastinate==3.10.0", "psycopg[binary,pool]")
PEER_PROGRAM = """
import asyncio, sys, time
import procrastinate

async def main(what, url, jobs):
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    @app.task(name="nothing")
    async def nothing(n):
        pass

    async with app.open_async():
        if what == "defer":
            await app.schema_manager.apply_schema_async()
            await nothing.batch_defer_async(*({"n": n} for n in range(jobs)))
            return
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.time()
        await app.run_worker_async(concurrency=10, wait=False, install_signal_handlers=False)
        print(started, time.time())

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class Wire:
    """One connection to a server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, method: str, target: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body)
        self._connection.request(method, target, data, JSON_HEADERS)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{method} {target}: {answer.status} {content!r}")
        return json.loads(content) if content else {}


def fill(wire: Wire, folder: str, targets: int, events: int) -> None:
    """Streams with events, in commits of 500 appends."""
    message = {"name": "Ordered", "data": {}, "meta": {}}
    paths = [f"{folder}/{number}" for number in range(targets)]
    for at in range(0, targets, 500):
        appends = [
            {
                "stream": path,
                "content_type": "application/json",
                "data": [message] * events,
                "auto_create": True,
            }
            for path in paths[at : at + 500]
        ]
        wire.ask("POST", "/v1/commit", {"appends": appends})


def drain(port: int, folder: str, targets: int, events: int, **widths: int) -> float:
    """Events a second that some workers handle and ack."""
    wire = Wire(port)
    fill(wire, folder, targets, events)
    wire.ask("PUT", f"/v1/groups/{folder}", {"sources": [f"{folder}/*"]})
    return worked(port, folder, targets * events, **widths)


def worked(port: int, folder: str, total: int, **widths: int) -> float:
    """How many events a second workers handle and ack, until so many are."""
    handled = [0] * WORKERS

    def work(number: int) -> None:
        own = Wire(port)
        claim = {"worker": f"w{number}", **widths}
        leases = own.ask("POST", f"/v1/groups/{folder}/claim", claim)["leases"]
        while sum(handled) < total:
            if not leases:
                time.sleep(0.002)
                leases = own.ask("POST", f"/v1/groups/{folder}/claim", claim)["leases"]
                continue
            items = [{"token": one["token"], "at": one["read_to"]} for one in leases]
            done = sum(len(one["events"]) for one in leases)
            body = {"items": items, "claim": claim}
            answer = own.ask("POST", f"/v1/groups/{folder}/ack", body)
            if any(item["outcome"] != "acked" for item in answer["items"]):
                raise SystemExit(f"an ack came to {answer['items']}")
            handled[number] += done
            leases = answer["leases"]

    seconds = run(work)
    if sum(handled) != total:
        raise SystemExit(f"{sum(handled)} events were handled, and {total} were appended")
    return total / seconds


def drain_computed(port: int, targets: int, group: str, **told: str) -> float:
    """Events a second of one source that many computed targets share, one event each.

    `told`: what goes with each event, such as its note.
    """
    wire, url = Wire(port), f"/v1/groups/{group}"
    wire.ask("PUT", url, {"sources": [f"{group}/*"], "targets": "computed"})
    for _ in range(0, targets, 1_000):
        fill(wire, group, 1, 1_000)
    after = wire.ask("GET", url)["correlated"]
    until = wire.ask("GET", f"{url}/stats")["head"]
    source, positions = f"{group}/0", range(until - targets + 1, until + 1)
    found = [{"target": f"t/{at}", "source": source, "position": at, **told} for at in positions]
    for at in range(0, targets, 5_000):
        piece = found[at : at + 5_000]
        body = {"after": after, "until": piece[-1]["position"], "targets": piece}
        after = wire.ask("POST", f"{url}/correlate", body)["correlated"]

    done = [0] * WORKERS

    def work(number: int) -> None:
        own, claim = Wire(port), {"worker": f"w{number}", "streams_max": 100}
        leases = own.ask("POST", f"{url}/claim", claim)["leases"]
        while sum(done) < targets:
            items = [{"token": one["token"], "at": one["until"]} for one in leases]
            body = {"items": items, "claim": claim}
            answer = own.ask("POST", f"{url}/ack", body)
            done[number] += len(items)
            leases = answer["leases"]

    return targets / run(work)


def appended(port: int, count: int) -> float:
    """Plain appends a second of as many connections."""

    def work(number: int) -> None:
        own = Wire(port)
        own.ask("PUT", f"/v1/stream/plain/{number}", [])
        for n in range(count // WORKERS):
            own.ask("POST", f"/v1/stream/plain/{number}", {"n": n})

    return count / run(work)


def run(work: Callable[[int], None]) -> float:
    """How many seconds it takes until every worker has ended."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def claim_times_ms(port: int, targets: int, claims: int) -> list[float]:
    """How long claims of ten targets take in a group of many targets that all have work."""
    wire = Wire(port)
    fill(wire, "many-source", 1, 1)
    wire.ask("PUT", "/v1/groups/many", {"sources": ["many-source/*"], "targets": "computed"})
    # Each piece of the targets is correlated with an event of its own: the watermark must move.
    names = [f"t/{number}" for number in range(targets)]
    for at in range(0, targets, 10_000):
        fill(wire, "many-source", 1, 1)
        known = wire.ask("GET", "/v1/groups/many")["correlated"]
        latest = wire.ask("GET", f"/v1/log?match=many-source/*&after={known}&limit=1")
        position = latest["position"]
        found = [
            {"target": name, "source": latest["stream"], "position": position}
            for name in names[at : at + 10_000]
        ]
        body = {"after": known, "until": position, "targets": found}
        wire.ask("POST", "/v1/groups/many/correlate", body)
    times = []
    for _ in range(claims):
        started = time.perf_counter()
        body = {"worker": "w", "events_max": 0, "lease_ms": 600_000}
        leases = wire.ask("POST", "/v1/groups/many/claim", body)["leases"]
        times.append((time.perf_counter() - started) * 1000)
        if len(leases) != 10:
            raise SystemExit(f"a claim got {len(leases)} targets")
    return times


def peer_rate(url: str, jobs: int) -> float:
    """Jobs a second of procrastinate's workers, ten at a time each."""
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *PEER]
        subprocess.run(install, check=True)
        environment = os.environ | {"PYTHONPATH": folder}
        command = [sys.executable, "-c", PEER_PROGRAM]
        subprocess.run([*command, "defer", url, str(jobs)], env=environment, check=True)
        workers = [
            subprocess.Popen(
                [*command, "work", url, "0"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(WORKERS)
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        times = [worker.communicate()[0].split() for worker in start(workers)]
        return jobs / (max(float(ended) for _, ended in times) - min(float(t[0]) for t in times))


def start(workers: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Tell all workers to begin."""
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return workers


def measure(name: str, server: ServerProcess, options: argparse.Namespace) -> None:
    with server:
        rate = drain(server.port, "wide", options.targets, 10)
        print(f"{name}: drain of {options.targets} targets x 10 events: {rate:,.0f} events/s")
        rate = drain(server.port, "widest", options.targets, 10, streams_max=100)
        print(f"{name}: the same with 100 targets in a claim: {rate:,.0f} events/s")
        print(f"{name}: plain appends: {appended(server.port, options.targets * 4):,.0f}/s")
        count = options.targets * 10
        rate = drain_computed(server.port, count, "shared")
        print(f"{name}: {count:,} computed targets over one source: {rate:,.0f}/s")
        rate = drain_computed(server.port, count, "told", note='[["reserve"]]')
        print(f"{name}: the same, each told of its event: {rate:,.0f}/s")
        rate = drain(server.port, "hot", 1, options.targets * 2)
        print(f"{name}: one hot target: {rate:,.0f} events/s")
        times = claim_times_ms(server.port, options.many, options.claims)
        p99 = statistics.quantiles(times, n=100)[98]
        print(
            f"{name}: claim at {options.many:,} targets: p50 {statistics.median(times):.2f} ms,"
            f" p99 {p99:.2f} ms",
            flush=True,
        )


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=1_000)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--claims", type=int, default=500)
    parser.add_argument("--no-peer", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        print(machine.facts(Path(folder)))
        measure("SQLite", ServerProcess(Path(folder) / "data"), options)
        measure("PostgreSQL", ServerProcess(store=postgres.new_database()), options)
        if not options.no_peer:
            rate = peer_rate(postgres.new_database(), options.targets * 10)
            print(f"procrastinate on the same PostgreSQL: {rate:,.0f} jobs/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
