"""Reads of the log that look at messages one by one: events by name or correlation, newest first.

Such a read is made of plain reads of pieces of the log. Forwards a piece is what one plain read
gives. Backwards a piece is a window of positions that ends where the last one began; a window that
holds more than fits is made smaller and read again. The wanted messages are collected as rows of
one message each, until the answer is full or `log_scan_max` positions were looked at.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import NamedTuple

from fencepost.protocol.log_filters import EventFilter
from fencepost.protocol.logs import COLUMNS, MESSAGE, ROW_BYTES
from fencepost.protocol.streams import JSON, media_type
from fencepost.store.log_contract import (
    BeyondHead,
    Integers,
    LogChunk,
    LogQuery,
    LogRows,
    Named,
    Pruned,
)

PIECE_MESSAGES = 8_192
"""Messages that are looked at together."""
FIRST_WINDOW = 1_024
"""Positions in the first window where not all messages are wanted; later windows are wider."""
ENOUGH_POSITIONS = 65_536
"""Positions after which a read that has found something comes back with it; the widest window."""

PlainRead = Callable[
    [LogQuery, Callable[[LogRows], "list[Message]"]],
    Awaitable["tuple[LogChunk, list[Message] | None] | Pruned | BeyondHead"],
]


class Message(NamedTuple):
    """One message or marker of the log, with all that its row says of it."""

    position: int
    stream: int
    named: Named
    kind: int
    version: int | None
    start: int
    time_ms: int
    producer: str | None
    epoch: int | None
    seq: int | None
    data: bytes

    @property
    def cost(self) -> int:
        return len(self.data) + ROW_BYTES


def messages_of(rows: LogRows) -> Iterator[Message]:
    """Every asked message of some rows."""
    end = rows.skip + rows.take
    for index, message in enumerate(_all_messages(rows)):
        if index >= end:
            return
        if index >= rows.skip:
            yield message


def _all_messages(rows: LogRows) -> Iterator[Message]:
    count = len(rows.positions)
    nothing: list[None] = [None] * count
    columns = zip(
        rows.positions,
        rows.streams.values(),
        rows.kinds or [MESSAGE] * count,
        rows.versions.values_or_nulls(),
        rows.starts.values(),
        rows.times_ms.values(),
        rows.producers or nothing,
        rows.epochs.values_or_nulls() if rows.epochs else nothing,
        rows.seqs.values_or_nulls() if rows.seqs else nothing,
        rows.payloads(),
        strict=True,
    )
    for position, stream, kind, version, start, time_ms, producer, epoch, seq, messages in columns:
        sent = producer, epoch, seq
        for data in messages:
            yield Message(
                position, stream, rows.names[stream], kind, version, start, time_ms, *sent, data
            )
            position += 1
            version = None if version is None else version + 1
            start += len(data)


def rows_of(messages: list[Message]) -> LogRows:
    """Rows of one message each, in the order in which the messages are given."""
    kinds = [message.kind for message in messages]
    producers = [message.producer for message in messages]
    is_sent = any(producer is not None for producer in producers)
    return LogRows(
        positions=[message.position for message in messages],
        sizes=[len(message.data) for message in messages],
        counts=None,
        kinds=kinds if any(kinds) else None,
        streams=_column(message.stream for message in messages),
        starts=_column(message.start for message in messages),
        versions=_column(message.version for message in messages),
        times_ms=_column(message.time_ms for message in messages),
        producers=producers if is_sent else None,
        epochs=_column(message.epoch for message in messages) if is_sent else None,
        seqs=_column(message.seq for message in messages) if is_sent else None,
        joined=b"".join(message.data for message in messages),
        batches=None,
        names={message.stream: message.named for message in messages},
        skip=0,
        take=len(messages),
    )


def _column(numbers: Iterable[int | None]) -> Integers:
    return Integers(json.dumps(list(numbers), separators=(",", ":")))


def wanted(rows: LogRows, events: EventFilter | None) -> list[Message]:
    """The asked messages of some rows that a filter takes."""
    if events is None:
        return list(messages_of(rows))
    json_streams = {
        stream for stream, named in rows.names.items() if media_type(named.content_type) == JSON
    }
    return [
        message
        for message in messages_of(rows)
        if message.kind == MESSAGE and message.stream in json_streams and events.takes(message.data)
    ]


class EventRead:
    """One such read, as far as it has come."""

    def __init__(self, plain: PlainRead, query: LogQuery, positions_max: int) -> None:
        self._plain = plain
        self._query = query
        self._positions_left = positions_max
        self._seen = 0
        self._looked_at = 0
        self._found: list[Message] = []
        self._cost = 0
        self._pruned: int | None = None

    async def run(self, head: int) -> LogChunk | Pruned | BeyondHead:
        """Read the answer. `head` is the newest position that may be read."""
        query = self._query
        after = head if query.after is None else query.after
        until = head if query.until is None else min(query.until, head)
        if after >= until:
            found = await self._piece(after, until)
            if not isinstance(found, LogChunk):
                return found
            # The log may have grown since the head was read: what is answered ends at that head,
            # or the reader would be told to go on from where it is, and that more is there.
            found = found._replace(head=head)
            return found._replace(next=after) if query.descending else found
        ended = await (
            self._backwards(after, until) if query.descending else self._forwards(after, until)
        )
        if not isinstance(ended, int):
            return ended
        at = self._cut(ended)
        rows = rows_of(self._found) if self._found else None
        return LogChunk(rows, after, at, until, head, self._pruned)

    async def _piece(self, after: int, until: int) -> LogChunk | Pruned | BeyondHead:
        """Collect what a plain read gives; nothing of a window that it does not give whole."""
        query = self._query
        asked = query._replace(
            after=after,
            until=until,
            messages_max=PIECE_MESSAGES,
            events=None,
            descending=False,
            columns=COLUMNS,
        )
        self._looked_at = 0
        found = await self._plain(asked, self._wanted)
        if isinstance(found, Pruned | BeyondHead):
            return found
        chunk, messages = found
        if query.descending and chunk.next < until:
            return chunk  # more than fits: a smaller window is read instead
        for message in reversed(messages or ()) if query.descending else messages or ():
            self._found.append(message)
            self._cost += message.cost
        if chunk.pruned is not None:
            self._pruned = max(chunk.pruned, -1 if self._pruned is None else self._pruned)
        self._seen += chunk.next - after
        self._positions_left -= chunk.next - after
        return chunk

    def _wanted(self, rows: LogRows) -> list[Message]:
        self._looked_at = rows.take
        return wanted(rows, self._query.events)

    @property
    def _is_enough(self) -> bool:
        query = self._query
        return (
            len(self._found) >= query.messages_max
            or self._cost >= query.bytes_max
            or self._positions_left <= 0
            or (bool(self._found) and self._seen >= ENOUGH_POSITIONS)
        )

    async def _forwards(self, after: int, until: int) -> int | Pruned | BeyondHead:
        """Look from `after` upwards; the last position that was looked at."""
        at = after
        while at < until and not self._is_enough:
            chunk = await self._piece(at, min(until, at + self._positions_left))
            if not isinstance(chunk, LogChunk):
                return chunk
            at = chunk.next
            if not self._looked_at:
                break  # the plain read has compared as many paths as one answer may
        return at

    async def _backwards(self, after: int, until: int) -> int | Pruned | BeyondHead:
        """Look from `until` downwards; the first position that was not looked at."""
        high = until
        is_sparse = self._query.events is not None or self._query.selection.by_path
        width = FIRST_WINDOW if is_sparse else min(self._query.messages_max, PIECE_MESSAGES)
        may_grow = True
        while high > after and not self._is_enough:
            low = max(after, high - min(width, self._positions_left))
            chunk = await self._piece(low, high)
            if not isinstance(chunk, LogChunk):
                return chunk
            if chunk.next < high:
                width = max(1, min((high - low) // 2, chunk.next - low))
                may_grow = False
                continue
            high = low
            if may_grow or not self._looked_at:
                width = min(2 * width, ENOUGH_POSITIONS)
        return high

    def _cut(self, ended: int) -> int:
        """Leave out what does not fit; where the reader goes on."""
        cost = 0
        for index, message in enumerate(self._found):
            cost += message.cost
            if index and (index >= self._query.messages_max or cost > self._query.bytes_max):
                del self._found[index:]
                return message.position - (not self._query.descending)
        return ended


async def read_events(
    plain: PlainRead, query: LogQuery, head: int, positions_max: int
) -> LogChunk | Pruned | BeyondHead:
    """Read events of the log by what they say, or the log from its end."""
    return await EventRead(plain, query, positions_max).run(head)
