"""A disk that fails: what is certain is said, what is not is called unknown, nothing is guessed.

The errors come out of a VFS, so SQLite meets them where a real disk would produce them: in the sync
of a commit, in its writes, in the statements before it, in a checkpoint.
"""

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost.protocol.appends import Appended, Duplicate, SequenceGap
from fencepost.store.contract import Deleted, Failed, Missing, Unknown
from fencepost.store.sqlite.connection import fold
from fencepost.store.sqlite.store import SqliteStore, StoreBrokenError
from fencepost.testing import FailingDisk, SyncGate, fault_vfs
from fencepost.testing.vfs import DATABASE, WAL
from tests.faults.recovery import check_rows
from tests.faults.stores import an_append, append, appended, content, create, delete, opened


def is_broken(store: SqliteStore) -> bool:
    """Whether the store asked to be stopped."""
    return store.failure.done() and isinstance(store.failure.exception(), StoreBrokenError)


@pytest.mark.parametrize("kind", ["sync", "write"])
async def test_a_failed_commit_is_an_unknown_outcome_and_ends_the_store(
    kind: Any, tmp_path: Path
) -> None:
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            await appended(store, "s", b"one", 0)
            vfs.rules.append(FailingDisk(kind, WAL))

            outcome = await append(store, "s", b"two", 1)

            assert outcome == Unknown()
            assert is_broken(store)
            assert await content(store, "s") == b"one"

    async with opened(tmp_path) as store:
        assert await content(store, "s") in (b"one", b"onetwo")
        retried = await append(store, "s", b"two", 1)
        assert isinstance(retried, Appended | Duplicate)
        assert await content(store, "s") == b"onetwo"
    check_rows(tmp_path)


async def test_after_a_failed_commit_nothing_is_decided_or_stored_any_more(tmp_path: Path) -> None:
    """`Failed` says that nothing happened, so closing the store must not make it happen."""
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            await create(store, "kept")
            vfs.rules.append(FailingDisk("sync", WAL))
            assert await append(store, "s", b"zero", 0) == Unknown()

            after = [
                await append(store, "s", b"one", 1),
                await append(store, "s", b"unnumbered"),
                await create(store, "new"),
                await delete(store, "kept"),
            ]

            assert after == [Failed(full=False)] * 4

    async with opened(tmp_path) as store:
        assert await content(store, "s") in (b"", b"zero")
        assert await content(store, "kept") == b""
        assert await delete(store, "new") == Missing()
    check_rows(tmp_path)


async def test_a_failed_commit_takes_along_what_was_decided_on_top_of_it(tmp_path: Path) -> None:
    gate = SyncGate()
    disk = FailingDisk("sync", WAL, times=0)
    with fault_vfs() as vfs:
        vfs.rules += [gate, disk]
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            gate.close()
            answers: dict[str, object] = {}

            def told(name: str) -> Any:
                return lambda outcome: answers.__setitem__(name, outcome)

            store.append(an_append("s", b"zero", seq=0), told("first"))
            await asyncio.to_thread(gate.await_arrival)
            store.append(an_append("s", b"one", seq=1), told("on top"))
            store.append(an_append("s", b"zero", seq=0), told("duplicate"))
            store.append(an_append("s", b"far", seq=7), told("gap"))
            store.delete("s", told("delete"))
            disk.left = 1
            gate.open()
            await store.commits.settled()

            # The gap was refused and the duplicate recognised by a state that never came to be.
            certain = Failed(full=False)
            assert answers == {
                "first": Unknown(),
                "on top": certain,
                "duplicate": certain,
                "gap": certain,
                "delete": certain,
            }

    async with opened(tmp_path) as store:
        assert await content(store, "s") in (b"", b"zero")


async def test_statements_that_fail_are_undone_and_a_retry_is_accepted_once(tmp_path: Path) -> None:
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            await appended(store, "s", b"zero", 0)
            writer = store._writer.connection.raw
            # A trigger is the plainest way to make one real statement fail and no disk.
            writer.execute(
                "CREATE TRIGGER refuse BEFORE INSERT ON log WHEN NEW.data = CAST('bad' AS BLOB)"
                " BEGIN SELECT RAISE(ABORT, 'as the test asked'); END"
            )
            answers: list[object] = []
            store.append(an_append("s", b"one", seq=1), answers.append)
            store.append(an_append("s", b"bad", seq=2), answers.append)
            store.append(an_append("s", b"three", seq=3), answers.append)
            await store.commits.settled()

            assert answers == [Failed(full=False)] * 3
            assert not store.failure.done()
            assert await content(store, "s") == b"zero"
            gap = await append(store, "s", b"three", 3)
            assert gap == SequenceGap(1, 3)
            await appended(store, "s", b"one", 1)
            assert isinstance(await append(store, "s", b"one", 1), Duplicate)
            await appended(store, "s", b"two", 2)
            assert await content(store, "s") == b"zeroonetwo"
    check_rows(tmp_path)


async def test_a_commit_that_fails_without_the_disk_is_followed_by_one_that_works(
    tmp_path: Path,
) -> None:
    """Out of memory in COMMIT: unknown, but no reason to stop; the next request is unharmed."""
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            vfs.rules.append(FailingDisk("write", WAL, error=apsw.NoMemError))

            assert await append(store, "s", b"zero", 0) == Unknown()

            assert not store.failure.done()
            assert isinstance(await append(store, "s", b"zero", 0), Appended | Duplicate)
            await appended(store, "s", b"one", 1)
            assert await content(store, "s") == b"zeroone"
    check_rows(tmp_path)


@pytest.mark.parametrize("suffix", [WAL, DATABASE])
async def test_a_checkpoint_that_the_disk_fails_ends_the_store_too(
    suffix: str, tmp_path: Path
) -> None:
    """After a failed sync no program can know which pages the disk has."""
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            await appended(store, "s", b"zero", 0)
            vfs.rules.append(FailingDisk("sync", suffix))

            with pytest.raises(apsw.IOError):
                await store.between_commits(lambda connection: fold(connection.raw))

            assert is_broken(store)
            assert await append(store, "s", b"one", 1) == Failed(full=False)
            assert await content(store, "s") == b"zero"

    async with opened(tmp_path) as store:
        assert await content(store, "s") == b"zero"
        await appended(store, "s", b"one", 1)
    check_rows(tmp_path)


async def test_a_deletion_whose_commit_failed_did_not_happen_by_half(tmp_path: Path) -> None:
    with fault_vfs() as vfs:
        async with opened(tmp_path, vfs) as store:
            await create(store, "s")
            await appended(store, "s", b"zero", 0)
            vfs.rules.append(FailingDisk("sync", WAL))
            assert await delete(store, "s") == Unknown()

    async with opened(tmp_path) as store:
        assert await delete(store, "s") in (Deleted(), Missing())
        assert await delete(store, "s") == Missing()
    check_rows(tmp_path)
