"""The events of leases: what a plain walk over the log would give, and each stretch read once.

FENCEPOST_SEED replays a run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from fencepost.protocol.globs import Glob
from fencepost.store.group_contract import EventSpan, SpanEvents
from fencepost.store.read import group_events
from fencepost.store.sql import Connection, Row
from tests.contract.subject import Subject

JSON = "application/json"
BYTES_MAX = 1 << 20


class Watched:
    """A connection that notes the rows of the log which it gives out with their data."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.fetched: list[int] = []
        self.queries = 0

    def fetch(self, query: str, *args: Any, **more: Any) -> list[Row]:
        rows = self._connection.fetch(query, *args, **more)
        self.queries += 1
        if query in ("events_at", "stream_events", "event_rows"):
            self.fetched += [row[0] for row in rows]
        return rows

    def __enter__(self) -> Connection:
        self._connection.__enter__()
        return cast(Connection, self)

    def __exit__(self, *args: Any) -> object:
        return self._connection.__exit__(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


async def events(
    subject: Subject, spans: Sequence[EventSpan], events_max: int = 10, bytes_max: int = BYTES_MAX
) -> tuple[list[SpanEvents], Watched]:
    def read(connection: Connection) -> tuple[list[SpanEvents], Watched]:
        watched = Watched(connection)
        found = group_events.events_of(
            cast(Connection, watched), spans, frozenset(), events_max, bytes_max
        )
        return found, watched

    run: Callable[..., Any] = cast(Any, subject.store).readers.run
    answer: tuple[list[SpanEvents], Watched] = await run(read)
    return answer


class Book:
    """What was written, in the order of positions."""

    def __init__(self) -> None:
        self.events: list[tuple[int, str, bytes]] = []

    async def write(self, subject: Subject, path: str, count: int) -> None:
        first = len(self.events)
        texts = [str(first + n).encode() for n in range(count)]
        body = texts[0] if count == 1 else b"[" + b",".join(texts) + b"]"
        done = await subject.appended(path, body, content_type=JSON)
        for n, text in enumerate(texts):
            self.events.append((done.position - count + 1 + n, path, text))

    def expected(self, span: EventSpan, events_max: int) -> list[tuple[int, str, bytes]]:
        glob = Glob(span.source)
        taken = [
            event
            for event in self.events
            if span.after < event[0] <= span.until and glob.matches(event[1])
        ][:events_max]
        return [event for event in taken if event[0] not in span.left_out]


async def test_leases_get_what_a_walk_over_the_log_would_give_them(subject: Subject) -> None:
    seed = int(os.environ.get("FENCEPOST_SEED", str(random.randrange(2**32))))
    sys.stderr.write(f"FENCEPOST_SEED={seed}\n")
    chance = random.Random(seed)
    book = Book()
    paths = [f"orders/{n}" for n in range(4)]
    for path in paths:
        await subject.create(path, JSON)
    for _ in range(60):
        await book.write(subject, chance.choice(paths), chance.choice((1, 1, 1, 3)))
        if chance.random() < 0.05:
            # Another stream at the same path: the events of the old one are delivered all the same.
            path = chance.choice(paths)
            await subject.delete(path)
            await subject.create(path, JSON)
    head = book.events[-1][0]

    for _ in range(30):
        spans = []
        for _ in range(chance.randint(1, 8)):
            after = chance.randrange(-1, head)
            until = chance.randint(after, head)
            left_out = frozenset(chance.sample(range(head), 3))
            spans.append(EventSpan(chance.choice([*paths, "orders/*"]), after, until, left_out))
        events_max = chance.choice((1, 2, 5, 100))
        found, _ = await events(subject, spans, events_max)

        for span, answer in zip(spans, found, strict=True):
            given = [(event.position, event.path, event.data) for event in answer.events]
            assert given == book.expected(span, events_max)
            last = max([span.after, *(event[0] for event in given)])
            assert last <= answer.read_to <= max(span.after, span.until)
            # What lies between the last event and read_to was examined: there is none.
            rest = EventSpan(span.source, last, answer.read_to, span.left_out)
            assert book.expected(rest, 100) == []


async def test_leases_that_overlap_read_a_source_once(subject: Subject) -> None:
    book = Book()
    await subject.create("busy", JSON)
    for _ in range(40):
        await book.write(subject, "busy", 1)
    first = book.events[0][0]
    spans = [EventSpan("busy", first - 1 + n, first + 39) for n in range(10)]

    found, watched = await events(subject, spans, events_max=10)

    assert all(len(answer.events) == 10 for answer in found)
    assert len(set(watched.fetched)) == len(watched.fetched), "a row was read twice"
    assert len(watched.fetched) <= 40


async def test_many_streams_take_a_few_queries(subject: Subject) -> None:
    book = Book()
    paths = [f"orders/{n}" for n in range(20)]
    for path in paths:
        await subject.create(path, JSON)
    for path in paths * 3:
        await book.write(subject, path, 1)
    head = book.events[-1][0]
    firsts = {path: position for position, path, _ in reversed(book.events)}

    found, watched = await events(
        subject, [EventSpan(path, firsts[path] - 1, head) for path in paths]
    )

    assert [len(answer.events) for answer in found] == [3] * 20
    assert watched.queries <= 3


async def test_an_answer_has_room_for_some_and_says_how_far_it_got(subject: Subject) -> None:
    await subject.create("large", JSON)
    positions = [
        (await subject.appended("large", b'"%b"' % (b"x" * 1_000), content_type=JSON)).position
        for _ in range(6)
    ]

    [answer], watched = await events(
        subject, [EventSpan("large", -1, positions[-1])], bytes_max=2_500
    )

    assert [event.position for event in answer.events] == positions[:2]
    assert answer.read_to == positions[2] - 1
    assert len(watched.fetched) <= 4, "more was read than the answer takes"
