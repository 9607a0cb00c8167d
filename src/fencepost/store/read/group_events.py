"""Reading the events of leases: each stretch of a source once, for all leases that are about it.

Sources that are single streams are looked up together. One query finds where the events of each
begin, and how large they are; a second one fetches as many as the answer takes. The first event
behind a position is found through the row that holds the position before it, which is usually the
event that was acked last; else by halving. A source that is a pattern is read block by block.

A computed target gets the events that it was told of (`told_events.py`). Only where that is not
known it gets all events of its source.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

import msgspec

from fencepost.protocol.batches import split
from fencepost.protocol.globs import Glob
from fencepost.protocol.logs import Selection
from fencepost.protocol.streams import JSON
from fencepost.protocol.told import Stretch, Told
from fencepost.store.group_contract import Event, EventSpan, SpanEvents
from fencepost.store.maintain import purge as purges
from fencepost.store.read.log_selection import first_place, row_start, run, streams_between
from fencepost.store.read.told_events import NOTHING_AHEAD, Ahead, look_ahead
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


class _Lying:
    """What lies ahead of one lease: its pieces in order, and what becomes of them."""

    __slots__ = ("gone", "pieces", "source", "until")

    def __init__(self, ahead: Ahead, n: int, span: EventSpan) -> None:
        self.source = span.source
        self.until = span.until
        """How far the pieces can be read."""
        self.gone: list[int] = []
        """Events that the target was told of, and that are in the log no longer."""
        self.pieces: Sequence[Told | Stretch]
        if span.told is not None:
            self.pieces, self.until = ahead.pieces[n], ahead.until[n]
        else:
            self.pieces = (Stretch(span.after + 1, span.until),)

    def pruned(self, read_to: int) -> tuple[int, int] | None:
        """Between which positions events are gone that the target was told of."""
        gone = [position for position in self.gone if position <= read_to]
        return (gone[0], gone[-1]) if gone else None

    def gap(self, first: int) -> tuple[int, int] | None:
        """Where events of the source may be gone, in front of the first one that was found."""
        piece = self.pieces[0]
        if isinstance(piece, Told) or first <= piece.first:
            return None
        return piece.first, min(first - 1, piece.last)

    def untold_to(self, read_to: int, left_out: frozenset[int]) -> int | None:
        """Up to where it is not known what the target was told of behind a position.

        The worker reads on by itself up to there, and gets no event from the log that is parked.
        """
        for piece in self.pieces:
            if isinstance(piece, Stretch) and piece.first <= read_to + 1 <= piece.last:
                parked = min((at for at in left_out if at > read_to), default=piece.last + 1)
                last = min(piece.last, parked - 1)
                return last if last > read_to else None
        return None


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
        self._ahead = NOTHING_AHEAD
        self._appends: dict[int, tuple[list[bytes], list[int]]] = {}
        """Messages of appends, and where each begins."""
        self._globs: dict[str, Glob] = {}

    def read(self, spans: Sequence[EventSpan]) -> list[SpanEvents]:
        # Leases of one source are read in the order in which they begin, so that reading goes on.
        order = sorted(range(len(spans)), key=lambda n: spans[n].after)
        answers: dict[int, SpanEvents] = {}
        gaps: dict[int, tuple[int, int]] = {}
        batch = max(1, BATCH_ROWS // (self._events_max + 1))
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            self._begin([spans[n] for n in numbers])
            told = {n: spans[n] for n in numbers if spans[n].told is not None}
            if told and self._left_bytes > 0:
                rows_max = self._events_max + 1
                self._ahead = look_ahead(self._connection, told, rows_max, self._left_bytes)
                self._appends.clear()
            for n in numbers:
                answers[n], gap = self._take(n, spans[n])
                if gap is not None:
                    gaps[n] = gap
        pruned = self._pruned(spans, gaps) if gaps else {}
        return [_told(answers[n], pruned.get(n)) for n in range(len(spans))]

    def _begin(self, spans: Sequence[EventSpan]) -> None:
        """Look up where the events of single streams begin, one lease of each."""
        firsts: dict[str, int] = {}
        for span in spans:
            if span.told is None and span.after < span.until and Glob(span.source).is_exact:
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

    def _take(self, n: int, span: EventSpan) -> tuple[SpanEvents, tuple[int, int] | None]:
        """The events of a span, and where in front of them events may be gone from the log."""
        given, gone = self._replays(span)
        low, until = span.after + 1, span.until
        if low > until or self._left_bytes <= 0 or self._events_max <= 0:
            # No room in this answer: the worker acks what it was given and claims again.
            return SpanEvents(given, span.after, not_replayed=gone), None
        lying = _Lying(self._ahead, n, span)
        taken: list[Event] = []
        read_to, size = None, 0
        if span.told is None:
            events = self._stretch(span.source, low).events_from(low)
        else:
            events = self._events(lying)
        for examined, event in enumerate(events):
            if event.position > lying.until:
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
        if read_to is None:
            read_to = lying.until
        given += [event for event in taken if event.position not in span.left_out]
        answer = SpanEvents(given, read_to, None, gone)
        if span.told is not None:
            pruned, untold_to = lying.pruned(read_to), lying.untold_to(read_to, span.left_out)
            answer = answer._replace(pruned=pruned, untold_to=untold_to)
        return answer, lying.gap(taken[0].position if taken else read_to + 1)

    def _events(self, lying: _Lying) -> Iterator[Event]:
        """What lies ahead of a lease."""
        for piece in lying.pieces:
            if isinstance(piece, Told):
                event = self._told_event(piece, lying)
                if event is not None:
                    yield event
                if piece.position > lying.until:
                    return
                continue
            stretch = self._stretch(lying.source, piece.first)
            for event in stretch.events_from(piece.first):
                if event.position > piece.last:
                    break
                yield event

    def _told_event(self, told: Told, lying: _Lying) -> Event | None:
        """An event that a target was told of; None if it is gone, or not read, or not its own."""
        place = self._ahead.places.get(told.position)
        if place is None:
            lying.gone.append(told.position)
            return None
        row = self._ahead.rows.get(place.row)
        if row is None:
            lying.until = told.position - 1
            return None
        # A worker may tell of any position, and it may not read every stream.
        if place.path != lying.source and not self._glob(lying.source).matches(place.path):
            return None
        found = self._appends.get(place.row)
        if found is None:
            pieces = _pieces(row)
            found = self._appends[place.row] = pieces, list(accumulate(map(len, pieces), initial=0))
        pieces, starts = found
        n = told.position - place.row
        _, stream, start, version, _, at_ms, producer, epoch, seq, *_ = row
        return Event(
            place.path,
            stream,
            place.content_type,
            told.position,
            start + starts[n],
            version + n,
            at_ms,
            None if producer is None else (producer, epoch, seq),
            pieces[n],
            note=told.note,
        )

    def _glob(self, source: str) -> Glob:
        glob = self._globs.get(source)
        if glob is None:
            glob = self._globs[source] = Glob(source)
        return glob

    def _replays(self, span: EventSpan) -> tuple[list[Event], list[int]]:
        """The events to be given out again, as far as there is room, and the positions of those
        that are gone."""
        given: list[Event] = []
        gone: list[int] = []
        notes = dict(span.notes)
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
            given.append(event._replace(replayed=True, note=notes.get(position)))
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
    gone = [*(pruned or ()), *(answer.pruned or ()), *answer.not_replayed]
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
    position, stream, start, version, _, at_ms, producer, epoch, seq, *_ = row
    sent = None if producer is None else (producer, epoch, seq)
    for piece in _pieces(row):
        yield Event(path, stream, content_type, position, start, version, at_ms, sent, piece)
        position += 1
        version += 1
        start += len(piece)


def _pieces(row: Row) -> list[bytes]:
    count, lengths, data = row[4], *row[-2:]
    if lengths is None or count == 1:
        return [bytes(data)]
    return split(bytes(lengths), bytes(data))


class _Named(msgspec.Struct):
    name: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


def has_name(event: Event, names: frozenset[str]) -> bool:
    """Whether an event has one of these names."""
    try:
        return _NAMED.decode(event.data).name in names
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
