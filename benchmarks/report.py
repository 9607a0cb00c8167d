"""What a run says: a table for a person, a JSON document for everything else.

Ratios are ours against the reference in memory and against the Rust server, from the same run. For
a rate more is better, for a time less is; both are turned so that above 1 is in our favour.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cases import Measurement, Outcome
from benchmarks.scale import Scale
from benchmarks.subjects import OURS, REFERENCE, RUST, SUBJECTS, Subject

TITLES = {
    "appends": "100-byte producer appends, bytes (p50 / p99)",
    "appends-json": "100-byte producer appends, JSON (p50 / p99)",
    "one-stream": "100-byte producer appends to one stream (p50 / p99)",
    "plain": "100-byte appends without a producer (p50 / p99)",
    "large": "64 KiB producer appends (p50 / p99)",
    "scattered": "100-byte producer appends on random streams, 64 connections (p50 / p99)",
    "catch-up": "catch-up as bytes, one connection",
    "catch-up-json": "catch-up as JSON, one connection",
    "sse": "SSE readers of one stream: from when a message was due to its last reader (p50 / p99)",
    "conditions": "100-byte appends with conditions, pipelined over one connection",
    "commit-stalls": "another writer's appends while many streams are committed (p50 / p99)",
    "log": "the global log from start to head, one reader",
    "lists": "pages of lists, one after the other over one connection (p50 / p99)",
    "restart": "restart: from the start of the process to its first answered read",
}
PEERS = (REFERENCE, RUST)
"""The servers that ours is compared with."""
LESS_IS_BETTER = {"last_p99_ms", "longest_wait_ms", "restart_seconds", "slowest_page_ms"}


@dataclass(frozen=True)
class Result:
    """One measurement of one subject."""

    row: Measurement
    subject: str
    outcome: Outcome


def document(
    machine: dict[str, Any], syncs: float, scale: Scale, results: list[Result]
) -> dict[str, Any]:
    """Everything about the run, ready for JSON."""
    return {
        "machine": machine,
        "disk": {"syncs_of_4_kib_per_second": round(syncs, 1)},
        "scale": asdict(scale),
        "results": [
            {
                "case": result.row.case,
                "label": result.row.label,
                "subject": result.subject,
                "main": result.row.main,
                "metrics": result.outcome.metrics,
                "problems": result.outcome.problems,
            }
            for result in results
        ],
        "ratios": [
            {"case": row.case, "label": row.label, "of": row.main, f"ours_to_{peer.name}": ratio}
            for row, by_subject in _grouped(results)
            for peer in PEERS
            if (ratio := _ratio(row, by_subject, peer)) is not None
        ],
        "promises": {subject.name: subject.promise for subject in SUBJECTS if subject.promise},
    }


def print_report(
    console: Console, machine: dict[str, Any], syncs: float, results: list[Result]
) -> None:
    """A table per case, and below them everything that was wrong."""
    grouped = _grouped(results)
    for case, title in TITLES.items():
        rows = [(row, by_subject) for row, by_subject in grouped if row.case == case]
        if rows:
            console.print(_table(title, rows))
    for subject in SUBJECTS:
        if subject.promise and any(result.subject == subject.name for result in results):
            console.print(f"{subject.title}: {subject.promise}")
    console.print("; ".join(f"{name} {value}" for name, value in machine.items()))
    console.print(f"this disk: {syncs:,.0f} syncs of 4 KiB a second, one at a time")
    for result in results:
        for problem in result.outcome.problems:
            where = f"{result.row.case}, {result.row.label}, {result.subject}"
            console.print(f"[red]wrong:[/red] {where}: {problem}")


def _table(title: str, rows: list[tuple[Measurement, dict[str, Outcome]]]) -> Table:
    shown = [s for s in SUBJECTS if any(s.name in by_subject for _, by_subject in rows)]
    peers = [peer for peer in PEERS if OURS in shown and peer in shown]
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("", max_width=24)
    for subject in shown:
        table.add_column(subject.title, justify="right", no_wrap=True)
    for peer in peers:
        table.add_column(f"ours : {peer.name}", justify="right", no_wrap=True)
    for row, by_subject in rows:
        cells = [_cell(row, by_subject.get(subject.name)) for subject in shown]
        for peer in peers:
            ratio = _ratio(row, by_subject, peer)
            cells.append("" if ratio is None else f"{ratio:.2f}")
        table.add_row(row.label, *cells)
    return table


def _grouped(results: list[Result]) -> list[tuple[Measurement, dict[str, Outcome]]]:
    rows: dict[tuple[str, str], tuple[Measurement, dict[str, Outcome]]] = {}
    for result in results:
        key = (result.row.case, result.row.label)
        rows.setdefault(key, (result.row, {}))[1][result.subject] = result.outcome
    return list(rows.values())


def _ratio(row: Measurement, by_subject: dict[str, Outcome], peer: Subject) -> float | None:
    ours, other = by_subject.get(OURS.name), by_subject.get(peer.name)
    if ours is None or other is None or ours.problems or other.problems:
        return None
    mine, theirs = ours.metrics[row.main], other.metrics[row.main]
    if row.main in LESS_IS_BETTER:
        mine, theirs = theirs, mine
    return round(mine / theirs, 3) if theirs else None


def _cell(row: Measurement, outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    if outcome.problems:
        return "[red]wrong"
    m = outcome.metrics
    match row.main:
        case "rate":
            spent = f"\n{m['cpu_us']:,.0f} us of processor" if "cpu_us" in m else ""
            return f"{m['rate']:,.0f}/s\n{_latency(m)}{spent}"
        case "mb_per_second" if "p99_ms" in m:
            return (
                f"{m['mb_per_second']:,.0f} MB/s\n{_latency(m)}\n{m['cpu_us']:,.0f} us of processor"
            )
        case "mb_per_second":
            spent = f"{m['mb_per_cpu_second']:,.0f} MB per s of cpu"
            return f"{m['mb_per_second']:,.0f} MB/s\n{spent}\npeak {m['peak_mb']:,.0f} MB"
        case "first_mb_per_second":
            return f"{m['first_mb_per_second']:,.0f} MB/s"
        case "per_core":
            return f"{m['per_core']:,.0f} per second of processor\n{m['rate']:,.0f}/s"
        case "rows_per_second":
            return (
                f"{m['rows_per_second']:,.0f} rows/s, {m['mb_per_second']:,.0f} MB/s\n"
                f"{m['per_core']:,.0f} rows per second of processor\npeak {m['peak_mb']:,.0f} MB"
            )
        case "longest_wait_ms":
            return (
                f"longest wait {m['longest_wait_ms']:,.0f} ms"
                f" (before: {m['calm_longest_wait_ms']:,.0f} ms)\n"
                f"{m['p50_ms']:.1f} / {m['p99_ms']:.1f} ms"
                f" (before: {m['calm_p50_ms']:.1f} / {m['calm_p99_ms']:.1f} ms)\n"
                f"{m['appends_meanwhile']:,} appends in {m['commit_seconds']:.1f} s\n"
                f"{m['cpu_us_per_stream']:,.0f} us of processor a stream,"
                f" peak {m['peak_mb']:,.0f} MB"
            )
        case "slowest_page_ms":
            pages = [f"{name}: {_latency(page)}" for name, page in m["pages"].items()]
            return "\n".join([*pages, f"slowest page {m['slowest_page_ms']:.1f} ms"])
        case "last_p99_ms":
            return f"{m['last_p50_ms']:.1f} / {m['last_p99_ms']:.1f} ms"
        case _:
            return (
                f"{m['restart_seconds']:.2f} s after SIGTERM\n"
                f"{m['restart_after_kill_seconds']:.2f} s after SIGKILL\n"
                f"{m['memory_mb']:,.0f} MB, before it {m['filled_memory_mb']:,.0f} MB\n"
                f"({m['bytes_per_stream']:,.0f} bytes a stream)\n"
                f"{m['disk_mb']:,.0f} MB on disk"
            )


def _latency(metrics: dict[str, Any]) -> str:
    return f"{metrics['p50_ms']:.2f} / {metrics['p99_ms']:.2f} ms"
