"""Plans of the log: exact ends, even splits, the place of a time; and what a purge leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost.protocol.globs import Glob, parse_glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.logs import Part, Selection
from fencepost.store.log_contract import LogChunk, LogQuery, Plan, PlanQuery
from fencepost.store.maintain import purge as purges
from fencepost.store.read import log
from fencepost.store.read import log_plan as plans
from fencepost.store.read.chunks import Readers
from fencepost.store.read.log import SqlLogs, read_log
from fencepost.store.read.log_selection import STREAMS_MAX
from fencepost.store.read.scans import Scans
from fencepost.store.sqlite.connection import FILE, SqliteConnection, connect
from tests.integration.log_support import ARROW, Client
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server with some hundred appends of very different sizes on a few streams."""
    with ServerProcess(tmp_path_factory.mktemp("data")) as server:
        client = Client(server.port)
        for number in range(4):
            client.create(f"plan/{number}")
        for turn in range(150):
            messages = ["x" * (turn % 7) * 50] * (1 + turn % 5)
            client.append(f"plan/{turn % 4}", json.dumps(messages))
        client.ask("DELETE", "/v1/stream/plan/3")
        yield client
        client.close()


def weigh(lines: list[dict[str, Any]]) -> tuple[int, int]:
    sizes = [len(json.dumps(line["data"])) for line in lines if "data" in line]
    return len(lines), sum(sizes)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "after=7",
        "after=11&until=200",
        "match=plan/*",
        "stream=plan/1&stream=plan/3",
        "part=1/3",
    ],
)
@pytest.mark.parametrize(
    "bound", ["", "rows_max=50", "bytes_max=3000", "rows_max=90&bytes_max=9000"]
)
def test_a_plan_says_exactly_what_a_read_will_find(written: Client, query: str, bound: str) -> None:
    plan = written.plan(f"{query}&{bound}&parts=5")

    selection = "&".join(p for p in query.split("&") if p and not p.startswith(("after", "until")))
    lines = written.read_all(f"{selection}&until={plan['until']}", plan["after"])
    assert weigh(lines) == (plan["rows"], plan["bytes"])
    at = plan["after"]
    for split in plan["splits"]:
        assert split["after"] == at
        at = split["until"]
        own = written.read_all(f"{selection}&until={at}", split["after"])
        assert weigh(own) == (split["rows"], split["bytes"])
    assert at == plan["until"]
    assert len(plan["splits"]) <= 5


def test_a_plan_of_all_splits_evenly(written: Client) -> None:
    plan = written.plan("parts=4")

    costs = [split["bytes"] + 100 * split["rows"] for split in plan["splits"]]
    assert len(costs) == 4
    assert max(costs) - min(costs) < 2 * (100 + 300)


def test_a_time_has_a_place_in_the_log(written: Client) -> None:
    lines = written.read_all()
    times = sorted({line["timestamp_ms"] for line in lines})
    for asked in (times[0], times[len(times) // 2], times[-1], times[0] - 1, times[-1] + 1):
        place = written.plan(f"at={asked}")["at"]

        older = [line["position"] for line in lines if line["timestamp_ms"] < asked]
        assert place["after"] == max(older, default=-1)
        assert place["timestamp_ms"] == asked
    shown = datetime.fromtimestamp(times[-1] / 1000, UTC).isoformat(timespec="milliseconds")
    written_as = shown.replace("+00:00", "Z")
    assert written.plan(f"at={written_as}")["at"]["time"] == written_as


def test_a_plan_of_an_empty_range_is_empty(written: Client) -> None:
    plan = written.plan("after=20&until=20")

    assert (plan["rows"], plan["bytes"], plan["splits"]) == (0, 0, [])


# Many positions, without a server: what is written down in advance, and what a purge does to it.


def glob(text: str) -> Glob:
    parsed = parse_glob(text)
    assert isinstance(parsed, Glob)
    return parsed


class OneConnection(Readers[SqliteConnection]):
    """Does the work of readers at once, on the connection of a test."""

    def __init__(self, connection: SqliteConnection) -> None:
        self._one = connection

    async def run(self, work: Any) -> Any:
        return work(self._one)


ROWS = 30_000
STREAMS = 10
ALONE = range(10_000, 20_000)
"""Positions that are all of the first stream."""


@pytest.fixture(scope="module")
def filled(server_process: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with many rows, written past the server whose schema it has."""
    folder = tmp_path_factory.mktemp("filled")
    source = apsw.Connection(str(server_process.data / FILE))
    target = connect(folder / FILE)
    with target.backup("main", source, "main") as copy:
        copy.step()
    with target:
        for stream in range(1, STREAMS + 1):
            target.execute(
                "INSERT INTO streams (id, path, state, content_type, created_ms, updated_ms,"
                " tail_messages, tail_bytes, first_messages, first_bytes, closed, forks_count)"
                " VALUES (?, ?, 0, 'text/plain', 0, 0, ?, 0, 0, 0, 0, 0)",
                (1000 + stream, f"many/{stream}", ROWS // STREAMS),
            )
        target.executemany(
            "INSERT INTO log (position, stream, kind, start_bytes, version, count, size, at_ms,"
            " data) VALUES (?, ?, 0, ?, ?, 1, ?, ?, ?)",
            rows_of_log(),
        )
        target.execute("UPDATE counters SET next_position = ?", (ROWS,))
    target.close()
    return folder / FILE


def rows_of_log() -> Iterator[tuple[Any, ...]]:
    """A row for each position; those of a stream follow on each other."""
    ends = dict.fromkeys(range(1001, 1001 + STREAMS), (0, 0))
    for at in range(ROWS):
        stream, size = 1001 if at in ALONE else 1001 + at % STREAMS, 1 + at % 9
        messages, start = ends[stream]
        ends[stream] = messages + 1, start + size
        yield at, stream, start, messages, size, at, b"x" * size


def ask(selection: Selection, **more: Any) -> PlanQuery:
    values = {"after": -1, "until": None, "rows_max": None, "bytes_max": None, "parts": 1}
    return PlanQuery(selection, **(values | {"at_ms": None} | more))


async def planned(connection: SqliteConnection, query: PlanQuery) -> Plan:
    plan = await SqlLogs(Scans(OneConnection(connection), threads=1), Limits()).plan(query)
    assert isinstance(plan, Plan)
    return plan


SELECTIONS = [
    Selection(),
    Selection(["many/3"]),
    Selection(["many/3", "many/4"], part=Part(0, 2)),
    Selection(part=Part(1, 4)),
]


@pytest.mark.parametrize("selection", SELECTIONS)
async def test_what_is_written_down_in_advance_changes_no_plan(
    filled: Path, selection: Selection
) -> None:
    connection = SqliteConnection(connect(filled))
    queries = [
        ask(selection, **bounds)
        for bounds in (
            {},
            {"parts": 7},
            {"after": 4_095, "until": 20_000},
            {"rows_max": 700, "parts": 3},
            {"bytes_max": 12_345},
            {"at_ms": 17_000},
        )
    ]
    connection.raw.execute("DELETE FROM log_buckets")
    before = [await planned(connection, query) for query in queries]

    connection.execute_many("save_bucket", plans.untallied(connection))

    assert plans.untallied(connection) == []
    assert [await planned(connection, query) for query in queries] == before
    assert before[-1].at == 16_999
    connection.close()


@pytest.mark.parametrize(
    "selection",
    [
        *SELECTIONS,
        Selection(globs=[glob("many/*")]),
        Selection(globs=[glob("*/7"), glob("many/2*")]),
        Selection(globs=[glob("many/1*")]),
        Selection(["many/1"], [glob("**/9")], Part(0, 2)),
    ],
)
@pytest.mark.parametrize("limit", [100, 5_000, 100_000])
@pytest.mark.parametrize(
    ("streams_max", "slice_characters"), [(STREAMS_MAX, 8_000), (0, 8_000), (0, 3)]
)
def test_however_rows_are_found_they_are_the_selected_ones_in_order(
    filled: Path,
    selection: Selection,
    limit: int,
    streams_max: int,
    slice_characters: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log, "STREAMS_MAX", streams_max)
    monkeypatch.setattr(log, "BLOCK_POSITIONS", 1_000)
    monkeypatch.setattr(log.Span, "block_positions", 1_000)
    monkeypatch.setattr(log, "SEARCH_POSITIONS", 12_000)
    monkeypatch.setattr(log, "SLICE_CHARACTERS", slice_characters)
    connection = SqliteConnection(connect(filled))
    paths: dict[Any, Any] = dict(connection.raw.execute("SELECT id, path FROM streams"))
    wanted = [
        position
        for position, stream in connection.raw.execute("SELECT position, stream FROM log")
        if selection.takes(stream, paths[stream])
    ]

    seen: list[int] = []
    after = -1
    while after < ROWS - 1:
        query = LogQuery(selection, after, None, messages_max=limit, bytes_max=1 << 20)
        with connection:
            chunk = read_log(connection, query, Limits())
        assert isinstance(chunk, LogChunk)
        assert chunk.next > after
        after = chunk.next
        if chunk.rows is not None:
            assert len(chunk.rows.positions) <= limit
            assert max(chunk.rows.positions) <= after
            assert chunk.rows.names.keys() >= set(chunk.rows.streams.values())
            seen += chunk.rows.positions

    assert seen == wanted
    connection.close()


async def test_a_purge_keeps_plans_exact_and_is_told_to_those_it_concerns(filled: Path) -> None:
    connection = SqliteConnection(connect(filled))
    connection.execute_many("save_bucket", plans.untallied(connection))
    with connection:
        connection.raw.execute("UPDATE streams SET state = 2 WHERE path = 'many/5'")
        while purges.purge(connection, 1005, 1_000):
            pass

    plan = await planned(connection, ask(Selection()))

    [(rows, size)] = connection.raw.execute("SELECT count(*), sum(size) FROM log").fetchall()
    assert plan.end.weight == (rows, size)
    assert rows == ROWS - (ROWS - len(ALONE)) // STREAMS
    last = ROWS - STREAMS + 4
    assert plan.pruned == last
    gone = (ROWS - len(ALONE)) // STREAMS
    assert plan.pruned_rows == gone
    assert (await planned(connection, ask(Selection(["many/5"])))).pruned_rows == gone
    assert (await planned(connection, ask(Selection(["many/4"])))).pruned_rows == 0
    assert (await planned(connection, ask(Selection(["many/5"])))).pruned == last
    assert (await planned(connection, ask(Selection(["many/4"])))).pruned is None
    assert (await planned(connection, ask(Selection(), after=last))).pruned is None
    # Between two rows that are gone nothing is: the record is exact.
    between = ask(Selection(), after=14, until=23)
    assert (await planned(connection, between)).pruned is None
    some = await planned(connection, ask(Selection(), after=13, until=23))
    assert (some.pruned, some.pruned_rows) == (14, 1)
    connection.close()


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that keeps the rows of deleted streams for no time at all."""
    config = tmp_path / "config.toml"
    config.write_text(
        "[server]\nlong_poll_ms = 200\n[store]\nlog_retention_ms = 1\nsweep_interval_ms = 20\n"
    )
    with ServerProcess(tmp_path / "data", arguments=["--config", str(config)]) as server:
        yield server


def test_only_who_asks_for_purged_rows_is_refused(forgetful: ServerProcess) -> None:
    client = Client(forgetful.port)
    for path in ("kept", "gone"):
        client.create(path)
    client.append("kept", "[0,1]")
    client.append("gone", "[2,3]")
    client.append("kept", "[4,5]")
    client.ask("DELETE", "/v1/stream/gone")
    while client.log("stream=gone").status != 410:
        client.log("live=long-poll&after=now")
    client.append("kept", "7")

    refused = client.log()
    assert (refused.status, refused.json()["code"]) == (410, "log_pruned")
    assert int(refused.headers["log-pruned"]) == 6
    assert client.log("match=g*").status == 410
    assert client.log("", Accept=ARROW).status == 410
    assert client.log("live=long-poll").status == 410
    assert client.log("live=sse").status == 410
    assert client.log("after=1&until=2").status == 410

    assert [line["data"] for line in client.read_all("stream=kept")] == [0, 1, 4, 5, 7]
    assert [line["data"] for line in client.log("until=1").lines()] == [0, 1]
    assert [line["data"] for line in client.log("after=3&until=5").lines()] == [4, 5]
    assert [line["data"] for line in client.log("after=6").lines()] == [7]
    left = client.log("pruned=skip")
    assert [line["data"] for line in left.lines()] == [0, 1, 4, 5, 7]
    assert int(left.headers["log-pruned"]) == 6
    plan = client.plan()
    assert (plan["rows"], plan["pruned"]) == (5, 6)
    client.close()


def test_purged_rows_stay_known_as_purged_over_a_restart(forgetful: ServerProcess) -> None:
    client = Client(forgetful.port)
    client.create("gone")
    client.append("gone", "1")
    client.ask("DELETE", "/v1/stream/gone")
    while client.log("stream=gone").status != 410:
        client.log("live=long-poll&after=now")
    client.close()

    forgetful.kill()
    forgetful.restart()

    client = Client(forgetful.port)
    assert client.log("stream=gone").status == 410
    assert client.log("after=1").status == 200
    client.close()
