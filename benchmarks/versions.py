"""`python -m benchmarks.versions`: what an append costs the servers of two versions, in turns.

Appends with producers, each connection to a stream of its own. The servers are started anew for
every round and take turns, so that other work on the machine falls on both; what is reported is
processor time for each append, which that work changes least, the rate, and the ratios of the
rounds. `--against` is the `src` folder of the other version, in a checkout of it; `--setting` are
variables of the other server alone, so that this version is compared with itself, set otherwise.
"""

import argparse
import contextlib
import http.client
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import generator, machine
from benchmarks.cases import wrong_answers
from benchmarks.errors import BenchmarkError
from benchmarks.subjects import Running, Subject, running
from fencepost.testing.postgres import PostgresServer

HERE = Path(__file__).parents[1] / "src"


class Cost(NamedTuple):
    """What one run measured."""

    cpu_us: float
    rate: float


def main() -> int:
    """Run what the command line asks for."""
    options = _parse()
    table = Table(title=f"appends of {options.size} bytes", title_justify="left")
    for title in (
        "store",
        "connections",
        "us of processor: the other",
        "this",
        "median ratio, and of the rounds",
        "appends/s: the other",
        "this",
        "median ratio",
    ):
        table.add_column(title)
    for store in options.store:
        for connections, rounds in _measured(store, options).items():
            others, ours = zip(*rounds, strict=True)
            spent = [our.cpu_us / other.cpu_us for other, our in rounds]
            faster = [our.rate / other.rate for other, our in rounds]
            table.add_row(
                store,
                f"{connections}",
                f"{statistics.median(one.cpu_us for one in others):.1f}",
                f"{statistics.median(one.cpu_us for one in ours):.1f}",
                f"{statistics.median(spent):.3f}: " + ", ".join(f"{one:.2f}" for one in spent),
                f"{statistics.median(one.rate for one in others):,.0f}",
                f"{statistics.median(one.rate for one in ours):,.0f}",
                f"{statistics.median(faster):.3f}",
            )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}", style="dim")
    return 0


def _measured(store: str, options: argparse.Namespace) -> dict[int, list[tuple[Cost, Cost]]]:
    """What an append cost in each round, by connections: the other version, this version."""
    database = PostgresServer() if store == "postgres" else contextlib.nullcontext()
    rounds: dict[int, list[tuple[Cost, Cost]]] = {one: [] for one in options.connections}
    with database as postgres:

        def cost(source: Path, settings: list[str], connections: int) -> Cost:
            url = None if postgres is None else postgres.new_database(migrated=False)
            return _measure(source, settings, url, connections, options)

        for _ in range(options.rounds):
            for connections, done in rounds.items():
                other = cost(options.against, options.setting, connections)
                done.append((other, cost(HERE, [], connections)))
    return rounds


def _measure(
    source: Path,
    settings: list[str],
    url: str | None,
    connections: int,
    options: argparse.Namespace,
) -> Cost:
    """What an append costs a server; the processor of the database is not counted."""
    program = str(Path(sys.executable).with_name("fencepost"))

    def command(data: Path) -> list[str]:
        place = ["--data", str(data)] if url is None else ["--store", url]
        serve = [program, "serve", "--port", "0", *place]
        return ["env", f"PYTHONPATH={source}", *settings, *serve]

    subject = Subject("version", "version", command, durable=True)
    streams = options.streams or connections
    with (
        tempfile.TemporaryDirectory(dir=options.data) as folder,
        running(subject, Path(folder) / "data") as server,
    ):
        _create(server, streams)
        before = machine.processor_s([server.pid])
        got = generator.run(
            "append",
            seconds_max=options.seconds + 60,
            port=server.port,
            path="/v1/stream/bench",
            connections=connections,
            seconds=options.seconds,
            warmup=0,
            type="application/octet-stream",
            size=options.size,
            producer=1,
            streams=streams,
            random=int(streams > connections),
        )
        spent = machine.processor_s([server.pid])[server.pid] - before[server.pid]
    problems = wrong_answers(got, 200)
    if problems:
        raise BenchmarkError("; ".join(problems))
    return Cost(1e6 * spent / got["answers"], got["rate"])


def _create(server: Running, streams: int) -> None:
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    for number in range(streams):
        headers = {"Content-Type": "application/octet-stream"}
        name = f"bench-{number}" if streams > 1 else "bench"
        client.request("PUT", f"/v1/stream/{name}", headers=headers)
        answer = client.getresponse()
        answer.read()
        if answer.status != 201:
            raise BenchmarkError(f"PUT was answered {answer.status}")
    client.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.versions",
        description="Measure what an append costs the servers of two versions, in turns.",
    )
    parser.add_argument("--against", type=Path, metavar="SRC", default=HERE)
    parser.add_argument(
        "--setting", nargs="+", metavar="NAME=VALUE", default=[], help="of the other server alone"
    )
    parser.add_argument(
        "--store", nargs="+", choices=("sqlite", "postgres"), default=["sqlite", "postgres"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5, help="how long one run lasts")
    parser.add_argument("--connections", type=int, nargs="+", default=[64])
    parser.add_argument("--streams", type=int, help="more than connections: random ones of these")
    parser.add_argument("--size", type=int, default=100, metavar="BYTES")
    parser.add_argument(
        "--data", type=lambda given: Path(given).resolve(), help="on the disk of this folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
