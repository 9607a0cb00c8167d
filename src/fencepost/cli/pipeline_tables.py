"""`fencepost pipeline table`: streams as tables, once or for as long as it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fencepost.cli.interrupts import ended_as_by_ctrl_c
from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.pipeline_spark import (
    DryRun,
    Master,
    Pattern,
    Running,
    SparkLog,
    bar,
    running,
)
from fencepost.cli.render import REFUSED, USAGE, CommandError, as_line, progress, show_facts

if TYPE_CHECKING:
    from fencepost.pipeline.tables.operations import Reached


def table(
    pattern: Pattern,
    to: Annotated[Path, typer.Argument(help="The folder of the tables; it is made.")],
    kind: Annotated[
        Literal["state", "rows"],
        typer.Option(help="state: what State streams say now, by type. rows: every message."),
    ] = "state",
    format: Annotated[
        Literal["parquet", "delta"], typer.Option(help="The format of the files.")
    ] = "parquet",
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="With state: a type, or with its columns as in user='name string, age int'."
            " May be repeated. Else all types, as JSON text.",
        ),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(help="With rows: the columns of values, as in 'total double'.")
    ] = None,
    rows_per_commit: Annotated[
        int, typer.Option(help="Messages after which a commit is made.", min=1)
    ] = 1_000_000,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on without rows that left the log unread.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="With --follow: serve metrics for Prometheus here.", min=0, max=65535),
    ] = None,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="Then remove files that nothing needs any more.")
    ] = False,
    dry_run: DryRun = False,
    master: Master = None,
    spark_log: SparkLog = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Bring tables of streams up to date. Stopped and run again, it goes on where it was.

    Examples:

      fencepost pipeline table 'users/**' ./tables/users --type user='name string, age int'
      fencepost pipeline table 'orders/*' ./tables/orders --kind rows --schema 'total double'
      fencepost pipeline table 'users/**' ./tables/users --format delta --follow
    """
    with running("table", url, token, master=master, log=spark_log, as_json=as_json) as job:
        settings: dict[str, Any] = {
            "match": pattern,
            "kind": kind,
            "format": format,
            "types": _types(types),
            "schema": schema,
            "options": {**job.options, "failOnDataLoss": not skip_lost},
        }
        if dry_run:
            _say(_planned(job, pattern, to), as_json)
            return
        if follow:
            _follow(job, to, settings, metrics_port, as_json)
        else:
            settings["rows_per_commit"] = rows_per_commit
            reached = _backfill(job, to, settings, as_json)
            _say(
                {
                    "to": str(to),
                    "messages": reached.rows,
                    "invalid": reached.invalid,
                    "position": reached.position,
                },
                as_json,
            )
        if vacuum:
            from fencepost.pipeline import tables

            _say({"files_removed": tables.vacuum(to)}, as_json)


def _backfill(job: Running, to: Path, settings: dict[str, Any], as_json: bool) -> Reached:
    from fencepost.pipeline import tables

    with progress(hidden=as_json) as bars:
        task = bars.add_task("up to the head", total=None)

        def tell(reached: Reached) -> None:
            bars.update(task, completed=reached.position + 1, total=reached.head + 1)

        return tables.backfill(job.spark, to, on_commit=tell, **settings)


def _follow(
    job: Running, to: Path, settings: dict[str, Any], port: int | None, as_json: bool
) -> None:
    from fencepost.pipeline import tables
    from fencepost.pipeline.metrics import watch

    with ended_as_by_ctrl_c(), watch(job.spark, port=port) as watching:
        if watching.port is not None:
            print(f"metrics on http://127.0.0.1:{watching.port}/metrics", file=sys.stderr)
        query = tables.follow(job.spark, to, name=f"table {to.name}", **settings)
        try:
            with bar(job.spark, f"following into {to}", hidden=as_json):
                query.awaitTermination()
        except KeyboardInterrupt:
            query.stop()
            return
        error = query.exception()
        if error is not None:
            raise CommandError(f"the query failed: {error}", REFUSED)


def _planned(job: Running, pattern: str, to: Path) -> dict[str, object]:
    """The rows, bytes and positions of the log that a run would read."""
    from fencepost.pipeline import tables
    from fencepost.pipeline.tables.files import DEFINITION

    begun = tables.position(to) if (to / DEFINITION).exists() else -1
    plan = job.client.plan(after=begun, match=pattern)
    return {
        "to": str(to),
        "after": begun,
        "until": plan.until,
        "messages": plan.rows,
        "bytes": plan.bytes,
    }


def _types(given: list[str] | None) -> dict[str, str | None] | None:
    if not given:
        return None
    found: dict[str, str | None] = {}
    for one in given:
        name, _, ddl = one.partition("=")
        if not name.strip():
            raise CommandError(f"--type is a type, or type=columns, not {one!r}", USAGE)
        found[name.strip()] = ddl.strip() or None
    return found


def _say(facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(as_line(facts))
    else:
        show_facts(facts)
