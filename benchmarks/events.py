"""`python -m benchmarks.events`: apps on PostgreSQL, beside eventsourcing and procrastinate.

Four questions, each with its peer on the same PostgreSQL server in the same run: how many commits a
second 16 connections make with an expected version, beside plain appends, by the load generator
(what the server does) and by our async client (what a program sees); how many `do` one thread
makes, beside aggregates of eventsourcing, in turns; how long it takes from an event to the effect
of its reaction, beside a deferred job of procrastinate; and how fast a projection is rebuilt,
beside the same rows read from a table. The peers are installed for the run into a temporary folder
(`--no-peer` leaves them out). How fast anything was decides nothing.
"""

import argparse
import asyncio
import itertools
import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

import psycopg

import fencepost
from benchmarks import generator, machine
from fencepost.events import (
    App,
    AsyncContext,
    Entity,
    Event,
    Recorded,
    Transaction,
    action,
    applies,
)
from fencepost.testing.postgres import PostgresServer
from tests.serving import ServerProcess

CONNECTIONS = 16
WIRE_ROUNDS = 5
ACT_ROUNDS = 3
PARTS = ("wire", "commits", "do", "reactions", "rebuild")
PEERS = ("eventsourcing[postgres]==9.5.3", "procrastinate==3.10.0", "psycopg[binary,pool]")
EVENTSOURCING = """
import os, sys, time
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

class Account(Aggregate):
    @event("Opened")
    def __init__(self):
        self.balance = 0

    @event("Paid")
    def pay(self, amount):
        self.balance += amount

accounts = Application()
ids = []
for _ in range(100):
    account = Account()
    accounts.save(account)
    ids.append(account.id)
count = int(sys.argv[1])
began, cpu = time.perf_counter(), time.process_time()
for n in range(count):
    account = accounts.repository.get(ids[n % 100])
    account.pay(1)
    accounts.save(account)
print(count / (time.perf_counter() - began), (time.process_time() - cpu) / count * 1e6)
"""
PROCRASTINATE = """
import asyncio, statistics, sys, time
import procrastinate

async def main(url, jobs):
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
    took = []
    done = asyncio.Event()

    @app.task(name="effect")
    async def effect(at):
        took.append((time.time() - at) * 1000)
        done.set()

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        worker = asyncio.create_task(app.run_worker_async(
            concurrency=10, install_signal_handlers=False))
        await asyncio.sleep(1)
        for _ in range(jobs):
            done.clear()
            await effect.defer_async(at=time.time())
            await done.wait()
        worker.cancel()
    print(statistics.median(took), statistics.quantiles(took, n=100)[98])

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Paid(Event):
    amount: int


class Noted(Event):
    number: int


class Account(Entity, stream="accounts/{id}"):
    balance: int = 0

    @action
    def pay(self, amount: int) -> Paid:
        return Paid(amount=amount)

    @applies
    def paid(self, event: Paid) -> Self:
        return self.replace(balance=self.balance + event.amount)


def rate_of(count: int, began: tuple[float, float]) -> str:
    seconds = time.perf_counter() - began[0]
    cpu_us = (time.process_time() - began[1]) / count * 1e6
    return f"{count / seconds:,.0f}/s ({cpu_us:.0f} us of processor in the client)"


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def listed(numbers: list[float], shape: str) -> str:
    return ", ".join(format(number, shape) for number in numbers)


async def sixteen(count: int, one: Callable[[int, int], Awaitable[Any]]) -> tuple[float, str]:
    """Calls a second of 16 tasks, each of which does one after the other."""
    each = count // CONNECTIONS

    async def run(task: int) -> None:
        for n in range(each):
            await one(task, n)

    began = now()
    await asyncio.gather(*(run(task) for task in range(CONNECTIONS)))
    return each * CONNECTIONS / (time.perf_counter() - began[0]), rate_of(each * CONNECTIONS, began)


def wire(server: ServerProcess, seconds: float) -> None:
    """Events of 100 bytes on 16 connections, each to a stream of its own, plain and by version."""
    kinds = {"plain appends": 0, "appends with If-Match": 1}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    costs: dict[str, list[float]] = {kind: [] for kind in kinds}
    p99s: dict[str, list[float]] = {kind: [] for kind in kinds}
    port = int(server.url.rpartition(":")[2])
    with fencepost.connect(server.url) as client:
        for turn, (kind, versioned) in itertools.product(range(WIRE_ROUNDS), kinds.items()):
            for stream in range(CONNECTIONS):
                client.create(f"wire{turn}{versioned}-{stream}")
            cpu = machine.cpu_seconds(server.pid)
            got = generator.run(
                "append",
                seconds_max=seconds + 60,
                port=port,
                path=f"/v1/stream/wire{turn}{versioned}",
                type="application/json",
                connections=CONNECTIONS,
                streams=CONNECTIONS,
                producer=0,
                if_match=versioned,
                seconds=seconds,
            )
            if set(got["statuses"]) - {"204", "200"}:
                raise SystemExit(f"{kind}: answers by status {got['statuses']}")
            rates[kind].append(got["rate"])
            p99s[kind].append(got["latency"]["p99_us"] / 1000)
            costs[kind].append((machine.cpu_seconds(server.pid) - cpu) / got["done"] * 1e6)
    for kind in kinds:
        print(
            f"{kind}, {CONNECTIONS} connections: {listed(rates[kind], ',.0f')}/s, "
            f"p99 {listed(p99s[kind], '.1f')} ms, "
            f"{listed(costs[kind], '.0f')} us of processor of the server"
        )
    pairs = list(zip(*rates.values(), strict=True))
    ratio = statistics.median(versioned / plain for plain, versioned in pairs)
    print(f"appends with If-Match: {ratio:.2f} of plain ones, the median of rounds", flush=True)


async def commits(url: str, count: int) -> None:
    numbers = itertools.count()
    async with fencepost.connect_async(url) as client, App("bench").open(client) as app:
        for _round in range(2):
            streams = [f"bench/{next(numbers)}" for _ in range(CONNECTIONS)]
            for stream in streams:
                await client.create(stream)
                await client.create(f"plain/{stream}")

            async def plain(task: int, n: int, streams: list[str] = streams) -> None:
                message = {"name": "Paid", "data": {"amount": n}}
                await client.stream(f"plain/{streams[task]}").append(message)

            async def expected(task: int, n: int, streams: list[str] = streams) -> None:
                await app.commit(streams[task], [Paid(amount=n)], n - 1)

            appended, shown = await sixteen(count, plain)
            print(f"plain appends, {CONNECTIONS} connections: {shown}")
            committed, shown = await sixteen(count, expected)
            ratio = committed / appended
            print(f"commits with If-Match: {shown}, {ratio:.2f} of plain appends", flush=True)


def acts(server: ServerProcess, count: int) -> float:
    """`do` a second of one thread, on a hundred accounts."""
    app = App("bench-do", entities=[Account])
    with fencepost.connect(server.url) as client, app.open(client) as bank:
        for n in range(100):
            bank.do(Account.pay, str(n), amount=1)
        cpu, began = machine.cpu_seconds(server.pid), now()
        for n in range(count):
            bank.do(Account.pay, str(n % 100), amount=1)
        rate = count / (time.perf_counter() - began[0])
        cpu_us = (machine.cpu_seconds(server.pid) - cpu) / count * 1e6
        print(f"do, one thread: {rate_of(count, began)}, {cpu_us:.0f} us of the server", flush=True)
    return rate


async def reactions(url: str, count: int) -> None:
    app = App("bench-react", entities=[Account])
    answered = asyncio.Event()

    @app.reaction(Paid)
    async def note(event: Recorded[Paid], context: AsyncContext) -> None:
        await context.append("bench-notes", Noted(number=event.position))

    def heard(_crumb: Any) -> None:
        answered.set()

    app.hook("acked")(heard)  # told once the commit of effect and ack is answered
    took = []
    async with fencepost.connect_async(url) as client, app.open(client) as bank:
        await bank.settle()
        working = asyncio.create_task(bank.work())
        for n in range(count + 20):
            answered.clear()
            await bank.do(Account.pay, f"r{n % 50}", amount=1)
            began = time.perf_counter()
            await answered.wait()
            if n >= 20:
                took.append((time.perf_counter() - began) * 1000)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    p99 = statistics.quantiles(took, n=100)[98]
    print(
        f"reaction, event committed to effect committed: p50 {statistics.median(took):.1f} ms, "
        f"p99 {p99:.1f} ms",
        flush=True,
    )


def rebuild(url: str, dsn: str, events: int, folder: Path) -> None:
    app = App("bench-project", sources=["projected/*"])

    @app.projection("paid", schema="create table {paid} (stream text, amount integer)")
    def paid(event: Recorded[Paid], db: Transaction) -> None:
        db.execute("insert into {paid} values (?, ?)", (event.stream, event.data.amount))

    messages = [{"name": "Paid", "data": {"amount": n}, "schema": 1} for n in range(events)]
    with fencepost.connect(url) as client:
        for n in range(10):
            path = f"projected/{n}"
            client.create(path).append_many(messages[n::10])
        with app.open(client, projections=str(folder / "rows.db")) as opened:
            began = now()
            opened.projections.rebuild("paid")
            rate = events / (time.perf_counter() - began[0])
            print(f"projection rebuild into SQLite: {rate_of(events, began)}", flush=True)
    with psycopg.connect(dsn, autocommit=True) as database:
        database.execute("create table rows (position bigint primary key, stream text, data jsonb)")
        with database.cursor().copy("copy rows from stdin") as copy:
            for n, message in enumerate(messages):
                copy.write_row((n, f"projected/{n % 10}", json.dumps(message)))
        with sqlite3.connect(folder / "plain.db", isolation_level=None) as into:
            into.execute("create table paid (stream text, amount integer)")
            began = now()
            at = -1
            while page := database.execute(
                "select position, stream, data from rows where position > %s order by 1 limit 1000",
                (at,),
            ).fetchall():
                into.execute("begin")
                for position, stream, data in page:
                    row = (stream, data["data"]["amount"])
                    into.execute("insert into paid values (?, ?)", row)
                    at = position
                into.execute("commit")
            plain = events / (time.perf_counter() - began[0])
            print(
                f"the same fold over rows of a PostgreSQL table: {rate_of(events, began)}; "
                f"rebuild {rate / plain:.2f} of it",
                flush=True,
            )


def peer(folder: str, program: str, *arguments: str, **environment: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": folder} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"a peer failed: {done.stderr[-2000:]}")
    return [float(word) for word in done.stdout.split()[-2:]]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=16_000)
    parser.add_argument("--seconds", type=float, default=3, help="of the generator, per round")
    parser.add_argument("--acts", type=int, default=3_000)
    parser.add_argument("--reactions", type=int, default=300)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    parts = set(options.only)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as peers,
        PostgresServer() as postgres,
    ):
        if not options.no_peer and parts & {"do", "reactions"}:
            install = [sys.executable, "-m", "pip", "install", "-q", "--target", peers, *PEERS]
            subprocess.run(install, check=True)
        print(machine.facts(Path(folder)), flush=True)
        with ServerProcess(store=postgres.new_database()) as server:
            on_one(server, options)
            if "do" in parts:
                acts_beside(server, "" if options.no_peer else peers, postgres, options.acts)
            if "reactions" in parts and not options.no_peer:
                found = peer(peers, PROCRASTINATE, postgres.new_database(), str(options.reactions))
                print(
                    f"procrastinate, deferred to done: p50 {found[0]:.1f} ms, p99 {found[1]:.1f} ms"
                )
            if "rebuild" in parts:
                rebuild(server.url, postgres.new_database(), options.events, Path(folder))
        with ServerProcess(Path(folder) / "data") as server:
            print("on SQLite:")
            on_one(server, options)
            if "do" in parts:
                acts(server, options.acts)
        print(
            f"processor of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_utime:.0f} s"
        )
    return 0


def on_one(server: ServerProcess, options: argparse.Namespace) -> None:
    """What is measured on either store without a peer."""
    if "wire" in options.only:
        wire(server, options.seconds)
    if "commits" in options.only:
        asyncio.run(commits(server.url, options.commits))
    if "reactions" in options.only:
        asyncio.run(reactions(server.url, options.reactions))


def acts_beside(server: ServerProcess, peers: str, postgres: PostgresServer, count: int) -> None:
    """`do` and aggregates of eventsourcing in turns: as it comes, and with a cache as `do` has."""
    at = psycopg.conninfo.conninfo_to_dict(postgres.new_database())
    database = {
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": str(at["dbname"]),
        "POSTGRES_HOST": str(at["host"]),
        "POSTGRES_PORT": str(at.get("port", 5432)),
        "POSTGRES_USER": str(at["user"]),
        "POSTGRES_PASSWORD": str(at.get("password", "x")),
    }
    if not peers:
        acts(server, count)
        return
    ways = {"": database, ", with a cache": {**database, "AGGREGATE_CACHE_MAXSIZE": "1000"}}
    ratios: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ACT_ROUNDS):
        rate = acts(server, count)
        for way, environment in ways.items():
            found, cpu_us = peer(peers, EVENTSOURCING, str(count), **environment)
            ratios[way].append(rate / found)
            print(f"eventsourcing{way}, one thread: {found:,.0f}/s ({cpu_us:.0f} us of processor)")
    for way, found_ratios in ratios.items():
        print(f"do is {statistics.median(found_ratios):.2f} of eventsourcing{way}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
