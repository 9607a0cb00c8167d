"""`python -m benchmarks.versions`: what an append costs the servers of two versions, in turns.

Appends of 100 bytes with producers, each connection to a stream of its own. The servers are started
anew for every round and take turns, so that other work on the machine falls on both; what is
reported is processor time for each append, which that work changes least, and the median ratio of a
round. `--against` is the `src` folder of the other version, in a checkout of it.
"""

import argparse
import contextlib
import http.client
import os
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import generator, machine
from benchmarks.cases import wrong_answers
from benchmarks.errors import BenchmarkError
from benchmarks.subjects import Running, Subject, running
from fencepost.testing.postgres import PostgresServer

HERE = Path(__file__).parents[1] / "src"


def main() -> int:
    """Run what the command line asks for."""
    options = _parse()
    table = Table(
        title=f"us of processor for an append, {options.connections} connections",
        title_justify="left",
    )
    for title in ("store", "the other", "this version", "median ratio", "ratios of the rounds"):
        table.add_column(title)
    for store in options.store:
        rounds = _rounds(store, options)
        medians = [statistics.median(costs) for costs in zip(*rounds, strict=True)]
        ratios = [ours / other for other, ours in rounds]
        table.add_row(
            store,
            *(f"{median:.1f}" for median in medians),
            f"{statistics.median(ratios):.3f}",
            ", ".join(f"{ratio:.2f}" for ratio in ratios),
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}", style="dim")
    return 0


def _rounds(store: str, options: argparse.Namespace) -> list[tuple[float, float]]:
    """What an append cost in each round: the other version, this version."""
    database = PostgresServer() if store == "postgres" else contextlib.nullcontext()
    with database as postgres:

        def cost(source: Path) -> float:
            url = None if postgres is None else postgres.new_database(migrated=False)
            return _measure(source, url, options.connections, options.seconds)

        return [(cost(options.against), cost(HERE)) for _ in range(options.rounds)]


def _measure(source: Path, url: str | None, connections: int, seconds: float) -> float:
    """us of processor of a server for an append; of the database's none."""
    program = str(Path(sys.executable).with_name("fencepost"))

    def command(data: Path) -> list[str]:
        place = ["--data", str(data)] if url is None else ["--store", url]
        return ["env", f"PYTHONPATH={source}", program, "serve", "--port", "0", *place]

    subject = Subject("version", "version", command, durable=True)
    with tempfile.TemporaryDirectory() as folder, running(subject, Path(folder) / "data") as server:
        _create(server, connections)
        before = machine.processor_s([server.pid])
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
            streams=connections,
            random=0,
        )
        spent = machine.processor_s([server.pid])[server.pid] - before[server.pid]
    problems = wrong_answers(got, 200)
    if problems:
        raise BenchmarkError("; ".join(problems))
    return float(1e6 * spent / got["answers"])


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
    parser.add_argument("--against", type=Path, metavar="SRC", required=True)
    parser.add_argument(
        "--store", nargs="+", choices=("sqlite", "postgres"), default=["sqlite", "postgres"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.5, help="how long one run lasts")
    parser.add_argument("--connections", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
