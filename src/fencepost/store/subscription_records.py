"""Rows to subscriptions and back, the same for every store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from fencepost.protocol.batches import Batch, Malformed, bytes_batch, json_batch
from fencepost.protocol.logs import next_text
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import JSON, Stream
from fencepost.protocol.subscriptions import Config, Link, Seen, Subscription, Wake
from fencepost.store.contract import LiveStream
from fencepost.store.database import Connection, Row


def subscriptions_from_rows(rows: Iterable[Row], links: Iterable[Row]) -> list[Subscription]:
    """Subscriptions with their links: an explicit one stays without its stream, others go."""
    found = {row[0]: _subscription(row) for row in rows}
    for subscription_id, *columns in links:
        subscription = found[subscription_id]
        link = _link(*columns)
        # Removing the row is left to whoever writes next: a load must not cause a commit.
        if link.stream_id is not None or link.explicit:
            subscription.links[link.path] = link
            subscription.note(link)
    return list(found.values())


def subscription_columns(subscription: Subscription) -> Row:
    """A new subscription's row."""
    return (
        subscription.id,
        subscription.name,
        subscription.config.canonical().decode(),
        subscription.base_url,
        subscription.created_ms,
        *wake_columns(subscription.wake),
        subscription.owner,
    )


def wake_columns(wake: Wake) -> Row:
    """Where the delivery stands."""
    *columns, snapshot = wake
    seen = [(path, stream_id, *tail) for path, stream_id, tail in snapshot]
    return (*columns, json.dumps(seen, separators=(",", ":")))


def link_columns(subscription: Subscription, link: Link) -> Row:
    """A link's row."""
    return (subscription.id, link.path, link.explicit, link.glob, link.stream_id, *link.acked)


def live_streams(
    connection: Connection, prefix: tuple[str, ...], matches: Callable[[str], bool]
) -> list[LiveStream]:
    """The committed streams below `prefix`, itself included, whose path `matches` takes."""
    folder = "/".join(prefix)
    bounds: list[tuple[str, str | None]] = [("", None)]
    if folder:
        # The path itself, and what is below it: "0" is the character after "/".
        bounds = [(folder, next_text(folder)), (folder + "/", folder + "0")]
    return [
        LiveStream(path, stream_id, Offset(messages, size))
        for bound in bounds
        for path, stream_id, messages, size in connection.fetch("live_streams", bound)
        if matches(path)
    ]


def event_batch(stream: Stream, event: bytes) -> Batch:
    """A wake event as a stream can carry it: one that is not JSON gets one event a line."""
    batch = json_batch(event) if stream.media_type == JSON else bytes_batch(event + b"\n")
    assert batch is not None
    assert not isinstance(batch, Malformed)
    return batch


def _subscription(row: Row) -> Subscription:
    subscription_id, name, config, base_url, created_ms = row[:5]
    generation, wake_id, holder, lease_until_ms, attempts, next_attempt_ms, snapshot = row[5:12]
    fields = json.loads(config)
    return Subscription(
        subscription_id,
        name,
        Config(**{**fields, "streams": tuple(fields["streams"])}),
        base_url=base_url,
        created_ms=created_ms,
        wake=Wake(
            generation,
            wake_id,
            holder,
            lease_until_ms,
            attempts,
            next_attempt_ms,
            _snapshot(snapshot),
        ),
        owner=row[12],
    )


def _snapshot(text: str) -> tuple[Seen, ...]:
    return tuple(
        Seen(path, stream_id, Offset(messages, size))
        for path, stream_id, messages, size in json.loads(text)
    )


def _link(
    path: str,
    explicit: int,
    glob: int,
    acked_messages: int,
    acked_bytes: int,
    stream_id: int | None,
    tail_messages: int | None,
    tail_bytes: int | None,
) -> Link:
    link = Link(path, explicit=bool(explicit), glob=bool(glob), stream_id=stream_id)
    if tail_messages is not None and tail_bytes is not None:
        link.acked = Offset(acked_messages, acked_bytes)
        link.tail = Offset(tail_messages, tail_bytes)
    return link
