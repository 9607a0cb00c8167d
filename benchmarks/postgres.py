"""`python -m benchmarks.postgres`: the store on PostgreSQL beside SQLite and the reference server.

Three questions, all in one run on one machine: how many durable appends a second one and two server
processes make on one database; how long an append takes to a reader who waits on the same node, and
to one who waits on the other; and how many claims a second actors win who compete for the same
tasks. PostgreSQL is started for the run with fsync on, from the wheel `pgserver` or from the
machine, on the same disk as everything else; it takes its own share of the processors, of which the
table speaks. Exits 1 when an answer was wrong; how fast anything was never decides that.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fencepost
from benchmarks import cases, machine, subjects
from benchmarks.errors import BenchmarkError
from benchmarks.generator import compile_generator
from benchmarks.scale import QUICK, Scale
from benchmarks.subjects import OURS, REFERENCE, REFERENCE_FILE, Subject, running
from fencepost.coordination import AsyncTaskClaims
from fencepost.testing.postgres import PostgresServer

ACTORS = 16
ROUNDS_BEFORE = 20
AT_64 = 15_000
"""The aim: durable appends a second at 64 connections through one server."""


def main() -> int:
    """Run what the command line asks for."""
    options = _parse()
    # Ending by a signal must pass through every `finally`: they stop the servers.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    console = Console(width=None if sys.stdout.isatty() else 130)
    scale = dataclasses.replace(
        QUICK if options.quick else Scale(),
        connections=(16,) if options.quick else (16, 64, 256),
    )
    if options.seconds is not None:
        scale = dataclasses.replace(scale, seconds=options.seconds)
    rounds, tasks = (30, 20) if options.quick else (1_000, 500)
    try:
        compile_generator()
        subjects.install_reference()
    except BenchmarkError as error:
        console.print(str(error), style="red")
        return 2
    if options.data is not None:
        options.data.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(options.data)
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as folder, ExitStack() as stack:
        data = Path(folder)
        # PostgreSQL may run as another user, who has to be able to come by.
        data.chmod(0o711)
        facts = machine.facts(data)
        syncs = machine.syncs_per_second(data, seconds=scale.sync_seconds)
        postgres = stack.enter_context(PostgresServer())
        facts["postgres"] = _version(postgres)
        found: dict[str, Any] = {"machine": facts, "syncs_of_4_kib_per_second": round(syncs, 1)}
        found["appends"], wrong = _appends(console, postgres, scale, data)
        found["tails"] = _tails(console, postgres, data, rounds)
        found["claims"] = _claims(console, postgres, data, tasks)
    console.print("; ".join(f"{name} {value}" for name, value in facts.items()))
    console.print(f"this disk: {syncs:,.0f} syncs of 4 KiB a second, one at a time")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    for problem in wrong:
        console.print(f"[red]wrong:[/red] {problem}")
    return 1 if wrong else 0


def _version(postgres: PostgresServer) -> str:
    import psycopg

    with psycopg.connect(postgres.dsn) as connection:
        version = connection.info.server_version
        return f"{version // 10_000}.{version % 10_000}"


# -- subjects ----------------------------------------------------------------------------------


def on_postgres(postgres: PostgresServer, workers: int) -> Subject:
    """So many processes on one port and one fresh database."""

    def command(_data: Path) -> list[str]:
        program = str(Path(sys.executable).with_name("fencepost"))
        where = ["--store", postgres.new_database()]
        return [program, "serve", "--port", "0", *where, "--workers", str(workers)]

    noun = "process" if workers == 1 else "processes"
    return Subject(f"postgres-{workers}", f"PostgreSQL, {workers} {noun}", command, durable=True)


@contextmanager
def nodes(postgres: PostgresServer, data: Path, count: int) -> Iterator[list[int]]:
    """The ports of so many servers on one database."""
    url = postgres.new_database()

    def command(_data: Path) -> list[str]:
        program = str(Path(sys.executable).with_name("fencepost"))
        return [program, "serve", "--port", "0", "--store", url]

    subject = Subject("node", "node", command, durable=True)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running(subject, data / f"node-{number}-{os.urandom(4).hex()}")
            ).port
            for number in range(count)
        ]


# -- appends -----------------------------------------------------------------------------------


def _appends(
    console: Console, postgres: PostgresServer, scale: Scale, data: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """100-byte producer appends on one stream, as `python -m benchmarks` measures them."""
    compared = (on_postgres(postgres, 1), on_postgres(postgres, 2), OURS, REFERENCE, REFERENCE_FILE)
    table = Table(title="100-byte producer appends, bytes (p50 / p99)", title_justify="left")
    table.add_column("", no_wrap=True)
    for subject in compared:
        title = "SQLite" if subject is OURS else subject.title
        table.add_column(title, justify="right", no_wrap=True)
    found, wrong = [], []
    for row in cases.measurements(scale):
        if row.case != "appends":
            continue
        cells = []
        for subject in compared:
            outcome = cases.measure(row, subject, scale, data, _silent)
            found.append({"label": row.label, "subject": subject.name, **outcome.metrics})
            wrong += [f"{row.label}, {subject.title}: {problem}" for problem in outcome.problems]
            cells.append("[red]wrong" if outcome.problems else _cell(outcome.metrics))
        table.add_row(row.label, *cells)
    console.print(table)
    console.print(f"aim: {AT_64:,}/s at 64 connections through one process", style="dim")
    return found, wrong


def _silent(_doing: str, _done: int, _total: int) -> None:
    """No request is checked."""


def _cell(metrics: dict[str, Any]) -> str:
    return f"{metrics['rate']:,.0f}/s\n{metrics['p50_ms']:.2f} / {metrics['p99_ms']:.2f} ms"


# -- tails -------------------------------------------------------------------------------------


def _tails(
    console: Console, postgres: PostgresServer, data: Path, rounds: int
) -> list[dict[str, Any]]:
    """From the moment an append is sent to when its event is there, one at a time."""
    table = Table(title="from an append to its event (p50 / p99 / longest)", title_justify="left")
    table.add_column("the reader waits on")
    table.add_column("after it was sent", justify="right")
    table.add_column("after it was answered", justify="right")
    found = []
    with running(OURS, data / "tails") as server, nodes(postgres, data, 2) as ports:
        pairs = (
            ("SQLite, the same server", server.port, server.port),
            ("PostgreSQL, the same node", ports[0], ports[0]),
            ("PostgreSQL, another node", ports[0], ports[1]),
        )
        for label, writer, reader in pairs:
            sent, answered = asyncio.run(_follow(writer, reader, rounds))
            table.add_row(label, _spread(sent), _spread(answered))
            found.append(
                {"label": label, "sent_ms": _numbers(sent), "after_ms": _numbers(answered)}
            )
    console.print(table)
    return found


async def _follow(writer_port: int, reader_port: int, rounds: int) -> tuple[list[float], ...]:
    path = f"tail-{os.urandom(4).hex()}"
    writer = await asyncio.open_connection("127.0.0.1", writer_port)
    reader = await asyncio.open_connection("127.0.0.1", reader_port)
    await _ask(writer, "PUT", path, b"")
    target = f"/v1/stream/{path}?offset=-1&live=sse"
    reader[1].write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    await reader[0].readuntil(b"\r\n\r\n")
    sent_ms, answered_ms = [], []
    for number in range(rounds + ROUNDS_BEFORE):
        mark = b"<%06d>" % number
        began = time.perf_counter()
        event = asyncio.create_task(_arrival(reader[0], mark))
        await _ask(writer, "POST", path, mark)
        answered = time.perf_counter()
        arrived = await asyncio.wait_for(event, 30)
        if number >= ROUNDS_BEFORE:
            sent_ms.append((arrived - began) * 1e3)
            answered_ms.append(max(0.0, (arrived - answered) * 1e3))
    for _, stream in (writer, reader):
        stream.close()
    return sent_ms, answered_ms


async def _arrival(reader: asyncio.StreamReader, mark: bytes) -> float:
    await reader.readuntil(mark)
    return time.perf_counter()


async def _ask(
    wire: tuple[asyncio.StreamReader, asyncio.StreamWriter], method: str, path: str, body: bytes
) -> None:
    head = f"{method} /v1/stream/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n"
    wire[1].write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await wire[0].readuntil(b"\r\n\r\n")
    if answer.split(b" ", 2)[1] not in (b"201", b"204"):
        raise BenchmarkError(f"{method} was answered {answer[:40]!r}")


def _numbers(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "max": max(values)}


def _spread(values: list[float]) -> str:
    return "{p50:.2f} / {p99:.2f} / {max:.2f} ms".format(**_numbers(values))


# -- claims ------------------------------------------------------------------------------------


def _claims(
    console: Console, postgres: PostgresServer, data: Path, tasks: int
) -> list[dict[str, Any]]:
    """Actors who all want every task, in the same order."""
    table = Table(title=f"claims, {ACTORS} actors compete for {tasks} tasks", title_justify="left")
    for name in ("", "won", "tried"):
        table.add_column(name, justify="right" if name else "left")
    found = []
    with (
        running(OURS, data / "claims") as server,
        nodes(postgres, data, 1) as one,
        nodes(postgres, data, 2) as two,
    ):
        for label, ports in (
            ("SQLite", [server.port]),
            ("PostgreSQL, one node", one),
            ("PostgreSQL, actors on two nodes", two),
        ):
            seconds = asyncio.run(_compete(ports, tasks))
            won, tried = tasks / seconds, tasks * ACTORS / seconds
            table.add_row(label, f"{won:,.0f}/s", f"{tried:,.0f}/s")
            found.append({"label": label, "won_per_second": won, "tried_per_second": tried})
    console.print(table)
    return found


async def _compete(ports: list[int], tasks: int) -> float:
    async with fencepost.connect_async(f"http://127.0.0.1:{ports[0]}") as client:
        await client.create("bench/claims")

    async def act(actor: int) -> int:
        url = f"http://127.0.0.1:{ports[actor % len(ports)]}"
        async with fencepost.connect_async(url) as client:
            claims = AsyncTaskClaims(client.stream("bench/claims"), f"actor-{actor}")
            return sum([await claims.claim(f"task-{n}") is not None for n in range(tasks)])

    began = time.perf_counter()
    won = sum(await asyncio.gather(*(act(actor) for actor in range(ACTORS))))
    if won != tasks:
        raise BenchmarkError(f"{won} claims were won on {tasks} tasks")
    return time.perf_counter() - began


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.postgres",
        description="Measure the store on PostgreSQL beside SQLite and the reference server.",
    )
    parser.add_argument("--seconds", type=float, help="how long one measurement lasts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="measure on the disk of this folder"
    )
    parser.add_argument(
        "--quick", action="store_true", help="about a minute: shows that it works, not how fast"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
