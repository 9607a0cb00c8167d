"""`fencepost outbox list`, `inspect`, `requeue`, `drop`: rows of an outbox, and changes to them.

With `--database` the rows are those of a caller's own database.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fencepost.cli.options import AsJson
from fencepost.cli.outbox_table import Database, talking_to
from fencepost.cli.render import REFUSED, USAGE, CommandError, show_facts, show_lines, show_table

if TYPE_CHECKING:
    from fencepost.outbox.database import OutboxDatabase
    from fencepost.outbox.states import Row, Status, Successor

ROWS_MAX = 1_000
CHAIN_MAX = 100
"""Successors that `inspect` follows."""
SHOWN_CHARACTERS_MAX = 80

RowId = Annotated[str, typer.Argument(metavar="ROW", help="The row, as `list` names it.")]


def list_(
    database: Database = None,
    pending: Annotated[
        bool, typer.Option("--pending", help="Rows that wait for their delivery.")
    ] = False,
    inflight: Annotated[bool, typer.Option("--inflight", help="Rows that are being sent.")] = False,
    done: Annotated[bool, typer.Option("--done", help="Rows that were delivered.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Rows that failed for good.")] = False,
    aborted: Annotated[
        bool, typer.Option("--aborted", help="Rows that were dropped or requeued.")
    ] = False,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Only rows of this mesh.")] = None,
    after: Annotated[str, typer.Option("--after", help="List the rows after this one.")] = "0",
    limit: Annotated[int, typer.Option(help="Rows to show.", min=1, max=ROWS_MAX)] = 100,
    as_json: AsJson = False,
) -> None:
    """List rows in the order in which they were accepted: those that are open or dead, or as asked.

    Examples:

      fencepost outbox list --failed
      fencepost outbox list --database shop.db --pending --mesh shop
    """
    asked: list[tuple[bool, Status]] = [
        (pending, "pending"),
        (inflight, "inflight"),
        (done, "done"),
        (failed, "dead"),
        (aborted, "aborted"),
    ]
    chosen = [status for is_asked, status in asked if is_asked]
    with talking_to(database, as_json=as_json) as (opened, _):
        opened.check()
        statuses: Sequence[Status] = chosen or ("pending", "inflight", "dead")
        found = opened.rows(statuses, mesh=mesh, after=_number(after), limit=limit)
        _show_rows(found, as_json=as_json)


def inspect(row_id: RowId, database: Database = None, as_json: AsJson = False) -> None:
    """Show a row with its payload, and the rows that took its place.

    Examples:

      fencepost outbox inspect 17 --database shop.db
    """
    from fencepost.outbox.states import facts_of

    with talking_to(database, as_json=as_json) as (opened, _):
        opened.check()
        chain = [_found(opened, row_id)]
        while len(chain) < CHAIN_MAX and (following := chain[-1].superseded_by) is not None:
            chain.append(_found(opened, following))
        payload = json.loads(chain[0].payload)
        if as_json:
            show_lines([facts_of(chain[0]) | {"payload": payload}, *map(facts_of, chain[1:])])
            return
        show_facts(facts_of(chain[0]) | {"payload": json.dumps(payload)[:1_000]})
        if chain[1:]:
            _show_rows(chain[1:], as_json=False)


def requeue(
    row_id: RowId,
    database: Database = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Send it under a new id that is made here.")
    ] = False,
    new_id: Annotated[str | None, typer.Option("--new-id", help="Send it under this id.")] = None,
    payload: Annotated[
        Path | None, typer.Option(help="A file with the send as JSON, in place of what was sent.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send the message of a dead or waiting row again under another id; its own stays used.

    Examples:

      fencepost outbox requeue 17 --auto --database shop.db
      fencepost outbox requeue 17 --new-id paid-7-again --payload fixed.json
    """
    from fencepost.outbox.states import IdUsed, NotOpen, Requeued, facts_of

    with talking_to(database, as_json=as_json) as (opened, _):
        opened.check()
        row = _found(opened, row_id)
        successor = _successor(row, new_id, payload, auto=auto)
        match opened.requeue(row.id, successor, by=getpass.getuser()):
            case Requeued(old, new):
                if as_json:
                    show_lines([{"old": facts_of(old), "new": facts_of(new)}])
                else:
                    typer.echo(f"row {new.id} sends it as {new.client_message_id}")
            case IdUsed(used):
                raise CommandError(
                    f"the id {used!r} was used in this mesh: name another, or say --auto", REFUSED
                )
            case NotOpen(status):
                raise _not_open(row_id, status)
            case None:
                raise _no_row(row_id)


def drop(row_id: RowId, database: Database = None, as_json: AsJson = False) -> None:
    """Give a row up: it is not sent any more, and its id stays used.

    Examples:

      fencepost outbox drop 17 --database shop.db
    """
    from fencepost.outbox.states import Dropped, NotOpen, facts_of

    with talking_to(database, as_json=as_json) as (opened, _):
        opened.check()
        row = _found(opened, row_id)
        match opened.drop(row.id, by=getpass.getuser()):
            case Dropped(dropped):
                if as_json:
                    show_lines([facts_of(dropped)])
                else:
                    typer.echo(f"row {dropped.id} is aborted: {dropped.client_message_id}")
            case NotOpen(status):
                raise _not_open(row_id, status)
            case None:
                raise _no_row(row_id)


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CommandError(f"--after is the number of a row, not {text!r}", USAGE)
    return int(text)


def _found(opened: OutboxDatabase, row_id: str) -> Row:
    row = opened.row(row_id)
    if row is None:
        raise _no_row(row_id)
    return row


def _no_row(row_id: str) -> CommandError:
    return CommandError(f"there is no row {row_id!r}: `fencepost outbox list` shows them", REFUSED)


def _not_open(row_id: str, status: Status) -> CommandError:
    return CommandError(f"row {row_id} is {status}: only an open or dead row can be changed")


def _successor(row: Row, new_id: str | None, payload: Path | None, *, auto: bool) -> Successor:
    """What takes the place of a row; raises `CommandError` for what cannot."""
    from fencepost.clock import SystemClock
    from fencepost.outbox.delivery import read_send, row_of, ulid
    from fencepost.outbox.states import Successor
    from fencepost.protocol.fingerprints import Unsendable, refuse_id

    if (new_id is None) == (not auto):
        raise CommandError("say --auto, or name a --new-id: one of the two", USAGE)
    fresh = ulid(SystemClock()) if new_id is None else new_id
    refused = refuse_id(fresh)
    if refused is not None:
        raise CommandError(refused.detail, USAGE)
    if payload is None:
        return Successor("", fresh)
    try:
        data = payload.read_bytes()
    except OSError as error:
        raise CommandError(f"the file {payload} cannot be read: {error.strerror}", USAGE) from None
    send = read_send(data, header_id=fresh, minted_id=fresh)
    if isinstance(send, Unsendable):
        raise CommandError(f"the payload in {payload}: {send.detail}", USAGE)
    patched = row_of(send, mesh=row.mesh, row_id="", now_ms=0)
    if patched.lane != row.lane:
        raise CommandError(
            f"a requeue keeps its destination and priority, {row.destination} and {row.priority}",
            USAGE,
        )
    return Successor("", fresh, patched.payload, patched.request_fingerprint)


def _show_rows(rows: Sequence[Row], *, as_json: bool) -> None:
    from fencepost.outbox.states import facts_of

    if as_json:
        show_lines(facts_of(row) for row in rows)
        return
    shown: list[tuple[Any, ...]] = [
        (
            row.id,
            row.status,
            row.client_message_id,
            f"{row.mesh} {row.destination}",
            row.attempts,
            (row.last_error or "")[:SHOWN_CHARACTERS_MAX],
        )
        for row in rows
    ]
    columns = ("row", "status", "id", "to", "attempts", "error")
    show_table(columns, shown, empty="there are no such rows")
