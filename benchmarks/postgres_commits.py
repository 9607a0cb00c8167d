"""`python -m benchmarks.postgres_commits`: large commits on PostgreSQL, and who waits for them.

Two servers share a database. Parts, one for each stream, are staged and become messages by one
commit on the first server; meanwhile one connection to each server appends to a stream of its own,
one request after the other. The longest of their waits is the number that counts, beside the same
two connections before the commit. Exits 1 when an answer was wrong; how fast anything was never
decides that.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.conditions import pipeline
from benchmarks.postgres import nodes
from benchmarks.slices import CALM_SECONDS, Other, appends_in, commit, commit_body, parts, quantile
from fencepost.testing.postgres import PostgresServer


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.postgres_commits")
    parser.add_argument("--streams", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="measure on the disk of this folder"
    )
    options = parser.parse_args()
    if options.data is not None:
        options.data.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(options.data)
    console = Console(width=None if sys.stdout.isatty() else 130)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fencepost-bench-") as folder, PostgresServer() as one:
        data = Path(folder)
        data.chmod(0o711)
        found = [measure(one, data, streams, wrong) for streams in options.streams]
        facts = machine.facts(data)
    console.print(_table(found))
    console.print("; ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "commits": found}, indent=2) + "\n")
    for problem in wrong:
        console.print(f"[red]wrong:[/red] {problem}")
    return 1 if wrong else 0


def measure(postgres: PostgresServer, data: Path, streams: int, wrong: list[str]) -> dict[str, Any]:
    """One commit of so many streams, and the appends to both servers before it and meanwhile."""
    with nodes(postgres, data, 2) as ports:
        staged = pipeline(ports[0], parts(streams))
        body = commit_body(streams)
        others = [Other(port) for port in ports]
        for other in others:
            other.start()
        time.sleep(CALM_SECONDS)
        calm = [other.cut() for other in others]
        began = time.perf_counter()
        status, answer = commit(ports[0], body)
        seconds = time.perf_counter() - began
        busy = [other.cut() for other in others]
        for other in others:
            other.stop()
            wrong += other.problems
    answered = appends_in(answer)
    if staged != {201: streams}:
        wrong.append(f"staging answered {staged}")
    if (status, answered) != (200, streams):
        wrong.append(f"the commit answered {status}, with {answered} appends")
    return {
        "streams": streams,
        "commit_seconds": seconds,
        "same_node": {"meanwhile": _spread(busy[0]), "calm": _spread(calm[0])},
        "other_node": {"meanwhile": _spread(busy[1]), "calm": _spread(calm[1])},
    }


def _spread(waits: list[float]) -> dict[str, float]:
    return {
        "appends": len(waits),
        "longest_ms": 1e3 * max(waits),
        "p50_ms": 1e3 * quantile(waits, 0.5),
        "p99_ms": 1e3 * quantile(waits, 0.99),
    }


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(title="appends while a large commit is under way: longest, p50 / p99")
    for name in ("streams", "commit", "to the same server", "to the other", "before it (both)"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        same, other = one["same_node"], one["other_node"]
        calm = f"{_cell(same['calm'])}; {_cell(other['calm'])}"
        table.add_row(
            f"{one['streams']:,}",
            f"{one['commit_seconds']:.1f} s",
            _cell(same["meanwhile"]),
            _cell(other["meanwhile"]),
            calm,
        )
    return table


def _cell(spread: dict[str, float]) -> str:
    return "{longest_ms:.0f}, {p50_ms:.1f} / {p99_ms:.1f} ms".format(**spread)


if __name__ == "__main__":
    sys.exit(main())
