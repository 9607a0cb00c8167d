"""`fencepost pipeline react` and `rebuild`: the reactions and projections of an app on Spark."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.pipeline_spark import Master, SparkLog, bar, running
from fencepost.cli.render import CommandError, as_line, fail, show_facts

if TYPE_CHECKING:
    import msgspec

Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="As in shop:app.")]


def react(
    target: Target,
    streams: Annotated[
        int, typer.Option(help="Targets that a task handles side by side.", min=1)
    ] = 16,
    tasks: Annotated[
        int | None, typer.Option(help="Tasks of a round. Default: as many as run at once.", min=1)
    ] = None,
    events: Annotated[int, typer.Option(help="Events of a target per lease.", min=1)] = 10,
    lane: Annotated[str | None, typer.Option(help="Serve this lane alone.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until Ctrl-C, instead of until idle.")
    ] = False,
    master: Master = None,
    spark_log: SparkLog = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Run the reactions of an app on executors until nothing is left to do. Safe to repeat.

    Examples:

      fencepost pipeline react shop:app
      fencepost pipeline react shop:app --master spark://host:7077 --follow
    """
    _check(target, as_json=as_json)
    with running("react", url, token, master=master, log=spark_log, as_json=as_json) as job:
        from fencepost.pipeline.reactions import drain

        with bar(job.spark, "handling events", hidden=as_json):
            done = drain(
                job.spark,
                target,
                options=job.options,
                tasks=tasks,
                streams=streams,
                events=events,
                lane=lane,
                follow=follow,
            )
        _show(done, as_json=as_json)


def rebuild(
    target: Target,
    name: Annotated[str, typer.Argument(help="The projection.")],
    projections: Annotated[
        str, typer.Option(help="Database of the projections, as executors reach it.")
    ],
    parts: Annotated[
        int | None,
        typer.Option(help="Parts that are built at once. Default: as many as run.", min=1),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Make the tables of this version anew first.")
    ] = False,
    master: Master = None,
    spark_log: SparkLog = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Build a projection in parallel, beside the live version, then switch to it.

    Examples:

      fencepost pipeline rebuild shop:app orders --projections postgresql://db/shop
    """
    _check(target, as_json=as_json)
    with running("rebuild", url, token, master=master, log=spark_log, as_json=as_json) as job:
        from fencepost.pipeline.rebuilds import rebuild as build

        with bar(job.spark, "building", hidden=as_json):
            built = build(
                job.spark, target, name, projections, options=job.options, parts=parts, anew=anew
            )
        _show(built, as_json=as_json)


def _check(target: str, *, as_json: bool) -> None:
    """Find out that there is no such app before Spark takes its seconds to start."""
    from fencepost.cli.events import find_app

    try:
        find_app(target)
    except CommandError as error:
        fail(str(error), error.code, as_json=as_json)


def _show(done: msgspec.Struct, *, as_json: bool) -> None:
    import msgspec

    facts = msgspec.structs.asdict(done)
    if as_json:
        sys.stdout.write(as_line(facts))
    else:
        show_facts(facts)
