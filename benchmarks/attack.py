"""`python -m benchmarks.attack`: what one principal notices while another one attacks.

`mallory` asks the log, again and again, for two readings with 256 patterns over 200,000 streams and
leaves each before its answer. Meanwhile `ann` does one request after the other, of every kind in
turns: a read of a stream, a list, an append, the log for few streams, the log without a filter, and
a page of the whole log by `ada`, who may read everything. Then `mallory` makes a subscription by a
pattern over 50,000 streams that are there, deletes it, and sends to a topic with 10,000 members,
while `ann` reads and appends. The same requests with nothing else going on stand beside each. How
long anything took decides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import machine
from fencepost.testing.postgres import PostgresServer
from tests.attacks.attacking import bearer
from tests.engines import POSTGRES, SQLITE, server_at
from tests.integration.auth_support import ALL, ROOT, principal
from tests.integration.raw import Connection, request
from tests.serving import ServerProcess

STREAMS_PER_COMMIT = 50_000
ANN_STREAMS = 20
GLOBS = 256
AT_ONCE = 2
LEFT_AFTER_S = 0.1
SETTLED_S = 2.0
JSON = "Content-Type: application/json"


def matching(pattern: Callable[[int], str]) -> str:
    """A query with as many patterns as an attack has."""
    return "&".join(f"match={pattern(number)}" for number in range(GLOBS))


# Patterns that match nothing: of one beginning, without one, many for each path. Then large pages
# of what is there.
SHAPES = {
    "same prefix": matching(lambda number: f"mallory/**/x*{number}"),
    "no prefix": matching(lambda number: f"**/*x{number}*y"),
    "overlapping": matching(lambda number: f"mallory/{number % 97}/*x{number}"),
    "pages": "after=-1&limit=100000",
}
# What is asked in turns: its name, by which principal, method, target, body.
READS = {
    "stream": ("ann", "GET", "/v1/stream/ann/0?offset=-1", b""),
    "list": ("ann", "GET", "/v1/streams?limit=20", b""),
    "append": ("ann", "POST", "/v1/stream/ann/0", b"[1]"),
    "log, narrow": ("ann", "GET", "/v1/log?after=-1&match=ann/*", b""),
    "log, unfiltered": ("ann", "GET", "/v1/log?after=-1", b""),
    "log, now": ("ann", "GET", "/v1/log?after=now&match=ann/*", b""),
    "whole log, 1,000 rows": ("ada", "GET", "/v1/log?after=-1&limit=1000", b""),
}
Times = dict[str, list[float]]


@contextlib.contextmanager
def served(engine: str, folder: Path) -> Iterator[ServerProcess]:
    """A server with principals on an empty store."""
    people = [
        ROOT,
        principal("ann", ("ann/**", ALL)),
        principal("ada", ("**", ["read"])),
        principal("mallory", ("mallory/**", ALL), ("__mesh/mallory/**", ["admin"])),
    ]
    named = {"FENCEPOST_PRINCIPALS": json.dumps(people)}
    database = PostgresServer() if engine == POSTGRES else contextlib.nullcontext()
    with database as postgres:
        store = folder / engine if postgres is None else postgres.new_database()
        with server_at(store, environment=named) as server:
            yield server


def make_streams(port: int, name: str, paths: list[str]) -> None:
    """Make these streams, each with a message."""
    with Connection(port) as connection:
        connection.socket.settimeout(600)
        for first in range(0, len(paths), STREAMS_PER_COMMIT):
            appends = [
                {"stream": path, "content_type": "application/json", "data": 1, "auto_create": True}
                for path in paths[first : first + STREAMS_PER_COMMIT]
            ]
            body = json.dumps({"appends": appends}).encode()
            done(connection, name, "POST", "/v1/commit", body)


def done(connection: Connection, name: str, method: str, target: str, body: bytes = b"") -> None:
    """Ask for something that must be granted."""
    reply = connection.ask(method, target, bearer(name), JSON, body=body)
    if reply.status not in (200, 201, 204):
        raise SystemExit(f"{method} {target}: {reply.status} {reply.body!r}")


def attack_log(port: int, target: str, stop: threading.Event) -> None:
    """Have two readings under way that their client does not wait for."""
    left: deque[Connection] = deque()
    while not stop.wait(LEFT_AFTER_S):
        if len(left) == AT_ONCE:
            left.popleft().close()
        connection = Connection(port)
        connection.send(request("GET", target, bearer("mallory")))
        left.append(connection)
    for connection in left:
        connection.close()


def noticed(port: int, goes_on: Callable[[Times], bool], kinds: Iterable[str] = READS) -> Times:
    """How long each kind of request takes, in turns."""
    times: Times = {kind: [] for kind in kinds}
    with Connection(port) as connection:
        while goes_on(times):
            for kind in times:
                asked = READS[kind]
                began = time.perf_counter()
                done(connection, *asked)
                times[kind].append(time.perf_counter() - began)
    return times


def report(name: str, times: Times) -> None:
    """One line for each kind of request."""
    for kind, taken in times.items():
        taken = sorted(taken)
        p50, p99, longest = (
            taken[min(int(len(taken) * share), len(taken) - 1)] * 1000 for share in (0.5, 0.99, 1.0)
        )
        print(
            f"{name:45} {kind:22} p50 {p50:7.1f}  p99 {p99:7.1f}  longest {longest:7.1f} ms",
            flush=True,
        )


def beside(attack: Callable[[threading.Event], None], port: int, count: int) -> Times:
    """What ann notices while an attack goes on."""
    stop = threading.Event()
    attacking = threading.Thread(target=attack, args=(stop,))
    attacking.start()
    try:
        time.sleep(3 * LEFT_AFTER_S)  # so that the attack is under way
        return noticed(port, lambda times: len(times["stream"]) < count)
    finally:
        stop.set()
        attacking.join()


def log_attacks(engine: str, server: ServerProcess, options: argparse.Namespace) -> None:
    """Readings of the log with many patterns, in three shapes."""
    names = [f"mallory/{number % 97}/part-{number}" for number in range(options.streams)]
    make_streams(server.port, "mallory", names)
    make_streams(server.port, "ann", [f"ann/{number}" for number in range(ANN_STREAMS)])
    calm = noticed(server.port, lambda times: len(times["stream"]) < options.reads)
    report(f"{engine}, nothing else", calm)
    for route, shape in itertools.product(options.routes, options.shapes):
        if shape == "pages" and route != "/v1/log":
            continue
        target = f"{route}?{SHAPES[shape]}"
        before = machine.processor_s([server.pid])[server.pid]
        began = time.perf_counter()
        times = beside(
            partial(attack_log, server.port, target),
            server.port,
            options.reads,
        )
        busy = machine.processor_s([server.pid])[server.pid] - before
        report(f"{engine}, {route}, {shape}", times)
        share = busy / (time.perf_counter() - began)
        print(f"  the server used {share:.2f} of a processor", flush=True)


def step_attacks(engine: str, server: ServerProcess, options: argparse.Namespace) -> None:
    """Requests of one principal that are about very many streams at once."""
    names = [f"mallory/many/{number}" for number in range(options.followed)]
    make_streams(server.port, "mallory", [*names, "mallory/wakes"])
    if "log" not in options.cases:
        make_streams(server.port, "ann", ["ann/0"])
    target = "/v1/stream/__ds/subscriptions/many"
    config = {"type": "pull-wake", "pattern": "mallory/many/*", "wake_stream": "mallory/wakes"}
    calm = noticed(server.port, lambda times: len(times["append"]) < 500, ("stream", "append"))
    report(f"{engine}, nothing else", calm)
    for method, body in (("PUT", json.dumps(config).encode()), ("DELETE", b"")):
        beside_step(engine, server.port, method, target, body)
    if options.members:
        with Connection(server.port) as mallory:
            done(mallory, "mallory", "PUT", "/v1/mesh/mallory")
            done(mallory, "mallory", "PUT", "/v1/mesh/mallory/topics/all")
            for number in range(options.members):
                done(mallory, "mallory", "PUT", f"/v1/mesh/mallory/members/m{number}")
                member = f"/v1/mesh/mallory/topics/all/members/m{number}"
                done(mallory, "mallory", "PUT", member)
        sent = json.dumps({"kind": "topic", "ref": "all", "sender": "mallory", "json": 1}).encode()
        for _ in range(3):
            beside_step(engine, server.port, "POST", "/v1/mesh/mallory/send", sent)


def beside_step(engine: str, port: int, method: str, target: str, body: bytes) -> None:
    """What ann notices of one request of mallory's, and of two seconds after it."""
    ended: list[float] = []

    def ask() -> None:
        with Connection(port) as mallory:
            mallory.socket.settimeout(600)
            done(mallory, "mallory", method, target, body)
        ended.append(time.perf_counter())

    asking = threading.Thread(target=ask)
    began = time.perf_counter()
    asking.start()
    times = noticed(
        port,
        lambda _: not ended or time.perf_counter() < ended[0] + SETTLED_S,
        ("stream", "append"),
    )
    asking.join()
    report(f"{engine}, {method} {target.partition('/v1/')[2]}", times)
    print(f"  it took {ended[0] - began:.2f} s", flush=True)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", nargs="+", default=[SQLITE, POSTGRES])
    parser.add_argument("--streams", type=int, default=200_000)
    parser.add_argument("--reads", type=int, default=300, help="requests of each kind")
    parser.add_argument("--routes", nargs="+", default=["/v1/log", "/v1/log/plan"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=["log", "steps"])
    parser.add_argument("--followed", type=int, default=50_000, help="streams of a subscription")
    parser.add_argument("--members", type=int, default=10_000, help="members of a topic; 0: none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(machine.facts(Path(folder)))
        for engine in options.store:
            with served(engine, Path(folder)) as server:
                for case in options.cases:
                    {"log": log_attacks, "steps": step_attacks}[case](engine, server, options)
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
