"""A full disk: writers hear 507, readers go on, and when there is room again so does everything.

The disk here is a VFS that counts; where this process may mount one, a real and very small tmpfs
does the same to a whole server (`test_a_real_full_file_system`).
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fencepost.protocol.appends import Appended, Duplicate, SequenceGap
from fencepost.store.contract import Deleted, Failed
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.connection import is_disk_error
from fencepost.testing import FullDisk, TestServer, fault_vfs
from tests.faults.recovery import check_rows
from tests.faults.stores import an_append, append, appended, content, create, delete, opened
from tests.faults.wire import HttpRequest, Wire, asked, get, post, put, remove
from tests.serving import ServerProcess

FULL = Failed(full=True)
BLOCK = bytes(20_000)
ROOM = 900_000
"""What an empty store takes, and some appends."""


async def test_a_full_disk_stores_nothing_and_says_so_until_there_is_room(tmp_path: Path) -> None:
    disk = FullDisk(ROOM)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            stored = 0
            while (outcome := await append(store, "s", BLOCK, stored)) != FULL:
                assert isinstance(outcome, Appended)
                stored += 1
            assert stored > 3
            assert disk.refused_count

            assert await append(store, "s", BLOCK, stored) == FULL
            assert not store.failure.done()
            assert await content(store, "s") == BLOCK * stored
            # What was refused did not advance the producer either, in memory or on disk.
            assert await append(store, "s", BLOCK, stored + 1) == SequenceGap(stored, stored + 1)

            disk.bytes_max *= 2
            await appended(store, "s", BLOCK, stored)
            assert isinstance(await append(store, "s", BLOCK, stored), Duplicate)
            await appended(store, "s", b"end", stored + 1)
            expected = BLOCK * (stored + 1) + b"end"
            assert await content(store, "s") == expected

    async with opened(tmp_path) as store:
        assert await content(store, "s") == expected
    check_rows(tmp_path)


async def test_a_group_that_does_not_fit_fails_as_a_whole(tmp_path: Path) -> None:
    disk = FullDisk(ROOM)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            answers: list[object] = []
            store.append(an_append("s", b"small", seq=0), answers.append)
            store.append(an_append("s", bytes(1_000_000), seq=1), answers.append)
            store.append(an_append("s", b"small too", seq=2), answers.append)
            await store.commits.settled()

            assert answers == [FULL] * 3
            assert await content(store, "s") == b""
            await appended(store, "s", b"small", 0)
    check_rows(tmp_path)


async def test_a_group_too_large_for_the_cache_fails_like_any_other(tmp_path: Path) -> None:
    """SQLite writes such a group out before its commit, so a statement is what finds no room."""
    disk = FullDisk(ROOM)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            store._writer.connection.raw.pragma("cache_size", 10)

            assert await append(store, "s", bytes(1_000_000), 0) == FULL

            assert not store.failure.done()
            await appended(store, "s", b"small", 0)
            assert await content(store, "s") == b"small"
    check_rows(tmp_path)


async def test_deletes_make_room_on_a_disk_that_allows_a_little_more(tmp_path: Path) -> None:
    disk = FullDisk(ROOM)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            seq = 0
            while await append(store, "s", BLOCK, seq) != FULL:
                seq += 1
            disk.bytes_max += 100_000
            assert await delete(store, "s") == Deleted()
    check_rows(tmp_path)


async def test_a_store_opens_on_a_full_disk_and_can_be_read(tmp_path: Path) -> None:
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            await appended(store, "s", BLOCK, 0)
            # As after a kill: a log that was never folded into the database.
            killed = copied(tmp_path, tmp_path / "killed")

    disk = FullDisk(0)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with opened(killed, vfs) as store:
            assert await content(store, "s") == BLOCK
            assert await append(store, "s", b"more", 1) == FULL
            disk.bytes_max = 10_000_000
            await appended(store, "s", b"more", 1)
    assert disk.refused_count


async def test_a_full_disk_is_507_to_writers_and_nothing_to_readers(tmp_path: Path) -> None:
    disk = FullDisk(ROOM)
    with fault_vfs() as vfs:
        vfs.rules.append(disk)
        async with TestServer(SqliteSettings(folder=tmp_path, vfs=vfs.name)) as server:
            await asked(server.port, put("s"))
            await _fill(server.port)
            refused = await asked(server.port, post("s", BLOCK, producer="q"))
            read = await asked(server.port, get("s"))
            disk.bytes_max *= 2
            accepted = await asked(server.port, post("s", BLOCK, producer="q"))
            again = await asked(server.port, post("s", BLOCK, producer="q"))

    assert (refused.status, refused.code) == (507, "storage_full")
    assert read.status == 200
    assert (accepted.status, again.status) == (200, 204)


async def _fill(port: int) -> int:
    """Append until the disk is full; how many were stored."""
    async with await Wire.connect(port) as wire:
        for seq in range(10_000):
            reply = await wire.ask(post("s", BLOCK, producer="p", seq=seq))
            if reply.status != 200:
                assert reply.status in (503, 507), reply
                return seq
    raise AssertionError("the disk did not fill up")


def copied(folder: Path, to: Path) -> Path:
    """The files of a store that is running, as a kill would leave them."""
    to.mkdir()
    for name in ("fencepost.db", "fencepost.db-wal"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


@contextmanager
def tiny_file_system(folder: Path) -> Iterator[bool]:
    """A file system of 2 MB mounted at `folder`; false where this process may not mount."""
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_real_full_file_system(tmp_path: Path) -> None:
    """A whole server on a tmpfs that fills up, where mounting one is allowed.

    Where it is not (no root, not Linux) the tests above have shown the same on a counting VFS, and
    the ballast file below still takes its turn, only no write runs out of room.
    """
    with tiny_file_system(tmp_path / "disk") as mounted:
        ballast = tmp_path / "disk" / "ballast"
        ballast.write_bytes(bytes(600_000))
        with ServerProcess(tmp_path / "disk" / "data") as server:
            await asked(server.port, put("s"))
            if not mounted:
                stored = 5
                for seq in range(stored):
                    await asked(server.port, post("s", BLOCK, producer="p", seq=seq))
            else:
                stored = await _fill(server.port)
                refused = await asked(server.port, post("s", BLOCK, producer="p", seq=stored))
                assert refused.status in (503, 507), refused
                read = await asked(server.port, HttpRequest("HEAD", "s"))
                assert read.headers["stream-next-offset"].endswith(f"{stored * len(BLOCK):016d}")
            ballast.unlink()
            accepted = await asked(server.port, post("s", BLOCK, producer="p", seq=stored))
            assert accepted.status == 200, (accepted, server.output)
            body = await asked(server.port, get("s"))
            assert body.body == BLOCK * (stored + 1)
            assert (await asked(server.port, remove("s"))).status == 204


def test_no_room_for_the_index_of_the_log_is_a_full_disk_and_not_a_broken_one() -> None:
    """SQLite calls it an I/O error. A real tmpfs has shown it, in the moment the index grows."""
    no_room = apsw.exception_for(apsw.SQLITE_IOERR_SHMSIZE)
    broken = apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)

    assert not is_disk_error(no_room)
    assert is_disk_error(broken)
