"""Rows of the tables to and from the types of `protocol`: streams, producers, keys, subscriptions.

Both stores use these columns, so that what is on disk is described once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable

import msgspec

from fencepost.protocol.appends import KeyRecord
from fencepost.protocol.batches import Batch, Malformed, bytes_batch, json_batch
from fencepost.protocol.logs import next_text
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import KEEP_ALL, Retention
from fencepost.protocol.streams import (
    JSON,
    PACKED_BYTES,
    RECENT_BATCHES,
    Fork,
    Lifetime,
    Producer,
    Segment,
    Stream,
    pack,
)
from fencepost.protocol.subscriptions import Config, Link, Seen, Subscription, Wake
from fencepost.store.contract import LiveStream
from fencepost.store.sql import Connection, Row

_PACKED = 0x78
"""What the answer to a large commit begins with: it is compressed. JSON begins with a brace."""

_TAIL_BYTES = 10
"""Where the bytes of the tail are in the row of a stream, behind its messages."""

LIVE, SOFT_DELETED, DELETED = 0, 1, 2
MESSAGES, CLOSED, REMOVED, EXPIRED, TRUNCATED = 0, 1, 2, 3, 4


def stream_from_row(row: Row) -> tuple[Stream, int | None]:
    """A stream, and the deadline that is stored for it."""
    (
        stream_id,
        path,
        state,
        content_type,
        created_ms,
        updated_ms,
        ttl_s,
        expires_at_ms,
        deadline_ms,
        tail_messages,
        tail_bytes,
        first_messages,
        first_bytes,
        closed,
        closed_by,
        seq,
        fork,
        segments,
        forks_count,
        retention,
        books_closed_at,
    ) = row
    stream = Stream(
        stream_id,
        path,
        content_type,
        created_ms=created_ms,
        lifetime=Lifetime(ttl_s, expires_at_ms),
        tail=Offset(tail_messages, tail_bytes),
        first=Offset(first_messages, first_bytes),
        retention=KEEP_ALL if retention is None else Retention(*json.loads(retention)),
    )
    if fork is not None:
        source_id, source_path, asked, messages, size = json.loads(fork)
        stream.fork = Fork(source_id, source_path, asked, Offset(messages, size))
        stream.segments = tuple(
            Segment(segment_id, Offset(*end)) for segment_id, end in json.loads(segments)
        )
    stream.forks_count = forks_count
    stream.closed = bool(closed)
    stream.closed_by = tuple(json.loads(closed_by)) if closed_by else None
    stream.seq = seq
    stream.soft_deleted = state == SOFT_DELETED
    stream.books_closed_at = books_closed_at
    # What is stored is never earlier than the truth, so this errs on the side of living longer.
    stream.touched_ms = updated_ms if ttl_s is None else deadline_ms - ttl_s * 1000
    return stream, deadline_ms


def with_tail(row: Row, moved: Row | None) -> Row:
    """The row of a stream with a tail that only the log has, in the order of `move_tail`."""
    if moved is None or moved[2] <= row[_TAIL_BYTES]:
        return row
    return (*row[: _TAIL_BYTES - 1], *moved[1:3], *row[_TAIL_BYTES + 1 :])


def with_batch(row: Row, newest: Producer | None) -> Row:
    """The row of a producer with a newest batch that only the log has."""
    epoch, seq, first, *_, principal, claim = row
    if newest is None or newest.epoch != epoch or newest.seq <= seq:
        return row
    return (epoch, newest.seq, first, newest.position, newest.updated_ms, principal, claim)


def hot_columns(
    stream: Stream, state: int, updated_ms: int, deadline_ms: int | None, ended_ms: int | None
) -> Row:
    """The columns that change, in the order of `update_stream` and `insert_stream`."""
    return (
        state,
        updated_ms,
        deadline_ms,
        *stream.tail,
        *stream.first,
        stream.closed,
        json.dumps(stream.closed_by) if stream.closed_by else None,
        stream.seq,
        stream.forks_count,
        ended_ms,
    )


def cold_columns(stream: Stream) -> Row:
    """The columns that never change, in the order of `insert_stream`, the id first."""
    fork = segments = None
    if stream.fork is not None:
        source_id, source_path, asked, at = stream.fork
        fork = json.dumps([source_id, source_path, asked, *at])
        segments = json.dumps(stream.segments)
    return (
        stream.id,
        stream.path,
        stream.content_type,
        stream.created_ms,
        stream.lifetime.ttl_s,
        stream.lifetime.expires_at_ms,
        fork,
        segments,
        None if stream.retention == KEEP_ALL else json.dumps(stream.retention),
        stream.owner,
    )


def producer_from_rows(producer_id: str, row: Row, batches: list[Row]) -> Producer:
    """A producer from its own row and those of its recent batches, the newest last."""
    epoch, seq, first, position, updated_ms, principal, claim = row
    recent = b"".join(pack(Offset(messages, size), digest) for messages, size, digest in batches)
    return Producer(producer_id, epoch, seq, first, recent, position, updated_ms, principal, claim)


def with_remembered(
    producer: Producer, found_count: int, epoch: int, seq: int, batches: bytes
) -> Producer:
    """A producer of whose batches only the newest `found_count` have rows, with those before."""
    newest_kept = producer.seq - found_count
    if epoch != producer.epoch or seq < newest_kept:
        return producer
    # Batches whose rows are there again need none of what was kept of them.
    usable = batches[: len(batches) - (seq - newest_kept) * PACKED_BYTES]
    recent = (usable + producer.recent)[-RECENT_BATCHES * PACKED_BYTES :]
    return msgspec.structs.replace(producer, recent=recent)


def producer_columns(stream_id: int, producer: Producer) -> Row:
    """A producer in the order of `save_producer`."""
    return (
        stream_id,
        producer.id,
        producer.epoch,
        producer.seq,
        producer.first,
        producer.position,
        producer.updated_ms,
        producer.principal,
        producer.claim,
    )


def key_from_row(row: Row) -> tuple[KeyRecord, bytes]:
    """What a key stands for, and the answer that is kept with it."""
    digest, start_messages, start_bytes, tail_messages, tail_bytes, closed, position, at, answer = (
        row
    )
    start, tail = Offset(start_messages, start_bytes), Offset(tail_messages, tail_bytes)
    if answer and answer[0] == _PACKED:
        answer = zlib.decompress(answer)
    return KeyRecord(digest, start, tail, bool(closed), position, at), answer or b""


def key_from_columns(columns: Row) -> tuple[KeyRecord, bytes]:
    """The same of a key that is not on disk yet, from what `save_key` will be given."""
    *_, created_ms, _expires_ms, answer = columns
    return key_from_row((*columns[3:10], created_ms, answer))


def key_columns(
    stream_id: int,
    principal: str,
    key: str,
    record: KeyRecord,
    answer: bytes,
    expires_ms: int | None,
) -> Row:
    """A key in the order of `save_key`."""
    return (
        stream_id,
        principal,
        key,
        record.digest,
        *record.start,
        *record.tail,
        record.closed,
        record.position,
        record.created_ms,
        expires_ms,
        answer or None,
    )


def subscriptions_from_rows(rows: Iterable[Row], links: Iterable[Row]) -> list[Subscription]:
    """Subscriptions with their links: an explicit one stays without its stream, others go."""
    found = {row[0]: _subscription(row) for row in rows}
    for subscription_id, *columns in links:
        subscription = found[subscription_id]
        link = _link(*columns)
        # The next write removes the row: a load must not cause a commit.
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
