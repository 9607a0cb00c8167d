"""Retention on real files: what readers are told, what the log keeps, what comes back on disk."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.appends import Appended, Duplicate, SeqRegression, StreamClosed
from fencepost.protocol.creates import BadForkPoint, Create, Created, ForkFrom
from fencepost.protocol.globs import Glob
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import Cut, Policy, Retention, Uncut
from fencepost.store.contract import BadOffset, Missing, SoftDeleted, Store, Truncated
from fencepost.store.engine import retention as keeping
from fencepost.store.engine.retention import Keeper
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.database import FILE
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.upkeep import SqliteUpkeep
from fencepost.testing.clock import SimClock
from tests.contract.subject import Subject, answered
from tests.engines import engine as engine
from tests.integration.raw import Connection, ask, code_of
from tests.serving import ServerProcess

JSON = "application/json"
LOG_MS = 60_000


class Engine:
    """An embedded store with settings of the test's own."""

    def __init__(self, folder: Path, clock: SimClock, **settings: Any) -> None:
        self._settings = SqliteSettings(folder=folder, **settings)
        self._clock = clock
        self.store: SqliteStore | None = None

    def open(self) -> Store:
        self.store = SqliteStore(self._settings, self._clock)
        return self.store

    async def close(self) -> None:
        assert self.store is not None
        await self.store.close()


class Kept(Subject):
    """A store under test with its upkeep at hand."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        clock = SimClock()
        self.folder = folder
        self.engine = Engine(folder, clock, log_retention_ms=LOG_MS, **settings)
        super().__init__(self.engine, clock)

    @property
    def sqlite(self) -> SqliteStore:
        assert self.engine.store is not None
        return self.engine.store

    @property
    def keeper(self) -> Keeper:
        return Keeper(self.sqlite, self.clock)

    async def truncate(self, path: str, before: Offset | None) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.store.truncate(path, before, answer.set_result)
        return await answered(answer)

    async def retain(self) -> int:
        """Go round all streams once."""
        count = await self.keeper.retain()
        assert await self.sqlite.durable() is None
        return count

    async def purge_all(self) -> int:
        """Let the log's retention pass, and drop everything that may go."""
        self.clock.advance(LOG_MS)
        purged = 0
        while count := await self.keeper.purge():
            purged += count
        return purged

    def rows(self, path: str) -> int:
        """Messages of any incarnation at a path that are still in the log."""
        [(count,)] = self.sqlite._lookups.raw.execute(
            "SELECT count(*) FROM log WHERE kind = 0 AND stream IN"
            " (SELECT id FROM streams WHERE path = ?)",
            (path,),
        )
        return int(count)

    def truncations(self) -> int:
        [(count,)] = self.sqlite._lookups.raw.execute("SELECT count(*) FROM truncations")
        return int(count)

    async def assert_whole(self) -> None:
        """What is on disk holds together, also after a restart."""
        assert await self.sqlite.durable() is None
        assert check(self.folder).findings == []
        await self.reopen()


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    subject = Kept(tmp_path / "data")
    yield subject
    await subject.close()
    assert check(tmp_path / "data").findings == []


async def numbers(kept: Kept, path: str, count: int, *, start: int = 0, every_ms: int = 0) -> None:
    for number in range(start, start + count):
        kept.clock.advance(every_ms)
        await kept.appended(path, b"[%d]" % number, content_type=JSON, producer=("p", 0, number))


async def test_a_truncated_stream_goes_on_and_never_back_to_zero(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 10)

    outcome = await kept.truncate("s", Offset(4, 4))

    assert outcome == Cut(Offset(4, 4), Offset(10, 10))
    await kept.assert_whole()
    info = await kept.info("s")
    assert (info.first, info.tail) == (Offset(4, 4), Offset(10, 10))
    assert await kept.messages("s") == [4, 5, 6, 7, 8, 9]
    assert await kept.read("s", START) == Truncated(Offset(4, 4))
    assert await kept.read("s", Offset(3, 3)) == Truncated(Offset(4, 4))
    appended = await kept.appended("s", b"[10]", content_type=JSON)
    assert appended.start == Offset(10, 10)


async def test_a_truncation_may_cut_inside_an_append_between_two_messages(kept: Kept) -> None:
    await kept.made("s", JSON, body=b'["a","b","c"]')

    assert isinstance(await kept.truncate("s", Offset(1, 3)), Cut)

    assert await kept.messages("s") == ["b", "c"]
    # The row stays as long as part of it is read.
    await kept.purge_all()
    assert await kept.messages("s") == ["b", "c"]
    await kept.truncate("s", Offset(3, 9))
    assert await kept.purge_all() == 1
    assert kept.rows("s") == 0


@pytest.mark.parametrize(
    "before", [Offset(1, 2), Offset(2, 3), Offset(3, 10), Offset(4, 9), Offset(0, 1)]
)
async def test_a_place_that_the_stream_does_not_have_is_refused(kept: Kept, before: Offset) -> None:
    await kept.made("s", JSON, body=b'["a","b","c"]')

    assert await kept.truncate("s", before) == BadOffset()

    assert (await kept.info("s")).first == START


async def test_truncating_again_changes_nothing(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 5)
    await kept.truncate("s", Offset(3, 3))
    position = kept.sqlite.ledger.next_position

    assert await kept.truncate("s", Offset(3, 3)) == Uncut(Offset(3, 3), Offset(5, 5))
    assert await kept.truncate("s", Offset(1, 1)) == Uncut(Offset(3, 3), Offset(5, 5))
    assert kept.sqlite.ledger.next_position == position


async def test_a_stream_that_is_not_there_cannot_be_truncated(kept: Kept) -> None:
    await kept.made("source", body=b"x")
    await kept.fork("fork", "source")
    await kept.delete("source")

    assert await kept.truncate("nowhere", None) == Missing()
    assert await kept.truncate("source", None) == SoftDeleted()


async def test_everything_can_be_dropped_while_appends_are_on_their_way(kept: Kept) -> None:
    await kept.made("s", JSON, body=b"[1]")
    flying = kept.appending("s", b"[2]", JSON)

    outcome = await kept.truncate("s", None)

    assert outcome == Cut(Offset(2, 2), Offset(2, 2))
    assert isinstance(await flying, Appended)
    assert await kept.messages("s") == []


async def test_the_committed_tail_is_a_place_while_appends_are_on_their_way(kept: Kept) -> None:
    await kept.made("s", JSON, body=b"[1]")
    flying = kept.appending("s", b"[2]", JSON)

    assert isinstance(await kept.truncate("s", Offset(1, 1)), Cut)

    await flying
    assert await kept.messages("s") == [2]


async def test_producers_seq_and_closure_survive_truncation_and_purge(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 40)
    await kept.appended("s", b'["last"]', content_type=JSON, seq="b")
    await kept.append("s", b"", JSON, closes=True, producer=("p", 0, 40))
    await kept.truncate("s", None)
    purged = await kept.purge_all()
    assert purged == 41
    await kept.assert_whole()

    for seq in range(41):
        body = b"[%d]" % seq if seq < 40 else b""
        again = await kept.append("s", body, JSON, producer=("p", 0, seq), closes=seq == 40)
        assert isinstance(again, Duplicate), again
        # Seq 0 and the last 16 batches are remembered in full, although their rows are gone.
        remembered = seq == 0 or seq > 40 - 16
        assert (again.original is not None) == remembered, seq
        if remembered:
            assert again.matches
    other = await kept.append("s", b"[-1]", JSON, producer=("p", 0, 39))
    assert isinstance(other, Duplicate)
    assert other.matches is False
    assert isinstance(await kept.append("s", b"[0]", JSON), StreamClosed)
    info = await kept.info("s")
    assert info.closed
    assert info.tail == info.first


async def test_stream_seq_is_still_compared_after_a_truncation(kept: Kept) -> None:
    await kept.made("s", JSON)
    await kept.appended("s", b"[1]", content_type=JSON, seq="b")
    await kept.truncate("s", None)
    await kept.purge_all()
    await kept.reopen()

    assert await kept.append("s", b"[2]", JSON, seq="a") == SeqRegression("b")
    assert (await kept.appended("s", b"[2]", content_type=JSON, seq="c")).start == Offset(1, 1)


async def test_batches_remembered_apart_join_those_that_still_have_rows(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 10)
    await kept.truncate("s", None)
    await kept.purge_all()
    await numbers(kept, "s", 10, start=10)
    await kept.truncate("s", (await kept.info("s")).tail)
    await numbers(kept, "s", 3, start=20)
    await kept.purge_all()
    await kept.assert_whole()

    for seq in range(23):
        again = await kept.append("s", b"[%d]" % seq, JSON, producer=("p", 0, seq))
        assert isinstance(again, Duplicate)
        assert (again.matches is True) == (seq == 0 or seq > 22 - 16), (seq, again)
        if again.original is not None:
            assert again.original.offset.messages == seq


async def test_rows_stay_for_the_log_until_its_retention_is_over(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 10)
    await kept.truncate("s", Offset(6, 6))

    assert await kept.keeper.purge() == 0
    kept.clock.advance(LOG_MS - 1)
    assert await kept.keeper.purge() == 0
    assert kept.rows("s") == 10
    kept.clock.advance(1)
    assert await kept.keeper.purge() == 6

    assert kept.rows("s") == 4
    assert kept.truncations() == 0
    assert await kept.messages("s") == [6, 7, 8, 9]


async def test_only_truncations_that_are_old_enough_are_purged(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 10)
    await kept.truncate("s", Offset(2, 2))
    kept.clock.advance(LOG_MS // 2)
    await kept.truncate("s", Offset(6, 6))
    kept.clock.advance(LOG_MS // 2)

    assert await kept.keeper.purge() == 2

    assert kept.rows("s") == 8
    assert kept.truncations() == 1


async def test_markers_of_earlier_truncations_go_with_their_rows(kept: Kept) -> None:
    await kept.made("s", JSON)
    await numbers(kept, "s", 10)
    for number in range(1, 8):
        await kept.truncate("s", Offset(number, number))

    assert await kept.purge_all() == 7

    [(markers,)] = kept.sqlite._lookups.raw.execute("SELECT count(*) FROM log WHERE kind = 4")
    assert markers == 1
    await kept.assert_whole()


async def test_purging_goes_in_pieces(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "ROWS_PER_STEP_MAX", 3)
    await kept.made("s", JSON)
    await numbers(kept, "s", 20)
    await kept.truncate("s", Offset(11, 12))

    assert await kept.purge_all() == 11

    assert kept.rows("s") == 9
    assert await kept.messages("s") == list(range(11, 20))


# Forks


async def test_forks_keep_what_they_inherit(kept: Kept) -> None:
    await kept.made("source", JSON)
    await numbers(kept, "source", 10)
    await kept.fork("fork", "source", Offset(6, 6))
    await kept.appended("fork", b'["own"]', content_type=JSON)
    await kept.truncate("source", Offset(9, 9))

    assert await kept.purge_all() == 0

    assert await kept.messages("fork") == [0, 1, 2, 3, 4, 5, "own"]
    assert await kept.messages("source") == [9]
    await kept.assert_whole()
    # The fork drops some of it as well: now that much can go.
    await kept.truncate("fork", Offset(4, 4))
    assert await kept.purge_all() == 4
    assert await kept.messages("fork") == [4, 5, "own"]
    assert await kept.messages("source") == [9]


async def test_what_was_kept_for_a_fork_goes_after_it(kept: Kept) -> None:
    await kept.made("source", JSON)
    await numbers(kept, "source", 10)
    await kept.fork("fork", "source", Offset(6, 6))
    await kept.truncate("source", Offset(9, 9))
    await kept.purge_all()
    assert kept.rows("source") == 10
    await kept.delete("fork")
    kept.clock.advance(LOG_MS)

    await SqliteUpkeep(kept.sqlite, kept.clock).purge()

    assert kept.rows("source") == 1
    assert await kept.messages("source") == [9]


async def test_a_fork_of_a_fork_holds_the_rows_of_the_first_source(kept: Kept) -> None:
    await kept.made("a", JSON)
    await numbers(kept, "a", 6)
    await kept.fork("b", "a", Offset(4, 4))
    await kept.appended("b", b'["b"]', content_type=JSON)
    await kept.fork("c", "b")
    await kept.delete("b")
    await kept.truncate("a", None)

    await kept.purge_all()

    assert await kept.messages("c") == [0, 1, 2, 3, "b"]
    await kept.assert_whole()


async def test_a_fork_of_a_truncated_source_begins_where_the_source_does(kept: Kept) -> None:
    await kept.made("source", JSON)
    await numbers(kept, "source", 10)
    await kept.truncate("source", Offset(4, 4))
    await kept.purge_all()

    assert isinstance(await kept.fork("fork", "source", Offset(8, 8)), Created)
    assert isinstance(await kept.fork("empty", "source", START), Created)
    assert isinstance(await kept.fork("early", "source", Offset(3, 3)), BadForkPoint)

    assert await kept.messages("fork") == [4, 5, 6, 7]
    assert (await kept.info("fork")).first == Offset(4, 4)
    assert await kept.read("fork", START) == Truncated(Offset(4, 4))
    assert await kept.messages("empty") == []
    appended = await kept.appended("empty", b'["next"]', content_type=JSON)
    assert appended.start == Offset(4, 4)
    await kept.assert_whole()
    assert await kept.messages("empty") == ["next"]


# Policies


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
    monkeypatch.setattr(keeping, "STREAMS_PER_STEP_MAX", 2)
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
    monkeypatch.setattr(keeping, "PRODUCERS_PER_STEP_MAX", 4)
    kept = Kept(tmp_path / "data", producer_retention_s=100)
    await kept.made("s")
    for number in range(10):
        await kept.appended("s", b"x", producer=(f"p{number}", 0, 0))
    kept.clock.advance(100_000)
    keeper = kept.keeper

    assert [await keeper.forget_producers() for _ in range(4)] == [4, 4, 2, 0]

    await kept.close()
    assert check(tmp_path / "data").findings == []


# Over HTTP


def test_truncation_over_http(server_process: ServerProcess) -> None:
    port = server_process.port
    with Connection(port) as client:
        client.ask("PUT", "/v1/stream/t", f"Content-Type: {JSON}", body=b"[0,1,2,3]")
        middle = "0000000000000002_0000000000000002"

        done = client.ask("POST", f"/v1/stream/t?truncate&before={middle}")

        assert done.status == 204
        assert done.headers["stream-first-offset"] == middle
        assert done.headers["stream-next-offset"] == "0000000000000004_0000000000000004"
        head = client.ask("HEAD", "/v1/stream/t")
        assert head.headers["stream-first-offset"] == middle
        for question in ("", "?offset=-1", f"?offset={middle}"):
            assert client.ask("GET", f"/v1/stream/t{question}").body == b"[2,3]"
        gone = client.ask("GET", "/v1/stream/t?offset=0000000000000001_0000000000000001")
        assert gone.status == 410
        assert code_of(gone) == "offset_truncated"
        assert gone.headers["stream-first-offset"] == middle
        zero = client.ask("GET", "/v1/stream/t?offset=0000000000000000_0000000000000000")
        assert zero.status == 410
        polled = client.ask("GET", "/v1/stream/t?offset=-1&live=long-poll")
        assert polled.body == b"[2,3]"
        assert client.ask("POST", "/v1/stream/t?truncate&before=now").status == 204
        assert client.ask("GET", "/v1/stream/t?offset=-1").body == b"[]"


@pytest.mark.parametrize(
    ("query", "body", "status", "code"),
    [
        ("truncate", b"", 400, "before_missing"),
        ("truncate&before=", b"", 400, "offset_invalid"),
        ("truncate&before=7", b"", 400, "offset_invalid"),
        ("truncate&before=0000000000000009_0000000000000009", b"", 400, "offset_invalid"),
        ("truncate&before=0000000000000001_0000000000000002", b"", 400, "offset_invalid"),
        ("truncate&before=now&before=-1", b"", 400, "query_repeated"),
        ("truncate=perhaps&before=now", b"", 400, "truncate_invalid"),
        ("truncate&before=now", b"[1]", 400, "body_unexpected"),
    ],
)
def test_a_truncation_that_is_not_understood_is_refused(
    server_process: ServerProcess, query: str, body: bytes, status: int, code: str
) -> None:
    port = server_process.port
    ask(port, "PUT", "/v1/stream/refusals", f"Content-Type: {JSON}", body=b'["a","b"]')

    reply = ask(port, "POST", f"/v1/stream/refusals?{query}", f"Content-Type: {JSON}", body=body)

    assert (reply.status, code_of(reply)) == (status, code)
    assert ask(port, "GET", "/v1/stream/refusals?offset=-1").body == b'["a","b"]'


def test_a_truncation_of_no_stream_is_a_404(server_process: ServerProcess) -> None:
    reply = ask(server_process.port, "POST", "/v1/stream/nowhere?truncate&before=now")

    assert (reply.status, code_of(reply)) == (404, "stream_not_found")


def test_another_query_on_an_append_means_nothing(server_process: ServerProcess) -> None:
    port = server_process.port
    ask(port, "PUT", "/v1/stream/q", "Content-Type: text/plain")

    assert (
        ask(port, "POST", "/v1/stream/q?a=b", "Content-Type: text/plain", body=b"x").status == 204
    )


def test_retention_is_part_of_a_streams_configuration(server_process: ServerProcess) -> None:
    port = server_process.port
    bounds = [
        "Stream-Retention-Age: 60",
        "Stream-Retention-Bytes: 1000",
        "Stream-Retention-Messages: 10",
    ]
    kind = "Content-Type: text/plain"

    assert ask(port, "PUT", "/v1/stream/r", kind, *bounds).status == 201
    assert ask(port, "PUT", "/v1/stream/r", kind, *bounds).status == 200
    assert ask(port, "PUT", "/v1/stream/r", kind, *bounds[:2]).status == 409
    assert ask(port, "PUT", "/v1/stream/r", kind).status == 409
    head = ask(port, "HEAD", "/v1/stream/r")
    assert head.headers["stream-retention-age"] == "60"
    assert head.headers["stream-retention-bytes"] == "1000"
    assert head.headers["stream-retention-messages"] == "10"


@pytest.mark.parametrize("name", ["Age", "Bytes", "Messages"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "", "99999999999999999999"])
def test_a_retention_that_is_not_a_number_is_refused(
    server_process: ServerProcess, name: str, value: str
) -> None:
    reply = ask(server_process.port, "PUT", "/v1/stream/bad", f"Stream-Retention-{name}: {value}")

    assert (reply.status, code_of(reply)) == (400, "retention_invalid")


def test_policies_of_the_config_file_are_applied(tmp_path: Path) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(
        "[store]\nsweep_interval_ms = 10\nretention_interval_ms = 10\n"
        '[[retention]]\nmatch = "logs/**"\nmax_messages = 2\n'
    )
    with ServerProcess(tmp_path / "data", arguments=["--config", str(config)]) as server:
        ask(server.port, "PUT", "/v1/stream/logs/a", f"Content-Type: {JSON}")
        for number in range(5):
            body = b"[%d]" % number
            ask(server.port, "POST", "/v1/stream/logs/a", f"Content-Type: {JSON}", body=body)
        with Connection(server.port) as client:
            while client.ask("GET", "/v1/stream/logs/a").body != b"[3,4]":
                pass
    assert check(tmp_path / "data").findings == []


# Faults


def test_a_server_killed_while_it_truncates_and_purges_leaves_a_whole_folder(
    tmp_path: Path,
) -> None:
    config = tmp_path / "fencepost.toml"
    config.write_text(
        "[store]\nsweep_interval_ms = 1\nretention_interval_ms = 1\nlog_retention_ms = 0\n"
        '[[retention]]\nmatch = "kept/**"\nmax_bytes = 3000\n'
    )
    folder = tmp_path / "data"
    server = ServerProcess(folder, arguments=["--config", str(config), "--log-level", "error"])
    dice = random.Random(11)
    sent = 0
    for _ in range(6):
        server.start()
        kill = threading.Timer(dice.uniform(0.3, 0.9), os.kill, (server.pid, signal.SIGKILL))
        ask(server.port, "PUT", "/v1/stream/kept/s", "Content-Type: text/plain")
        kill.start()
        try:
            with Connection(server.port) as client:
                while True:
                    reply = client.ask(
                        "POST",
                        "/v1/stream/kept/s",
                        "Content-Type: text/plain",
                        "Producer-Id: p",
                        "Producer-Epoch: 0",
                        f"Producer-Seq: {sent}",
                        body=b"%06d%b" % (sent, b"x" * 194),
                    )
                    assert reply.status in (200, 204), reply
                    sent += 1
                    if sent % 50 == 0:
                        tail = reply.headers["stream-next-offset"]
                        client.ask("POST", f"/v1/stream/kept/s?truncate&before={tail}")
        except (ConnectionError, AssertionError, TimeoutError):
            kill.join()
        server.kill()

        report = check(folder)

        assert report.findings == []
    server.start()
    head = ask(server.port, "HEAD", "/v1/stream/kept/s")
    # The request in flight at the last kill may or may not have been stored.
    assert int(head.headers["stream-next-offset"].partition("_")[0]) in (sent, sent + 1)
    server.stop()
    assert check(folder).findings == []
    assert check(folder).counts["rows"] < sent
    assert sent > 50


def test_the_upkeep_of_a_stopped_piece_is_all_or_nothing(tmp_path: Path) -> None:
    """A process killed between the pieces of a purge goes on with it after a restart."""
    script = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from fencepost.store.engine import retention as keeping, purges\n"
        "from tests.integration.test_retention import Kept, numbers, JSON, Offset\n"
        "keeping.ROWS_PER_STEP_MAX = 3\n"
        "left = int(sys.argv[2])\n"
        "drop = purges.drop\n"
        "def dying(*arguments):\n"
        "    global left\n"
        "    drop(*arguments)\n"
        "    left -= 1\n"
        "    if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "purges.drop = dying\n"
        "async def main():\n"
        "    kept = Kept(Path(sys.argv[1]))\n"
        "    await kept.made('s', JSON)\n"
        "    await numbers(kept, 's', 20)\n"
        "    await kept.truncate('s', Offset(11, 12))\n"
        "    await kept.purge_all()\n"
        "asyncio.run(main())\n"
    )
    for pieces in (1, 2, 3, 4):
        folder = tmp_path / f"data-{pieces}"

        ended = subprocess.run(
            [sys.executable, "-c", script, str(folder), str(pieces)],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            timeout=60,
        )

        assert ended.returncode == -signal.SIGKILL
        report = check(folder)
        assert report.findings == []
        # The piece under way when it was killed is still there as a whole.
        assert report.counts["messages"] == 20 - 3 * (pieces - 1)
