"""`fencepost pipeline`: audits, tables, reactions, sweeps, lag and recovery, with exit codes.

Each command starts Spark if it needs it, runs a function of `fencepost.pipeline` and shows what it
gave back. How Spark is started and what is said of its failures is in `pipeline_spark.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.pipeline_apps import react, rebuild
from fencepost.cli.pipeline_spark import Master, Pattern, SparkLog, bar, running
from fencepost.cli.pipeline_sweeps import reclaim, retention
from fencepost.cli.pipeline_tables import table
from fencepost.cli.render import (
    INTERRUPTED,
    as_line,
    show_facts,
    show_lines,
    show_table,
    talking,
)

if TYPE_CHECKING:
    from fencepost.pipeline.audit.reports import Report

DEFECTS, FAILED = 1, 2
"""Exit codes of an audit beside 0: something is wrong with the log; nothing can be said of it."""
DAYS_SHOWN_MAX = 14
STREAMS_SHOWN_MAX = 10

app = typer.Typer(
    help="Spark jobs: audits, tables, reactions. They need pip install 'fencepost\\[spark]'.",
    no_args_is_help=True,
)


@app.command("audit")
def audit(
    pattern: Pattern = "**",
    after: Annotated[
        int, typer.Option(help="Check what lies above this position, without the lists.", min=-1)
    ] = -1,
    until: Annotated[
        int | None,
        typer.Option(help="Check up to this position, without the lists. Else the head.", min=0),
    ] = None,
    samples: Annotated[int, typer.Option(help="Examples of each kind of defect.", min=1)] = 20,
    plot: Annotated[Path | None, typer.Option(help="Draw the report to this PNG file.")] = None,
    forgetting: Annotated[
        bool,
        typer.Option(
            "--forgetting", help="The server forgets silent producers (producer_retention_s)."
        ),
    ] = False,
    once: Annotated[
        str | None,
        typer.Option(help="A path in JSON messages: no two of a stream may be equal in it."),
    ] = None,
    master: Master = None,
    spark_log: SparkLog = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Check that the log holds what was promised, and that the lists agree with it.

    Exit code 0: clean; 1: there are defects; 2: it could not be checked.

    Examples:

      fencepost pipeline audit
      fencepost pipeline audit 'orders/**' --plot audit.png --json | jq .defects
      fencepost pipeline audit 'orders/**' --once order.id
    """
    with (
        _failing_as(FAILED),
        running("audit", url, token, master=master, log=spark_log, as_json=as_json) as job,
    ):
        from fencepost.pipeline.audit import audit as run
        from fencepost.pipeline.audit import reports

        with bar(job.spark, "auditing", hidden=as_json) as step:
            report = run(
                job.spark,
                match=pattern,
                after=after,
                until=until,
                options=job.options,
                samples_max=samples,
                forgetting=forgetting,
                once=once,
                tell=step,
            )
        if as_json:
            sys.stdout.write(as_line({"clean": report.is_clean, **_fields(report)}))
        else:
            _show(report)
        if plot is not None:
            reports.plot(report, plot)
    if not report.is_clean:
        raise typer.Exit(DEFECTS)


@app.command("lag")
def lag(
    places: Annotated[
        list[str],
        typer.Argument(
            help="Folders of tables, checkpoints of queries, or names of groups.",
            show_default=False,
        ),
    ],
    match: Annotated[
        str | None,
        typer.Option(help="The streams that a query reads, which its checkpoint does not say."),
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show how far queries, tables and groups are behind the head of the log. Needs no Spark.

    Examples:

      fencepost pipeline lag ./tables/users ./checkpoints/by-day
      fencepost pipeline lag shop
      fencepost pipeline lag ./checkpoints/by-day --match 'orders/*' --json | jq .messages
    """
    with talking(url, token, as_json=as_json) as client:
        from fencepost.pipeline.lag import lags

        found = [one for place in places for one in lags(client, place, match)]
        if as_json:
            show_lines(found)
            return
        rows = (
            (
                *(one.place, one.kind, one.selection, one.batch, one.position),
                *(one.messages, one.bytes, one.seconds),
            )
            for one in found
        )
        behind = ("messages behind", "bytes", "seconds")
        columns = ("place", "kind", "streams", "batch", "position", *behind)
        show_table(columns, rows, empty="no consumers")


@app.command("recover")
def recover(
    sink: Annotated[str, typer.Argument(help="The sinkName of the query; its stream by default.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show how to go on when a checkpoint is lost or old. Needs no Spark, changes nothing.

    Examples:

      fencepost pipeline recover orders/by-day
      fencepost pipeline recover orders/by-day --json | jq .source_options
    """
    with talking(url, token, as_json=as_json) as client:
        from fencepost.pipeline.recovery import recovery

        found = recovery(client, sink)
        if as_json:
            show_lines([found])
            return
        begin = "its start" if found.after is None else found.after
        facts = {
            "sink": found.sink,
            "query": found.query,
            "last batch": found.batch,
            "read from": f"the positions after {begin} up to {found.until}",
        }
        for kind, options in (("source", found.source_options), ("sink", found.sink_options)):
            facts |= {f"{kind} option {name}": value for name, value in options.items()}
        show_facts(facts)


app.command("table")(table)
app.command("react")(react)
app.command("rebuild")(rebuild)
app.command("reclaim")(reclaim)
app.command("retention")(retention)


@contextmanager
def _failing_as(code: int) -> Iterator[None]:
    """One exit code for every way in which nothing could be said."""
    try:
        yield
    except typer.Exit as end:
        if end.exit_code in (0, INTERRUPTED):
            raise
        raise typer.Exit(code) from None


def _fields(report: Report) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(report)


def _show(report: Report) -> None:
    from fencepost.pipeline.audit import KINDS

    show_facts(
        {
            "streams": report.streams,
            "messages": report.messages,
            "producers": report.producers if report.lists_compared else None,
            "keys": report.keys if report.lists_compared else None,
            "positions": f"{report.after + 1:,} to {report.until:,}",
            "rows that left the log": None
            if report.pruned is None
            else f"some up to position {report.pruned:,}: checked as far as they are there",
            "result": "clean" if report.is_clean else f"{sum(report.defects.values()):,} defects",
        }
    )
    if report.days:
        print()
        days = report.days[-DAYS_SHOWN_MAX:]
        rows = ((one.name, one.messages, one.bytes) for one in days)
        show_table(("day", "messages", "bytes"), rows, empty="")
        print()
        largest = report.largest[:STREAMS_SHOWN_MAX]
        rows = ((one.name, one.messages, one.bytes) for one in largest)
        show_table(("largest streams", "messages", "bytes"), rows, empty="")
    if report.defects:
        print()
        kinds = ((kind, count, KINDS[kind]) for kind, count in report.defects.items())
        show_table(("defect", "found", "which means that"), kinds, empty="")
        print()
        samples = ((one.kind, one.stream, one.position, one.detail) for one in report.samples)
        show_table(("defect", "stream", "position", "detail"), samples, empty="")
