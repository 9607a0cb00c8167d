"""`fencepost ls`, `create`, `head`, `close`, `rm`, `fork`, `producers` and `claims`.

Each command is one or two calls of the client and a way to show what came back. Appending is in
`append.py`, reading in `read.py`, what all of them say of a failure in `render.py`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

import fencepost
from fencepost.cli.options import (
    TYPES,
    AsJson,
    ExpiresAt,
    Path,
    Token,
    Ttl,
    Type,
    Url,
    complete_paths,
    content_type_of,
)
from fencepost.cli.render import ask, show_facts, show_lines, show_list, talking

CLAIM_GLOBS = ("task:*/**", "tool:*/**")
"""Ids that are claims unless the server was told otherwise; an id may have slashes in it."""
HELD = ("claimed", "heartbeat")
"""The states of a claim that an actor holds (docs/guides/task-claims.md)."""
NOTHING_KNOWN = {"owner": None, "status": None, "since": None, "message": None}


def ls(
    pattern: Annotated[str, typer.Argument(help="Which paths: * is one segment, ** any.")] = "**",
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List streams. After a truncation `messages` still counts what was dropped, `bytes` does not.

    Examples:

      fencepost ls
      fencepost ls 'orders/*'
      fencepost ls --json | jq .path
    """
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.streams(match=pattern),
            ("stream", "type", "messages", "bytes", "state", "updated"),
            lambda info: (
                *(info.path, _short(info.content_type), info.version + 1, info.size_bytes),
                *("closed" if info.closed else "open", info.updated),
            ),
            empty=f"no streams match {pattern}",
            as_json=as_json,
        )


def _short(content_type: str) -> str:
    return next((short for short, whole in TYPES.items() if whole == content_type), content_type)


def create(
    stream: Path,
    content_type: Type = None,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    closed: Annotated[bool, typer.Option("--closed", help="Make it closed and empty.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a stream, of JSON unless told otherwise; fine if it exists as it would be made.

    Examples:

      fencepost create orders
      fencepost create logs/web --type text --ttl 86400
    """
    with talking(url, token, as_json=as_json) as client:
        made = client.create(
            stream,
            content_type=content_type_of(content_type or "json"),
            ttl_seconds=ttl,
            expires_at=expires_at,
            closed=closed,
        )
        _say({"path": made.path, "content_type": made.content_type}, as_json)


def head(stream: Path, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Show a stream without reading it: type, tail, closed, lifetime.

    Examples:

      fencepost head orders --json | jq -r .next_offset
    """
    with talking(url, token, as_json=as_json) as client:
        found = client.stream(stream).head()
        _say({"path": stream, **msgspec.structs.asdict(found)}, as_json)


def close(stream: Path, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Close a stream: readers see its end, writers are refused. Closing again is fine.

    Examples:

      fencepost close orders/7
    """
    with talking(url, token, as_json=as_json) as client:
        closed = client.stream(stream).close()
        _say({"path": stream, "closed": True, "next_offset": closed.next_offset}, as_json)


def rm(
    stream: Path,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Delete a stream and its messages. Asks first; without a terminal it needs --yes.

    Examples:

      fencepost rm orders/7
      fencepost rm orders/7 --yes
    """
    with talking(url, token, as_json=as_json) as client:
        if not yes:
            ask(f"Delete the stream {stream} and everything in it?")
        client.stream(stream).delete()
        _say({"path": stream, "deleted": True}, as_json)


def truncate(
    stream: Path,
    before: Annotated[
        str, typer.Option("--before", help="Drop what lies before this offset; now: everything.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Drop the messages of a stream before an offset; its offsets go on as they were.

    Examples:

      fencepost truncate orders/7 --before now --yes
    """
    with talking(url, token, as_json=as_json) as client:
        if not yes:
            ask(f"Drop everything in {stream} before {before}?")
        left = client.stream(stream).truncate(before=before)
        facts = {"path": stream, "first_offset": left.first_offset, "tail": left.next_offset}
        _say(facts, as_json)


def fork(
    source: Path,
    new: Annotated[str, typer.Argument(help="Path of the new stream.")],
    offset: Annotated[
        str | None, typer.Option("--at", help="Offset up to which the past is shared: the tail.")
    ] = None,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a stream that begins as another one, and then goes its own way. Nothing is copied.

    Examples:

      fencepost fork orders orders-what-if
    """
    with talking(url, token, as_json=as_json) as client:
        made = client.stream(source).fork(
            new, offset=offset, ttl_seconds=ttl, expires_at=expires_at
        )
        facts = {"path": new, "forked_from": source, "content_type": made.content_type}
        _say(facts, as_json)


def producers(
    stream: Annotated[
        str | None,
        typer.Argument(help="A path or a pattern of paths.", autocompletion=complete_paths),
    ] = None,
    match: Annotated[str | None, typer.Option(help="Pattern of producer ids.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List producers: in which session each is, and how far it came.

    Examples:

      fencepost producers orders
      fencepost producers --match 'checkout-*'
    """
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.producers(stream=stream, match=match),
            ("stream", "producer", "epoch", "seq", "last seen"),
            lambda one: (one.stream, one.id, one.epoch, one.seq, one.updated),
            empty="no producers match",
            as_json=as_json,
        )


def claims(
    stream: Annotated[
        str | None,
        typer.Argument(help="A path or a pattern of paths.", autocompletion=complete_paths),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of ids that are claims; may come again. Default: task:*, tool:*"
        ),
    ] = None,
    held: Annotated[
        bool, typer.Option("--held", help="Only those that an actor holds now.")
    ] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List claims: who holds what since when, as the messages of each claim say.

    Examples:

      fencepost claims
      fencepost claims coordination --match 'task:*'
    """
    with talking(url, token, as_json=as_json) as client:
        found = _claims(client, stream, match or CLAIM_GLOBS)
        if held:
            found = [one for one in found if one["status"] in HELD]
        names = ("stream", "id", "owner", "status", "since", "updated", "epoch")
        show_list(
            found,
            ("stream", "claim", "owner", "status", "since", "last seen", "epoch"),
            lambda one: [one[name] for name in names],
            empty="no claims match",
            as_json=as_json,
        )


def _claims(
    client: fencepost.Client, stream: str | None, globs: Iterable[str]
) -> list[dict[str, Any]]:
    """Producers under the patterns, each with what its messages say: who, what, since when."""
    found: dict[str, dict[str, fencepost.ProducerInfo]] = {}
    for glob in globs:
        for one in client.producers(stream=stream, match=glob):
            found.setdefault(one.stream, {})[one.id] = one
    claims: list[dict[str, Any]] = []
    for path, claimed in sorted(found.items()):
        moves = _moves(client, path, claimed)
        claims += (
            {**msgspec.structs.asdict(one), **moves.get(one.id, NOTHING_KNOWN)}
            for _, one in sorted(claimed.items())
        )
    return claims


def _moves(client: fencepost.Client, path: str, ids: Container[str]) -> dict[str, dict[str, Any]]:
    """What the newest message of each claim says, from one pass over the stream's log."""
    moves: dict[str, dict[str, Any]] = {}
    for entry in client.log(streams=[path], skip_pruned=True):
        if entry.producer is None or entry.producer.id not in ids:
            continue
        # A State message, or the plain object that the published coordination patterns show.
        data = entry.data if isinstance(entry.data, dict) else {}
        value = data.get("value", data)
        said: dict[str, Any] = value if isinstance(value, dict) else {}
        before = moves.get(entry.producer.id)
        begins = before is None or entry.producer.seq == 0 or said.get("status") == "claimed"
        stored = datetime.fromtimestamp(entry.timestamp_ms / 1000, UTC)
        moves[entry.producer.id] = {
            "owner": said.get("owner", said.get("executorId")),
            "status": said.get("status"),
            "since": stored if begins or before is None else before["since"],
            "message": entry.data,
        }
    return moves


def _say(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_lines([facts])
    else:
        show_facts({name.replace("_", " "): value for name, value in facts.items()})
