"""`fencepost pipeline reclaim` and `retention`: work over very many streams at once."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.pipeline_spark import DryRun, Master, Pattern, SparkLog, bar, running
from fencepost.cli.render import REFUSED, USAGE, CommandError, ask, show_lines, show_table

if TYPE_CHECKING:
    from fencepost.protocol.retention import Policy


def reclaim(
    pattern: Pattern = "**",
    timeout: Annotated[
        float, typer.Option(help="Seconds of silence that make a claim stale.", min=0.0)
    ] = 60.0,
    kind: Annotated[
        Literal["task", "tool"] | None, typer.Option(help="Only claims of this kind.")
    ] = None,
    owner: Annotated[str, typer.Option(help="The owner that is written into the stream.")] = (
        "fencepost-reclaim"
    ),
    dry_run: DryRun = False,
    master: Master = None,
    spark_log: SparkLog = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Give the tasks of silent holders back, over all coordination streams. Safe to repeat.

    Examples:

      fencepost pipeline reclaim --dry-run
      fencepost pipeline reclaim 'jobs/**' --timeout 300
    """
    with running("reclaim", url, token, master=master, log=spark_log, as_json=as_json) as job:
        from fencepost.pipeline import sweeps

        with bar(job.spark, "looking for silent holders", hidden=as_json):
            found = sweeps.reclaim(
                job.spark,
                match=pattern,
                kinds=sweeps.CLAIM_KINDS if kind is None else (kind,),
                timeout=timeout,
                owner=owner,
                dry_run=dry_run,
                options=job.options,
            )
        if as_json:
            show_lines(found)
        else:
            rows = (
                (
                    one.stream,
                    one.task,
                    one.owner,
                    one.epoch,
                    _whole(one.silent_seconds),
                    one.outcome,
                )
                for one in found
            )
            columns = ("stream", "task", "holder", "epoch", "silent for", "outcome")
            show_table(columns, rows, empty="no claim is stale")
        _refuse([one.error for one in found if one.error is not None])


def retention(
    pattern: Annotated[
        str | None, typer.Argument(help="Which streams; or give --policies.", show_default=False)
    ] = None,
    max_age: Annotated[
        int | None, typer.Option(help="Keep what is at most so many seconds old.", min=0)
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="Keep at most so many bytes of a stream.", min=0)
    ] = None,
    max_messages: Annotated[
        int | None, typer.Option(help="Keep at most so many messages of a stream.", min=0)
    ] = None,
    policies: Annotated[
        Path | None,
        typer.Option(help=r"A TOML file with \[\[retention]] policies, as of the server."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    master: Master = None,
    spark_log: SparkLog = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Say what policies would drop, then drop it. Asks first; without a terminal it needs --yes.

    Examples:

      fencepost pipeline retention 'logs/**' --max-age 604800 --dry-run
      fencepost pipeline retention 'logs/**' --max-messages 1000000 --yes
      fencepost pipeline retention --policies retention.toml
    """
    with running("retention", url, token, master=master, log=spark_log, as_json=as_json) as job:
        from fencepost.pipeline import sweeps

        wanted = _policies(pattern, max_age, max_bytes, max_messages, policies)
        planned: list[Any] = []
        if dry_run or not yes:
            with bar(job.spark, "looking for what to drop", hidden=as_json):
                planned = sweeps.retention(job.spark, wanted, dry_run=True, options=job.options)
            if dry_run or not planned:
                _show_dropped(planned, as_json)
                return
            ask(f"Drop {_sum(planned, 'messages'):,} messages of {len(planned):,} streams?")
        with bar(job.spark, "dropping", hidden=as_json):
            done = sweeps.retention(job.spark, wanted, options=job.options)
        _show_dropped(done, as_json)
        _refuse([one.error for one in done if one.error is not None])


def _policies(
    pattern: str | None,
    max_age: int | None,
    max_bytes: int | None,
    max_messages: int | None,
    file: Path | None,
) -> list[Policy]:
    from fencepost.pipeline.sweeps import policy

    if (pattern is None) == (file is None):
        raise CommandError("give a pattern with bounds, or --policies FILE", USAGE)
    if pattern is not None:
        bounds = {"max_age_s": max_age, "max_bytes": max_bytes, "max_messages": max_messages}
        return [policy(pattern, **bounds)]
    assert file is not None
    try:
        written = tomllib.loads(file.read_text())["retention"]
        return [policy(**one) for one in written]
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}", USAGE) from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise CommandError(
            f"{file} has no policies that can be used ({error}): each is a [[retention]] with match"
            " and max_age_s, max_bytes or max_messages",
            USAGE,
        ) from None


def _show_dropped(rows: list[Any], as_json: bool) -> None:
    if as_json:
        show_lines(rows)
        return
    shown = ((one.stream, one.messages, one.bytes, one.before, one.outcome) for one in rows)
    columns = ("stream", "messages", "bytes", "begins then at", "outcome")
    show_table(columns, shown, empty="nothing to drop")
    if rows:
        total = f"{_sum(rows, 'messages'):,} messages, {_sum(rows, 'bytes'):,} bytes"
        print(f"together {total}", file=sys.stderr)


def _refuse(errors: list[str]) -> None:
    """Say that some streams refused, once the others are shown."""
    if errors:
        raise CommandError(
            f"{len(errors):,} streams refused, the first because {errors[0]}. Run it again later",
            REFUSED,
        )


def _sum(rows: list[Any], name: str) -> int:
    return sum(getattr(one, name) for one in rows)


def _whole(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:,.0f} s"
