"""Truncation on real files: what readers are told, what the log keeps, what forks inherit."""

from __future__ import annotations

from functools import partial

import pytest

from fencepost.protocol.appends import Appended, Duplicate, SeqRegression, StreamClosed
from fencepost.protocol.commits import CommitDuplicate
from fencepost.protocol.creates import BadForkPoint, Created
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import Cut, Uncut
from fencepost.store.contract import BadOffset, Missing, SoftDeleted, Truncated
from fencepost.store.maintain import jobs, retention
from fencepost.store.maintain import purge as purges
from fencepost.store.sql import Row
from fencepost.store.sqlite.check import check
from fencepost.store.sqlite.maintain import SqliteUpkeep
from tests.contract.conditional import ask_commit, ask_stage, item
from tests.engines import engine as engine
from tests.integration.retention_support import JSON, LOG_MS, Kept, numbers
from tests.integration.retention_support import kept as kept


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


async def test_of_staged_data_that_is_purged_only_what_retries_are_compared_with_stays(
    kept: Kept,
) -> None:
    await kept.made("s")
    for ordinal in range(2):
        await ask_stage(kept, "p", b"x" * 100_000, ordinal)
    made = item("s", parts=("p",), producer=("w", 0, 0), strict=True, key="k")
    await ask_commit(kept, made)
    half = Offset(1, 100_000)

    assert isinstance(await kept.truncate("s", half), Cut)
    assert await kept.purge_all() == 1

    raw = kept.sqlite._lookups.raw
    sizes = raw.execute("SELECT length(data), size FROM chunks ORDER BY ordinal").fetchall()
    assert sizes == [(0, 100_000), (100_000, 100_000)]
    assert await kept.content("s") == b"x" * 100_000
    assert isinstance(await ask_commit(kept, made), CommitDuplicate)
    await kept.assert_whole()


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


async def test_a_stream_that_is_truncated_all_the_time_leaves_few_records(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purges, "RUNS_PER_RECORD_MAX", 20)
    await kept.made("s", JSON)
    await kept.made("other", JSON)
    gone = 0
    for number in range(30):
        await numbers(kept, "s", 2, start=2 * number)
        await numbers(kept, "other", 1, start=number)
        await kept.truncate("s", None)
        gone += await kept.purge_all()

    assert gone == 60
    records: list[Row] = kept.sqlite._lookups.raw.execute("SELECT runs FROM purges").fetchall()
    runs = [list(purges.unpack_runs(packed)) for (packed,) in records]
    assert len(records) == 2
    # A marker goes when the next one makes it void: the newest is there.
    assert sum(count for record in runs for _, count in record) == 60 + 29
    assert runs == [purges.join_runs(sorted(record)) for record in runs], "as few as there can be"
    assert kept.rows("other") == 30
    await kept.assert_whole()


async def test_a_deleted_stream_is_whole_at_every_step_of_its_purge(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ROWS_PER_PURGE_MAX", 1)
    await kept.made("s", JSON)
    await numbers(kept, "s", 4)
    await kept.truncate("s", Offset(2, 2))
    await kept.append("s", b"", closes=True)
    await kept.delete("s")
    rows: list[Row] = kept.sqlite._lookups.raw.execute("SELECT id FROM streams").fetchall()
    [(stream_id,)] = rows

    steps = 0
    while await kept.sqlite.between_commits(partial(jobs._purge_rows, stream_id)):
        assert check(kept.folder).findings == []
        steps += 1

    assert steps == 4 + 3, "each message and each marker"


async def test_purging_goes_in_pieces(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_STEP_MAX", 3)
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
