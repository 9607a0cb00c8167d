"""`python -m benchmarks.sends`: sends of messages over HTTP, beside appends and NATS JetStream.

Sixteen connections, each one request after the other. Sends to a queue stand beside appends with an
Idempotency-Key to as many streams, and beside the same sends again, which are duplicates. The cases
take turns, round by round, because other work on the machine slows all of them. Then sends to a
topic with many members, counted in deliveries; and publishes to JetStream with Nats-Msg-Id and
`sync_interval: always`, if `--nats` names a server (2.10 or newer; its client is installed for the
run). How fast anything was decides nothing.
"""

from __future__ import annotations

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

from benchmarks import machine
from fencepost.testing.postgres import PostgresServer
from tests.serving import ServerProcess

CONNECTIONS = 16
CLIENT = "nats-py"
JSON_TYPE = {"Content-Type": "application/json"}
BODY = {"order": 7, "text": "x" * 80}
Ask = Callable[[http.client.HTTPConnection, int], None]


def asked(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: object = None,
    headers: dict[str, str] | None = None,
    *,
    expect: tuple[int, ...] = (200, 201, 204),
) -> bytes:
    """The body of an answer that has one of these statuses."""
    data = None if body is None else json.dumps(body)
    connection.request(method, target, data, JSON_TYPE | (headers or {}))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status not in expect:
        raise SystemExit(f"{method} {target}: {answer.status} {content!r}")
    return content


def rate_of(port: int, ask: Ask, first: int, count: int) -> float:
    """Requests a second at sixteen connections."""
    each = count // CONNECTIONS
    ready = threading.Barrier(CONNECTIONS + 1)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.connect()
        ready.wait()
        try:
            for at in range(each):
                ask(connection, first + number * each + at)
        except BaseException as error:
            failures.append(error)
        connection.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    ready.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return count / (time.perf_counter() - started)


def append(connection: http.client.HTTPConnection, number: int) -> None:
    key = {"Idempotency-Key": f"a-{number}"}
    asked(connection, "POST", f"/v1/stream/appends/{number % CONNECTIONS}", [BODY], key)


def send(connection: http.client.HTTPConnection, number: int) -> None:
    fields = {"kind": "queue", "ref": f"q{number % CONNECTIONS}", "sender": "bench", "json": BODY}
    key = {"Idempotency-Key": f"s-{number}"}
    asked(connection, "POST", "/v1/mesh/bench/send", fields, key, expect=(201,))


def send_again(connection: http.client.HTTPConnection, number: int) -> None:
    fields = {"kind": "queue", "ref": f"q{number % CONNECTIONS}", "sender": "bench", "json": BODY}
    key = {"Idempotency-Key": f"s-{number}"}
    asked(connection, "POST", "/v1/mesh/bench/send", fields, key, expect=(200,))


def processor_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, server: ServerProcess, count: int, rounds: int, members: int) -> float:
    """Sends beside appends and duplicates, then a topic with many members; the rate of sends."""
    with server:
        setup = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        asked(setup, "PUT", "/v1/mesh/bench")
        for number in range(CONNECTIONS):
            asked(setup, "PUT", f"/v1/mesh/bench/queues/q{number}")
            asked(setup, "PUT", f"/v1/stream/appends/{number}")
        found: dict[str, list[tuple[float, float]]] = {}
        cases: dict[str, Ask] = {
            "appends with a key": append,
            "sends": send,
            "duplicates": send_again,
        }
        for turn in range(rounds):
            for case, ask in cases.items():
                before = processor_s(server.pid)
                rate = rate_of(server.port, ask, turn * count, count)
                busy = (processor_s(server.pid) - before) / count * 1e6
                found.setdefault(case, []).append((rate, busy))
        medians = {
            case: (statistics.median(r for r, _ in runs), statistics.median(b for _, b in runs))
            for case, runs in found.items()
        }
        base_rate, base_busy = medians["appends with a key"]
        for case, (rate, busy) in medians.items():
            print(
                f"{name}: {case}: {rate:,.0f}/s ({rate / base_rate:.2f} of appends),"
                f" {busy:.0f} us of the server's processor ({busy / base_busy:.2f})",
                flush=True,
            )
        fan_out(name, setup, server, members)
        setup.close()
        return medians["sends"][0]


def fan_out(
    name: str, setup: http.client.HTTPConnection, server: ServerProcess, members: int
) -> None:
    """Deliveries a second of sends to a topic with many members, one send after the other."""
    asked(setup, "PUT", "/v1/mesh/bench/topics/all")
    for number in range(members):
        asked(setup, "PUT", f"/v1/mesh/bench/members/m{number}")
        asked(setup, "PUT", f"/v1/mesh/bench/topics/all/members/m{number}")
    fields = {"kind": "topic", "ref": "all", "sender": "bench", "json": BODY}
    times = []
    before = processor_s(server.pid)
    for number in range(30):
        started = time.perf_counter()
        key = {"Idempotency-Key": f"f-{number}"}
        asked(setup, "POST", "/v1/mesh/bench/send", fields, key, expect=(201,))
        times.append(time.perf_counter() - started)
    busy = (processor_s(server.pid) - before) / (30 * members) * 1e6
    middle = statistics.median(times)
    print(
        f"{name}: a send to {members} members takes {middle * 1000:.1f} ms:"
        f" {members / middle:,.0f} deliveries/s, {busy:.1f} us of the server's processor each",
        flush=True,
    )


NATS_PROGRAM = """
import asyncio, json, sys, time
import nats

async def main(url, count):
    async def publish(number, each, go):
        connection = await nats.connect(url)
        stream = connection.jetstream()
        await go.wait()
        for at in range(each):
            headers = {"Nats-Msg-Id": f"{number}-{at}"}
            await stream.publish(f"bench.{number}", json.dumps(BODY).encode(), headers=headers)
        await connection.close()

    first = await nats.connect(url)
    await first.jetstream().add_stream(name="bench", subjects=["bench.*"])
    go = asyncio.Event()
    tasks = [asyncio.create_task(publish(n, count // 16, go)) for n in range(16)]
    await asyncio.sleep(1)
    started = time.perf_counter()
    go.set()
    await asyncio.gather(*tasks)
    print(count / (time.perf_counter() - started))
    await first.close()

BODY = {"order": 7, "text": "x" * 80}
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def nats(program: str, folder: Path, count: int) -> float:
    """Publishes a second into JetStream, each synced before its ack, at sixteen connections."""
    config = folder / "nats.conf"
    store = folder / "jetstream"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"\n'
        f'jetstream {{ store_dir: "{store}", sync_interval: always }}\n'
    )
    with subprocess.Popen([program, "-c", str(config)], stderr=subprocess.DEVNULL) as server:
        try:
            ports: list[Path] = []
            while not ports and server.poll() is None:
                ports = [one for one in folder.glob("*.ports") if one.stat().st_size]
                time.sleep(0.05)
            if not ports:
                raise SystemExit("the NATS server did not start: does it know sync_interval?")
            url = json.loads(ports[0].read_text())["nats"][0]
            packages = folder / "packages"
            install = [sys.executable, "-m", "pip", "install", "-q", "--target", packages, CLIENT]
            subprocess.run(install, check=True)
            done = subprocess.run(
                [sys.executable, "-c", NATS_PROGRAM, url, str(count)],
                env=os.environ | {"PYTHONPATH": str(packages)},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"the NATS client failed: {done.stderr[-2000:]}")
            return float(done.stdout.split()[-1])
        finally:
            server.terminate()


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4_000, help="requests of a case in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--members", type=int, default=1_000)
    parser.add_argument("--nats", default="", help="a nats-server, 2.10 or newer")
    options = parser.parse_args()
    count = options.count // CONNECTIONS * CONNECTIONS
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as postgres:
        print(machine.facts(Path(folder)))
        server = ServerProcess(Path(folder) / "data")
        rate = measure("SQLite", server, count, options.rounds, options.members)
        if options.nats:
            peer = nats(options.nats, Path(folder), count)
            print(
                f"NATS JetStream, sync always: {peer:,.0f}/s; our sends {rate / peer:.2f} of that"
            )
        server = ServerProcess(store=postgres.new_database())
        measure("PostgreSQL", server, count, options.rounds, options.members)
    return 0


if __name__ == "__main__":
    sys.exit(main())
