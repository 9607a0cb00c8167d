"""Every query gives the same on both engines: the engine's own functions, on the same rows."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fencepost.protocol.globs import Glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.logs import Part, Selection
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import Policy, Retention
from fencepost.protocol.streams import Segment
from fencepost.store import records
from fencepost.store.log_contract import Integers, LogQuery, LogRows, PlanQuery
from fencepost.store.maintain import purge as purges
from fencepost.store.maintain import retention
from fencepost.store.postgres.driver.connection import PostgresConnection, connect
from fencepost.store.postgres.driver.statements import QUERIES, statement
from fencepost.store.read import chunks as reading
from fencepost.store.read import lists
from fencepost.store.read import log_plan as plans
from fencepost.store.read.chunks import own_segments
from fencepost.store.read.log import read_log
from fencepost.store.read.log_selection import ends_of, head_of
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import Connection, Row, Values, load_queries
from fencepost.store.sqlite import connection as sqlite
from fencepost.testing.clock import SimClock
from fencepost.testing.postgres import PostgresServer
from tests.contract.twin_rows import TABLES, contents, copy, fill, same_contents

FAR_MS = 10**15
HOUR_MS = 3_600_000


class Twins(NamedTuple):
    """The same rows twice."""

    sqlite: sqlite.SqliteConnection
    postgres: PostgresConnection

    def agree(self, work: Callable[[Connection], Any]) -> Any:
        """The result of `work`, which is the same on both."""
        expected = plain(work(self.sqlite))
        found = plain(work(self.postgres))
        assert found == expected
        return expected

    def fetch(self, query: str, values: Values = (), *, any_order: bool = False) -> list[Row]:
        """The rows of a query, the same from both."""

        def work(connection: Connection) -> list[Row]:
            rows = connection.fetch(query, values)
            return sorted(rows) if any_order else rows

        return [tuple(row) for row in self.agree(work)]

    def assert_same_tables(self) -> None:
        for table in TABLES:
            names, rows = contents(self.sqlite, table)
            assert plain(same_contents(self.postgres, table, names)) == plain(rows), table
        self.fetch("usage")


def plain(value: Any) -> Any:
    """A value without the differences that mean nothing: spaces in JSON, bool and 0 or 1."""
    match value:
        case Integers():
            return value.values_or_nulls()
        case LogRows():
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple() | range():
            return [plain(item) for item in value]
        case _:
            return value


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that tests read and copy."""
    folder = tmp_path_factory.mktemp("filled") / "data"
    asyncio.run(fill(folder, SimClock()))
    return folder


@pytest.fixture(scope="module")
def read_twins(filled: Path, postgres_server: PostgresServer) -> Iterator[Twins]:
    """Both engines for tests that only read."""
    yield from _twins(filled / sqlite.FILE, postgres_server, readonly=True)


@pytest.fixture
def twins(filled: Path, tmp_path: Path, postgres_server: PostgresServer) -> Iterator[Twins]:
    """Both engines for a test that writes."""
    file = tmp_path / "copy.db"
    source = sqlite.connect(filled / sqlite.FILE)
    source.execute("VACUUM INTO ?", (str(file),))
    source.close()
    yield from _twins(file, postgres_server, readonly=False)


def _twins(file: Path, server: PostgresServer, *, readonly: bool) -> Iterator[Twins]:
    dsn = server.new_database()
    embedded = sqlite.SqliteConnection(sqlite.connect(file))
    writing = connect(PostgresSettings(url=dsn))
    copy(embedded, writing)
    connection = connect(PostgresSettings(url=dsn), readonly=True) if readonly else writing
    yield Twins(embedded, connection)
    embedded.close()
    connection.close()
    writing.close()
    server.drop_database(dsn)


def _paths(connection: Connection) -> list[str]:
    bounds = {"first": "", "last": connection.after_every_text, "limit": 1_000}
    return [path for (path,) in connection.fetch("candidate_paths", bounds)]


# The names


@pytest.mark.parametrize("file", ["queries", "logs", "lists", "retention", "subscriptions"])
def test_both_engines_have_the_same_queries(file: str) -> None:
    """What only servers that share a database need is in files of its own."""
    embedded = load_queries("fencepost.store.sqlite", f"{file}.sql")

    assert load_queries("fencepost.store.postgres", f"{file}.sql").keys() == embedded.keys()


@pytest.mark.parametrize(
    "file", ["queries", "logs", "lists", "retention", "subscriptions", "groups", "check"]
)
def test_a_query_that_both_databases_understand_is_written_once(file: str) -> None:
    embedded = load_queries("fencepost.store.sqlite", f"{file}.sql")
    shared = load_queries("fencepost.store.postgres", f"{file}.sql")

    assert not embedded.items() & shared.items(), "put it into shared.sql, or check/check.sql"


PARTS_AS_COLUMNS = {"find_parts", "chunks_of_parts", "count_staged_messages"}
"""Queries that take parts as two columns here, and as JSON in SQLite."""
PLACES_AS_COLUMNS = {"event_places"}
"""Queries that take pairs of path and position in the same two ways."""
CHUNKS_AS_COLUMNS = {"find_chunks"}
"""Queries that take parts and numbers of chunks in the same two ways."""
SHARED = sorted(
    (sqlite.QUERIES.keys() & QUERIES.keys())
    - PARTS_AS_COLUMNS
    - PLACES_AS_COLUMNS
    - CHUNKS_AS_COLUMNS
)
RECENT_BESIDE = {"save_producer"}
"""Statements that take one value more: a producer's recent batches lie in its row here."""


@pytest.mark.parametrize("name", SHARED)
def test_both_engines_take_the_same_values(name: str) -> None:
    embedded, here = sqlite.QUERIES[name], statement(name)
    names = set(re.findall(r":([a-z_]+)", embedded))
    numbers = [int(number) for number in re.findall(r"\?(\d+)", embedded)]
    count = max(numbers, default=embedded.count("?"))

    assert set(here.names) == names
    if not names:
        given = [int(number) for number in re.findall(rb"\$(\d+)", here.text)]
        assert max(given, default=0) == count + (name in RECENT_BESIDE)


def test_the_rows_to_compare_hold_every_kind_of_row(read_twins: Twins) -> None:
    [(kinds,)] = read_twins.sqlite.raw.execute("SELECT group_concat(DISTINCT kind) FROM log")
    head = head_of(read_twins.sqlite)
    [(chunks, producers, forks, soft)] = read_twins.sqlite.raw.execute(
        "SELECT (SELECT count(*) FROM log WHERE chunk IS NOT NULL),"
        " (SELECT count(*) FROM producers), (SELECT count(*) FROM streams WHERE fork IS NOT NULL),"
        " (SELECT count(*) FROM streams WHERE state = 1)"
    )

    assert {int(kind) for kind in kinds.split(",")} >= {0, 1, 2, 4}
    assert head > 2 * 16_384
    assert min(chunks, producers, forks, soft) > 0


def test_the_copy_is_whole(read_twins: Twins) -> None:
    read_twins.assert_same_tables()


# Streams


def test_streams_are_found_alike(read_twins: Twins) -> None:
    for path in [*_paths(read_twins.sqlite), "missing"]:
        read_twins.fetch("find_stream", (path,))
    for stream_id in range(40):
        read_twins.fetch("find_stream_by_id", (stream_id,))
        read_twins.fetch("stream_to_purge", (stream_id,))
    paths = {"paths": json.dumps(_paths(read_twins.sqlite))}
    found = read_twins.fetch("find_streams", paths, any_order=True)
    assert len(found) > 10
    ids = {"streams": json.dumps([row[0] for row in found])}
    assert read_twins.fetch("forks_of", ids, any_order=True)


@pytest.mark.parametrize("bytes_max", [1, 7, 100, 5_000, 1 << 20])
def test_chunks_of_streams_are_read_alike(read_twins: Twins, bytes_max: int) -> None:
    for path in _paths(read_twins.sqlite):
        [row] = read_twins.sqlite.fetch("find_stream", (path,))
        stream, _ = records.stream_from_row(row)
        segments = own_segments(stream.id, stream.segments, stream.tail)
        at = stream.first
        for _ in range(30):
            if at.bytes >= stream.tail.bytes:
                break
            read = partial(
                _read, segments=segments, at=at, bytes_max=bytes_max, is_json=stream.is_json
            )
            data, following = read_twins.agree(read)
            assert data
            at = Offset(*following)


def _read(
    connection: Connection,
    segments: tuple[Segment, ...],
    at: Offset,
    bytes_max: int,
    is_json: bool,
) -> reading.Piece:
    return reading.read_chunk(connection, segments, at, bytes_max=bytes_max, is_json=is_json)


def test_places_that_are_no_offsets_are_refused_alike(read_twins: Twins) -> None:
    for path in _paths(read_twins.sqlite):
        [row] = read_twins.sqlite.fetch("find_stream", (path,))
        stream, _ = records.stream_from_row(row)
        segments = own_segments(stream.id, stream.segments, stream.tail)
        for step in range(1, 60, 7):
            at = Offset(stream.first.messages + step % 3, stream.first.bytes + step)
            if at.bytes < stream.tail.bytes:
                read = partial(
                    _read, segments=segments, at=at, bytes_max=100, is_json=stream.is_json
                )
                read_twins.agree(partial(_outcome, work=read))


def _outcome(connection: Connection, work: Callable[[Connection], Any]) -> Any:
    try:
        return work(connection)
    except (reading.OffsetError, reading.RowsGoneError) as error:
        return type(error).__name__


# The log

SELECTIONS = {
    "all": Selection(),
    "part": Selection(part=Part(1, 3)),
    "path": Selection(["a"]),
    "paths": Selection(["a/b", "gone/twice", "b", "missing"]),
    "glob": Selection(globs=[Glob("a/**")]),
    "last characters": Selection(globs=[Glob("b/\U0010ffff**")]),
    "deleted": Selection(globs=[Glob("gone/*")]),
    "staged": Selection(globs=[Glob("staged/*")]),
    "all by glob": Selection(globs=[Glob("**")]),
    "glob and part": Selection(globs=[Glob("a/**")], part=Part(0, 2)),
}


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize(
    ("messages_max", "bytes_max"), [(100_000, 4 << 20), (10, 4 << 20), (7_000, 9_000), (3, 50)]
)
def test_the_log_is_read_alike(
    read_twins: Twins, name: str, messages_max: int, bytes_max: int
) -> None:
    head = read_twins.agree(head_of)
    for after in (-1, 0, 17, 300, 5_000, 20_000, head - 40, head - 1, head, head + 5):
        for until in (None, min(after + 9, head), head - 20):
            query = LogQuery(SELECTIONS[name], after, until, messages_max, bytes_max)
            read_twins.agree(partial(_read_log, query=query))


def test_a_large_commit_holds_readers_of_the_log_back_alike(twins: Twins) -> None:
    for connection in twins:
        connection.execute("begin_large", (100, 5_000))
        connection.execute("begin_large", (50, 60))
        connection.execute("turn_large", (2, 50))
        connection.execute("save_slice", (100, 3, b"three"))
        connection.execute("save_slice", (100, 1, b"one"))

    assert twins.agree(ends_of)[0] == 99
    twins.fetch("next_slice", (100, 0))
    twins.fetch("some_slices", (100, 5))
    twins.fetch("slice_at", (100, 3))
    twins.fetch("large_state", (50,))


def _read_log(connection: Connection, query: LogQuery) -> Any:
    with connection:
        chunk = read_log(connection, query, Limits())
    return type(chunk).__name__, tuple(chunk)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("parts", [1, 5])
async def test_plans_are_made_alike(read_twins: Twins, name: str, parts: int) -> None:
    for after, until, rows_max, bytes_max, at_ms in (
        (-1, None, None, None, None),
        (10, 30_000, 9_000, None, 1_700_000_000_000),
        (1, None, None, 20_000, 0),
        (9_000, 9_100, 10, 10, FAR_MS),
    ):
        query = PlanQuery(SELECTIONS[name], after, until, rows_max, bytes_max, parts, at_ms)
        expected = await plans.make(_Alone(read_twins.sqlite), query)  # type: ignore[arg-type]
        found = await plans.make(_Alone(read_twins.postgres), query)  # type: ignore[arg-type]
        assert found == expected


class _Alone:
    """A queue of scans with one reader, here."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def run(self, _principal: str, work: Callable[[Connection], Any]) -> Any:
        return work(self._connection)


def test_times_and_ends_of_rows_are_found_alike(read_twins: Twins) -> None:
    head = head_of(read_twins.sqlite)
    times = [at for (at,) in read_twins.sqlite.raw.execute("SELECT DISTINCT at_ms FROM log")]
    for at_ms in times[::5]:
        read_twins.agree(partial(plans.before_time, at_ms=at_ms, head=head))
    for position in range(0, head, 911):
        read_twins.agree(partial(plans.row_end, position=position))


# Lists

GLOBS = [None, *map(Glob, ("a", "a/**", "*", "q/*", "b/\U0010ffff*", "**", "missing", "k*"))]


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("glob", GLOBS, ids=lambda glob: "any" if glob is None else glob.text)
def test_lists_are_paged_alike(read_twins: Twins, glob: Glob | None, limit: int) -> None:
    after = ""
    for _ in range(50):
        _, following = read_twins.agree(partial(lists.streams, glob=glob, after=after, limit=limit))
        if following is None:
            break
        [after] = following
    place = ("", "")
    for _ in range(200):
        _, following = read_twins.agree(
            partial(lists.producers, stream=None, glob=glob, after=place, limit=limit)
        )
        if following is None:
            break
        place = tuple(following)
    read_twins.agree(partial(lists.producers, stream=glob, glob=None, after=("", ""), limit=limit))


def test_keys_are_paged_alike(read_twins: Twins) -> None:
    after, pages = (0, "", ""), 0
    while True:
        _, following = read_twins.agree(
            partial(lists.keys, after=after, as_of_ms=None, owner=None, limit=7)
        )
        pages += 1
        if following is None:
            break
        after = (int(following[0]), following[1], following[2])
    assert pages > 2


# What is looked up while something is decided


def test_producers_keys_and_parts_are_found_alike(read_twins: Twins) -> None:
    producers = read_twins.fetch("producers_after", (0, "", 1_000))
    for stream_id, producer_id, _ in producers:
        place = (stream_id, producer_id)
        # The newest batches lie in the row itself on PostgreSQL, behind what both have.
        [row] = read_twins.sqlite.fetch("find_producer", place)
        assert read_twins.postgres.fetch("find_producer", place) == [(*row, b"")]
        read_twins.fetch("recent_batches", (row[3], 16))
        read_twins.fetch("find_remembered", place)
    keys = read_twins.sqlite.raw.execute("SELECT stream, principal, key FROM keys").fetchall()
    for key in keys:
        read_twins.fetch("find_key", key)
    for part in (("t", "text"), ("t", "json"), ("t", "nobody"), ("t", "missing")):
        read_twins.fetch("find_part", part)
        read_twins.fetch("part_chunks", part)
        read_twins.fetch("find_chunk", (*part, 1))
    # SQLite takes parts as JSON, PostgreSQL as a column of transactions and one of names.
    parts = [("t", "text"), ("t", "nobody"), ("t", "missing")]
    columns = [list(column) for column in zip(*parts, strict=True)]
    for query in PARTS_AS_COLUMNS:
        rows = read_twins.sqlite.fetch(query, {"parts": json.dumps(parts)})
        assert rows
        assert sorted(read_twins.postgres.fetch(query, columns)) == sorted(map(tuple, rows))
    chunks = [(*part, ordinal) for part in parts for ordinal in (0, 1)]
    columns = [list(column) for column in zip(*chunks, strict=True)]
    rows = read_twins.sqlite.fetch("find_chunks", {"chunks": json.dumps(chunks)})
    assert rows
    assert sorted(read_twins.postgres.fetch("find_chunks", columns)) == sorted(map(tuple, rows))
    assert len(producers) > 5
    assert len(keys) > 5


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("abandoned_parts", (FAR_MS, 10)),
        ("count_live_streams", ()),
        ("count_waiting_parts", ()),
        ("count_writers", ()),
        ("usage_of", ("ann",)),
        ("expired_streams", (FAR_MS, 10)),
        ("large_commits", ()),
        ("load_counters", ()),
        ("next_chunk", ()),
        ("open_claims", ()),
        ("open_claims_of", (1,)),
        ("purgeable_streams", (FAR_MS, 10)),
        ("retained_streams_to_look_at", (0, 100)),
        ("streams_to_look_at", (3, 4)),
        ("live_streams", ("a", None)),
        ("live_streams", ("a/", "a0")),
    ],
)
def test_single_queries_give_the_same(read_twins: Twins, query: str, values: Row) -> None:
    read_twins.fetch(query, values, any_order=True)


# Retention and purges


POLICIES = [Policy(Glob("a/**"), Retention(bytes=300)), Policy(Glob("**"), Retention(messages=4))]


@pytest.mark.parametrize("policies", [[], POLICIES], ids=["own", "policies"])
def test_what_is_overdue_is_found_alike(read_twins: Twins, policies: list[Policy]) -> None:
    now_ms = read_twins.sqlite.fetch("load_counters")[0][2]
    for later_ms in (0, 1_000, 59_000, HOUR_MS):
        overdue, _ = read_twins.agree(
            partial(retention.find_overdue, after=0, policies=policies, now_ms=now_ms + later_ms)
        )
        assert overdue


def test_retention_purges_alike(twins: Twins) -> None:
    streams = [row[0] for row in twins.sqlite.raw.execute("SELECT id FROM streams")]

    for stream_id in streams:
        limit = twins.agree(partial(retention.purge_limit, stream_id=stream_id, before_ms=FAR_MS))
        twins.agree(partial(retention.inherited_from, stream_id))
        if limit:
            twins.agree(partial(retention.purge_piece, stream_id=stream_id, limit=limit))
    while due := twins.agree(partial(retention._find_due, before_ms=FAR_MS)):
        twins.agree(partial(retention._finish, stream_id=due[0], position=due[1]))

    assert twins.sqlite.raw.execute("SELECT count(*) FROM remembered").fetchall() != [(0,)]
    twins.assert_same_tables()
    for name, selection in SELECTIONS.items():
        query = LogQuery(selection, -1, None, 1_000, 1 << 20, skip_pruned=name == "all")
        twins.agree(partial(_read_log, query=query))


def test_deleted_streams_are_purged_alike(twins: Twins) -> None:
    buckets = twins.agree(plans.untallied)
    assert buckets
    for connection in twins:
        connection.execute_many("save_bucket", [tuple(row) for row in buckets])
        connection.execute("save_bucket", (0, 1, 1))  # is there already
    deleted = [row[0] for row in twins.fetch("purgeable_streams", (FAR_MS, 99))]
    assert len(deleted) >= 3

    for stream_id in deleted:
        while twins.agree(partial(_purge, stream_id=stream_id)):
            pass
        for what in ("producers", "remembered", "truncations", "keys", "stream"):
            twins.agree(partial(_execute, query=f"purge_{what}", values=(stream_id,)))

    twins.assert_same_tables()
    head = head_of(twins.sqlite)
    for selection in SELECTIONS.values():
        for found in (purges.last_purged, purges.count_purged):
            twins.agree(partial(found, selection=selection, low=0, high=head))


def _execute(connection: Connection, query: str, values: Row) -> int:
    return connection.execute(query, values)


def _purge(connection: Connection, stream_id: int) -> int:
    with connection:
        return purges.purge(connection, stream_id, 2)


def test_the_data_of_a_purged_chunk_goes_with_its_row(twins: Twins) -> None:
    [(stream_id,)] = twins.sqlite.raw.execute("SELECT id FROM streams WHERE path = 'staged/text'")

    while twins.agree(partial(_purge, stream_id=stream_id)):
        pass

    twins.assert_same_tables()
    left = "SELECT count(*), sum(length(data)), count(digest) FROM chunks WHERE part = 'text'"
    [(chunks, data, digests)] = twins.sqlite.raw.execute(left).fetchall()
    assert (data, digests) == (0, chunks)


# Writing


def test_statements_of_every_kind_write_the_same_rows(twins: Twins) -> None:
    for connection in twins:
        with connection:
            for query, values in WRITTEN:
                connection.execute(query, values)

    twins.assert_same_tables()
    for query in ("load_subscriptions", "load_links", "last_subscription"):
        assert twins.fetch(query)


WRITTEN: list[tuple[str, Row]] = [
    ("save_counters", (99_999, 77, 5)),
    ("save_part", ("u", "new", "text/plain", 5)),
    ("save_part", ("u", "dropped", "text/plain", 5)),
    ("save_chunk", (500, "u", "new", 0, 1, 3, 5, None, b"abc", b"d" * 16, 7)),
    ("save_chunk", (501, "u", "dropped", 0, 2, 3, 5, b"\x01\x02", b"abc", b"d" * 16, None)),
    ("commit_part", (70_000, "u", "new")),
    ("commit_part", (70_001, "u", "new")),
    ("drop_part", ("u", "dropped")),
    ("drop_part", ("u", "new")),  # committed: it stays
    ("drop_chunks", ("u", "dropped")),
    ("save_key", (1, "who", "k", b"d" * 16, 1, 2, 3, 4, True, 5, 6, 7, None)),
    ("save_key", (0, "", "k", b"d" * 16, 1, 2, 3, 4, False, 5, 6, None, b"answer")),
    ("insert_truncation", (80_000, 1, 6)),
    ("save_remembered", (1, "p", 1, 5, b"x" * 32)),
    ("save_remembered", (1, "p", 2, 0, b"y" * 32)),
    ("forget_remembered", (1, "p")),
    ("save_remembered", (1, "never", 2, 0, b"y" * 32)),
    ("forget_remembered", (1, "never")),
    ("note_forgetting", (500,)),
    ("note_forgetting", (900,)),
    ("save_secret", ("s", b"first", 1)),
    ("save_secret", ("s", b"second", 2)),
    ("forget_producer", (1, "p", FAR_MS)),
    ("forget_producer", (2, "p", 0)),
    ("stir", ()),
    ("save_writer", ("w", "", "q", 1, None, None, 5, 6)),
    ("save_writer", ("w", "me", "q", 2, 7, "digest", 5, 8)),
    ("save_writer", ("v", "me", "q", 2, 7, "digest", 5, 8)),
    ("forget_writer", ("v",)),
    ("save_writer_batch", ("w", 5, None, None, None, 7)),
    ("save_writer_batch", ("w", 6, None, 17, "digest", 7)),
    ("save_writer_batch", ("w", 7, 17, 19, "digest", 8)),
    ("trim_writer_history", ("w", 2)),
    ("trim_writer_history", ("w", 2)),
    ("save_writer_batch", ("v", 7, -1, 19, "digest", 8)),
    ("drop_writer_history", ("v",)),
    ("begin_large", (90_000, 95_000)),
    ("turn_large", (1, 90_000)),
    ("save_slice", (90_000, 0, b"slice")),
    ("save_slice", (90_000, 1, b"slice")),
    ("mark_slice", (90_000, 0)),
    ("drop_slice", (90_000, 1)),
    ("save_slice", (91_000, 0, b"stray")),
    ("drop_stray_slices", ()),
    ("begin_large", (96_000, 97_000)),
    ("end_large", (96_000,)),
    ("insert_subscription", (3, "n", "{}", "http://x", 1, 0, None, None, None, 0, None, "[]", "")),
    ("insert_subscription", (9, "m", "{}", "http://x", 1, 0, None, None, None, 0, None, "[]", "")),
    ("save_wake", (1, "wake", "holder", 5, 2, 6, "[]", 3)),
    ("save_link", (3, "a", True, False, 1, 0, 0)),
    ("save_link", (3, "a", True, True, 1, 2, 30)),
    ("save_link", (3, "b", False, True, None, 0, 0)),
    ("save_link", (9, "b", False, True, None, 0, 0)),
    ("delete_link", (3, "b")),
    ("delete_subscription", (9,)),
    ("delete_links", (9,)),
]


def test_a_batch_is_written_like_its_rows_one_by_one(twins: Twins) -> None:
    hot = (0, 5, None, 1, 2, 0, 0, False, None, None, 0, None)
    streams = [
        (*hot, 901, "new/901", "text/plain", 5, None, None, None, None, None, "ann"),
        (*hot, 902, "new/902", "text/plain", 5, 9, None, None, None, "[9, null, null]", "ann"),
    ]
    updates = [
        (2, 6, None, 3, 4, 1, 1, True, '["p", 1, 2]', "seq", 1, 77, 901),
        (0, 7, 99, 3, 4, 0, 0, False, None, None, 0, None, 902),
    ]
    rows = [
        (200_000, 901, 0, 0, 0, 2, 5, 5, "p", 1, 0, None, b"d" * 16, None, b"\x00", b"ab,cd", 9),
        (200_002, 902, 1, 0, 0, 1, 0, 5, *[None] * 9),
        (200_003, 901, 0, 5, 2, 1, 0, 5, "ü", 1, 1, 200_000, b"d" * 16, 3, None, None, 2**63 - 1),
    ]

    for connection in twins:
        connection.execute_many("insert_stream", streams)
        connection.execute_many("update_stream", updates)
        connection.execute_many("move_tail", [(8, 5, 6, 902), (9, 7, 8, 1)])
        connection.execute_many("insert_log", rows)
        connection.execute_many("insert_log", [])
        connection.execute_many("purge_row", [(200_002,), (200_003,)])

    twins.assert_same_tables()


def test_of_a_link_saved_several_times_in_a_batch_the_last_counts(twins: Twins) -> None:
    links = [(1, "a", True, False, 1, 0, 0), (1, "b", True, False, 1, 0, 0)]
    links.append((1, "a", False, True, 2, 5, 50))

    for connection in twins:
        connection.execute_many("save_link", links)

    twins.assert_same_tables()


# Groups


def test_groups_and_leases_are_found_alike(read_twins: Twins) -> None:
    [group] = read_twins.fetch("find_group", ("billing",))
    group_id, now_ms = group[0], group[5]
    assert not read_twins.fetch("find_group", ("gone",))
    assert read_twins.fetch("deleted_groups")
    assert len(read_twins.fetch("live_groups", ("", 9))) == 1
    read_twins.fetch("find_group_by_id", (group_id,))
    read_twins.fetch("count_groups")
    place = (group_id, "default")
    for query in ("claim_urgent", "claim_oldest", "claim_newest"):
        assert len(read_twins.fetch(query, (*place, 9))) > 1
    assert read_twins.fetch("claim_due", (*place, FAR_MS, 9))
    assert read_twins.fetch("next_due", (*place, now_ms, 9))
    rows = read_twins.fetch("leases_after", (group_id, "work/1", 50))
    assert len(rows) > 8
    assert len(read_twins.fetch("blocked_leases_after", (group_id, "", 50))) == 1
    read_twins.fetch("find_lease", (group_id, rows[0][0]))
    assert read_twins.fetch("workers_of_group", (group_id, "", 9))
    assert read_twins.fetch("lane_counts", (group_id,), any_order=True)


def test_parked_events_are_found_alike(read_twins: Twins) -> None:
    [group] = read_twins.fetch("find_group", ("billing",))
    events = read_twins.fetch("parked_after", (group[0], "", -1, 9))

    assert len(events) == 2
    for target, _, position, *_, replaying, _ in events:
        assert read_twins.fetch("find_parked", (group[0], target, position))
        again = read_twins.fetch("replaying_of_target", (group[0], target, -1, 9))
        assert (position in [row[2] for row in again]) == bool(replaying)
        assert read_twins.fetch("parked_of_target", (group[0], target, -1, 9))
    after = (group[0], events[0][0], events[0][2], 9)
    assert len(read_twins.fetch("parked_after", after)) == 1


def test_what_targets_were_told_of_is_kept_and_found_alike(twins: Twins) -> None:
    [group] = twins.fetch("find_group", ("billing",))
    group_id, owned = group[0], 4711
    head = twins.agree(head_of)
    told = [
        (group_id, target, position, position - 1, f"ü{position}")
        for target in ("a", "b/c")
        for position in range(3, head, 7)
    ]
    for connection in twins:
        connection.execute_many("save_told", [*told, (owned, "a", 3, 0, "")])
        connection.execute_many("save_told", [(group_id, "a", 3, 0, "again")])
        connection.execute_many("drop_told", [(group_id, "a", 12), (group_id, "b/c", 2)])
        connection.execute("drop_group_told", (owned, 9))
    twins.assert_same_tables()
    count = len(told) - 2
    assert twins.fetch("count_told", (group_id,)) == [(count,)]
    assert twins.fetch("count_told", (owned,)) == [(0,)]
    assert not twins.fetch("find_told", (group_id, "a", 3))
    assert twins.fetch("find_told", (group_id, "b/c", 3)) == [("b/c", 3, 2, "ü3")]

    leases = [[group_id, "b/c", -1, head], [group_id, "a", 20, 40], [owned, "a", 0, head]]
    ahead = twins.fetch("told_ahead", {"leases": json.dumps(leases), "limit": 3})
    assert [(row[0], row[2]) for row in ahead] == [
        (0, 3),
        (0, 10),
        (0, 17),
        (1, 24),
        (1, 31),
        (1, 38),
    ]
    positions = json.dumps([*range(0, head, 11), head + 9])
    rows = twins.fetch("rows_over", {"positions": positions}, any_order=True)
    assert rows

    for connection in twins:
        connection.execute("drop_group_told_count", (owned,))
    assert not twins.fetch("count_told", (owned,))
