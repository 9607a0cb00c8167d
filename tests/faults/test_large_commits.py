"""Large commits and bad disks: whatever moment it ends at, all of a commit is there or nothing.

The disks that a power loss may leave are made from a record of every write and sync, as in
`test_power_loss`; each is opened by a store, which finishes what was certain, and looked at.
FENCEPOST_FAULT_KILLS=200 looks at ten times as many of them.
"""

import asyncio
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost.protocol.appends import Append, Appended, Conditions
from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.commits import Commit, CommitItem, CommitReplayed, CommittedInSlices
from fencepost.protocol.writers import BatchDone, WriterBatch, WriterOpen, WriterOpened
from fencepost.store.contract import Chunk, Failed, StreamInfo, Unknown
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.connection import LedgerWriter
from fencepost.store.sqlite.store import SqliteStore, StoreBrokenError
from fencepost.store.write.group_commit import DiskFullError
from fencepost.store.write.ledger_group import LedgerGroup
from fencepost.testing import Disk, DiskLog, FullDisk, SimClock, fault_vfs
from fencepost.testing.disk import everything, nothing, some_prefix, some_sectors, write_image
from tests.faults.recovery import ask

TYPE = "application/octet-stream"
SLICE = 3
COUNT = 24
OLD = [f"old/{number}" for number in range(COUNT // 2)]
PATHS = [*OLD, *(f"new/{number}" for number in range(COUNT // 2))]
POINTS_DEFAULT = 60
BATCH = WriterBatch("w", "q", 1, 0, "d")


def an_append(path: str, data: bytes) -> Append:
    mark = digest(TYPE, False, data)
    conditions = Conditions(create_as=TYPE)
    return Append(path, bytes_batch(data), TYPE, digest=mark, conditions=conditions)


def a_commit(data: bytes = b"<all>", **more: Any) -> Commit:
    return Commit([CommitItem(an_append(path, data)) for path in PATHS], "k", b"m" * 16, **more)


def opened(folder: Path, vfs: str | None = None) -> SqliteStore:
    settings = SqliteSettings(folder=folder, vfs=vfs, commit_slice_appends=SLICE)
    return SqliteStore(settings, SimClock())


async def furnish(store: SqliteStore) -> None:
    for path in OLD:
        appended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        store.append(an_append(path, b"<old>"), appended.set_result)
        assert isinstance(await appended, Appended)
    run = await ask(lambda done: store.open_writer(WriterOpen("w", "q"), done))
    assert isinstance(run, WriterOpened)


async def contents(store: SqliteStore) -> dict[str, bytes]:
    """What is in each stream; nothing where there is none."""
    found = {}
    for path in PATHS:
        info = await store.look(path, touch=False)
        found[path] = b""
        if isinstance(info, StreamInfo):
            chunk = await store.read(info, info.first, bytes_max=1 << 20)
            assert isinstance(chunk, Chunk)
            found[path] = chunk.data
    return found


BEFORE = {path: b"<old>" if path in OLD else b"" for path in PATHS}
AFTER = {path: data + b"<all>" for path, data in BEFORE.items()}


async def record(folder: Path, log: DiskLog) -> tuple[int, int]:
    """A large commit beside other writers; where it was asked for, and where it was answered."""
    with fault_vfs(log=log) as vfs:
        store = opened(folder, vfs.name)
        await furnish(store)
        asked = len(log.operations)
        answered: list[int] = []
        done = asyncio.get_running_loop().create_future()
        store.commit(a_commit(writer=BATCH), done.set_result)
        done.add_done_callback(lambda _: answered.append(len(log.operations)))
        while not done.done():
            other = await ask(lambda done: store.append(an_append("other", b"x"), done))
            assert isinstance(other, Appended)
        assert isinstance(await done, CommittedInSlices)
        await store.close()
    return asked, answered[0]


async def test_a_power_loss_at_any_point_leaves_all_of_a_large_commit_or_nothing(
    tmp_path: Path,
) -> None:
    seed = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
    many = int(os.environ.get("FENCEPOST_FAULT_KILLS", "0")) >= 200
    dice = random.Random(seed)
    log = DiskLog()
    asked, answered = await record(tmp_path / "recorded", log)
    points = sorted(
        dice.sample(
            range(asked, len(log.operations)),
            min(len(log.operations) - asked, POINTS_DEFAULT * (10 if many else 1)),
        )
    )
    seen = {"nothing": 0, "finished": 0, "all": 0}
    disk, at = Disk(), 0
    for number, point in enumerate(points):
        disk.advance(log.operations, point)
        at = point
        survives = dice.choice((nothing, everything, some_prefix(dice), some_sectors(dice)))
        folder = tmp_path / f"loss-{number}"
        write_image(disk.cut(survives), folder)
        try:
            seen[await look_at(folder, answered=at >= answered)] += 1
        except BaseException as error:
            error.add_note(f"power loss before operation {point}; FENCEPOST_FAULT_SEED={seed}")
            raise
    assert all(seen.values()), f"some kind of end was never seen: {seen}"


async def look_at(folder: Path, *, answered: bool) -> str:
    """What a disk holds after a power loss, once a store has opened it."""
    under_way = check(folder)
    assert under_way.findings == []
    store = opened(folder)
    found = await contents(store)
    finished = bool(store.lookup("large_commits"))
    writer = await store.find_writer("w")
    assert found in (BEFORE, AFTER)
    assert found == AFTER or not answered, "it was answered, and is lost"
    again = await ask(lambda done: store.commit(a_commit(writer=BATCH), done))
    if found == AFTER:
        assert again == BatchDone(0, True)
        replayed = await ask(lambda done: store.commit(a_commit(), done))
        assert isinstance(replayed, CommitReplayed)
    else:
        assert getattr(writer, "batch", None) is None
        assert isinstance(again, CommittedInSlices)
    assert await contents(store) == AFTER
    await store.close()
    assert check(folder).findings == []
    if found == BEFORE:
        return "nothing"
    return "finished" if finished else "all"


async def test_a_disk_that_fills_up_under_a_large_commit_loses_nothing_of_it(
    tmp_path: Path,
) -> None:
    """Wherever it fills up: before it is certain the commit is refused, later it is finished."""
    kinds = set()
    for room in range(10_000, 400_000, 15_000):
        folder = tmp_path / str(room)
        disk = FullDisk(1 << 40)
        with fault_vfs() as vfs:
            vfs.rules.append(disk)
            store = opened(folder, vfs.name)
            await furnish(store)
            disk.bytes_max = sum(file.stat().st_size for file in folder.iterdir()) + room
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            store.commit(a_commit(bytes(3000)), done.set_result)
            while not (done.done() or disk.refused_count):
                assert await store.probe() in (None, Failed(full=True))
            disk.bytes_max = 1 << 40
            async with asyncio.timeout(30):
                outcome = await done
            whole = {path: data + bytes(3000) for path, data in BEFORE.items()}
            assert not store.failure.done()
            found = await contents(store)
            assert found == (whole if isinstance(outcome, CommittedInSlices) else BEFORE)
            kinds.add(type(outcome) if not isinstance(outcome, Failed) else outcome)
            again: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            store.commit(a_commit(bytes(3000)), again.set_result)
            assert isinstance(await again, CommittedInSlices | CommitReplayed)
            await store.close()
        assert check(folder).findings == []
    assert Failed(full=True) in kinds
    assert CommittedInSlices in kinds


async def test_a_slice_that_could_not_be_written_is_carried_out_before_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit appends twice to each stream, in two slices: the later one is the stream's end."""
    monkeypatch.setattr("fencepost.store.large.commits.RETRY_S", 0)
    write = LedgerWriter.write
    twice = [CommitItem(an_append(path, data)) for data in (b"<1>", b"<2>") for path in PATHS]
    carried: list[int] = []
    left = 0

    def failing(self: LedgerWriter, sealed: LedgerGroup) -> None:
        nonlocal left
        left -= bool(sealed.carried)
        if sealed.carried and left == 0:
            raise DiskFullError("no room, as the test asked")
        write(self, sealed)
        carried.extend(piece.log[0][0] for piece in sealed.carried if piece.log)

    monkeypatch.setattr(LedgerWriter, "write", failing)
    for number in range(1, 2 * COUNT // SLICE):
        folder = tmp_path / str(number)
        store = opened(folder)
        await furnish(store)
        left = number
        carried.clear()

        outcome = await ask(partial(store.commit, Commit(twice)))

        assert isinstance(outcome, CommittedInSlices)
        assert len(carried) == 2 * COUNT // SLICE
        assert carried == sorted(carried), "a slice overtook one that was tried again"
        assert await contents(store) == {path: BEFORE[path] + b"<1><2>" for path in PATHS}
        await store.close()
        assert check(folder).findings == []


class BreakingDisk:
    """Every sync of the write-ahead log fails from a certain one on."""

    def __init__(self, syncs: int) -> None:
        self._left = syncs

    def __call__(self, kind: str, file: str, size: int, end: int) -> None:
        del size, end
        if kind == "sync" and file.endswith("-wal"):
            self._left -= 1
            if self._left < 0:
                raise apsw.IOError("the disk failed, as the test asked")


async def test_a_disk_that_breaks_under_a_large_commit_stops_the_store_and_is_made_up_for(
    tmp_path: Path,
) -> None:
    ends = set()
    for number in range(1, 40, 3):
        folder = tmp_path / str(number)
        with fault_vfs() as vfs:
            store = opened(folder, vfs.name)
            await furnish(store)
            vfs.rules.append(BreakingDisk(number))
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            store.commit(a_commit(), done.set_result)
            async with asyncio.timeout(30):
                outcome = await done
            vfs.rules.clear()
            await store.close()
            if store.failure.done() and not store.failure.cancelled():
                assert isinstance(store.failure.exception(), StoreBrokenError)
        store = opened(folder)
        found = await contents(store)
        assert found in (BEFORE, AFTER)
        if isinstance(outcome, CommittedInSlices):
            assert found == AFTER
        elif isinstance(outcome, Failed):
            assert found == BEFORE
        else:
            assert outcome == Unknown()
        ends.add(found == AFTER)
        await store.close()
        assert check(folder).findings == []
    assert ends == {True, False}


class Hiccup:
    """One commit ends in doubt, without the disk's fault: a write of it finds no memory."""

    def __init__(self, writes: int) -> None:
        self._left = writes
        self.happened = False

    def __call__(self, kind: str, file: str, size: int, end: int) -> None:
        del size, end
        if kind == "write" and file.endswith("-wal") and not self.happened:
            self._left -= 1
            if self._left < 0:
                self.happened = True
                raise apsw.NoMemError("no memory, as the test asked")


async def test_a_commit_in_doubt_on_the_way_leaves_a_large_commit_whole_in_the_same_server(
    tmp_path: Path,
) -> None:
    kinds = set()
    for writes in range(0, 90, 6):
        folder = tmp_path / str(writes)
        hiccup = Hiccup(writes)
        with fault_vfs() as vfs:
            store = opened(folder, vfs.name)
            await furnish(store)
            vfs.rules.append(hiccup)
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            store.commit(a_commit(), done.set_result)
            async with asyncio.timeout(30):
                outcome = await done
            found = await contents(store)
            assert found == (AFTER if isinstance(outcome, CommittedInSlices) else BEFORE)
            kinds.add(type(outcome))
            again: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            store.commit(a_commit(), again.set_result)
            assert isinstance(await again, CommittedInSlices | CommitReplayed)
            assert await contents(store) == AFTER
            await store.close()
        store = opened(folder)
        assert await contents(store) == AFTER
        await store.close()
        assert check(folder).findings == []
    assert CommittedInSlices in kinds
    assert {Unknown, Failed} & kinds
