"""Lists in SQLite: pages that begin after a key and look at a bounded number of candidates.

A pattern narrows the index range by what all its matches begin with; the rest is decided path by
path, on a covering index. A page that has looked at enough candidates ends there, with the key to
go on after, even when it is not full.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from typing import NamedTuple

import apsw

from fencepost.protocol.globs import Glob
from fencepost.protocol.logs import literal_prefix, text_range
from fencepost.protocol.offsets import Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.log_contract import ListedKey, ListedProducer, ListedStream, Page
from fencepost.store.sql import load_queries
from fencepost.store.sqlite.database import Row
from fencepost.store.sqlite.reading import Readers

QUERIES = load_queries("fencepost.store.sqlite", "lists.sql")

CANDIDATES_MAX = 10_000
"""Streams, or producers of one stream, that one page looks at."""


class SqliteLists:
    """The lists of one embedded store."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def list_streams(
        self, glob: Glob | None, *, after: str, limit: int
    ) -> Page[ListedStream]:
        return await self._readers.run(partial(streams, glob=glob, after=after, limit=limit))

    async def list_producers(
        self, stream: Glob | None, glob: Glob | None, *, after: tuple[str, str], limit: int
    ) -> Page[ListedProducer]:
        return await self._readers.run(
            partial(producers, stream=stream, glob=glob, after=after, limit=limit)
        )

    async def list_keys(
        self, *, after: tuple[int, str, str], as_of_ms: int | None, limit: int
    ) -> Page[ListedKey]:
        return await self._readers.run(partial(keys, after=after, as_of_ms=as_of_ms, limit=limit))


def _run(connection: apsw.Connection, query: str, **values: object) -> list[Row]:
    return connection.execute(QUERIES[query], values).fetchall()


class _Texts(NamedTuple):
    """A pattern and the range that all its matches lie in."""

    glob: Glob | None
    first: str
    last: str | None

    def take(self, text: str) -> bool:
        return self.glob is None or self.glob.matches(text)


def _texts(glob: Glob | None) -> _Texts:
    if glob is None:
        return _Texts(None, "", None)
    if glob.is_exact:
        return _Texts(glob, glob.text, glob.text + "\0")
    return _Texts(glob, *text_range(literal_prefix(glob)))


def streams(
    connection: apsw.Connection, glob: Glob | None, after: str, limit: int
) -> Page[ListedStream]:
    """A page of live streams, in the order of their paths."""
    wanted = _texts(glob)
    # One more than the page holds tells whether there is a next one.
    candidates_max = CANDIDATES_MAX if glob is not None else limit + 1
    with connection:
        candidates = [
            path
            for (path,) in _run(
                connection,
                "candidate_paths",
                after=after,
                first=wanted.first,
                last=wanted.last,
                limit=candidates_max,
            )
        ]
        matching = list(islice(filter(wanted.take, candidates), limit + 1))
        found = _run(connection, "streams_at", paths=json.dumps(matching[:limit]))
    following: tuple[str, ...] | None = None
    if len(matching) > limit:
        following = (matching[limit - 1],)
    elif len(candidates) == candidates_max:
        following = (candidates[-1],)
    return Page([_stream(row) for row in found], following)


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
    )


def producers(
    connection: apsw.Connection,
    stream: Glob | None,
    glob: Glob | None,
    after: tuple[str, str],
    limit: int,
) -> Page[ListedProducer]:
    """A page of producers, in the order of their streams' paths and then of their ids."""
    with connection:
        paths = _texts(stream)
        candidates = _run(
            connection,
            "candidate_streams",
            after=after[0],
            first=paths.first,
            last=paths.last,
            limit=CANDIDATES_MAX,
        )
        chosen = [(path, stream_id) for path, stream_id in candidates if paths.take(path)]
        ids = json.dumps([stream_id for _, stream_id in chosen])
        populated = {row[0] for row in _run(connection, "streams_with_producers", streams=ids)}
        page: list[ListedProducer] = []
        for path, stream_id in chosen:
            if stream_id not in populated:
                continue
            begin = after[1] if path == after[0] else ""
            more, following = _producers_of(
                connection, path, stream_id, _texts(glob), begin, limit - len(page)
            )
            page += more
            if following is not None:
                return Page(page, (path, following))
    if len(candidates) == CANDIDATES_MAX:
        # The id after every other: this stream is done.
        return Page(page, (candidates[-1][0], "\U0010ffff"))
    return Page(page, None)


def _producers_of(
    connection: apsw.Connection, path: str, stream_id: int, wanted: _Texts, after: str, limit: int
) -> tuple[list[ListedProducer], str | None]:
    """Some producers of one stream, and the id to go on after when there may be more."""
    if limit == 0:
        return [], after
    candidates_max = CANDIDATES_MAX if wanted.glob is not None else limit + 1
    rows = _run(
        connection,
        "producers_of",
        stream=stream_id,
        after=after,
        first=wanted.first,
        last=wanted.last,
        limit=candidates_max,
    )
    matching = list(islice((row for row in rows if wanted.take(row[0])), limit + 1))
    following: str | None = None
    if len(matching) > limit:
        following = matching[limit - 1][0]
    elif len(rows) == candidates_max:
        following = rows[-1][0]
    return [_producer(path, row) for row in matching[:limit]], following


def _producer(path: str, row: Row) -> ListedProducer:
    producer_id, epoch, seq, version, start, updated_ms = row
    offset = None if version is None else Offset(version, start)
    return ListedProducer(path, producer_id, epoch, seq, offset, updated_ms)


def keys(
    connection: apsw.Connection, after: tuple[int, str, str], as_of_ms: int | None, limit: int
) -> Page[ListedKey]:
    """A page of idempotency keys, as they were at a time if one is given."""
    stream, principal, key = after
    rows = _run(
        connection,
        "keys_after",
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
