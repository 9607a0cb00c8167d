"""Retention on real files: policies, space that comes back, producers that are forgotten."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.appends import Appended, Duplicate
from fencepost.protocol.creates import Create, Created, ForkFrom
from fencepost.protocol.globs import Glob
from fencepost.protocol.offsets import Offset
from fencepost.protocol.retention import Policy, Retention
from fencepost.store.maintain import retention
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.connection import FILE
from fencepost.store.sqlite.maintain import SqliteUpkeep
from tests.engines import engine as engine
from tests.integration.retention_support import JSON, Kept, numbers
from tests.integration.retention_support import kept as kept


async def made_with(kept: Kept, path: str, retention: Retention, **more: Any) -> Any:
    return await kept._asked(kept.store.create, Create(path, JSON, retention=retention, **more))


async def test_a_stream_forgets_by_messages(kept: Kept) -> None:
    await made_with(kept, "s", Retention(messages=3))
    await numbers(kept, "s", 10)

    assert await kept.retain() == 1

    assert await kept.messages("s") == [7, 8, 9]
    assert await kept.retain() == 0


async def test_a_stream_forgets_by_bytes_whole_appends_at_a_time(kept: Kept) -> None:
    await made_with(kept, "s", Retention(bytes=10))
    for _ in range(5):
        await kept.appended("s", b'["abc","d"]', content_type=JSON)  # 8 bytes each

    assert await kept.retain() == 1

    assert await kept.messages("s") == ["abc", "d"]
    info = await kept.info("s")
    assert info.tail.bytes - info.first.bytes == 8


async def test_a_stream_forgets_by_age_and_may_end_up_empty(kept: Kept) -> None:
    await made_with(kept, "s", Retention(age_s=10))
    await numbers(kept, "s", 20, every_ms=1_000)

    await kept.retain()
    recent = await kept.messages("s")
    kept.clock.advance(60_000)
    await kept.retain()

    assert recent == list(range(10, 20))
    assert await kept.messages("s") == []
    info = await kept.info("s")
    assert info.first == info.tail == Offset(20, 30)


async def test_the_newest_append_is_kept_however_large(kept: Kept) -> None:
    await made_with(kept, "s", Retention(bytes=10, messages=1))
    await kept.appended("s", b"[1]", content_type=JSON)
    await kept.appended("s", b"[%b]" % b",".join([b"22222"] * 10), content_type=JSON)

    await kept.retain()

    assert await kept.messages("s") == [22222] * 10


async def test_policies_hold_for_streams_without_a_retention_of_their_own(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "data", retention=(Policy(Glob("logs/**"), Retention(messages=2)),))
    for path in ("logs/a", "logs/b/c", "other"):
        await kept.made(path, JSON)
        await numbers(kept, path, 5)
    await made_with(kept, "logs/own", Retention(messages=4))
    await numbers(kept, "logs/own", 5)

    assert await kept.retain() == 3

    assert await kept.messages("logs/a") == [3, 4]
    assert await kept.messages("logs/b/c") == [3, 4]
    assert await kept.messages("logs/own") == [1, 2, 3, 4]
    assert await kept.messages("other") == [0, 1, 2, 3, 4]
    await kept.close()
    assert check(tmp_path / "data").findings == []


async def test_a_round_goes_in_steps_and_is_not_begun_too_often(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "STREAMS_PER_STEP_MAX", 2)
    for number in range(5):
        await made_with(kept, f"s{number}", Retention(messages=1))
        await numbers(kept, f"s{number}", 3)
    keeper = kept.keeper

    steps = [await keeper.retain() for _ in range(3)]
    await numbers(kept, "s0", 3, start=3)
    too_soon = await keeper.retain()
    kept.clock.advance(kept.sqlite.settings.retention_interval_ms)

    assert steps == [2, 2, 1]
    assert too_soon == 0
    assert await keeper.retain() == 1


async def test_a_fork_with_a_retention_drops_what_it_inherited_first(kept: Kept) -> None:
    await kept.made("source", JSON)
    await numbers(kept, "source", 10, every_ms=1_000)
    fork_from = ForkFrom("source", Offset(8, 8))
    outcome = await kept._asked(
        kept.store.create,
        Create("fork", None, retention=Retention(messages=5), fork_from=fork_from),
    )
    assert isinstance(outcome, Created)
    await kept.appended("fork", b'["x"]', content_type=JSON)
    await kept.appended("fork", b'["y"]', content_type=JSON)

    await kept.retain()
    inherited_too = await kept.messages("fork")
    for number in range(4):
        await kept.appended("fork", b"[%d]" % number, content_type=JSON)
    await kept.retain()

    assert inherited_too == [5, 6, 7, "x", "y"]
    assert await kept.messages("fork") == ["y", 0, 1, 2, 3]
    assert await kept.messages("source") == list(range(10))


@pytest.mark.parametrize("seed", range(5))
async def test_the_search_finds_what_a_walk_would_find(kept: Kept, seed: int) -> None:
    """For random streams and bounds: the first append kept is the first one within bounds."""
    dice = random.Random(seed)
    bounds = Retention(
        dice.choice([None, dice.randint(1, 60)]),
        dice.choice([None, dice.randint(1, 2_000)]),
        dice.choice([None, dice.randint(1, 60)]),
    )
    await made_with(kept, "s", bounds)
    starts: list[tuple[Offset, int]] = []
    for _ in range(60):
        kept.clock.advance(dice.choice([0, 1, 500, 5_000]))
        body = b"[%b]" % b",".join([b"7" * dice.randint(1, 40)] * dice.randint(1, 4))
        appended = await kept.appended("s", body, content_type=JSON)
        starts.append((appended.start, kept.clock.now_ms()))
    tail = (await kept.info("s")).tail

    await kept.retain()

    def fits(start: Offset, at_ms: int) -> bool:
        return (
            (bounds.age_s is None or at_ms > kept.clock.now_ms() - bounds.age_s * 1000)
            and (bounds.bytes is None or tail.bytes - start.bytes <= bounds.bytes)
            and (bounds.messages is None or tail.messages - start.messages <= bounds.messages)
        )

    expected = next((start for start, at_ms in starts if fits(start, at_ms)), starts[-1][0])
    assert (await kept.info("s")).first == expected


# Space


async def test_space_comes_back_on_disk(kept: Kept) -> None:
    await kept.made("s")
    for _ in range(64):
        await kept.appended("s", os.urandom(128 * 1024))
    await kept.appended("s", b"what is left")
    await kept.sqlite.restart_log()
    before = (kept.folder / FILE).stat().st_size
    await kept.truncate("s", Offset(64, 64 * 128 * 1024))

    assert await kept.purge_all() == 64
    steps = 0
    while await SqliteUpkeep(kept.sqlite, kept.clock).vacuum():
        steps += 1
    await kept.sqlite.restart_log()

    after = (kept.folder / FILE).stat().st_size
    assert before > 8 << 20
    assert after < 4 << 20
    assert steps >= 1
    assert await kept.content("s") == b"what is left"


# Producers


async def test_producers_that_are_idle_are_forgotten_but_never_claims(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "data", producer_retention_s=100)
    await kept.made("s")
    for name in ("p", "task:1", "tool:x", "row:y", "busy"):
        await kept.appended("s", b"x", producer=(name, 3, 0))
    kept.clock.advance(100_000)
    await kept.appended("s", b"x", producer=("busy", 3, 1))

    assert await kept.keeper.forget_producers() == 1

    await kept.assert_whole()
    for name in ("task:1", "tool:x", "row:y"):
        assert isinstance(await kept.append("s", b"x", producer=(name, 3, 0)), Duplicate)
    assert isinstance(await kept.append("s", b"x", producer=("busy", 3, 1)), Duplicate)
    # A producer that was forgotten begins again, in any epoch.
    await kept.appended("s", b"x", producer=("p", 2, 0))
    await kept.appended("s", b"x", producer=("p", 2, 1))
    await kept.close()
    assert check(tmp_path / "data").findings == []


async def test_a_producer_that_comes_back_in_the_same_commit_is_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "data", producer_retention_s=100)
    await kept.made("s")
    await kept.appended("s", b"x", producer=("p", 0, 0))
    kept.clock.advance(100_000)
    keeper = kept.keeper
    assert await keeper.forget_producers() == 1
    back = await kept.append("s", b"y", producer=("p", 0, 0))
    assert isinstance(back, Appended)

    await kept.assert_whole()

    assert isinstance(await kept.append("s", b"y", producer=("p", 0, 0)), Duplicate)
    await kept.close()


async def test_by_default_producers_live_as_long_as_their_stream(kept: Kept) -> None:
    await kept.made("s")
    await kept.appended("s", b"x", producer=("p", 0, 0))
    kept.clock.advance(10 * 365 * 86_400_000)

    assert await kept.keeper.forget_producers() == 0

    assert isinstance(await kept.append("s", b"x", producer=("p", 0, 0)), Duplicate)


async def test_producers_are_swept_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PRODUCERS_PER_STEP_MAX", 4)
    kept = Kept(tmp_path / "data", producer_retention_s=100)
    await kept.made("s")
    for number in range(10):
        await kept.appended("s", b"x", producer=(f"p{number}", 0, 0))
    kept.clock.advance(100_000)
    keeper = kept.keeper

    assert [await keeper.forget_producers() for _ in range(4)] == [4, 4, 2, 0]

    await kept.close()
    assert check(tmp_path / "data").findings == []
