"""A write-ahead log with a torn tail: every commit whose frames are whole is kept, and no other.

The log is cut or its bits are flipped at many places, in the way a bad shutdown of a drive does it.
Each append here is one commit, and the length of the log after its answer is known, so which
appends have to survive a given damage is known exactly.
"""

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from fencepost.protocol.appends import Appended, Duplicate
from fencepost.store.sqlite.connection import FILE
from fencepost.store.sqlite.store import StoreBrokenError
from tests.faults.recovery import check_rows
from tests.faults.stores import append, appended, content, create, opened
from tests.faults.wire import asked, get, post
from tests.serving import ServerProcess

APPENDS = 12
WAL_FILE = FILE + "-wal"


class Written(NamedTuple):
    """A folder as a kill leaves it, and how long the log was after each append."""

    folder: Path
    ends: list[int]


def message(number: int) -> bytes:
    return f"<{number}:{'x' * (number * 400)}>".encode()


def whole(written: Written, damaged_at: int) -> int:
    """How many appends lie before the damage."""
    return sum(end <= damaged_at for end in written.ends)


@pytest.fixture
async def written(tmp_path: Path) -> Written:
    ends = []
    async with opened(tmp_path / "first") as store:
        await create(store, "s")
        for number in range(APPENDS):
            await appended(store, "s", message(number), number)
            ends.append((tmp_path / "first" / WAL_FILE).stat().st_size)
        shutil.copytree(tmp_path / "first", tmp_path / "killed")
    (tmp_path / "killed" / f"{FILE}-shm").unlink()
    return Written(tmp_path / "killed", ends)


def damages(written: Written) -> list[tuple[str, int]]:
    """Places to cut or flip at: around every end of a commit, and anywhere."""
    dice = random.Random(1)
    first, last = written.ends[0], written.ends[-1]
    around = [end + shift for end in written.ends for shift in (-1, 0, 1) if end + shift < last]
    anywhere = [dice.randrange(first, last) for _ in range(20)]
    return [(kind, at) for at in around + anywhere for kind in ("cut", "flip")]


def damage(log: Path, kind: str, at: int) -> None:
    data = bytearray(log.read_bytes())
    if kind == "cut":
        del data[at:]
    else:
        data[at] ^= 0x40
    log.write_bytes(data)


async def test_every_whole_commit_is_kept_and_nothing_after_the_damage(
    written: Written, tmp_path: Path
) -> None:
    for number, (kind, at) in enumerate(damages(written)):
        folder = tmp_path / str(number)
        shutil.copytree(written.folder, folder)
        damage(folder / WAL_FILE, kind, at)
        kept = whole(written, at)

        async with opened(folder) as store:
            assert await content(store, "s") == b"".join(map(message, range(kept))), (kind, at)
            if kept:
                again = await append(store, "s", message(kept - 1), kept - 1)
                assert isinstance(again, Duplicate)
            if kept < APPENDS:
                outcome = await append(store, "s", message(kept), kept)
                assert isinstance(outcome, Appended)
        check_rows(folder)


async def test_a_server_starts_on_a_torn_log_and_takes_the_lost_requests_again(
    written: Written,
) -> None:
    damage(written.folder / WAL_FILE, "cut", written.ends[-2] + 100)

    with ServerProcess(written.folder) as server:
        before = await asked(server.port, get("s"))
        retried = await asked(
            server.port, post("s", message(APPENDS - 1), producer="p", seq=APPENDS - 1)
        )
        after = await asked(server.port, get("s"))

    assert before.body == b"".join(map(message, range(APPENDS - 1)))
    assert retried.status == 200
    assert after.body == b"".join(map(message, range(APPENDS)))


async def test_a_log_without_its_header_is_as_good_as_none(written: Written) -> None:
    damage(written.folder / WAL_FILE, "cut", 10)

    async with opened(written.folder) as store:
        outcome = await append(store, "s", b"to a stream that only the log knew")

    assert type(outcome).__name__ == "Missing"


async def test_a_database_with_a_damaged_header_is_refused(written: Written) -> None:
    async with opened(written.folder):
        pass  # Folds the log into the database, so that the header is read from there.
    damage(written.folder / FILE, "flip", 3)

    with pytest.raises(StoreBrokenError, match="not a database"):
        async with opened(written.folder):
            raise AssertionError("it was opened")
