"""The tools themselves: a disk that forgets what it should, and nothing else."""

import random
from pathlib import Path

from fencepost.store.settings import SqliteSettings
from fencepost.testing import Disk, DiskLog, SimClock, TestServer
from fencepost.testing.disk import (
    Delete,
    Operation,
    Sync,
    Truncate,
    Write,
    everything,
    nothing,
    some_sectors,
)
from tests.faults.wire import asked, get, head, post, put


def disk_after(operations: list[Operation]) -> Disk:
    disk = Disk()
    disk.advance(operations, len(operations))
    return disk


def test_what_was_not_synced_is_gone_after_a_power_loss_and_there_after_a_kill() -> None:
    disk = disk_after([Write("f", 0, b"aaaa"), Sync("f", 1), Write("f", 2, b"bbbb")])

    assert disk.cut(nothing) == {"f": b"aaaa"}
    assert disk.cut(everything) == {"f": b"aabbbb"}


def test_a_write_during_a_sync_is_not_promised_by_it() -> None:
    disk = disk_after([Write("f", 0, b"old"), Write("f", 0, b"new"), Sync("f", 1)])

    assert disk.cut(nothing) == {"f": b"old"}


def test_a_deleted_file_may_come_back_until_its_folder_is_synced() -> None:
    operations: list[Operation] = [
        Write("journal", 0, b"x"),
        Sync("journal", 1),
        Delete("journal"),
        Write("wal", 0, b"y"),
    ]

    assert disk_after(operations).cut(nothing) == {"journal": b"x"}
    assert disk_after([*operations, Sync("wal", 4, folder=True)]).cut(nothing) == {"wal": b"y"}


def test_a_truncation_is_lost_like_a_write() -> None:
    disk = disk_after([Write("f", 0, b"abcdef"), Sync("f", 1), Truncate("f", 2)])

    assert disk.cut(nothing) == {"f": b"abcdef"}
    assert disk.cut(everything) == {"f": b"ab"}


def test_writes_are_torn_between_sectors_only() -> None:
    before, after = b"-" * 2048, b"+" * 1500
    disk = disk_after([Write("f", 0, before), Sync("f", 1), Write("f", 100, after)])
    whole = disk.cut(everything)["f"]

    seen = set()
    for seed in range(200):
        torn = disk.cut(some_sectors(random.Random(seed)))["f"]
        for start in range(0, len(whole), 512):
            sector = torn[start : start + 512]
            assert sector in (before[start : start + 512], whole[start : start + 512])
        seen.add(torn)

    assert len(seen) == 16, "four sectors are touched, and each may be there or not"


def test_a_log_keeps_the_marks_between_the_operations() -> None:
    log = DiskLog()
    log.record(Write("f", 0, b"a"))
    log.mark("answered")
    log.record(Sync("f", 1))

    assert [type(operation).__name__ for operation in log.operations] == ["Write", "Mark", "Sync"]


async def test_a_server_in_the_loop_lives_by_the_clock_that_it_is_given(tmp_path: Path) -> None:
    clock = SimClock()
    async with TestServer(SqliteSettings(folder=tmp_path), clock=clock) as server:
        assert (await asked(server.port, put("s", stream_ttl="60"))).status == 201
        assert (await asked(server.port, post("s", b"x"))).status == 204
        assert (await asked(server.port, get("s"))).body == b"x"
        clock.advance(60_001)
        assert (await asked(server.port, head("s"))).status == 404
