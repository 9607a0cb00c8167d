"""Reading the events of leases: each stretch of a source once, for all leases that are about it.

Sources that are single streams are looked up together. One query finds where the events of each
begin, and how large they are; a second one fetches as many as the answer takes. The first event
behind a position is found through the row that holds the position before it, which is usually the
event that was acked last; else by halving. A source that is a pattern is read block by block.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from fencepost.protocol.batches import split
from fencepost.protocol.globs import Glob
from fencepost.protocol.logs import Selection
from fencepost.protocol.streams import JSON
from fencepost.store.group_contract import Event, EventSpan, SpanEvents
from fencepost.store.maintain import purge as purges
from fencepost.store.read.log_selection import first_place, row_start, run, streams_between
from fencepost.store.sql import Connection, Row

BLOCK_POSITIONS = 4_096
"""Positions that are looked through together for a source that is a pattern."""
BATCH_ROWS = 20_000
"""Rows of the log whose places are looked up together."""
GAP_POSITIONS = 256
"""A lease that begins at most so far behind what was read of its source is read on from there."""
EXAMINED_MAX = 10_000
"""Events that are examined for one lease, when few of them have a name that the group takes."""
PAGE_ROWS_MIN = 16
"""Rows that are read at once of a stream whose first rows were not enough."""
EVENT_BYTES = 100
"""What an event takes in an answer beside its data."""

_position = attrgetter("position")


def events_of(
    connection: Connection,
    spans: Sequence[EventSpan],
    names: frozenset[str],
    events_max: int,
    bytes_max: int,
) -> list[SpanEvents]:
    """The first events of each span, in the order of the spans, as many as fit into an answer."""
    with connection:
        return _Reading(connection, names, events_max, bytes_max).read(spans)


class _Stretch:
    """The events of a source from a position on, read as far as any lease has asked."""

    def __init__(self, low: int, events: Iterator[Event]) -> None:
        self._low = low
        self._events = events
        self._known: list[Event] = []

    def holds(self, low: int) -> bool:
        """Whether a lease that begins at a position is read from here."""
        end = self._known[-1].position if self._known else self._low
        return self._low <= low <= end + GAP_POSITIONS

    def events_from(self, low: int) -> Iterator[Event]:
        at = bisect_left(self._known, low, key=_position)
        while True:
            if at == len(self._known):
                event = next(self._events, None)
                if event is None:
                    return
                self._known.append(event)
            if self._known[at].position >= low:
                yield self._known[at]
            at += 1


class _Reading:
    """One answer in the making."""

    def __init__(
        self, connection: Connection, names: frozenset[str], events_max: int, bytes_max: int
    ) -> None:
        self._connection = connection
        self._names = names
        self._events_max = events_max
        self._left_bytes = bytes_max
        self._stretches: dict[str, list[_Stretch]] = {}
        self._begun: dict[tuple[str, int], list[_Begun]] = {}

    def read(self, spans: Sequence[EventSpan]) -> list[SpanEvents]:
        # Leases of one source are read in the order in which they begin, so that reading goes on.
        order = sorted(range(len(spans)), key=lambda n: spans[n].after)
        answers: dict[int, SpanEvents] = {}
        gaps: dict[int, tuple[int, int]] = {}
        batch = max(1, BATCH_ROWS // (self._events_max + 1))
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            self._begin([spans[n] for n in numbers])
            for n in numbers:
                answers[n], first = self._take(spans[n])
                if first > spans[n].after + 1:
                    gaps[n] = (spans[n].after + 1, first - 1)
        pruned = self._pruned(spans, gaps) if gaps else {}
        return [_told(answers[n], pruned.get(n)) for n in range(len(spans))]

    def _begin(self, spans: Sequence[EventSpan]) -> None:
        """Look up where the events of single streams begin, one lease of each."""
        firsts: dict[str, int] = {}
        for span in spans:
            if span.after < span.until and Glob(span.source).is_exact:
                firsts.setdefault(span.source, span.after + 1)
        wanted = [
            (path, low)
            for path, low in firsts.items()
            if not any(stretch.holds(low) for stretch in self._stretches.get(path, ()))
        ]
        if wanted and self._left_bytes > 0:
            rows_max = self._events_max + 1
            self._begun |= _begin_streams(self._connection, wanted, rows_max, self._left_bytes)

    def _stretch(self, source: str, low: int) -> _Stretch:
        known = self._stretches.setdefault(source, [])
        for stretch in reversed(known):
            if stretch.holds(low):
                return stretch
        events = _events_from(self._connection, source, low, self._begun)
        known.append(_Stretch(low, events))
        return known[-1]

    def _take(self, span: EventSpan) -> tuple[SpanEvents, int]:
        """The events of a span, and the position of its first one that is still in the log."""
        given, gone = self._replays(span)
        low, until = span.after + 1, span.until
        if low > until or self._left_bytes <= 0 or self._events_max <= 0:
            # No room in this answer: the worker acks what it was given and claims again.
            return SpanEvents(given, span.after, not_replayed=gone), low
        taken: list[Event] = []
        read_to, size = until, 0
        for examined, event in enumerate(self._stretch(span.source, low).events_from(low)):
            if event.position > until:
                break
            cost = len(event.data) + EVENT_BYTES
            is_full = taken and size + cost > self._left_bytes
            if len(taken) == self._events_max or is_full or examined == EXAMINED_MAX:
                read_to = event.position - 1
                break
            if not self._names or has_name(event, self._names):
                size += cost
                taken.append(event)
        self._left_bytes -= size
        events = [event for event in taken if event.position not in span.left_out]
        first = taken[0].position if taken else read_to + 1
        return SpanEvents(given + events, read_to, not_replayed=gone), first

    def _replays(self, span: EventSpan) -> tuple[list[Event], list[int]]:
        """The events to be given out again, as far as there is room, and the positions of those
        that are gone."""
        given: list[Event] = []
        gone: list[int] = []
        for position in span.replayed:
            if self._left_bytes <= 0:
                break
            events = _events_from(self._connection, span.source, position, {})
            event = next((event for event in events if event.position >= position), None)
            if event is None or event.position > position:
                gone.append(position)
                continue
            cost = len(event.data) + EVENT_BYTES
            if given and cost > self._left_bytes:
                break
            self._left_bytes -= cost
            given.append(event._replace(replayed=True))
        return given, gone

    def _pruned(
        self, spans: Sequence[EventSpan], gaps: Mapping[int, tuple[int, int]]
    ) -> dict[int, tuple[int, int]]:
        """Between which positions events of a span are gone; it has none in its gap."""
        low, high = min(gap[0] for gap in gaps.values()), max(gap[1] for gap in gaps.values())
        if not run(self._connection, "any_purge", low=low, high=high):
            return {}
        found: dict[int, tuple[int, int]] = {}
        for n, (low, high) in gaps.items():
            selection = Selection((), (Glob(spans[n].source),))
            last = purges.last_purged(self._connection, selection, low, high)
            if last is not None:
                found[n] = (low, last)
        return found


def _told(answer: SpanEvents, pruned: tuple[int, int] | None) -> SpanEvents:
    """An answer with the positions between which events are gone, those to be replayed included."""
    gone = [*(pruned or ()), *answer.not_replayed]
    return answer._replace(pruned=(min(gone), max(gone)) if gone else None)


# Sources that are streams


class _Begun(NamedTuple):
    """What was read of one incarnation of a stream: its first rows, and where the next begins."""

    stream: int
    content_type: str
    rows: Sequence[Row]
    place: int | None
    """None: there are no more."""


def _begin_streams(
    connection: Connection, wanted: Sequence[tuple[str, int]], rows_max: int, bytes_max: int
) -> dict[tuple[str, int], list[_Begun]]:
    """The first rows of streams from a position on, as many bytes of them as an answer takes."""
    places = run(connection, "event_places", spans=json.dumps(wanted), limit=rows_max)
    fetched, left_bytes = [], bytes_max
    for *_, position, _, size in places:
        if position is not None and left_bytes > 0:
            fetched.append(position)
            left_bytes -= size + EVENT_BYTES
    found = run(connection, "events_at", positions=json.dumps(fetched)) if fetched else []
    data = {row[0]: row for row in found}
    begun: dict[tuple[str, int], list[_Begun]] = {place: [] for place in wanted}
    incarnations: dict[tuple[int, int], list[Row]] = {}
    for row in places:
        incarnations.setdefault((row[0], row[1]), []).append(row)
    for (n, stream), rows in sorted(incarnations.items()):
        _, _, content_type, place, first, *_ = rows[0]
        known = [data[row[4]] for row in rows if row[4] in data]
        if place is None:
            # No row beside the position is of this stream.
            _, low = wanted[n]
            following = first_place(connection, stream, row_start(connection, low))
        elif first is None:
            following = None
        elif len(known) < len(rows):
            following = rows[len(known)][5]
        else:
            following = rows[-1][5] + 1 if len(rows) == rows_max else None
        begun[wanted[n]].append(_Begun(stream, content_type, known, following))
    return begun


def _events_from(
    connection: Connection,
    source: str,
    low: int,
    begun: Mapping[tuple[str, int], Sequence[_Begun]],
) -> Iterator[Event]:
    """The messages of a source, in order, from the row on that a position lies in."""
    glob = Glob(source)
    if not glob.is_exact:
        yield from events_in_range(
            connection, Selection((), (glob,)), row_start(connection, low), None
        )
        return
    found = begun.get((source, low))
    if found is None:
        found = _begin_streams(connection, [(source, low)], 2, 0)[source, low]
    # Incarnations at a path follow one another, so their events do.
    for one in found:
        for row in one.rows:
            yield from _messages(source, one.content_type, row)
        if one.place is not None:
            rows_max = max(len(one.rows), PAGE_ROWS_MIN)
            yield from stream_events(
                connection, source, one.stream, one.place, rows_max, one.content_type
            )


def stream_events(
    connection: Connection,
    path: str,
    stream: int,
    place: int,
    limit: int,
    content_type: str = JSON,
) -> Iterator[Event]:
    """The messages of a stream from a byte offset on, `limit` rows read at a time."""
    while True:
        rows = run(connection, "stream_events", stream=stream, place=place, limit=limit)
        for row in rows:
            yield from _messages(path, content_type, row)
        if len(rows) < limit:
            return
        place = rows[-1][2] + 1


# Sources that are patterns


def events_in_range(
    connection: Connection, selection: Selection, low: int, high: int | None
) -> Iterator[Event]:
    """The messages of all selected streams in a range, which has no end but the log's for None."""
    if high is None:
        [(high, _)] = run(connection, "head")
    at = low
    while at <= high:
        stop = min(at + BLOCK_POSITIONS - 1, high)
        found = streams_between(connection, selection, at, stop)
        if found.names:
            source = found.source(at, stop, None)
            for row in run(connection, "event_rows", source, limit=BLOCK_POSITIONS):
                named = found.names.get(row[1])
                if named is not None:
                    yield from _messages(named.path, named.content_type, row)
        at = stop + 1


# Messages


def _messages(path: str, content_type: str, row: Row) -> Iterator[Event]:
    """The messages of one append."""
    position, stream, start, version, count, at_ms, producer, epoch, seq, lengths, data = row
    sent = None if producer is None else (producer, epoch, seq)
    pieces = [bytes(data)] if lengths is None or count == 1 else split(bytes(lengths), bytes(data))
    for piece in pieces:
        yield Event(path, stream, content_type, position, start, version, at_ms, sent, piece)
        position += 1
        version += 1
        start += len(piece)


class _Named(msgspec.Struct):
    name: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def has_name(event: Event, names: frozenset[str]) -> bool:
    """Whether an event has one of these names."""
    try:
        return _NAMED.decode(event.data).name in names
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
