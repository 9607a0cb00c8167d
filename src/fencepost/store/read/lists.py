"""Lists of streams, producers, keys, writers and what writers published, page by page.

A page begins after a key and looks at a bounded number of candidates. A pattern narrows the range
of the index by what all its matches begin with; the rest is compared path by path. A page that has
looked at enough candidates ends there, with the key to go on after, even when it is not full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from fencepost.protocol.globs import Glob, literal_prefix
from fencepost.protocol.grants import Narrowed
from fencepost.protocol.logs import next_text, text_range
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Lifetime
from fencepost.protocol.writers import PublishedBatch, Writer
from fencepost.store.large.locks import Holds
from fencepost.store.log_contract import ListedKey, ListedProducer, ListedStream, Page
from fencepost.store.read.chunks import Readers
from fencepost.store.read.log_selection import end_of
from fencepost.store.sql import Connection, Row
from fencepost.store.write.writers import published_batch

CANDIDATES_MAX = 10_000
"""Streams, or producers, that one page looks at."""
_BATCHES_END = 1 << 53
"""Above every number of a batch."""


class SqlLists:
    """The lists of one store."""

    def __init__(self, readers: Readers[Any], holds: Holds | None = None) -> None:
        self._readers = readers
        self._holds = Holds() if holds is None else holds

    async def list_streams(
        self, glob: Glob | None, *, after: str, limit: int
    ) -> Page[ListedStream]:
        work = partial(streams, glob=glob, after=after, limit=limit)
        return await self._holds.whole(
            lambda: self._readers.run(work), lambda page: [one.path for one in page.entries]
        )

    async def list_producers(
        self, stream: Glob | None, glob: Glob | None, *, after: tuple[str, str], limit: int
    ) -> Page[ListedProducer]:
        work = partial(producers, stream=stream, glob=glob, after=after, limit=limit)
        return await self._holds.whole(
            lambda: self._readers.run(work), lambda page: [one.stream for one in page.entries]
        )

    async def list_keys(
        self, *, owner: str | None, after: tuple[int, str, str], as_of_ms: int | None, limit: int
    ) -> Page[ListedKey]:
        work = partial(keys, owner=owner, after=after, as_of_ms=as_of_ms, limit=limit)
        return await self._holds.whole(
            lambda: self._readers.run(work), lambda page: [one.stream for one in page.entries]
        )

    async def usage(self) -> list[tuple[str, str, int]]:
        rows = await self._readers.run(partial(_run, query="usage"))
        return [(str(name), str(resource), int(amount)) for name, resource, amount in rows]

    async def list_writers(
        self, glob: Glob | None, *, owner: str | None, after: str, limit: int
    ) -> Page[Writer]:
        return await self._readers.run(
            partial(writers, glob=glob, owner=owner, after=after, limit=limit)
        )

    async def list_writer_history(
        self, name: str, *, before: int | None, limit: int
    ) -> Page[PublishedBatch]:
        return await self._readers.run(
            partial(writer_history, name=name, before=before, limit=limit)
        )


def _run(connection: Connection, query: str, **values: object) -> list[Row]:
    return connection.fetch(query, values)


class _Texts(NamedTuple):
    """A pattern and the range that all its matches lie in."""

    glob: Glob | None
    first: str
    last: str | None

    def bounds(self, connection: Connection, after: str = "") -> dict[str, object]:
        """The range for a query, from the first text after `after`."""
        first = max(self.first, next_text(after)) if after else self.first
        return {"first": first, "last": end_of(connection, self.last)}

    def take(self, text: str) -> bool:
        return self.glob is None or self.glob.matches(text)


def _texts(glob: Glob | None) -> _Texts:
    if glob is None:
        return _Texts(None, "", None)
    if glob.is_exact:
        return _Texts(glob, glob.text, next_text(glob.text))
    whole = text_range(literal_prefix(glob))
    return _Texts(glob, *(glob.within(whole) if isinstance(glob, Narrowed) else whole))


def streams(
    connection: Connection, glob: Glob | None, after: str, limit: int
) -> Page[ListedStream]:
    """A page of live streams, in the order of their paths."""
    wanted = _texts(glob)
    matching: list[str] = []
    looked_at, more = after, False
    with connection:
        for count in _batches(limit + 1):
            bounds = wanted.bounds(connection, looked_at)
            found = _run(connection, "candidate_paths", **bounds, limit=count)
            matching += [path for (path,) in found if wanted.take(path)]
            more = len(found) == count
            looked_at = found[-1][0] if found else looked_at
            if len(matching) > limit or not more:
                break
        rows = _run(connection, "streams_at", paths=json.dumps(matching[:limit]))
    following: tuple[str, ...] | None = None
    if len(matching) > limit:
        following = (matching[limit - 1],)
    elif more:
        following = (looked_at,)
    return Page([_stream(row) for row in rows], following)


def _batches(first: int) -> Iterator[int]:
    """How many candidates to fetch next: more each time, as long as there may be more."""
    left, count = CANDIDATES_MAX, first
    while left > 0:
        yield count
        left -= count
        count = min(4 * count, left)


def _stream(row: Row) -> ListedStream:
    return ListedStream(
        path=row[0],
        id=row[1],
        content_type=row[2],
        tail=Offset(row[3], row[4]),
        first=Offset(row[5], row[6]),
        closed=bool(row[7]),
        created_ms=row[8],
        updated_ms=row[9],
        lifetime=Lifetime(row[10], row[11]),
        forked_from=row[12],
        books_closed=bool(row[13]),
    )


def producers(
    connection: Connection,
    stream: Glob | None,
    glob: Glob | None,
    after: tuple[str, str],
    limit: int,
) -> Page[ListedProducer]:
    """A page of producers, in the order of their streams' paths and then of their ids."""
    paths, ids = _texts(stream), _texts(glob)
    page: list[ListedProducer] = []
    at = after
    with connection:
        for count in _batches(limit + 1):
            # The stream that the page before ended in may have more.
            bounds = paths.bounds(connection) | {"first": max(paths.first, at[0])}
            found = _run(connection, "candidate_streams", **bounds, limit=count)
            chosen = [row for row in found if paths.take(row[0])]
            more, following = _producers_of(connection, chosen, ids, at, limit - len(page))
            page += more
            if following is not None:
                return Page(page, following)
            if len(found) < count:
                return Page(page, None)
            # The text after the last path: that stream is done.
            at = (next_text(found[-1][0]), "")
    return Page(page, at)


def _producers_of(
    connection: Connection, chosen: list[Row], ids: _Texts, after: tuple[str, str], limit: int
) -> tuple[list[ListedProducer], tuple[str, str] | None]:
    """Some producers of some streams, and the key to go on after when there may be more."""
    resumes = bool(chosen) and chosen[0][0] == after[0]
    candidates_max = CANDIDATES_MAX if ids.glob is not None else limit + 1
    rows = _run(
        connection,
        "producers_of",
        streams=json.dumps([stream_id for _, stream_id in chosen]),
        **ids.bounds(connection),
        after=after[1] if resumes else "",
        limit=candidates_max,
    )
    matching = [row for row in rows if ids.take(row[1])]
    page = [_producer(chosen[row[0]][0], row[1:]) for row in matching[:limit]]
    if len(matching) > limit:
        # The key before the first that is left out, also when nothing fits any more.
        return page, (page[-1].stream, page[-1].id) if page else after
    if len(rows) == candidates_max:
        return page, (chosen[rows[-1][0]][0], rows[-1][1])
    return page, None


def _producer(path: str, row: Row) -> ListedProducer:
    producer_id, epoch, seq, version, start, updated_ms = row
    offset = None if version is None else Offset(version, start)
    return ListedProducer(path, producer_id, epoch, seq, offset, updated_ms)


def keys(
    connection: Connection,
    owner: str | None,
    after: tuple[int, str, str],
    as_of_ms: int | None,
    limit: int,
) -> Page[ListedKey]:
    """A page of idempotency keys, as they were at a time if one is given."""
    stream, principal, key = after
    rows = _run(
        connection,
        "keys_after",
        owner=owner,
        stream=stream,
        principal=principal,
        key=key,
        limit=limit + 1,
    )
    page = [
        ListedKey(
            path, incarnation, owner, name, Offset(messages, size), position, created, expires
        )
        for path, incarnation, owner, name, messages, size, position, created, expires in rows[
            :limit
        ]
        if as_of_ms is None or _held(created, expires, as_of_ms)
    ]
    if len(rows) <= limit:
        return Page(page, None)
    last = rows[limit - 1]
    return Page(page, (str(last[1]), last[2], last[3]))


def _held(created_ms: int, expires_ms: int | None, at_ms: int) -> bool:
    return created_ms <= at_ms and (expires_ms is None or expires_ms > at_ms)


def writers(
    connection: Connection, glob: Glob | None, owner: str | None, after: str, limit: int
) -> Page[Writer]:
    """A page of writers, in the order of their names."""
    wanted = _texts(glob)
    page: list[Writer] = []
    looked_at = after
    with connection:
        # There are few enough of them to look at all.
        while True:
            bounds = wanted.bounds(connection, looked_at)
            rows = _run(connection, "writers_after", **bounds, owner=owner, limit=limit + 1)
            page += [Writer(*row) for row in rows if wanted.take(row[0])]
            if len(page) > limit:
                return Page(page[:limit], (page[limit - 1].name,))
            if len(rows) <= limit:
                return Page(page, None)
            looked_at = rows[-1][0]


def writer_history(
    connection: Connection, name: str, before: int | None, limit: int
) -> Page[PublishedBatch]:
    """A page of what a writer published, the newest batch first."""
    bound = _BATCHES_END if before is None else before
    rows = _run(connection, "writer_history_before", name=name, before=bound, limit=limit + 1)
    page = [published_batch(row) for row in rows[:limit]]
    return Page(page, (str(page[-1].batch),) if len(rows) > limit else None)
