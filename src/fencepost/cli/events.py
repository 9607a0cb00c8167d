"""`fencepost events run MODULE:APP`: workers for the reactions and projections of an app.

`projections` and `rebuild` look at the projections and build them anew.

One process runs the app's handlers with as many targets at once as `--streams` says. With
`--processes` a parent keeps that many of them running: it starts one again that has died, and
passes on the request to stop. A worker that is asked to stop finishes the handlers that run, with
their leases renewed until then, and gives nothing half done away.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
import uvloop

import fencepost
from fencepost.cli.options import AsJson, LogLevel, Token, Url
from fencepost.cli.process import set_up_logs, stop_on_signals
from fencepost.cli.profile import Profile, ProfileError, resolve
from fencepost.cli.render import REFUSED, UNREACHABLE, USAGE, CommandError, fail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.events import App, ClosedBooks, OpenApp

app = typer.Typer(
    help="Apps of fencepost.events: run them, look after their projections.",
    no_args_is_help=True,
)

FIRST_WAIT_S, WAIT_S_MAX = 0.2, 5.0
"""How long to wait before a dead process is started again: doubled each time, up to so much."""
LIVED_S = 5.0
"""A process that lived for longer counts as one that could start."""
FAILED_STARTS_MAX = 5
"""After so many processes in a row that died at once, the parent gives up."""


@app.callback()
def _events() -> None:
    """Apps of fencepost.events: run them, look after their projections."""


@app.command("run")
def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="As in shop:app.")],
    processes: Annotated[int, typer.Option(help="Processes to run.", min=1)] = 1,
    streams: Annotated[
        int, typer.Option(help="Targets that a process handles at once.", min=1)
    ] = 10,
    events: Annotated[int, typer.Option(help="Events of a target per lease.", min=1)] = 10,
    lane: Annotated[str | None, typer.Option(help="Serve this lane alone.")] = None,
    worker: Annotated[str | None, typer.Option(help="Name of the worker.")] = None,
    projections: Annotated[
        str | None, typer.Option(help="Database of the projections: a file or postgresql://.")
    ] = None,
    log_level: LogLevel = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as JSON lines.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Run the reactions of an app until Ctrl-C or SIGTERM."""
    try:
        found = find_app(target)
        profile = resolve(url, token, os.environ)
        set_up_logs(log_level, as_json=log_json)
        if processes > 1:
            code = uvloop.run(_supervise(processes, worker or found.name))
        else:
            uvloop.run(_work(found, profile, worker, streams, events, lane, projections))
            code = 0
    except (CommandError, ProfileError) as error:
        fail(str(error), getattr(error, "code", USAGE))
    except (fencepost.ConnectionFailedError, fencepost.OutcomeUnknownError) as error:
        fail(f"no server answers: {error}", UNREACHABLE)
    except fencepost.FencepostError as error:
        fail(str(error), REFUSED)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if code:
        raise typer.Exit(code)


Database = Annotated[
    str, typer.Option("--projections", help="Database of the projections: a file or postgresql://.")
]
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="As in shop:app.")]


@app.command("projections")
def show_projections(
    target: Target, database: Database, url: Url = None, token: Token = None
) -> None:
    """Show every version of the projections of an app: how far it is, and which is live."""
    with _opened(target, database, url, token) as opened:
        head = opened.client.log_head()
        for one in opened.projections.statuses():
            live = "live" if one.live else ""
            behind = max(0, head - one.position)
            typer.echo(f"{one.name}\tv{one.version}\t{one.position}\t{behind} behind\t{live}")


@app.command("rebuild")
def rebuild(
    target: Target,
    name: Annotated[str, typer.Argument(help="The projection.")],
    database: Database,
    after: Annotated[
        int | None,
        typer.Option(help="Go back to this position first; -1 makes the tables anew.", min=-1),
    ] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Build a projection up to the head of the log, beside the live version, then switch to it."""

    def shown(at: int, head: int) -> None:
        typer.echo(f"{at} of {head}", err=True)

    with _opened(target, database, url, token) as opened:
        reached = opened.projections.rebuild(name, after=after, on_progress=shown)
        typer.echo(f"{name} is built up to {reached} and live")


def close_books(
    target: Annotated[str, typer.Argument(help="The app, MODULE:APP, as in shop:app.")],
    entity: Annotated[
        str | None, typer.Argument(help="The class of the entity; without it, what is due.")
    ] = None,
    entity_id: Annotated[str | None, typer.Argument(help="The id of the entity.")] = None,
    retire: Annotated[bool, typer.Option("--retire", help="End the stream for good.")] = False,
    reopen: Annotated[bool, typer.Option("--reopen", help="Give up a close that began.")] = False,
    before: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"],
            help="Drop the events before this time (UTC), and keep the entity live.",
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Close the books of an entity, or of all that the app's policies say are due.

    A stream that a group has work left on is left as it is, and the group is named: then the exit
    code is 1. Run it again later; a close that was interrupted goes on.

    Examples:

      fencepost close-books shop:app
      fencepost close-books shop:app Order 7 --retire
      fencepost close-books shop:app Order 7 --before 2026-01-01
    """
    if (entity is None) != (entity_id is None):
        fail("give the class and the id of the entity, or neither", USAGE, as_json=as_json)
    if sum((retire, reopen, before is not None)) > 1 or (
        entity is None and (retire or reopen or before)
    ):
        what = "give an entity, and one of --retire, --reopen and --before"
        fail(what, USAGE, as_json=as_json)
    with _opened(target, None, url, token, as_json=as_json) as opened:
        books = opened.books
        if entity is None or entity_id is None:
            done = books.close_due()
        else:
            kinds = {kind.__name__: kind for kind in opened.app.registry.entities}
            if entity not in kinds:
                known = ", ".join(sorted(kinds))
                raise CommandError(f"the app has no entity {entity!r}: it has {known}", USAGE)
            kind = kinds[entity]
            if reopen:
                done = [books.reopen(kind, entity_id)]
            elif before is not None:
                done = [books.drop(kind, entity_id, before=before.replace(tzinfo=UTC))]
            else:
                then: Literal["retire", "restart"] = "retire" if retire else "restart"
                done = [books.close(kind, entity_id, then=then)]
    for one in done:
        typer.echo(json.dumps(msgspec.to_builtins(one)) if as_json else _shown(one))
    if any(one.outcome == "pending" for one in done):
        raise typer.Exit(REFUSED)


def _shown(done: ClosedBooks) -> str:
    parts = [done.stream, done.outcome, f"version {done.version}"]
    if done.group is not None:
        parts.append(f"the group {done.group} has work left on it")
    if done.error is not None:
        parts.append(done.error)
    if done.guarded and done.outcome == "pending":
        parts.append("it takes no events until it is closed, or reopened with --reopen")
    return "\t".join(parts)


@contextlib.contextmanager
def _opened(
    target: str,
    database: str | None,
    url: str | None,
    token: str | None,
    *,
    as_json: bool = False,
) -> Iterator[OpenApp]:
    try:
        found = find_app(target)
        profile = resolve(url, token, os.environ)
        with (
            fencepost.connect(profile.url, token=profile.token) as client,
            found.open(client, projections=database) as opened,
        ):
            yield opened
    except (CommandError, ProfileError) as error:
        fail(str(error), getattr(error, "code", USAGE), as_json=as_json)
    except (fencepost.ConnectionFailedError, fencepost.OutcomeUnknownError) as error:
        fail(f"no server answers: {error}", UNREACHABLE, as_json=as_json)
    except fencepost.FencepostError as error:
        fail(str(error), REFUSED, as_json=as_json)
    except Exception as error:
        from fencepost.events.projections.stores import is_of_database

        if database is None or not is_of_database(error):
            raise
        # What PostgreSQL's library says goes on with questions on further lines.
        reason = str(error).strip().partition("\n")[0]
        fail(f"the database of the projections cannot be used: {reason}", UNREACHABLE)


def find_app(target: str) -> App:
    """The app that `MODULE:APP` names; raises `CommandError` with what is wrong."""
    from fencepost.events import App

    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise CommandError(f"{target!r} is not of the form MODULE:APP, as in shop:app", USAGE)
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder that the command runs in, as `python -m` has it
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        where = f"there is no module {error.name!r} in {os.getcwd()} or among those installed"
        raise CommandError(where, USAGE) from None
    found = getattr(module, name, None)
    if not isinstance(found, App):
        what = "has no" if found is None else "has no App, but another object, as"
        apps = [key for key, value in vars(module).items() if isinstance(value, App)]
        hint = f": its apps are {', '.join(apps)}" if apps else ""
        raise CommandError(f"the module {module_name!r} {what} {name!r}{hint}", USAGE)
    return found


async def _work(
    found: App,
    profile: Profile,
    worker: str | None,
    streams: int,
    events: int,
    lane: str | None,
    projections: str | None,
) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with (
        fencepost.connect_async(profile.url, token=profile.token) as client,
        found.open(client, projections=projections) as opened,
    ):
        name = worker or f"{found.name}-{os.getpid()}"
        typer.echo(f"worker {name} runs the reactions of {found.name} at {profile.url}", err=True)
        await opened.work(worker=name, streams=streams, events=events, lane=lane, stopping=stop)
    typer.echo(f"worker {name} has stopped", err=True)


# Several processes


async def _supervise(processes: int, name: str) -> int:
    """Keep processes running until this one is asked to stop; the exit code."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    kept = [asyncio.create_task(_keep(f"{name}-{n + 1}", stop)) for n in range(processes)]
    codes = await asyncio.gather(*kept)
    return max(codes)


async def _keep(worker: str, stop: asyncio.Event) -> int:
    """Run a process, again and again, until it is to stop or cannot start."""
    loop = asyncio.get_running_loop()
    failures = 0
    while not stop.is_set():
        began_s = loop.time()
        code = await _run_once(worker, stop)
        if stop.is_set():
            break
        failures = 1 if loop.time() - began_s > LIVED_S else failures + 1
        if failures > FAILED_STARTS_MAX or code == USAGE:
            stop.set()
            return code or 1
        wait_s = min(FIRST_WAIT_S * 2.0 ** (failures - 1), WAIT_S_MAX)
        typer.echo(f"worker {worker} has ended with {code} and is started again", err=True)
        try:
            await asyncio.wait_for(stop.wait(), wait_s)
        except TimeoutError:
            continue
    return 0


async def _run_once(worker: str, stop: asyncio.Event) -> int:
    """Start a process and wait until it has ended; its exit code."""
    arguments = one_process(sys.argv[1:], worker)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fencepost", *arguments), start_new_session=True
    )
    ending = asyncio.create_task(process.wait())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            process.send_signal(signal.SIGTERM)
        return await ending
    finally:
        stopping.cancel()
        if process.returncode is None:
            process.kill()


def one_process(arguments: list[str], worker: str) -> list[str]:
    """The arguments of this command for one process of it."""
    kept: list[str] = []
    skipping = False
    for argument in arguments:
        if skipping:
            skipping = False
            continue
        if argument in ("--processes", "--worker"):
            skipping = True
        elif not argument.startswith(("--processes=", "--worker=")):
            kept.append(argument)
    return [*kept, "--processes", "1", "--worker", worker]
