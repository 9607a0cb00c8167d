"""`fencepost log` and `keys`: the log of all streams, and the keys that the server remembers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated

import typer

import fencepost
from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.render import USAGE, CommandError, show_list, talking


def log(
    match: Annotated[
        list[str] | None,
        typer.Argument(help="Which paths: * is one segment, ** any; all without it."),
    ] = None,
    after: Annotated[
        int, typer.Option(help="Begin behind this position; -1 is the beginning.", min=-1)
    ] = -1,
    until: Annotated[int | None, typer.Option(help="End at this position.", min=0)] = None,
    limit: Annotated[int | None, typer.Option(help="Show so many entries at most.", min=1)] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Only events with this name; may come several times.")
    ] = None,
    correlation: Annotated[
        str | None, typer.Option(help="Only events with this correlation.")
    ] = None,
    newest: Annotated[bool, typer.Option("--newest", help="The newest first.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show the messages of all streams in the one order in which they were stored.

    Examples:

      fencepost log
      fencepost log 'orders/*' --after 1000 --limit 20
      fencepost log 'orders/*' --name Paid --newest --limit 1
      fencepost log --follow --json | jq .data
    """
    with talking(url, token, as_json=as_json) as client:
        if newest and follow:
            raise CommandError("--newest shows what is there, --follow what comes: give one", USAGE)
        entries = client.log(
            after=after,
            until=until,
            match=match or None,
            names=name or None,
            correlation=correlation,
            order="desc" if newest else "asc",
            follow=follow,
            skip_pruned=True,
        )
        show_list(
            islice(entries, limit),
            ("position", "stream", "stored", "message"),
            lambda one: (one.position, one.stream, _stored(one), _content(one)),
            empty="the log has no entries",
            as_json=as_json or follow,
        )


def keys(
    stream: Annotated[
        str | None, typer.Argument(help="Only the keys of this stream; all without it.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List idempotency keys that the server remembers: of which request, and for how long.

    Examples:

      fencepost keys
      fencepost keys orders/7 --json | jq .key
    """
    with talking(url, token, as_json=as_json) as client:
        remembered = client.keys()
        show_list(
            (one for one in remembered if stream in (None, one.stream)),
            ("key", "stream", "position", "created", "expires"),
            lambda one: (
                *(one.key, one.stream or "a commit", one.position),
                *(one.created, one.expires or "kept"),
            ),
            empty="no keys match",
            as_json=as_json,
        )


def _stored(entry: fencepost.LogEntry) -> datetime:
    return datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC)


def _content(entry: fencepost.LogEntry) -> str:
    if entry.marker is not None:
        return f"({entry.marker})"
    if entry.data_base64 is not None:
        return f"base64 {entry.data_base64}"
    return json.dumps(entry.data, ensure_ascii=False)
