"""`fencepost subscriptions`: make subscriptions, look at them, and take their work by hand.

`claim` prints the wake with its token; `ack` and `release` take them back, so that a shell script
can be a worker.
"""

from __future__ import annotations

from typing import Annotated

import typer

import fencepost
from fencepost.cli.options import AsJson, Token, Url
from fencepost.cli.render import (
    USAGE,
    CommandError,
    ask,
    show_facts,
    show_lines,
    show_list,
    show_table,
    talking,
)
from fencepost.client.subscriptions import Ticket
from fencepost.client.sync.subscriptions import Wake

app = typer.Typer(
    help="Subscriptions: who is woken when streams have news.",
)

Id = Annotated[str, typer.Argument(metavar="ID", help="The subscription's id.")]
WakeId = Annotated[str, typer.Option("--wake-id", help="As `claim` printed it.")]
Generation = Annotated[int, typer.Option("--generation", help="As `claim` printed it.")]
WakeToken = Annotated[str, typer.Option("--wake-token", help="As `claim` printed it.")]


@app.callback(invoke_without_command=True)
def _subscriptions(
    context: typer.Context, url: Url = None, token: Token = None, as_json: AsJson = False
) -> None:
    """Without a command: list the subscriptions."""
    if context.invoked_subcommand is not None:
        return
    with talking(url, token, as_json=as_json) as client:
        show_list(
            client.subscriptions(),
            ("id", "status", "pattern", "wakes", "streams", "pending"),
            lambda one: (
                *(one.id, one.status, one.pattern),
                *(_wakes(one), one.streams_total, one.pending_streams),
            ),
            empty="there are no subscriptions",
            as_json=as_json,
        )


def _wakes(one: fencepost.SubscriptionInfo) -> str | None:
    return one.wake_stream if one.webhook is None else one.webhook.url


@app.command("show")
def show(name: Id, url: Url = None, token: Token = None, as_json: AsJson = False) -> None:
    """Show a subscription: whom it wakes, where its delivery stands, and how far each stream is."""
    with talking(url, token, as_json=as_json) as client:
        _shown(client.subscription(name).info(), as_json=as_json)


def _shown(found: fencepost.SubscriptionInfo, *, as_json: bool) -> None:
    if as_json:
        show_lines([found])
        return
    show_facts(
        {
            "subscription": found.id,
            "type": found.type,
            "pattern": found.pattern,
            "wakes": _wakes(found),
            "status": found.status,
            "description": found.description,
            "lease_ttl_ms": found.lease_ttl_ms,
            "generation": found.generation,
            "holder": found.holder,
            "lease_expires_at": found.lease_expires_at,
            "attempts": found.attempts,
            "next_attempt_at": found.next_attempt_at,
            "pending_streams": found.pending_streams,
        }
    )
    rows = ((one.path, one.link_type, one.acked_offset) for one in found.streams)
    show_table(("stream", "linked by", "acknowledged"), rows, empty="no streams yet")


@app.command("create")
def create(
    name: Id,
    pattern: Annotated[str | None, typer.Option(help="Watch streams that match.")] = None,
    stream: Annotated[list[str] | None, typer.Option(help="Watch this stream too.")] = None,
    webhook: Annotated[str | None, typer.Option(help="The URL to call.")] = None,
    wake_stream: Annotated[
        str | None, typer.Option(help="The stream to announce wakes in instead.")
    ] = None,
    lease_ms: Annotated[int | None, typer.Option(help="How long a worker may be silent.")] = None,
    description: Annotated[
        str | None, typer.Option(help="A description, for people who list subscriptions.")
    ] = None,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Make a subscription; fine if it exists with this configuration.

    Examples:

      fencepost subscriptions create orders --pattern 'orders/*' --webhook https://x.example/hook
      fencepost subscriptions create jobs --pattern 'jobs/**' --wake-stream wake/pool
    """
    with talking(url, token, as_json=as_json) as client:
        made = client.subscription(name).create(
            pattern=pattern,
            streams=stream or (),
            webhook=webhook,
            wake_stream=wake_stream,
            lease_ttl_ms=lease_ms,
            description=description,
        )
        _shown(made, as_json=as_json)


@app.command("delete")
def delete(
    name: Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Delete a subscription. How far its workers came is forgotten."""
    with talking(url, token, as_json=as_json) as client:
        if not yes:
            known = client.subscription(name).info()
            ask(f"Delete {name} with its {known.streams_total} streams?")
        client.subscription(name).delete()
        _done({"subscription": name, "deleted": True}, as_json=as_json)


@app.command("add")
def add(
    name: Id,
    streams: Annotated[list[str], typer.Argument(help="Streams to watch.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Watch more streams, from their tails on."""
    with talking(url, token, as_json=as_json) as client:
        client.subscription(name).add_streams(*streams)
        _done({"subscription": name, "added": len(streams)}, as_json=as_json)


@app.command("remove")
def remove(
    name: Id,
    stream: Annotated[str, typer.Argument(help="The stream.")],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Watch a stream no longer by its name; the pattern may still take it in."""
    with talking(url, token, as_json=as_json) as client:
        client.subscription(name).remove_stream(stream)
        _done({"subscription": name, "removed": stream}, as_json=as_json)


@app.command("claim")
def claim(
    name: Id,
    worker: Annotated[
        str, typer.Option("--worker", help="The name of the worker that takes the work.")
    ],
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Take the work of a pull-wake subscription, and print the wake with its token."""
    with talking(url, token, as_json=as_json) as client:
        wake = client.subscription(name).claim(worker)
        facts: dict[str, object] = {
            "wake_id": wake.wake_id,
            "generation": wake.generation,
            "wake_token": wake.token,
            "lease_ttl_ms": wake.lease_ttl_ms,
        }
        if as_json:
            show_lines([{**facts, "streams": wake.streams}])
            return
        show_facts(facts)
        rows = ((one.path, one.acked_offset, one.tail_offset) for one in wake.streams)
        show_table(("stream", "read after", "tail"), rows, empty="no streams")


@app.command("ack")
def ack(
    name: Id,
    wake_id: WakeId,
    generation: Generation,
    wake_token: WakeToken,
    offset: Annotated[
        list[str] | None, typer.Option("--offset", help="STREAM=OFFSET: done up to here.")
    ] = None,
    done: Annotated[
        bool, typer.Option("--done", help="End the wake: all its work is done.")
    ] = False,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Say how far the work is; without --done the lease begins anew.

    Examples:

      fencepost subscriptions ack jobs --wake-id w_1 --generation 1 --wake-token eyJ \\
        --offset jobs/a=0000000000000001_0000000000000012 --done
    """
    offsets: dict[str, str] = {}
    with talking(url, token, as_json=as_json) as client:
        for given in offset or ():
            path, equals, place = given.rpartition("=")
            if not equals or not path or not place:
                raise CommandError(f"--offset is STREAM=OFFSET, not {given!r}", USAGE)
            offsets[path] = place
        acked = _wake(client, name, wake_id, generation, wake_token).ack(offsets, done=done)
        _done({"acked": len(offsets), "next_wake": acked.next_wake}, as_json=as_json)


@app.command("release")
def release(
    name: Id,
    wake_id: WakeId,
    generation: Generation,
    wake_token: WakeToken,
    url: Url = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Give the work back: it is announced again."""
    with talking(url, token, as_json=as_json) as client:
        _wake(client, name, wake_id, generation, wake_token).release()
        _done({"subscription": name, "released": True}, as_json=as_json)


def _wake(client: fencepost.Client, name: str, wake_id: str, generation: int, token: str) -> Wake:
    ticket = Ticket(name=name, wake_id=wake_id, generation=generation, token=token, endpoint="ack")
    return Wake(client._driver, ticket, [])


def _done(facts: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        show_lines([facts])
    else:
        show_facts(facts)
