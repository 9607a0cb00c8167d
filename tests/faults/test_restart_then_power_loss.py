"""Killed, started again, then the power goes: what the second server said must still be true.

A killed server leaves commits in the page cache that it had not synced. The next one finds them and
would tell readers and retrying producers of them; by then they have to be on the disk, although
nothing was written since.
"""

import asyncio
from pathlib import Path

from fencepost.protocol.appends import Duplicate
from fencepost.testing import Disk, DiskLog, SyncGate, fault_vfs
from fencepost.testing.disk import everything, nothing, write_image
from tests.faults.recovery import check_rows
from tests.faults.stores import an_append, append, appended, content, create, opened


async def killed_before_the_sync(folder: Path, log: DiskLog) -> None:
    """Leave in `folder` what SIGKILL leaves of an append that was written and not yet synced."""
    gate = SyncGate()
    with fault_vfs(log=log) as vfs:
        vfs.rules.append(gate)
        async with opened(folder.with_name("killed"), vfs) as store:
            await create(store, "s")
            await appended(store, "s", b"first", 0)
            gate.close()
            answered: list[object] = []
            store.append(an_append("s", b"second", seq=1), answered.append)
            await asyncio.to_thread(gate.await_arrival)
            assert answered == []
            upto = len(log.operations)
            gate.open()
    # What the store did after this moment, the killed process never did.
    del log.operations[upto:]
    disk = Disk()
    disk.advance(log.operations, upto)
    write_image(disk.cut(everything), folder)


def power_loss(log: DiskLog, folder: Path) -> None:
    """Write to `folder` what the disk has for certain."""
    disk = Disk()
    disk.advance(log.operations, len(log.operations))
    write_image(disk.cut(nothing), folder)


async def test_a_duplicate_is_on_disk_before_a_restarted_server_says_so(tmp_path: Path) -> None:
    log = DiskLog()
    await killed_before_the_sync(tmp_path / "restarted", log)

    with fault_vfs(log=log) as vfs:
        async with opened(tmp_path / "restarted", vfs) as store:
            outcome = await append(store, "s", b"second", 1)
            power_loss(log, tmp_path / "after")

    assert isinstance(outcome, Duplicate)
    async with opened(tmp_path / "after") as store:
        assert await content(store, "s") == b"firstsecond"
    check_rows(tmp_path / "after")


async def test_a_reader_of_a_restarted_server_sees_only_what_is_on_disk(tmp_path: Path) -> None:
    log = DiskLog()
    await killed_before_the_sync(tmp_path / "restarted", log)

    with fault_vfs(log=log) as vfs:
        async with opened(tmp_path / "restarted", vfs) as store:
            seen = await content(store, "s")
            power_loss(log, tmp_path / "after")

    async with opened(tmp_path / "after") as store:
        assert await content(store, "s") == seen
