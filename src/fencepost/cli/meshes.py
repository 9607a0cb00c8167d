"""`fencepost mesh`, `send`, `inbox` and `messages`: meshes, and the messages that are sent in them.

The mesh of `send`, `inbox` and `messages` is `--mesh`, or FENCEPOST_MESH.
"""

from __future__ import annotations

import getpass
import json
import os
from typing import Annotated, Any

import typer

import fencepost
from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.profile import resolve
from fencepost.cli.render import (
    REFUSED,
    USAGE,
    CommandError,
    ask,
    fail,
    show_facts,
    show_lines,
    show_list,
    show_table,
    talking,
)
from fencepost.outbox.local import answers, socket_of

MESH_VARIABLE = "FENCEPOST_MESH"

mesh_app = typer.Typer(
    help="Meshes: make them, their members, topics and queues; list and delete them.",
    no_args_is_help=True,
)
messages_app = typer.Typer(
    help="What a mesh remembers of sends: check it, rebuild it, sweep it.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(help="The mesh.")]
Member = Annotated[str, typer.Argument(help="The member.")]
MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", envvar=MESH_VARIABLE, help=f"The mesh. Else {MESH_VARIABLE}."),
]


def _mesh(name: str | None) -> str:
    if not name:
        raise CommandError(f"which mesh? Say --mesh NAME, or set {MESH_VARIABLE}", USAGE)
    return name


@mesh_app.command("create")
def create(
    mesh: Name,
    mode: Annotated[
        str | None, typer.Option(help="retention_scoped (default) or permanent.")
    ] = None,
    days: Annotated[int | None, typer.Option(help="Days that an id is remembered (365).")] = None,
    policy: Annotated[
        str | None, typer.Option(help="prefer_newest (default), prefer_oldest, allow_concurrent.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a mesh; fine if it exists with these settings."""
    with talking(url, token, as_json=as_json) as client:
        made = client.mesh(mesh).make(
            dedupe_mode=mode, dedupe_retention_days=days, default_policy=policy
        )
        _show(made, as_json, f"mesh {made.mesh} is there")


@mesh_app.command("member")
def member(
    mesh: Name, name: Member, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Make a member with an inbox."""
    with talking(url, token, as_json=as_json) as client:
        made = client.mesh(mesh).make_member(name)
        _show(made, as_json, f"member {name} has the inbox {made.stream}")


@mesh_app.command("topic")
def topic(
    mesh: Name,
    name: Annotated[str, typer.Argument(help="The topic.")],
    members: Annotated[
        list[str] | None,
        typer.Option("--member", help="A member that listens; may be given several times."),
    ] = None,
    leaving: Annotated[
        list[str] | None, typer.Option("--leave", help="A member that stops listening.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a topic, and say which members listen to it."""
    with talking(url, token, as_json=as_json) as client:
        made = client.mesh(mesh).make_topic(name, members or ())
        for one in leaving or ():
            client.mesh(mesh).leave(name, one)
        listening = [row.member for row in client.mesh(mesh).topic_members(name)]
        _show(made, as_json, f"topic {name} goes to {', '.join(listening) or 'no member yet'}")


@mesh_app.command("queue")
def queue(
    mesh: Name,
    name: Annotated[str, typer.Argument(help="The queue.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a queue."""
    with talking(url, token, as_json=as_json) as client:
        made = client.mesh(mesh).make_queue(name)
        _show(made, as_json, f"queue {name} is worked on through the group {made.group}")


@mesh_app.command("list")
def list_(
    mesh: Annotated[str | None, typer.Argument(help="The mesh; else all meshes.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List the meshes, or the members, topics and queues of one."""
    with talking(url, token, as_json=as_json) as client:
        if mesh is None:
            show_list(
                client.meshes(),
                ("mesh", "dedupe", "days", "policy"),
                lambda one: (
                    *(one.mesh, one.dedupe_mode),
                    *(one.dedupe_retention_days, one.default_policy),
                ),
                empty="there are no meshes",
                as_json=as_json,
            )
            return
        names = client.mesh(mesh)
        names.info()
        show_list(
            [*names.members(), *names.topics(), *names.queues()],
            ("kind", "name", "stream", "group"),
            lambda one: (_kind(one), one.name, one.stream, one.group),
            empty="the mesh has no members, topics or queues",
            as_json=as_json,
        )


@mesh_app.command("delete")
def delete(
    mesh: Name,
    member: Annotated[str | None, typer.Option(help="Only this member.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic.")] = None,
    queue: Annotated[str | None, typer.Option(help="Only this queue.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Delete a mesh, or one member, topic or queue of it, with its messages."""
    with talking(url, token, as_json=as_json) as client:
        named = (("member", member), ("topic", topic), ("queue", queue))
        only = [(noun, name) for noun, name in named if name]
        if not only and not yes:
            ask(f"Delete the mesh {mesh} with everything in it?")
        names = client.mesh(mesh)
        for noun, name in only:
            getattr(names, f"delete_{noun}")(name)
        if not only:
            names.delete()
        what = ", ".join(f"{noun} {name}" for noun, name in only) or f"mesh {mesh}"
        _show({"deleted": what}, as_json, f"{what} is gone")


def send(
    to: Annotated[str, typer.Argument(help="topic:NAME, dm:MEMBER or queue:NAME.")],
    body: Annotated[str, typer.Argument(help="The message.")],
    id: Annotated[
        str | None, typer.Option("--id", help="The id: the same one is stored once.")
    ] = None,
    mesh: MeshOption = None,
    sender: Annotated[
        str | None, typer.Option(help="Who sends, where the server has no principals.")
    ] = None,
    priority: Annotated[str | None, typer.Option(help="now, next (default) or low.")] = None,
    reply_to: Annotated[str | None, typer.Option(help="A broker_message_id.")] = None,
    meta: Annotated[str | None, typer.Option(help="A JSON object.")] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Send a message to a topic, a member or a queue of a mesh; the same id is stored once.

    It goes through the outbox of this machine if one answers, unless --url, --token or --sender
    name the server and who sends; else to the server. The answer says which of the two.

    Examples:

      fencepost send topic:alerts 'disk is full' --id alert-17
      fencepost send queue:jobs 'resize 7.png' --mesh shop --priority now
    """
    if ":" not in to:
        fail(f"say where it goes as topic:NAME, dm:MEMBER or queue:NAME, not {to!r}", USAGE)
    given = _checked_meta(meta)
    more: dict[str, Any] = {"priority": priority, "reply_to": reply_to, "meta": given}
    is_for_outbox = url is None and token is None and sender is None
    if is_for_outbox and _send_to_outbox(to, body, id, mesh, more, as_json=as_json):
        return
    with talking(url, token, as_json=as_json) as client:
        names = client.mesh(_mesh(mesh))
        if sender is None and resolve(url, token, os.environ).token is None:
            # The server has no principals, as far as this command can tell.
            sender = getpass.getuser()
        stored = names.send(to, body, id=id, sender=sender, **more)
        said = "was stored before" if stored.duplicate else "is stored"
        _show(stored, as_json, f"{stored.client_message_id} {said} as {stored.broker_message_id}")


def _send_to_outbox(
    to: str, body: str, id: str | None, mesh: str | None, more: dict[str, Any], *, as_json: bool
) -> bool:
    """Hand a message to the daemon; false when none answers, or it does not serve the mesh."""
    if not answers(socket_of(None)):
        return False
    # Loaded here alone: a send to a server does not wait for it.
    from fencepost.cli.outbox import asking

    with asking(None, as_json=as_json) as outbox:
        try:
            taken = outbox.send(to, body, id=id, mesh=mesh, **more)
        except fencepost.ResponseError as error:
            if error.code == "mesh_not_served":
                return False
            raise
        if taken.broker_message_id is not None:
            said = f"was delivered before as {taken.broker_message_id}"
        elif taken.duplicate:
            said = "is with the outbox of this machine already, and is delivered when possible"
        else:
            said = "is with the outbox of this machine, and is delivered when possible"
        _show(taken, as_json, f"{taken.client_message_id} {said}")
    return True


def _checked_meta(text: str | None) -> dict[str, Any] | None:
    try:
        return _meta(text)
    except CommandError as error:
        fail(str(error), error.code)


def _meta(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CommandError(f"--meta is not JSON: {error}", USAGE) from None
    if not isinstance(found, dict):
        raise CommandError("--meta is a JSON object", USAGE)
    return found


def inbox(
    member: Member,
    mesh: MeshOption = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Show what is in the inbox of a member. Nothing is taken out of it.

    Examples:

      fencepost inbox ann
      fencepost inbox ann --mesh shop --json | jq .body
    """
    with talking(url, token, as_json=as_json) as client:
        name = _mesh(mesh)
        try:
            found = client.stream(f"__mesh/{name}/inbox/{member}").read().messages()
        except fencepost.StreamNotFoundError:
            detail = f"the mesh {name!r} has no member {member!r}, or there is no such mesh"
            advice = f"`fencepost mesh list {name}` shows its members"
            raise CommandError(f"{detail}. {advice}", REFUSED) from None
        show_list(
            found,
            ("from", "to", "id", "message"),
            lambda one: (
                *(one["sender"], f"{one['kind']}:{one['ref']}"),
                *(one["client_message_id"], _body(one)),
            ),
            empty="the inbox is empty",
            as_json=as_json,
        )


def _body(entry: dict[str, Any]) -> object:
    if "body_at" in entry:
        place = entry["body_at"]
        return f"{place['bytes']} bytes in {place['stream']} at {place['offset']}"
    if "json" in entry:
        return json.dumps(entry["json"], ensure_ascii=False)
    return entry.get("body", entry.get("body_base64"))


@messages_app.command("check")
def check(
    mesh: MeshOption = None, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Hold dedupe rows and messages against each other; exit with 1 if something is wrong."""
    with talking(url, token, as_json=as_json) as client:
        names = [mesh] if mesh else [one.mesh for one in client.meshes()]
        if not names and not as_json:
            typer.echo("there are no meshes")
        wrong = 0
        for name in names:
            report = client.mesh(name).check()
            wrong += len(report.findings)
            if as_json:
                show_lines([{"mesh": name, "report": report}])
                continue
            show_facts({"mesh": name, "rows": report.rows, "messages": report.messages})
            rows = ((one.code, one.detail) for one in report.findings)
            show_table(("finding", "what"), rows, empty="every send has its message and its row")
        if wrong:
            raise typer.Exit(1)


@messages_app.command("rebuild")
def rebuild(
    mesh: MeshOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Write the rows; else only count.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Write missing dedupe rows from messages. Without --yes nothing is written."""
    with talking(url, token, as_json=as_json) as client:
        rebuilt = client.mesh(_mesh(mesh)).rebuild(dry_run=not yes)
        done = f"{rebuilt.written} were written" if yes else "nothing was written: say --yes"
        _show(rebuilt, as_json, f"{rebuilt.missing} rows are missing; {done}")


@messages_app.command("sweep")
def sweep(
    mesh: MeshOption = None, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Forget the sends whose time is over, now and not with the upkeep."""
    with talking(url, token, as_json=as_json) as client:
        swept = client.mesh(_mesh(mesh)).sweep()
        _show({"swept": swept}, as_json, f"{swept} sends were forgotten")


def _kind(name: fencepost.MeshName) -> str:
    return "member" if name.member else "topic" if name.topic else "queue"


def _show(found: object, as_json: bool, sentence: str) -> None:
    if as_json:
        show_lines([found])
    else:
        typer.echo(sentence)
