"""`python -m benchmarks`: measure, print the table, write the JSON.

Exits 0 when every answer of every server was the right one, 1 when some were not, 2 when the run
could not begin. How fast anything was never decides the exit code.
"""

import argparse
import dataclasses
import json
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import cases, machine, subjects
from benchmarks.errors import BenchmarkError
from benchmarks.generator import WORK, compile_generator
from benchmarks.report import Result, document, print_report
from benchmarks.scale import QUICK, Scale


def main() -> int:
    """Run what the command line asks for."""
    options = _parse()
    # Ending by a signal must pass through every `finally`: they stop the servers.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    # A pipe has no width of its own; the tables need about this much.
    console = Console(width=None if sys.stdout.isatty() else 110)
    scale = QUICK if options.quick else Scale()
    if options.seconds is not None:
        scale = dataclasses.replace(scale, seconds=options.seconds)
    chosen = [s for s in subjects.SUBJECTS if not options.subject or s.name in options.subject]
    if not options.subject and (options.quick or not subjects.can_build_rust()):
        # To build it takes minutes, which the quick scale has not.
        chosen.remove(subjects.RUST)
    rows = [r for r in cases.measurements(scale) if not options.only or r.case in options.only]
    try:
        compile_generator()
        if {subjects.REFERENCE, subjects.REFERENCE_FILE} & set(chosen):
            console.print("preparing the reference server", style="dim")
            subjects.install_reference()
        if subjects.RUST in chosen:
            console.print("preparing the Rust server", style="dim")
            subjects.install_rust()
    except BenchmarkError as error:
        console.print(str(error), style="red")
        return 2
    parent = options.data or WORK
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=parent) as folder:
        data = Path(folder)
        facts = machine.facts(data)
        if facts["filesystem"] == "tmpfs":
            console.print("This folder is in memory, where a sync costs nothing: give --data.")
        syncs = machine.syncs_per_second(data, seconds=scale.sync_seconds)
        results = _measure(rows, chosen, scale, data)
    print_report(console, facts, syncs, results)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document(facts, syncs, scale, results), indent=2) + "\n")
    return 1 if any(result.outcome.problems for result in results) else 0


def _measure(
    rows: list[cases.Measurement],
    chosen: list[subjects.Subject],
    scale: Scale,
    data: Path,
) -> list[Result]:
    # The subjects take turns row by row, so that a machine that slows down half way slows
    # both sides of a ratio.
    work = [(row, subject) for row in rows for subject in row.subjects if subject in chosen]
    results: list[Result] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        overall = bars.add_task("measurements", total=len(work))
        step = bars.add_task("", total=1, visible=False)

        def say(doing: str, done: int, total: int) -> None:
            bars.update(step, description=doing, completed=done, total=total, visible=True)

        for row, subject in work:
            bars.update(overall, description=f"{row.case}, {row.label}: {subject.title}")
            outcome = cases.measure(row, subject, scale, data, say)
            results.append(Result(row, subject.name, outcome))
            bars.update(step, visible=False)
            bars.advance(overall)
    return results


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure Fencepost beside the reference server, on loopback.",
        epilog="The Python client has numbers of its own: python -m benchmarks.client",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=cases.case_names())
    parser.add_argument(
        "--subject",
        nargs="+",
        metavar="NAME",
        choices=[subject.name for subject in subjects.SUBJECTS],
        help="any of: " + ", ".join(subject.name for subject in subjects.SUBJECTS),
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
