"""`fencepost outbox`: the daemon on this machine that accepts sends and delivers them.

The commands for rows in a caller's own database are in `outbox_table`, and join the same group;
`run` is in `outbox_run`.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from heapq import merge
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import platformdirs
import typer

import fencepost
from fencepost.cli import outbox_rows, outbox_run, outbox_table
from fencepost.cli.options import AsJson
from fencepost.cli.outbox_rows import ROWS_MAX
from fencepost.cli.outbox_table import Database
from fencepost.cli.render import (
    INTERRUPTED,
    REFUSED,
    UNREACHABLE,
    USAGE,
    CommandError,
    console,
    fail,
    show_facts,
    show_lines,
    show_table,
)
from fencepost.outbox.daemon.running import LAST_EXIT
from fencepost.outbox.errors import IdUsedError
from fencepost.outbox.local import FOLDER_VARIABLE, SOCKET_VARIABLE, RowInfo, socket_of
from fencepost.outbox.sync.daemons import DaemonOutbox

STATUSES = ("pending", "inflight", "done", "dead", "aborted")
OPEN_OR_DEAD = ("pending", "inflight", "dead")
COLUMNS = ("row", "status", "mesh", "to", "id", "attempts", "age", "error")

app = typer.Typer(
    help="The outbox: sends that are accepted here and delivered when the server can be reached.",
    no_args_is_help=True,
)

Row = Annotated[str, typer.Argument(help="The id of the row, as `list` shows it.")]
Socket = Annotated[
    Path | None,
    typer.Option("--socket", help=f"The daemon's socket. Else {SOCKET_VARIABLE}, or its folder's."),
]


@app.callback()
def _outbox() -> None:
    """The outbox: sends that are accepted here and delivered when the server can be reached."""


@contextmanager
def asking(socket: Path | None, *, as_json: bool = False) -> Iterator[DaemonOutbox]:
    """The daemon that is meant, with an end in words for every failure."""
    where = socket_of(socket)
    try:
        with DaemonOutbox(where) as outbox:
            yield outbox
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except CommandError as error:
        fail(str(error), error.code, as_json=as_json, **error.fields)
    except IdUsedError as error:
        fail(str(error), REFUSED, as_json=as_json, conflict=error.conflict)
    except fencepost.ConnectionFailedError as error:
        last = _last_exit(Path(where).parent)
        why = f"; the last one ended: {last['detail']}" if last else ""
        fail(
            f"no outbox answers at {where} ({error}){why}. Start one with `fencepost outbox run`;"
            " for the rows of an outbox table say --database",
            UNREACHABLE,
            as_json=as_json,
            last_exit=last,
        )
    except fencepost.ResponseError as error:
        fail(error.detail, REFUSED, as_json=as_json, code=error.code)
    except fencepost.FencepostError as error:
        fail(str(error), REFUSED, as_json=as_json)


def _last_exit(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / LAST_EXIT).read_text())
    except (OSError, ValueError):
        return None
    return found


@app.command("status")
def status(
    socket: Socket = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again each second.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what waits, which meshes are in reach, and what hooks did.

    Without a daemon it says why the last one ended, and exits with 3.
    """
    with asking(socket, as_json=as_json) as outbox:
        while True:
            found = outbox.status()
            if watch and not as_json:
                console().clear()
            _show_status(found, as_json)
            if not watch:
                return
            time.sleep(1.0)


def _show_status(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_lines([found])
        return
    rows = found["rows"]
    show_facts(
        {
            "outbox": found["status"],
            "member": found["member"] or None,
            "folder": found["folder"],
            "process": str(found["pid"]),
            "rows": ", ".join(f"{rows[name]} {name}" for name in rows) or "none",
            "under way": found["deliveries_under_way"],
            "came in": found["inbox_stored"],
        }
    )
    meshes = (
        (
            mesh["mesh"],
            mesh["state"],
            mesh["via"] if mesh["state"] == "connected" else "",
            _age(mesh["since_ms"]),
            mesh["reconnects"],
            f"{mesh['max_age_hours']} h" if "max_age_hours" in mesh else "unknown",
            mesh.get("error", ""),
        )
        for mesh in found["meshes"]
    )
    print()
    show_table(
        ("mesh", "state", "via", "for", "reconnects", "rows live", "error"), meshes, empty=""
    )
    if found["hooks"]:
        hooks = ((hook["hook"], hook["runs"], hook["failures"]) for hook in found["hooks"])
        print()
        show_table(("hook", "runs", "gave up"), hooks, empty="")


@app.command("list")
def list_(
    socket: Socket = None,
    database: Database = None,
    mesh: Annotated[str | None, typer.Option(help="Only rows of this mesh.")] = None,
    pending: Annotated[
        bool, typer.Option("--pending", help="Rows that wait for their delivery.")
    ] = False,
    inflight: Annotated[bool, typer.Option("--inflight", help="Rows being sent.")] = False,
    done: Annotated[bool, typer.Option("--done", help="Rows that were delivered.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Rows that failed for good.")] = False,
    aborted: Annotated[
        bool, typer.Option("--aborted", help="Rows that were dropped or replaced.")
    ] = False,
    after: Annotated[str, typer.Option("--after", help="List the rows after this one.")] = "0",
    limit: Annotated[int, typer.Option(help="Rows to show.", min=1, max=ROWS_MAX)] = 100,
    as_json: AsJson = False,
) -> None:
    """List rows in the order in which they were accepted: those that are open or dead, or as asked.

    The rows are those of the daemon, or with --database those of a caller's own database.

    Examples:

      fencepost outbox list --failed
      fencepost outbox list --pending --mesh shop --json | jq .client_message_id
      fencepost outbox list --failed --database shop.db
    """
    if database is not None:
        outbox_rows.list_(
            *(database, pending, inflight, done, failed, aborted, mesh, after, limit, as_json)
        )
        return
    asked = zip(STATUSES, (pending, inflight, done, failed, aborted), strict=True)
    chosen = [status for status, is_asked in asked if is_asked] or OPEN_OR_DEAD
    with asking(socket, as_json=as_json) as outbox:
        found = (outbox.rows(status=status, mesh=mesh, after=after) for status in chosen)
        merged = merge(*found, key=lambda row: row.id)
        # A row that was taken between two of these questions is in both answers.
        newest = (list(same)[-1] for _, same in groupby(merged, key=lambda row: row.id))
        rows = list(islice(newest, limit))
        if as_json:
            show_lines(rows)
            return
        show_table(COLUMNS, map(_columns, rows), empty="there are no such rows")


def _columns(row: RowInfo) -> tuple[object, ...]:
    return (
        row.id,
        row.status,
        row.mesh,
        row.destination,
        row.client_message_id,
        row.attempts,
        _age(row.enqueued_ms),
        row.last_error or "",
    )


@app.command("inspect")
def inspect(
    row: Row, socket: Socket = None, database: Database = None, as_json: AsJson = False
) -> None:
    """Show a row with its payload, and the rows that were sent in its place."""
    if database is not None:
        outbox_rows.inspect(row, database, as_json)
        return
    with asking(socket, as_json=as_json) as outbox:
        found = outbox.inspect(row)
        if as_json:
            show_lines([found])
            return
        show_facts(
            {
                "row": found.id,
                "status": found.status,
                "mesh": found.mesh,
                "to": found.destination,
                "id": found.client_message_id,
                "priority": found.priority,
                "attempts": found.attempts,
                "accepted": _time(found.enqueued_ms),
                "next attempt": _time(found.next_attempt_ms),
                "error": found.last_error,
                "delivered": _time(found.delivered_ms),
                "stored as": found.broker_message_id,
                "aborted": _time(found.aborted_ms),
                "aborted by": found.aborted_by,
                "fingerprint": found.request_fingerprint,
                "payload": json.dumps(found.payload, ensure_ascii=False),
            }
        )
        if found.successors:
            print()
            show_table(COLUMNS, map(_columns, found.successors), empty="")


@app.command("requeue")
def requeue(
    row: Row,
    new_id: Annotated[
        str | None, typer.Option("--new-id", help="The id under which it is sent now.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Make a new id for it.")] = False,
    payload: Annotated[
        Path | None,
        typer.Option(help="A file with another payload: JSON, as `inspect` shows it."),
    ] = None,
    socket: Socket = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Send a row's message under another id, to the same destination. The old id stays used.

    Examples:

      fencepost outbox requeue 01M7RA73MYZNGHEVEEKCZGYQJH --auto
      fencepost outbox requeue 01M7RA73MYZNGHEVEEKCZGYQJH --new-id alert-17-b --payload fixed.json
    """
    if database is not None:
        outbox_rows.requeue(row, database, auto, new_id, payload, as_json)
        return
    with asking(socket, as_json=as_json) as outbox:
        if (new_id is None) != auto:
            raise CommandError("say --auto or --new-id ID: one of the two", USAGE)
        patched = _payload(payload)
        done = outbox.requeue(row, new_id=new_id, payload=patched, by=getpass.getuser())
        if as_json:
            show_lines([done])
            return
        typer.echo(
            f"{done.old.id} is aborted; {done.new.id} is sent in its place"
            f" as {done.new.client_message_id}"
        )


def _payload(file: Path | None) -> dict[str, Any] | None:
    if file is None:
        return None
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}", USAGE) from None
    except ValueError as error:
        raise CommandError(f"{file} is not JSON: {error}", USAGE) from None
    if not isinstance(found, dict):
        raise CommandError(f"{file} is not a JSON object", USAGE)
    return found


@app.command("drop")
def drop(
    row: Row, socket: Socket = None, database: Database = None, as_json: AsJson = False
) -> None:
    """Give a row up: it is not sent, and its id stays used."""
    if database is not None:
        outbox_rows.drop(row, database, as_json)
        return
    with asking(socket, as_json=as_json) as outbox:
        dropped = outbox.drop(row, by=getpass.getuser())
        if as_json:
            show_lines([dropped])
            return
        typer.echo(f"{dropped.id} is aborted; the id {dropped.client_message_id} stays used")


UNIT = """\
[Unit]
Description=Fencepost outbox: accepts sends on this machine and delivers them
After=network.target
# Exit codes 10 to 15 want a person: a mesh refused this outbox.
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=10 11 12 13 14 15
UMask=0077
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={folder}
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
MemoryMax=1G
{environment}
[Install]
WantedBy=default.target
"""


@app.command("install-service")
def install_service(
    meshes: Annotated[
        list[str], typer.Option("--mesh", help="A mesh to serve; may be given several times.")
    ],
    member: Annotated[str, typer.Option("--as", help="The member whose inbox is kept.")] = "",
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the unit, install nothing.")] = False,
) -> None:
    """Write a hardened systemd unit of this user, and say how to start it.

    The server and its token come from the client's config file: a unit is no place for a token.
    """
    folder = Path(socket_of(None)).parent
    command = [sys.executable, "-m", "fencepost", "outbox", "run"]
    for mesh in meshes:
        command += ["--mesh", mesh]
    if member:
        command += ["--as", member]
    if config is not None:
        command += ["--config", str(config.resolve())]
    variables = ("FENCEPOST_URL", "FENCEPOST_CONFIG", FOLDER_VARIABLE, SOCKET_VARIABLE)
    environment = "".join(
        f"Environment={_quoted(f'{name}={os.environ[name]}')}\n"
        for name in variables
        if os.environ.get(name)
    )
    # ReadWritePaths must exist when the unit starts.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    unit = UNIT.format(
        command=" ".join(map(_quoted, command)),
        folder=_quoted(str(folder)),
        environment=environment,
    )
    if show:
        typer.echo(unit, nl=False)
        return
    file = (
        platformdirs.user_config_path("systemd", appauthor=False) / "user/fencepost-outbox.service"
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(unit)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    typer.echo(f"{file} is written. Start it, now and with every login:\n")
    typer.echo("  systemctl --user daemon-reload")
    typer.echo("  systemctl --user enable --now fencepost-outbox")
    typer.echo(f"  loginctl enable-linger {shlex.quote(getpass.getuser())}  # without a login too")


def _quoted(text: str) -> str:
    """A word as systemd reads it: quoted, with its specifiers and variables doubled."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != text or shlex.quote(text) != text else text


def _age(at_ms: int) -> str:
    seconds = max(0, int(time.time() - at_ms / 1000))
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _time(at_ms: int | None) -> str | None:
    if at_ms is None:
        return None
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")


app.command("run")(outbox_run.run)
outbox_table.add_commands(app)
