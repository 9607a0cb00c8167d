"""Resources on a real server: no update is lost, and one request is enough without competitors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import pytest

import fencepost
from fencepost import Client, CommitAppend, Producing, Stream
from fencepost.client import state
from fencepost.coordination import (
    AsyncResources,
    Conflict,
    Merge,
    Override,
    Overrides,
    Resources,
    Row,
    UpdateAbortedError,
    UpdateContendedError,
)
from fencepost.coordination.rules.ids import row_id
from fencepost.coordination.rules.resources import Resolution
from fencepost.protocol.streams import RECENT_BATCHES
from tests.integration.coordination_support import Cutting
from tests.serving import ServerProcess


class Counter(msgspec.Struct):
    count: int


class Versioned(msgspec.Struct):
    name: str
    version: int = -1


def more(counter: Counter | None) -> Counter:
    return Counter(1 if counter is None else counter.count + 1)


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="stream")
def _stream(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"resources/{request.node.name}")


@pytest.fixture(name="ours")
def _ours(stream: Stream) -> Resources[Counter]:
    return Resources(stream, "counter", Counter)


@pytest.fixture(name="theirs")
def _theirs(stream: Stream) -> Resources[Counter]:
    return Resources(stream, "counter", Counter)


def test_a_row_is_made_updated_deleted_and_made_again(
    stream: Stream, ours: Resources[Counter]
) -> None:
    assert ours.get("visits") is None
    assert ours.update("visits", more) == Row(key="visits", value=Counter(1), epoch=0, version=0)
    assert ours.update("visits", more).version == 1
    ours.delete("visits")
    assert ours.get("visits") is None
    assert list(ours.rows()) == []
    ours.delete("visits")
    ours.delete("never there")
    assert ours.update("visits", more) == Row(key="visits", value=Counter(1), epoch=0, version=3)

    messages = list(stream.read())
    assert [one["headers"]["operation"] for one in messages] == [
        *("insert", "update", "delete", "insert")
    ]
    assert [one["value"]["version"] for one in messages] == [0, 1, 2, 3]
    assert state.Materialized(stream).refresh().get("counter", "visits")["count"] == 1


def test_an_update_that_comes_second_reads_again(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    ours.update("visits", more)
    assert theirs.update("visits", more).value == Counter(2)

    assert ours.update("visits", more).value == Counter(3)
    assert ours.update("others", more).value == Counter(1)


def racing(theirs: Resources[Counter], times: int = 1) -> Callable[[Counter | None], Counter]:
    """A mutation during which another actor updates the same row."""
    left = [times]

    def mutate(counter: Counter | None) -> Counter:
        if left[0]:
            left[0] -= 1
            theirs.update("visits", lambda one: Counter(100 if one is None else one.count + 100))
        return more(counter)

    return mutate


def test_a_handler_is_told_of_the_conflict_and_decides(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    seen: list[Conflict[Counter]] = []

    def on_conflict(conflict: Conflict[Counter]) -> Resolution[Counter]:
        seen.append(conflict)
        return "retry"

    row = ours.update("visits", racing(theirs), on_conflict=on_conflict)

    assert row.value == Counter(101)
    assert seen == [
        Conflict(
            key="visits",
            attempted=(0, 0),
            server=(0, 0),
            local=Counter(1),
            current=Counter(100),
        )
    ]


def test_a_handler_may_abort(ours: Resources[Counter], theirs: Resources[Counter]) -> None:
    with pytest.raises(UpdateAbortedError) as raised:
        ours.update("visits", racing(theirs), on_conflict=lambda _conflict: "abort")

    assert raised.value.conflict.current == Counter(100)
    row = ours.get("visits")
    assert row is not None
    assert row.value == Counter(100)


def test_a_handler_may_merge_or_let_the_last_writer_win(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    def merge(conflict: Conflict[Counter]) -> Resolution[Counter]:
        assert conflict.local is not None
        assert conflict.current is not None
        return Merge(Counter(max(conflict.local.count, conflict.current.count)))

    assert ours.update("visits", racing(theirs), on_conflict=merge).value == Counter(100)
    last = ours.update("visits", racing(theirs), on_conflict=lambda _conflict: "last-writer-wins")
    assert (last.value, last.version) == (Counter(101), 3)


def test_a_handler_that_answers_nonsense_is_told(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    nonsense: Any = "perhaps"
    with pytest.raises(fencepost.FencepostError, match="perhaps"):
        ours.update("visits", racing(theirs), on_conflict=lambda _conflict: nonsense)


def test_an_update_gives_up_after_its_retries(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    with pytest.raises(UpdateContendedError):
        ours.update("visits", racing(theirs, times=99), retries=2)

    row = theirs.get("visits")
    assert row is not None
    assert row.value == Counter(300)


def test_values_are_objects_of_their_type(stream: Stream) -> None:
    plain: Resources[dict[str, Any]] = Resources(stream, "doc")
    assert plain.update("a", lambda _none: {"x": 1}).value == {"x": 1}
    wrong: Resources[Any] = Resources(stream, "doc")
    with pytest.raises(fencepost.FencepostError, match="object"):
        wrong.update("c", lambda _none: 7)
    with pytest.raises(fencepost.FencepostError, match="delete"):
        wrong.update("c", lambda _none: None)


class Renamed(msgspec.Struct, rename={"edition": "version"}):
    edition: int


@dataclass
class Epochal:
    epoch: int


class Overridden(TypedDict):
    override: bool


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Versioned, "version"),
        (Renamed, "version"),
        (Epochal, "epoch"),
        (Overridden, "override"),
    ],
)
def test_a_type_with_a_field_that_rows_have_themselves_is_refused(
    stream: Stream, kind: type[Any], field: str
) -> None:
    with pytest.raises(fencepost.FencepostError, match=f"{kind.__name__} has the field {field}"):
        Resources(stream, "doc", kind)


def test_a_dict_with_a_field_that_rows_have_themselves_is_refused_and_not_stored(
    stream: Stream,
) -> None:
    docs: Resources[dict[str, Any]] = Resources(stream, "doc")

    with pytest.raises(fencepost.FencepostError, match="doc/a has the field version"):
        docs.update("a", lambda _none: {"version": "2.0"})

    assert list(stream.read()) == []


def test_a_row_says_when_it_was_stored_and_that_it_was_overridden(
    stream: Stream, ours: Resources[Counter]
) -> None:
    ours.update("visits", more)
    row = ours.get("visits")
    assert row is not None
    assert row.updated is not None
    assert row.override is None

    corrected = Overrides(stream, "root").correct("counter", "visits", Counter(9), reason="wrong")

    assert corrected.override == Override(by="root", reason="wrong")
    row = ours.get("visits")
    assert row is not None
    assert (row.value, row.override) == (Counter(9), Override(by="root", reason="wrong"))
    assert ours.update("visits", more).override is None


def test_getting_a_row_reads_it_and_what_is_known_does_not(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    theirs.update("visits", more)
    assert ours.known("visits") is None
    found = ours.get("visits")
    assert found is not None
    assert ours.known("visits") == found
    theirs.update("visits", more)
    assert [row.value for row in ours.rows()] == [Counter(2)]


def test_following_misses_nothing_that_another_call_reads(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    theirs.update("visits", more)
    changes = ours.follow()
    assert next(changes).version == 0
    theirs.update("visits", more)
    ours.get("visits")

    assert next(changes).version == 1


def test_a_value_that_is_not_of_its_type_is_told_by_its_key(stream: Stream) -> None:
    plain: Resources[dict[str, Any]] = Resources(stream, "counter")
    plain.update("visits", lambda _none: {"count": "many"})

    with pytest.raises(state.StateMessageError, match="counter/visits is no Counter"):
        Resources(stream, "counter", Counter).get("visits")


def test_types_share_a_stream_and_not_their_keys(stream: Stream) -> None:
    left, right = Resources(stream, "a:b", Counter), Resources(stream, "a", Counter)
    left.update("c", more)
    right.update("b:c", more)
    right.refresh()

    assert [row.key for row in right.rows()] == ["b:c"]
    assert [row.key for row in left.rows()] == ["c"]


def test_one_request_is_enough_when_nobody_competes_at_100_000_keys_too(
    server_process: ServerProcess, client: Client
) -> None:
    stream = client.create("resources/many")
    page = 10_000
    for first in range(0, 100_000, page):
        client.commit(
            CommitAppend(
                stream=stream.path,
                messages=[state.insert("counter", str(n), {"count": n, "epoch": 0, "version": 0})],
                producer=Producing(row_id("counter", str(n)), 0, 0),
            )
            for n in range(first, first + page)
        )
    ours = Resources(stream, "counter", Counter)
    ours.refresh()
    with Cutting(server_process) as counting, fencepost.connect(counting.url) as near:
        # The rows were read over a plain connection; from here on every request is counted.
        ours._driver = near._driver
        before = counting.requests

        for key in ("0", "77777", "99999"):
            row = ours.update(key, more)
            assert (row.value.count, row.version) == (int(key) + 1, 1)
        ours.update("new", more)
        ours.update("new", more)

        assert counting.requests - before == 5


def test_an_update_whose_answer_was_lost_can_be_settled(
    server_process: ServerProcess, stream: Stream, theirs: Resources[Counter]
) -> None:
    with (
        Cutting(server_process) as cutting,
        fencepost.connect(cutting.url, retries=fencepost.NO_RETRIES) as near,
    ):
        ours = Resources(near.stream(stream.path), "counter", Counter)
        ours.update("visits", more)
        cutting.answers_lost = 1
        with pytest.raises(fencepost.OutcomeUnknownError):
            ours.update("visits", more)

        assert ours.settle("visits") is True
        assert ours.settle("visits") is None
        assert ours.update("visits", more).value == Counter(3)
    row = theirs.get("visits")
    assert row is not None
    assert row.value == Counter(3)


def _overtake(
    stream: Stream, theirs: Resources[Counter], *, by: Literal["updates", "override"]
) -> None:
    """Move the row on until the server cannot compare an old number with what was stored."""
    if by == "override":
        Overrides(stream, "root").correct("counter", "visits", {"count": 100}, reason="recounted")
    else:
        for _time in range(RECENT_BATCHES + 3):
            theirs.update("visits", more)


@pytest.mark.parametrize("by", ["updates", "override"])
@pytest.mark.parametrize("arrived", [True, False])
def test_an_update_that_others_have_overtaken_is_counted_once(
    server_process: ServerProcess,
    stream: Stream,
    theirs: Resources[Counter],
    by: Literal["updates", "override"],
    arrived: bool,
) -> None:
    """Its answer was lost, and it is sent again when the server has forgotten what it stored."""
    with (
        Cutting(server_process) as cutting,
        fencepost.connect(cutting.url, retries=fencepost.NO_RETRIES) as near,
    ):
        ours = Resources(near.stream(stream.path), "counter", Counter)
        ours.update("visits", more)
        if arrived:
            cutting.answers_lost = 1
        else:
            cutting.requests_lost = 1
        with pytest.raises((fencepost.OutcomeUnknownError, fencepost.ConnectionFailedError)):
            ours.update("visits", more)
        _overtake(stream, theirs, by=by)

        assert ours.settle("visits") is arrived
        count = 100 if by == "override" else 1 + arrived + RECENT_BATCHES + 3
        assert ours.update("visits", more).value == Counter(count + 1)


def test_an_update_that_was_overtaken_and_that_the_log_forgot_stays_unknown(tmp_path: Path) -> None:
    forgets = {"FENCEPOST_STORE_LOG_RETENTION_MS": "1", "FENCEPOST_STORE_SWEEP_INTERVAL_MS": "20"}
    with (
        ServerProcess(tmp_path / "data", environment=forgets) as server,
        Cutting(server) as cutting,
        fencepost.connect(server.url) as client,
        fencepost.connect(cutting.url, retries=fencepost.NO_RETRIES) as near,
    ):
        stream = client.create("forgotten")
        ours = Resources(near.stream(stream.path), "counter", Counter)
        ours.update("visits", more)
        cutting.answers_lost = 1
        with pytest.raises(fencepost.OutcomeUnknownError):
            ours.update("visits", more)
        theirs = Resources(stream, "counter", Counter)
        _overtake(stream, theirs, by="updates")
        stream.truncate(before="now")
        while any(entry.producer for entry in client.log(streams=["forgotten"], skip_pruned=True)):
            continue  # the log forgets within its next round of upkeep
        theirs.update("visits", more)

        with pytest.raises(fencepost.OutcomeUnknownError, match="number 1"):
            ours.settle("visits")


def test_many_threads_lose_no_increment(client: Client, stream: Stream) -> None:
    def increment() -> None:
        ours = Resources(stream, "counter", Counter)
        for _time in range(10):
            ours.update("visits", more, retries=1000)

    threads = [threading.Thread(target=increment) for _actor in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    row = Resources(stream, "counter", Counter).get("visits")
    assert row is not None
    assert (row.value, row.version) == (Counter(60), 59)


def test_threads_that_share_an_object_do_not_contend(ours: Resources[Counter]) -> None:
    """As the requests of a web application do; each of them may lose to other actors only."""
    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(lambda _: ours.update("visits", more, retries=0), range(64)))

    assert sorted(row.version for row in rows) == list(range(64))


async def test_coroutines_that_share_an_object_do_not_contend(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        ours = AsyncResources(await client.create(path), "counter", Counter)

        rows = await asyncio.gather(*(ours.update("a", more, retries=0) for _one in range(64)))

        assert sorted(row.version for row in rows) == list(range(64))


def test_changes_of_others_are_followed(
    ours: Resources[Counter], theirs: Resources[Counter]
) -> None:
    theirs.update("visits", more)
    changes = ours.follow()
    assert next(changes).value == Counter(1)
    theirs.update("visits", more)
    theirs.delete("visits")

    seen = [next(changes), next(changes)]

    assert [(one.version, one.value) for one in seen] == [(1, Counter(2)), (2, None)]


async def test_the_async_twin_does_the_same(server_process: ServerProcess, path: str) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        stream = await client.create(path)
        ours, theirs = (AsyncResources(stream, "counter", Counter) for _one in range(2))
        await ours.update("visits", more)
        await theirs.update("visits", more)

        async def on_conflict(_conflict: Conflict[Counter]) -> Resolution[Counter]:
            return "retry"

        row = await ours.update("visits", more, on_conflict=on_conflict)

        assert row.value == Counter(3)
        await theirs.refresh()
        assert [one.value for one in await theirs.rows()] == [Counter(3)]
        await ours.delete("visits")
        assert await ours.settle("visits") is None
        changes = theirs.follow()
        assert (await anext(changes)).value is None
        assert await theirs.get("visits") is None
