"""Commits that are carried out in slices: whole or not at all, while other requests go on.

Slices are small here, so that a commit of a few dozen appends goes through hundreds of turns of the
loop; an observer looks at the store in every one of them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import apsw
import pytest

from fencepost.protocol.appends import Append, Appended, Conditions, ProducerTuple, TailMoved
from fencepost.protocol.batches import digest
from fencepost.protocol.commits import (
    Commit,
    CommitItem,
    CommitKeyReused,
    CommitPartial,
    CommitRefused,
    CommitReplayed,
    CommittedInSlices,
    ItemDeleted,
    Part,
    PartDropped,
    PartMissing,
    PartUsed,
)
from fencepost.protocol.creates import ConfigConflict, Create, Created, Exists, ForkFrom
from fencepost.protocol.globs import Glob, parse_glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.logs import Selection
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime
from fencepost.protocol.writers import BatchDone, WriterBatch, WriterFenced, WriterOpen
from fencepost.server.subscriptions.cluster import Subscriptions, open_subscriptions
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.contract import (
    Bundle,
    Deleted,
    Failed,
    Missing,
    PartClosed,
    StreamInfo,
    Unknown,
    Upload,
)
from fencepost.store.large.slices import decode_slice
from fencepost.store.log_contract import BeyondHead, LogChunk, LogQuery, LogRows, Pruned
from fencepost.store.read.lists import SqlLists
from fencepost.store.read.log import SqlLogs
from fencepost.store.read.scans import Scans
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.connection import FILE
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.subscriptions import SqliteSubscriptions
from fencepost.testing.clock import SimClock
from tests.contract.subject import answered, batch_of
from tests.integration.subscriptions_support import pull_config

T = TypeVar("T")
JSON = "application/json"
SLICE = 3
COUNT = 30
PATHS = [f"s/{number:02}" for number in range(COUNT)]


class Place:
    """A store with small slices, its log and its lists."""

    def __init__(self, folder: Path) -> None:
        self.clock = SimClock()
        self.settings = SqliteSettings(folder=folder, commit_slice_appends=SLICE)
        self.open()

    def open(self) -> None:
        self.store = SqliteStore(self.settings, self.clock)
        self.holds = self.store.decider.holds
        self.lists = SqlLists(self.store.readers, self.holds)
        self.logs = SqlLogs(Scans(self.store.scanners, threads=1), Limits())

    def ask(self, ask: Any, *request: Any) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ask(*request, answer.set_result)
        return answer

    def commit(self, *items: CommitItem, **more: Any) -> asyncio.Future[Any]:
        mark = more.pop("mark", b"m" * 16)
        return self.ask(self.store.commit, Commit(items, more.pop("key", None), mark, **more))

    def append(self, path: str, body: bytes = b"1", **options: Any) -> asyncio.Future[Any]:
        return self.ask(self.store.append, append(path, body, **options))

    async def content(self, path: str) -> bytes:
        info = await self.store.look(path, touch=False)
        assert isinstance(info, StreamInfo), info
        chunk = await self.store.read(info, info.first, bytes_max=1 << 20)
        return b"" if info.tail == info.first else chunk.data  # type: ignore[union-attr]

    async def probe(self) -> None:
        assert await self.store.probe() is None

    async def until_begun(self) -> None:
        """Wait until a commit has taken its positions."""
        async with asyncio.timeout(20):
            while not self.store.lookup("large_commits"):
                await self.probe()

    async def carrying(self) -> None:
        """Wait until a commit has begun to change the tables, and is not done."""
        async with asyncio.timeout(20):
            while True:
                held = self.holds.held
                if held is not None and held.carrying:
                    [(first, _, _)] = self.store.lookup("large_commits")
                    if 2 <= len(self.store.lookup("some_slices", (first, -1))) < COUNT // SLICE:
                        return
                await asyncio.sleep(0)

    async def leftovers(self) -> list[Any]:
        """What is left of large commits once none is under way."""
        while self.holds:
            await asyncio.wait_for(self.probe(), 20)
        return [
            *self.store.lookup("large_commits"),
            *self.store._lookups.raw.execute("SELECT first, number FROM large_slices"),
        ]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path / "data")
    yield made
    if not made.store.failure.done():
        await made.store.close()
    assert check(tmp_path / "data").findings == []


def append(
    path: str,
    body: bytes = b"1",
    *,
    makes: bool = True,
    producer: tuple[str, int, int] | None = None,
    closes: bool = False,
    **conditions: Any,
) -> Append:
    return Append(
        path,
        batch_of(body, JSON) if body else None,
        JSON if body else None,
        closes,
        None if producer is None else ProducerTuple(*producer),
        None,
        digest(JSON if body else "", closes, body),
        Conditions(create_as=JSON if makes else None, **conditions),
    )


def item(path: str, body: bytes = b"1", *, parts: tuple[str, ...] = (), **more: Any) -> CommitItem:
    if parts:
        body = b""
    return CommitItem(append(path, body, **more), tuple(Part("t", name) for name in parts))


def items(value: int = 1, **more: Any) -> list[CommitItem]:
    return [item(path, b"%d" % value, **more) for path in PATHS]


def upload(part: str, ordinal: int = 0) -> Upload:
    batch = batch_of(b"7", JSON)
    assert batch is not None
    return Upload(Part("t", part), ordinal, JSON, batch, digest(JSON, False, batch.data))


def glob(text: str) -> Glob:
    found = parse_glob(text)
    assert isinstance(found, Glob)
    return found


# Whole or not at all


class Observer:
    """Looks at everything a reader can see, in every turn of the loop, until it is told to stop."""

    def __init__(self, place: Place, before: list[int]) -> None:
        self._place = place
        self._before = before
        self.looked_while_carrying = 0
        self.stopped = False

    async def watch_streams(self) -> None:
        store = self._place.store
        while not self.stopped:
            held = self._place.holds.held
            carrying = held is not None and held.carrying
            infos = [await store.look(path, touch=True) for path in PATHS]
            counts = [info.tail.messages if isinstance(info, StreamInfo) else 0 for info in infos]
            assert counts in (self._before, [count + 1 for count in self._before])
            self.looked_while_carrying += carrying and counts == self._before
            await asyncio.sleep(0)

    async def watch_tables(self) -> None:
        lists, logs = self._place.lists, self._place.logs
        every = LogQuery(Selection([], [glob("s/*")], None), -1, None, 10_000, 1 << 20)
        while not self.stopped:
            page = await lists.list_streams(glob("s/*"), after="", limit=100)
            found = {one.path: one.tail.messages for one in page.entries}
            assert [found.get(path, 0) for path in PATHS] in self._wholes()
            senders = await lists.list_producers(glob("s/*"), None, after=("", ""), limit=100)
            assert len(senders.entries) in (0, COUNT)
            keys = await lists.list_keys(owner=None, after=(-1, "", ""), as_of_ms=None, limit=100)
            assert len(keys.entries) in (0, COUNT)
            _, rows = found_rows(await logs.read(every, count_rows))
            assert (rows or 0) in (sum(self._before), sum(self._before) + COUNT)

    def _wholes(self) -> tuple[list[int], list[int]]:
        return self._before, [count + 1 for count in self._before]


def found_rows(
    read: tuple[LogChunk, T | None] | Pruned | BeyondHead,
) -> tuple[LogChunk, T | None]:
    assert not isinstance(read, Pruned | BeyondHead), read
    return read


def count_rows(rows: LogRows) -> int:
    return len(rows.positions)


async def test_readers_see_all_of_a_large_commit_or_nothing(place: Place) -> None:
    for path in PATHS[::2]:
        await answered(place.append(path))
    observer = Observer(place, [1, 0] * (COUNT // 2))
    watching = [
        asyncio.create_task(observer.watch_streams()),
        asyncio.create_task(observer.watch_tables()),
    ]

    done = await answered(
        place.commit(*[item(path, producer=("p", 0, 0), key="k") for path in PATHS])
    )

    assert isinstance(done, CommittedInSlices) or len(done.outcomes) == COUNT
    observer.stopped = True
    await asyncio.gather(*watching)
    assert observer.looked_while_carrying > 3
    assert {await place.content(path) for path in PATHS} == {b"1,1", b"1"}
    assert await place.leftovers() == []


async def test_other_writers_are_answered_while_a_large_commit_is_under_way(place: Place) -> None:
    done = place.commit(*items())
    await asyncio.sleep(0)
    positions = []
    while not done.done():
        outcome = await answered(place.append("other"))
        assert isinstance(outcome, Appended)
        positions.append(outcome.position)

    await done
    assert len(positions) > COUNT // SLICE
    assert await place.content("other") == b",".join([b"1"] * len(positions))
    query = LogQuery(Selection([], [], None), -1, None, 10_000, 1 << 20)
    _, found = found_rows(await place.logs.read(query, lambda rows: list(rows.positions)))
    assert found == sorted(found or [])
    assert set(positions) < set(found or [])


async def test_a_position_behind_a_large_commit_is_known_before_it_can_be_read(
    place: Place,
) -> None:
    done = place.commit(*items())
    await place.carrying()
    behind = await answered(place.append("other"))
    query = LogQuery(Selection([], [], None), behind.position, None, 10, 1000)

    head = await place.logs.head()
    chunk, _ = found_rows(await place.logs.read(query, count_rows))
    await done

    assert head < behind.position <= await place.logs.head()
    assert (chunk.rows, chunk.next) == (None, behind.position)


async def test_readers_of_the_log_are_woken_for_what_a_large_commit_held_back(
    place: Place,
) -> None:
    told: list[str] = []
    done = place.commit(*items())
    await place.carrying()
    await answered(place.append("other"))
    place.store.listen(lambda changes: told.extend(change.info.path for change in changes))

    await done

    assert "other" in told
    assert set(PATHS) <= set(told)


# Who waits


async def test_what_comes_for_held_streams_is_decided_afterwards_in_its_order(
    place: Place,
) -> None:
    """No request waits for an answer here, so only the order of arrival counts."""
    a, b, gone = PATHS[0], PATHS[-1], PATHS[1]
    asked = [
        place.append(a, b"0"),
        place.commit(*items(1)),
        place.append(a, b"2"),
        place.append(b, b"2", if_match=Offset(1, 1)),
        place.commit(item(a, b"3"), item("free", b"3")),
        place.commit(*items(4)),
        place.append(a, b"5"),
        place.append(b, b"5", if_match=Offset(1, 1)),
        place.ask(place.store.delete, gone),
        place.append(gone, b"6"),
        place.append("free", b"6"),
        place.ask(place.store.create, Create(PATHS[2], content_type="text/plain")),
        place.ask(place.store.create, Create("fork", fork_from=ForkFrom(b, None, 0))),
        place.ask(place.store.truncate, PATHS[3], None),
    ]

    outcomes = [await answered(one) for one in asked]

    assert isinstance(outcomes[7], TailMoved)
    assert outcomes[8] == Deleted()
    assert isinstance(outcomes[11], ConfigConflict | Exists)
    assert isinstance(outcomes[12], Created)
    assert await place.content(a) == b"0,1,2,3,4,5"
    assert await place.content(b) == b"1,2,4"
    assert await place.content(gone) == b"6"
    assert await place.content("fork") == b"1,2,4"
    assert await place.content(PATHS[3]) == b""


async def test_a_fork_of_a_held_stream_ends_after_the_commit(place: Place) -> None:
    """Ending a fork changes what it was forked from, which must not be undone by a slice."""
    source = PATHS[5]
    await answered(place.append(source, b"0"))
    fork = Create("fork", fork_from=ForkFrom(source, None, 0))
    assert isinstance(await answered(place.ask(place.store.create, fork)), Created)

    done = place.commit(*items())
    await place.carrying()
    deleted = place.ask(place.store.delete, "fork")

    await done
    assert await answered(deleted) == Deleted()
    assert await place.content(source) == b"0,1"


async def test_the_same_key_or_batch_again_waits_for_the_first(place: Place) -> None:
    await answered(place.ask(place.store.open_writer, WriterOpen("w", "q")))
    keyed = place.commit(*items(1), key="k")
    again = place.commit(*items(1), key="k")
    other = place.commit(item("x"), key="k", mark=b"n" * 16)
    batch = WriterBatch("w", "q", 1, 0, "d")
    published = place.commit(*items(2), writer=batch)
    repeated = place.commit(writer=batch)
    fencing = place.ask(place.store.open_writer, WriterOpen("w", "q"))
    late = place.commit(*items(3), writer=batch._replace(batch=1))

    first = await answered(keyed)

    replayed = await answered(again)
    assert isinstance(replayed, CommitReplayed)
    assert isinstance(await answered(other), CommitKeyReused)
    assert len(first.outcomes) == COUNT
    await answered(published)
    assert await answered(repeated) == BatchDone(0, True)
    assert (await answered(fencing)).writer.batch == 0
    assert await answered(late) == WriterFenced(2)
    assert await place.content(PATHS[0]) == b"1,2"


async def test_parts_are_used_once_and_stand_still_meanwhile(place: Place) -> None:
    for number in range(COUNT):
        await answered(place.ask(place.store.stage, upload(f"p{number}")))
    done = place.commit(*[item(path, parts=(f"p{number}",)) for number, path in enumerate(PATHS)])
    later = place.ask(place.store.stage, upload("p0", 1))
    bundle = place.ask(place.store.stage_all, Bundle([upload("p3", 1), upload("p4", 1)]))
    dropped = place.ask(place.store.unstage, Part("t", "p1"))
    again = place.commit(item("x", parts=("p2",)))
    place.clock.advance(10 * 86_400_000)
    swept = asyncio.create_task(SqliteUpkeep(place.store, place.clock).sweep_parts())

    await answered(done)

    assert isinstance(await answered(later), PartClosed)
    assert [type(one) for one in await answered(bundle)] == [PartClosed, PartClosed]
    assert isinstance(await answered(dropped), PartUsed)
    refused = await answered(again)
    assert isinstance(refused, CommitRefused)
    assert isinstance(refused.outcome, PartUsed)
    await swept
    assert {await place.content(path) for path in PATHS} == {b"7"}
    assert place.store.ledger.staging.waiting_count == 0


# What comes to nothing


async def test_one_refused_append_leaves_nothing_of_a_large_commit(place: Place) -> None:
    for number in range(COUNT):
        await answered(place.ask(place.store.stage, upload(f"p{number}")))
    parts = [item(path, parts=(f"p{number}",)) for number, path in enumerate(PATHS)]

    missing = await answered(place.commit(*parts, item("x", parts=("none",)), key="k"))
    moved = await answered(place.commit(*items(), item(PATHS[0], if_match=START), key="k"))

    assert missing == CommitRefused(COUNT, PartMissing(Part("t", "none")))
    assert isinstance(moved, CommitRefused)
    assert moved.item == COUNT
    assert isinstance(moved.outcome, TailMoved)
    for path in PATHS:
        assert isinstance(await place.store.look(path, touch=False), Missing)
    dropped = await answered(place.ask(place.store.unstage, Part("t", "p0")))
    assert dropped == PartDropped()
    after = await answered(place.append("free"))
    assert after.position == await place.logs.head(), "the log is held back no longer"
    assert await place.leftovers() == []


async def test_a_large_commit_again_is_a_duplicate_and_in_part_a_refusal(place: Place) -> None:
    sent = [item(path, producer=("p", 0, 0)) for path in PATHS]
    await answered(place.commit(*sent))

    again = await answered(place.commit(*sent))
    more = await answered(place.commit(*sent, item("x", producer=("p", 0, 0))))

    assert len(again.outcomes) == COUNT
    assert isinstance(more, CommitPartial)
    assert more.duplicates == tuple(range(COUNT))
    assert isinstance(await place.store.look("x", touch=False), Missing)
    assert await place.leftovers() == []


async def test_deleted_and_expired_streams_are_treated_as_ever(place: Place) -> None:
    for path in ("soft", "short"):
        lifetime = Lifetime(ttl_s=1) if path == "short" else Lifetime()
        made = Create(path, content_type=JSON, batch=batch_of(b"0", JSON), lifetime=lifetime)
        await answered(place.ask(place.store.create, made))
    await answered(
        place.ask(place.store.create, Create("fork", fork_from=ForkFrom("soft", None, 0)))
    )
    await answered(place.ask(place.store.delete, "soft"))
    place.clock.advance(5_000)

    refused = await answered(place.commit(*items(), item("soft")))
    done = await answered(place.commit(*items(), item("short", b"9")))

    assert refused == CommitRefused(COUNT, ItemDeleted())
    assert len(done.outcomes) == COUNT + 1
    assert await place.content("short") == b"9"


async def test_an_expiry_during_a_large_commit_does_not_undo_it(place: Place) -> None:
    for path in PATHS:
        made = Create(path, content_type=JSON, lifetime=Lifetime(ttl_s=10))
        await answered(place.ask(place.store.create, made))
    done = place.commit(*items())
    await place.carrying()
    place.clock.advance(9_000)
    upkeep = SqliteUpkeep(place.store, place.clock)
    await upkeep.expire()

    await done

    assert {await place.content(path) for path in PATHS} == {b"1"}


async def test_the_answer_to_a_large_commit_is_kept_with_its_key(place: Place) -> None:
    answers = []
    for _ in range(2):
        outcome = place.commit(*items(), key="k")
        async with asyncio.timeout(20):
            answers.append((await outcome).answer)
    await place.store.close()
    place.open()
    async with asyncio.timeout(20):
        answers.append((await place.commit(*items(), key="k")).answer)

    assert len(set(answers)) == 1
    assert answers[0].count(b'"position"') == COUNT


# Ends in the middle


async def test_a_stop_before_a_large_commit_is_certain_leaves_nothing(place: Place) -> None:
    done = place.commit(*items(), key="k")
    await place.until_begun()

    await place.store.close()
    place.open()

    assert await done == Failed(full=False)
    assert await place.leftovers() == []
    for path in PATHS:
        assert isinstance(await place.store.look(path, touch=False), Missing)
    assert (await answered(place.append("free"))).position == await place.logs.head()


async def test_a_stop_between_two_slices_is_made_up_for_at_the_next_start(place: Place) -> None:
    await answered(place.ask(place.store.open_writer, WriterOpen("w", "q")))
    batch = WriterBatch("w", "q", 1, 4, "d")
    done = place.commit(*items(), key="k", writer=batch)
    await place.carrying()
    waiting = [place.append(PATHS[0], b"2"), place.append(PATHS[-1], b"2")]

    await place.store.close()
    assert check(place.settings.folder).findings == []
    place.open()

    assert await done == Unknown()
    assert [await answered(one) for one in waiting] == [Failed(full=False)] * 2
    assert {await place.content(path) for path in PATHS} == {b"1"}
    assert await answered(place.commit(*items(), key="k", writer=batch)) == BatchDone(4, True)
    replayed = place.commit(*items(), key="k")
    async with asyncio.timeout(20):
        assert isinstance(await replayed, CommitReplayed)
    page = await place.lists.list_streams(glob("s/*"), after="", limit=100)
    assert len(page.entries) == COUNT
    query = LogQuery(Selection([], [glob("s/*")], None), -1, None, 10_000, 1 << 20)
    _, rows = found_rows(await place.logs.read(query, count_rows))
    assert rows == COUNT


async def test_a_check_finds_what_is_wrong_with_slices_that_are_left(tmp_path: Path) -> None:
    """Each kind of damage is done to a copy of what a stop between two slices leaves."""
    place = Place(tmp_path / "data")
    done = place.commit(*items())
    await place.carrying()
    await place.store.close()
    assert await done == Unknown()
    assert check(tmp_path / "data").findings == []

    found = {}
    for code in ("slice_missing", "slice_gap", "slice_half_carried"):
        copy = Path(shutil.copytree(tmp_path / "data", tmp_path / code))
        connection = apsw.Connection(str(copy / FILE))
        query = "SELECT content FROM large_slices ORDER BY number LIMIT 1"
        [(content,)] = connection.execute(query).fetchall()
        assert isinstance(content, bytes)
        if code == "slice_missing":
            connection.execute(
                "DELETE FROM large_slices WHERE number = (SELECT max(number) FROM large_slices)"
            )
        elif code == "slice_gap":
            connection.execute(
                "DELETE FROM large_slices WHERE number = (SELECT min(number) + 1 FROM large_slices)"
            )
        else:
            row = decode_slice(content).log[0]
            connection.execute(f"INSERT INTO log VALUES ({', '.join('?' * len(row))})", tuple(row))
        connection.close()
        found[code] = set(check(copy).codes)

    assert found["slice_missing"] == found["slice_gap"] == {"slice_missing"}
    assert "slice_half_carried" in found["slice_half_carried"]


async def test_subscriptions_hear_of_streams_that_a_start_has_finished(place: Place) -> None:
    first = await watching(place)
    await first.engine.create("all", pull_config("s/*"), "http://here")
    done = place.commit(*items())
    await place.carrying()
    await place.store.close()
    await first.webhooks.close()
    assert await done == Unknown()

    place.open()
    second = await watching(place)

    subscription = second.engine.find("all")
    assert subscription is not None
    assert sorted(subscription.links) == PATHS
    assert sorted(subscription.pending) == PATHS
    await second.engine.durable()
    assert await place.leftovers() == []
    await second.webhooks.close()


async def watching(place: Place) -> Subscriptions:
    """The store's subscriptions."""
    return await open_subscriptions(
        SqliteSubscriptions(place.store),
        place.clock,
        SubscriptionSettings(),
        Limits(),
        on_loopback=True,
    )
