"""Rows of streams and producers are written behind the commits: what a kill leaves of that, a full
disk, a copy taken meanwhile, an older version.

The power losses (`test_power_loss`) and the simulation write behind as well, after few rows of the
log or after many. Here each moment between two groups is looked at, and the row that is not written
is the point.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

import fencepost.store.sqlite.check as checking
import fencepost.store.sqlite.migrate as migrating
from fencepost.protocol.appends import Append, Appended, Duplicate, ProducerTuple, SequenceGap
from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.commits import Commit, CommitItem, CommittedInSlices
from fencepost.protocol.globs import Glob
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import Policy, Retention
from fencepost.store.check.report import UnreadableError
from fencepost.store.contract import Failed, StreamInfo
from fencepost.store.read.lists import SqlLists
from fencepost.store.settings import SqliteSettings
from fencepost.store.sql import SchemaTooNewError, load_migrations
from fencepost.store.sqlite.backup import backup
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.connection import FILE
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write.behind import Behind
from fencepost.testing import FailingDisk, FullDisk, SimClock, fault_vfs
from fencepost.testing.vfs import WAL
from tests.faults.recovery import ask, check_rows
from tests.faults.stores import TYPE, create
from tests.old_folders import make_older

STREAMS = [f"s{number}" for number in range(7)]
PRODUCERS = ["p", "q"]


@asynccontextmanager
async def opened(folder: Path, vfs: Any = None, **settings: Any) -> AsyncIterator[SqliteStore]:
    """A store that is closed at the end."""
    name = None if vfs is None else vfs.name
    store = SqliteStore(SqliteSettings(folder=folder, vfs=name, **settings), SimClock())
    try:
        yield store
    finally:
        if vfs is not None:
            vfs.rules.clear()
        await store.close()
        if store.failure.done() and not store.failure.cancelled():
            store.failure.exception()


async def append(store: SqliteStore, path: str, producer_id: str, seq: int) -> Any:
    """The next batch of a producer, and what became of it."""
    body = f"{producer_id}{seq};".encode()
    request = Append(
        path,
        bytes_batch(body),
        TYPE,
        producer=ProducerTuple(producer_id, 0, seq),
        digest=digest(TYPE, False, body),
    )
    return await ask(lambda done: store.append(request, done))


class Writers:
    """Producers that append in an order of their own, and what each of them has been answered."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.sent: Counter[tuple[str, str]] = Counter()

    async def append(self, store: SqliteStore) -> None:
        place = self._dice.choice(STREAMS), self._dice.choice(PRODUCERS)
        outcome = await append(store, *place, self.sent[place])
        assert isinstance(outcome, Appended), outcome
        self.sent[place] += 1

    async def group(self, store: SqliteStore, count: int) -> None:
        """As many appends, each of another stream, in one group."""
        places = [(path, "p") for path in self._dice.sample(STREAMS, count)]
        outcomes = await asyncio.gather(
            *(append(store, *place, self.sent[place]) for place in places)
        )
        assert all(isinstance(outcome, Appended) for outcome in outcomes), outcomes
        self.sent.update(places)

    def tail(self, path: str) -> Offset:
        counts = [(name, self.sent[path, name]) for name in PRODUCERS]
        size = sum(len(f"{name}{seq};") for name, count in counts for seq in range(count))
        return Offset(sum(count for _, count in counts), size)


def killed(folder: Path, to: Path) -> Path:
    """The files of a store that is running, as a kill would leave them."""
    to.mkdir()
    for name in (FILE, f"{FILE}-wal"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def outstanding(folder: Path) -> int:
    """Rows of the log that the tables of a folder may not say."""
    connection = apsw.Connection(str(folder / FILE))
    query = "SELECT count(*) FROM log WHERE position >= (SELECT written_to FROM behind)"
    [(count,)] = connection.execute(query).fetchall()
    connection.close()
    return int(str(count))


async def made(store: SqliteStore) -> None:
    for path in STREAMS:
        await create(store, path)


async def assert_all_is_known(store: SqliteStore, writers: Writers) -> None:
    """Tails and producers are what was answered: to readers, in lists, and to decisions."""
    lists = SqlLists(store.readers, store.decider.holds)
    listed = {one.path: one for one in (await lists.list_streams(None, after="", limit=99)).entries}
    producers = await lists.list_producers(None, None, after=("", ""), limit=99)
    for path in STREAMS:
        info = await store.look(path, touch=False)
        assert isinstance(info, StreamInfo)
        assert info.tail == listed[path].tail == writers.tail(path)
    seqs = {(one.stream, one.id): one.seq + 1 for one in producers.entries}
    assert seqs == {place: count for place, count in writers.sent.items() if count}
    for place, count in list(writers.sent.items()):
        if count:
            assert isinstance(await append(store, *place, count - 1), Duplicate)
        assert isinstance(await append(store, *place, count + 1), SequenceGap)
        assert isinstance(await append(store, *place, count), Appended)
        writers.sent[place] += 1


@pytest.mark.parametrize("rows_behind_max", [1, 5, 30, 4_096])
async def test_after_a_kill_between_any_two_groups_everything_is_known(
    rows_behind_max: int, tmp_path: Path
) -> None:
    """Before, while and after a generation is written, also by a server that is killed again."""
    writers = Writers(seed=rows_behind_max)
    most = 0
    async with opened(tmp_path / "data", rows_behind_max=rows_behind_max) as store:
        await made(store)
        for number in range(60):
            if number % 3:
                await writers.append(store)
            else:
                await writers.group(store, 1 + number % 7)
            folder = killed(tmp_path / "data", tmp_path / str(number))
            most = max(most, outstanding(folder))
            if number % 4:
                continue
            assert check(folder).findings == []
            copy = Writers(0)
            copy.sent = Counter(writers.sent)
            async with opened(folder, rows_behind_max=3, streams_cached_max=2) as again:
                await assert_all_is_known(again, copy)
                twice = killed(folder, tmp_path / f"{number} again")
            assert check(folder).findings == []
            assert outstanding(folder) == 0, "a server that is stopped leaves nothing for later"
            async with opened(twice) as third:
                await assert_all_is_known(third, copy)
            check_rows(folder)

    assert most > min(rows_behind_max, 60), "there was always something left for later"


async def test_a_server_that_forgets_what_is_behind_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without what the log says, batches would be stored twice."""
    writers = Writers(seed=1)
    async with opened(tmp_path / "data") as store:
        await made(store)
        for _ in range(40):
            await writers.append(store)
        folder = killed(tmp_path / "data", tmp_path / "killed")

    monkeypatch.setattr(Behind, "load", lambda _self, _connection: None)
    async with opened(folder) as again:
        with pytest.raises(AssertionError):
            await assert_all_is_known(again, writers)


async def test_a_disk_that_fills_up_while_rows_are_written_behind_loses_none(
    tmp_path: Path,
) -> None:
    disk = FullDisk(10_000_000)
    writers = Writers(seed=2)
    refused = unwritten = 0
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(tmp_path / "data", vfs, rows_behind_max=4, streams_cached_max=2) as store:
            await made(store)
            dice = random.Random(3)
            for _ in range(150):
                place = dice.choice(STREAMS), dice.choice(PRODUCERS)
                if dice.random() < 0.4:
                    # No room for the next page of the write-ahead log, or a few pages later.
                    disk.bytes_max = sum(disk._sizes.values()) + dice.choice((0, 6_000, 12_000))
                outcome = await append(store, *place, writers.sent[place])
                if isinstance(outcome, Appended):
                    writers.sent[place] += 1
                else:
                    assert outcome == Failed(full=True)
                    refused += 1
                    try:
                        await store.settle()  # may need fewer pages, or none
                    except apsw.FullError:
                        unwritten += 1
                    lists = SqlLists(store.readers, store.decider.holds)
                    page = await lists.list_streams(None, after="", limit=99)
                    assert {one.path: one.tail for one in page.entries} == {
                        path: writers.tail(path) for path in STREAMS
                    }
                    full = killed(tmp_path / "data", tmp_path / f"full {refused}")
                    assert check(full).findings == []
                disk.bytes_max = 10_000_000
            await assert_all_is_known(store, writers)
    assert refused > 20
    assert unwritten > 5
    check_rows(tmp_path / "data")
    assert check(tmp_path / "data").findings == []


async def test_a_store_opens_on_a_full_disk_with_rows_behind(tmp_path: Path) -> None:
    writers = Writers(seed=4)
    async with opened(tmp_path / "data") as store:
        await made(store)
        for _ in range(40):
            await writers.append(store)
        folder = killed(tmp_path / "data", tmp_path / "killed")
    assert outstanding(folder)

    disk = FullDisk(0)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(folder, vfs) as store:
            for path in STREAMS:
                info = await store.look(path, touch=False)
                assert isinstance(info, StreamInfo)
                assert info.tail == writers.tail(path)
            assert await append(store, "s0", "p", writers.sent["s0", "p"]) == Failed(full=True)
            disk.bytes_max = 10_000_000
            await assert_all_is_known(store, writers)
    assert disk.refused_count
    assert check(folder).findings == []


async def test_a_disk_that_fails_while_all_of_it_is_written_stops_the_store(
    tmp_path: Path,
) -> None:
    writers = Writers(seed=5)
    with fault_vfs() as vfs:
        async with opened(tmp_path / "data", vfs) as store:
            await made(store)
            for _ in range(40):
                await writers.append(store)
            vfs.rules.append(FailingDisk("sync", WAL))
            with pytest.raises(apsw.IOError):
                await store.settle()
            assert store.failure.done()

    async with opened(tmp_path / "data") as store:
        await assert_all_is_known(store, writers)


async def test_copies_taken_while_rows_are_written_behind_are_whole(tmp_path: Path) -> None:
    writers = Writers(seed=6)
    async with opened(tmp_path / "data", rows_behind_max=4) as store:
        await made(store)
        for number in range(30):
            await writers.append(store)
            copy = tmp_path / f"{number}.db"
            taken = asyncio.create_task(asyncio.to_thread(backup, tmp_path / "data", copy))
            appended: Counter[tuple[str, str]] = Counter(writers.sent)
            while not taken.done():
                await writers.append(store)
            await taken
            assert check(copy).findings == []
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / FILE).write_bytes(copy.read_bytes())
            async with opened(folder) as again:
                for place, count in appended.items():
                    if count:
                        assert isinstance(await append(again, *place, count - 1), Duplicate)


async def test_a_large_commit_goes_on_from_tails_that_only_the_log_has(tmp_path: Path) -> None:
    writers = Writers(seed=7)
    async with opened(tmp_path / "data", commit_slice_appends=2, streams_cached_max=2) as store:
        await made(store)
        for _ in range(40):
            await writers.append(store)
        assert store.behind.tails
        items = []
        for path in STREAMS:
            seq = writers.sent[path, "p"]
            body = f"p{seq};".encode()
            items.append(
                CommitItem(
                    Append(
                        path,
                        bytes_batch(body),
                        TYPE,
                        producer=ProducerTuple("p", 0, seq),
                        digest=digest(TYPE, False, body),
                    )
                )
            )
        outcome = await ask(lambda done: store.commit(Commit(items), done))
        assert isinstance(outcome, CommittedInSlices), outcome
        writers.sent.update((path, "p") for path in STREAMS)

        folder = killed(tmp_path / "data", tmp_path / "killed")
        await assert_all_is_known(store, writers)
    assert check(folder).findings == []
    assert check(tmp_path / "data").findings == []


async def test_retention_goes_by_tails_that_only_the_log_has(tmp_path: Path) -> None:
    keep = (Policy(Glob("*"), Retention(messages=2)),)
    async with opened(tmp_path / "data", retention=keep, log_retention_ms=0) as store:
        await made(store)
        for seq in range(5):
            await append(store, "s0", "p", seq)
        upkeep = SqliteUpkeep(store, SimClock())

        await upkeep._keeper.retain()

        info = await store.look("s0", touch=False)
        assert isinstance(info, StreamInfo)
        assert (info.first.messages, info.tail.messages) == (3, 5)
        assert await upkeep._keeper.purge() == 3
        assert isinstance(await append(store, "s0", "p", 4), Duplicate)
        assert isinstance(await append(store, "s0", "p", 1), Duplicate), "remembered beyond its row"
        assert isinstance(await append(store, "s0", "p", 5), Appended)
    assert check(tmp_path / "data").findings == []


async def test_what_nobody_adds_to_is_written_when_a_second_look_finds_it(tmp_path: Path) -> None:
    """The upkeep looks once a second: a busy server writes by itself, and is left alone."""
    async with opened(tmp_path / "data") as store:
        await made(store)
        upkeep = SqliteUpkeep(store, SimClock())
        assert not await upkeep.write_behind()
        await append(store, "s0", "p", 0)
        await append(store, "s0", "p", 1)

        assert [await upkeep.write_behind() for _ in range(3)] == [True, False, False]

        assert outstanding(tmp_path / "data") == 0
        await append(store, "s0", "p", 2)
        await store.settle()
        await append(store, "s0", "p", 3)
        assert not await upkeep.write_behind(), "something was written since the last look"
        assert await upkeep.write_behind()


async def test_a_producer_that_is_forgotten_does_not_come_back(tmp_path: Path) -> None:
    async with opened(tmp_path / "data", rows_behind_max=1_000) as store:
        await made(store)
        for seq in range(3):
            await append(store, "s0", "p", seq)
            await append(store, "s1", "q", seq)
        stream_id = store.ledger.cached("s0").stream.id  # type: ignore[union-attr]
        now_ms = store.ledger.last_ms

        assert await store.decide(lambda d: d.forget_producer(stream_id, "p", now_ms, 0))
        await store.settle()

        lists = SqlLists(store.readers, store.decider.holds)
        page = await lists.list_producers(None, None, after=("", ""), limit=9)
        assert [one.id for one in page.entries] == ["q"]
        assert isinstance(await append(store, "s0", "p", 0), Appended), "it begins again"


# Other versions


async def test_a_folder_of_the_version_before_opens(tmp_path: Path) -> None:
    writers = Writers(seed=8)
    folder = tmp_path / "data"
    async with opened(folder) as store:
        await made(store)
        for _ in range(40):
            await writers.append(store)
    make_older(folder, version=16)
    assert check(folder).findings == []

    async with opened(folder) as store:
        await assert_all_is_known(store, writers)
        for _ in range(10):
            await writers.append(store)
        after = killed(folder, tmp_path / "killed")
    assert check(after).findings == []
    async with opened(after) as store:
        await assert_all_is_known(store, writers)


async def test_the_version_before_refuses_a_folder_whose_rows_are_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take old tails for true, and write over messages."""
    async with opened(tmp_path / "data") as store:
        await made(store)
        await append(store, "s0", "p", 0)
        folder = killed(tmp_path / "data", tmp_path / "killed")
    steps = load_migrations("fencepost.store.sqlite.migrations")
    older = [step for step in steps if step[0] <= 16]
    refused = f"schema version {steps[-1][0]}, this server knows 16: run the"
    for module in (migrating, checking):
        monkeypatch.setattr(module, "load_migrations", lambda _package: older)

    with pytest.raises(SchemaTooNewError, match=refused):
        SqliteStore(SqliteSettings(folder=folder), SimClock())
    with pytest.raises(UnreadableError, match="use the newer version"):
        check(folder)
