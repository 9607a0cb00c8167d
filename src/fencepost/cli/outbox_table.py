"""The commands of `fencepost outbox` for rows in a caller's own database."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

import fencepost
from fencepost.cli.options import AsJson, LogLevel, Token, Url
from fencepost.cli.profile import Profile, ProfileError, resolve
from fencepost.cli.render import (
    UNREACHABLE,
    USAGE,
    CommandError,
    code_of,
    fail,
    sentence_of,
    show_lines,
)

if TYPE_CHECKING:
    from fencepost.outbox.database import OutboxDatabase
    from fencepost.outbox.relay import Counts, RelaySettings
    from fencepost.outbox.rows import DialectName

DATABASE_VARIABLE = "FENCEPOST_OUTBOX_DATABASE"
MESH_VARIABLE = "FENCEPOST_MESH"
DEFAULT_SENDER = "outbox"
"""One name for relays of all users: the server knows a repeated send by its sender too."""

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar=DATABASE_VARIABLE,
        help=f"The caller's database: a SQLite file or postgresql://. Else {DATABASE_VARIABLE}.",
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this module to the group `fencepost outbox`."""
    app.command("relay")(relay)
    app.command("schema")(schema)


def schema(
    dialect: Annotated[str, typer.Option(help="sqlite or postgresql.")],
    alembic: Annotated[bool, typer.Option("--alembic", help="As a migration of Alembic.")] = False,
    django: Annotated[bool, typer.Option("--django", help="As a migration of Django.")] = False,
) -> None:
    """Print the outbox table for your migrations. Nothing is changed.

    Examples:

      fencepost outbox schema --dialect sqlite | sqlite3 shop.db
      fencepost outbox schema --dialect postgresql --alembic > migrations/versions/outbox.py
    """
    from fencepost.outbox.migrations import alembic_migration, django_migration
    from fencepost.outbox.rows import schema as schema_of

    try:
        if alembic and django:
            raise CommandError("say --alembic or --django, not both", USAGE)
        if dialect not in ("sqlite", "postgresql"):
            raise CommandError(f"--dialect is sqlite or postgresql, not {dialect!r}", USAGE)
        write = alembic_migration if alembic else django_migration if django else schema_of
        typer.echo(write(cast("DialectName", dialect)), nl=False)
    except CommandError as error:
        fail(str(error), error.code)


def relay(
    database: Database = None,
    meshes: Annotated[
        list[str] | None,
        typer.Option("--mesh", help=f"A mesh to serve; several times. Else {MESH_VARIABLE}."),
    ] = None,
    sender: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="Who sends, where the server has no principals; the same for all relays."
            f" Default: {DEFAULT_SENDER}.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Deliver what is due, then end.")] = False,
    sends: Annotated[int, typer.Option(help="Sends at the same time.", min=1, max=1_000)] = 32,
    per_destination: Annotated[
        int, typer.Option(help="Sends to one destination at the same time.", min=1, max=3)
    ] = 3,
    lease_seconds: Annotated[
        float,
        typer.Option(help="A relay that is silent for so long loses its rows.", min=1, max=3600),
    ] = 30.0,
    keep_done_hours: Annotated[
        float, typer.Option(help="How long a delivered row is kept.", min=0, max=8760)
    ] = 168.0,
    max_age_hours: Annotated[
        int | None,
        typer.Option(help="Hours after which a row is given up; the mesh has a cap.", min=1),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve metrics for Prometheus on this port.", min=0, max=65535),
    ] = None,
    log_level: LogLevel = "info",
    log_json: Annotated[bool, typer.Option("--log-json", help="Logs as JSON lines.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Deliver the rows of an outbox table until Ctrl-C or SIGTERM, beside any number of others.

    Examples:

      fencepost outbox relay --database postgresql://app@db/shop --mesh shop
      fencepost outbox relay --database shop.db --mesh shop --once
    """
    from fencepost.outbox.relay import Counts, RelaySettings

    counts = Counts()
    lease_ms = int(lease_seconds * 1000)
    settings = RelaySettings(
        lease_ms=lease_ms,
        attempt_ms=min(RelaySettings().attempt_ms, lease_ms // 2),
        sends_max=sends,
        destination_max=per_destination,
        keep_done_ms=int(keep_done_hours * 3_600_000),
        max_age_hours=max_age_hours,
    )
    with talking_to(database, url, token, as_json=as_json) as (opened, profile):
        from fencepost.cli.process import set_up_logs

        set_up_logs(log_level, as_json=log_json)
        names = meshes or [name for name in [os.environ.get(MESH_VARIABLE)] if name]
        if not names:
            raise CommandError(f"which mesh? Say --mesh NAME, or set {MESH_VARIABLE}", USAGE)
        if sender is None and profile.token is None:
            sender = DEFAULT_SENDER
        opened.check()
        if metrics_port is not None:
            _serve_metrics(opened, counts, metrics_port)
        asyncio.run(_relay(opened, profile, names, sender, settings, counts, once=once))
        _show_counts(counts, as_json=as_json)


def _serve_metrics(database: OutboxDatabase, counts: Counts, port: int) -> None:
    from fencepost.outbox.relay_metrics import RelayMetrics, serve

    try:
        taken = serve(RelayMetrics(database, counts), port)
    except OSError as error:
        raise CommandError(f"metrics cannot be served on port {port}: {error}", USAGE) from None
    print(f"metrics on http://127.0.0.1:{taken}/metrics", file=sys.stderr, flush=True)


async def _relay(
    database: OutboxDatabase,
    profile: Profile,
    names: list[str],
    sender: str | None,
    settings: RelaySettings,
    counts: Counts,
    *,
    once: bool,
) -> None:
    from fencepost.cli.process import stop_on_signals
    from fencepost.clock import SystemClock
    from fencepost.outbox.relay import Relay

    stop = asyncio.Event()
    stop_on_signals(stop)
    timeouts = fencepost.Timeouts(connect=5.0, answer=settings.attempt_ms / 1000)
    async with fencepost.connect_async(
        profile.url, token=profile.token, retries=fencepost.NO_RETRIES, timeouts=timeouts
    ) as client:
        meshes = {name: client.mesh(name) for name in names}
        relay = Relay(
            database,
            meshes,
            sender=sender,
            clock=SystemClock(),
            settings=settings,
            counted=counts,
        )
        if not once:
            print(f"relaying {', '.join(names)} to {profile.url}", file=sys.stderr, flush=True)
        await relay.run(stop, once=once)


def _show_counts(counts: Counts, *, as_json: bool) -> None:
    facts = {name: counts[name] for name in ("delivered", "duplicate", "retries", "dead", "lost")}
    if as_json:
        show_lines([facts])
    else:
        typer.echo(f"{facts['delivered']} delivered, {facts['dead']} dead")


@contextmanager
def talking_to(
    database: str | None, url: str | None = None, token: str | None = None, *, as_json: bool
) -> Iterator[tuple[OutboxDatabase, Profile]]:
    """An outbox table, with an end in words for every failure."""
    from fencepost.clock import SystemClock
    from fencepost.outbox.database import open_outbox

    where = url or ""
    opened = None
    try:
        if not database:
            raise CommandError(f"which database? Say --database, or set {DATABASE_VARIABLE}", USAGE)
        profile = resolve(url, token, os.environ)
        where = profile.url
        opened = open_outbox(database, SystemClock())
        yield opened, profile
    except (Exception, KeyboardInterrupt) as raised:
        _end(first_of(raised), opened, where, as_json=as_json)
    finally:
        if opened is not None:
            opened.close()


def _end(
    error: BaseException, opened: OutboxDatabase | None, where: str, *, as_json: bool
) -> NoReturn:
    """End the command with a sentence about an error, if it is not a defect."""
    from fencepost.outbox.errors import OutboxError
    from fencepost.outbox.relay import TermsRefusedError

    match error:
        case KeyboardInterrupt():
            raise typer.Exit(130) from None
        case CommandError() | ProfileError():
            fail(str(error), getattr(error, "code", USAGE), as_json=as_json)
        case TermsRefusedError():
            fail(str(error), error.exit_code, as_json=as_json)
        case OutboxError():
            fail(str(error), USAGE, as_json=as_json)
        case fencepost.FencepostError():
            code = getattr(error, "code", None)
            fail(sentence_of(error, where), code_of(error), as_json=as_json, code=code)
        case Exception() if opened is not None and opened.is_away(error):
            # What PostgreSQL's library says goes on with questions on further lines.
            reason = str(error).strip().partition("\n")[0]
            fail(f"the database cannot be used: {reason}", UNREACHABLE, as_json=as_json)
    raise error


def first_of(error: BaseException) -> BaseException:
    """The first error that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
