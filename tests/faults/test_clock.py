"""A clock that jumps: times in the log never run backwards, and nothing expires before its time."""

from pathlib import Path

import apsw

from fencepost.store.contract import Missing, StreamInfo
from fencepost.store.sqlite.connection import FILE
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.testing import SimClock
from tests.faults.recovery import check_rows
from tests.faults.stores import append, appended, content, create, delete, opened

HOUR_MS = 3_600_000


def times(folder: Path) -> list[int]:
    """The times of all rows of the log, in the order of their positions."""
    connection = apsw.Connection(str(folder / FILE))
    try:
        rows = connection.execute("SELECT at_ms FROM log ORDER BY position").fetchall()
    finally:
        connection.close()
    return [int(str(at_ms)) for (at_ms,) in rows]


async def test_times_in_the_log_never_run_backwards(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock=clock) as store:
        await create(store, "s")
        for number in range(20):
            clock.jump((-1) ** number * number * HOUR_MS)
            clock.advance(7)
            await appended(store, "s", b"x", number)
        await delete(store, "s")

    recorded = times(tmp_path)
    assert len(recorded) == 21
    assert recorded == sorted(recorded)


async def test_a_start_with_an_earlier_clock_goes_on_where_time_stood(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock=clock) as store:
        await create(store, "s")
        clock.advance(HOUR_MS)
        await appended(store, "s", b"one", 0)
    clock.jump(-24 * HOUR_MS)

    async with opened(tmp_path, clock=clock) as store:
        clock.advance(5)
        await appended(store, "s", b"two", 1)
        assert await content(store, "s") == b"onetwo"

    recorded = times(tmp_path)
    assert recorded == sorted(recorded)
    check_rows(tmp_path)


async def test_a_stream_does_not_expire_early_when_the_clock_jumps_back(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock=clock) as store:
        upkeep = SqliteUpkeep(store, clock)
        await create(store, "s", ttl_s=60)
        clock.jump(-HOUR_MS)
        clock.advance(59_000)
        await upkeep.expire()
        assert isinstance(await store.look("s", touch=True), StreamInfo)
        await appended(store, "s", b"x")
        clock.advance(59_999)
        await upkeep.expire()
        assert isinstance(await store.look("s", touch=False), StreamInfo)


async def test_a_stream_still_expires_once_the_clock_has_caught_up(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock=clock) as store:
        await create(store, "s", ttl_s=60)
        clock.jump(-HOUR_MS)
        clock.advance(HOUR_MS + 60_001)

        assert await store.look("s", touch=False) == Missing()
        assert await append(store, "s", b"x") == Missing()

    async with opened(tmp_path, clock=clock) as store:
        clock.jump(-HOUR_MS)
        assert await store.look("s", touch=False) == Missing()


async def test_a_restart_behind_the_deadline_neither_ends_nor_prolongs_a_life(
    tmp_path: Path,
) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock=clock) as store:
        await create(store, "ends", ttl_s=60)
        await create(store, "lives", ttl_s=6_000)
    clock.advance(100_000)

    async with opened(tmp_path, clock=clock) as store:
        assert await store.look("ends", touch=False) == Missing()
        assert isinstance(await store.look("lives", touch=False), StreamInfo)


async def test_two_clocks_with_one_seed_agree_and_standing_still_is_possible() -> None:
    first, second = SimClock(seed=7), SimClock(seed=7)

    assert first.token(16) == second.token(16)
    assert first.random() == second.random()
    assert first.now_ms() == second.now_ms()
    first.jump(-10)
    assert first.monotonic_ms() == second.monotonic_ms()
    first.advance(25)
    assert (first.monotonic_ms(), first.monotonic_ns()) == (25, 25_000_000)
