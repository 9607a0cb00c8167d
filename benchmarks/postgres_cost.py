"""`python -m benchmarks.postgres_cost`: what an append on PostgreSQL costs the processor, and whom.

On a machine that others use as well, appends a second tell how busy it was. Processor time does so
far less, and it says where to look: in the servers, in the sessions of PostgreSQL that write turns,
or in all others. With `--against` servers of another version, from the folder of its source, take
turns with those of this one, so that other work falls on both.
"""

import argparse
import http.client
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks import generator, machine
from benchmarks.cases import wrong_answers
from benchmarks.errors import BenchmarkError
from benchmarks.subjects import Subject, running
from fencepost.testing.postgres import PostgresServer

HERE = Path(__file__).parents[1] / "src"
COLUMNS = ("rate", "per_turn", "server_us", "turns_us", "rest_us", "wal_bytes")
SESSIONS = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def main() -> int:
    """Run what the command line asks for."""
    options = _parse()
    console = Console(width=None if sys.stdout.isatty() else 130)
    versions = {"this version": HERE}
    if options.against is not None:
        versions = {"the other": options.against, **versions}
    found: dict[tuple[int, int, str], list[dict[str, float]]] = {}
    with PostgresServer() as postgres:
        for _ in range(options.rounds):
            for workers in options.workers:
                for connections in options.connections:
                    for name, source in versions.items():
                        measured = _measure(postgres, source, workers, connections, options.seconds)
                        found.setdefault((workers, connections, name), []).append(measured)
    table = Table(
        title="processor time for an append, in microseconds, and what came of it",
        title_justify="left",
    )
    for title in ("processes", "connections", "", "appends/s", "in a turn", "servers"):
        table.add_column(title, justify="right" if title else "left")
    for title in ("sessions of turns", "other sessions", "bytes of WAL"):
        table.add_column(title, justify="right")
    for (workers, connections, name), runs in found.items():
        cells = [", ".join(f"{run[column]:,.0f}" for run in runs) for column in COLUMNS]
        table.add_row(str(workers), str(connections), name, *cells)
    console.print(table)
    console.print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}", style="dim")
    return 0


def _measure(
    postgres: PostgresServer, source: Path, workers: int, connections: int, seconds: float
) -> dict[str, float]:
    url = postgres.new_database(migrated=False)
    program = str(Path(sys.executable).with_name("fencepost"))
    served = ["serve", "--port", "0", "--store", url, "--workers", str(workers)]
    command = ["env", f"PYTHONPATH={source}", program, *served]
    subject = Subject("cost", "cost", lambda _data: command, durable=True)
    with tempfile.TemporaryDirectory() as folder, running(subject, Path(folder) / "data") as server:
        _create(server.port)
        with psycopg.connect(url, autocommit=True) as database:
            turns, wal = _progress(database)
            servers = machine.processor_s([server.pid, *_children(server.pid)])
            sessions = machine.processor_s([pid for (pid,) in database.execute(SESSIONS)])
            got = generator.run(
                "append",
                seconds_max=seconds + 60,
                port=server.port,
                path="/v1/stream/bench",
                connections=connections,
                seconds=seconds,
                warmup=0,
                type="application/octet-stream",
                size=100,
                producer=1,
                streams=1,
                random=1,
            )
            servers_after = machine.processor_s([server.pid, *_children(server.pid)])
            sessions_after = machine.processor_s([pid for (pid,) in database.execute(SESSIONS)])
            turns_after, wal_after = _progress(database)
            row = database.execute("SELECT count(*) FROM log").fetchone()
            assert row is not None
            appends = row[0]
    problems = wrong_answers(got, 200)
    if problems:
        raise BenchmarkError("; ".join(problems))
    spent = sorted(
        (after - sessions.get(pid, 0.0) for pid, after in sessions_after.items()), reverse=True
    )
    us = 1e6 / appends
    return {
        "rate": got["rate"],
        "per_turn": appends / (turns_after - turns),
        "server_us": us * sum(t - servers.get(pid, 0.0) for pid, t in servers_after.items()),
        # Each process has one session that writes its turns: no other session does more.
        "turns_us": us * sum(spent[:workers]),
        "rest_us": us * sum(spent[workers:]),
        "wal_bytes": (wal_after - wal) / appends,
    }


def _create(port: int) -> None:
    client = http.client.HTTPConnection("127.0.0.1", port)
    client.request("PUT", "/v1/stream/bench", headers={"Content-Type": "application/octet-stream"})
    answer = client.getresponse()
    answer.read()
    client.close()
    if answer.status != 201:
        raise BenchmarkError(f"PUT was answered {answer.status}")


def _progress(database: psycopg.Connection[Any]) -> tuple[int, int]:
    query = "SELECT turn, (pg_current_wal_lsn() - '0/0')::bigint FROM counters"
    row = database.execute(query).fetchone()
    assert row is not None
    return row[0], row[1]


def _children(pid: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.postgres_cost",
        description="Measure the processor time of an append on PostgreSQL.",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long one run lasts")
    parser.add_argument("--connections", type=int, nargs="+", default=[64])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--against", type=Path, metavar="SRC", help="the `src` folder of another version"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
