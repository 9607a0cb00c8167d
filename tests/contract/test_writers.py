"""What a store promises about writers: runs fence each other, and a batch is published once."""

import asyncio
from pathlib import Path
from typing import Any

from fencepost.protocol.appends import TailMoved
from fencepost.protocol.commits import (
    Commit,
    CommitDuplicate,
    CommitItem,
    CommitRefused,
    Committed,
    ItemMissing,
    Part,
    PartDropped,
    PartMissing,
    PartUsed,
)
from fencepost.protocol.offsets import START
from fencepost.protocol.writers import (
    BatchDone,
    PositionRange,
    PublishedBatch,
    Writer,
    WriterBatch,
    WriterFenced,
    WriterForgotten,
    WriterHeld,
    WriterHistoryGone,
    WriterMissing,
    WriterOpen,
    WriterOpened,
    WriterQueryChanged,
    WriterRangeMismatch,
    WritersFull,
)
from fencepost.store.log_contract import Page
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.read.lists import SqlLists
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write.writers import TRIM_BATCHES
from fencepost.testing.clock import SimClock
from tests.contract.conditional import ask_append, ask_commit, ask_stage, item
from tests.contract.sliced import also_in_slices
from tests.contract.subject import Outcome, SqliteEngine, Subject, answered

subject = also_in_slices


async def opened(subject: Subject, name: str = "w", query: str = "q", **more: Any) -> Writer:
    outcome = await ask_open(subject, name, query, **more)
    assert isinstance(outcome, WriterOpened), outcome
    return outcome.writer


async def ask_open(subject: Subject, name: str = "w", query: str = "q", **more: Any) -> Outcome:
    request = WriterOpen(name, query, **more)
    return await answered(subject.ask(subject.store.open_writer, request))


def publishing(
    subject: Subject,
    batch: int,
    *items: CommitItem,
    epoch: int = 1,
    digest: str | None = "d",
    key: str | None = None,
    **more: Any,
) -> asyncio.Future[Outcome]:
    """Send a batch and come back at once."""
    writer = WriterBatch("w", more.pop("query", "q"), epoch, batch, digest, **more)
    return subject.ask(subject.store.commit, Commit(items, key, b"m" * 16, writer=writer))


async def publish(subject: Subject, batch: int, *items: CommitItem, **more: Any) -> Outcome:
    return await answered(publishing(subject, batch, *items, **more))


async def known(subject: Subject, name: str = "w") -> Writer:
    found = await subject.store.find_writer(name)
    assert isinstance(found, Writer), found
    return found


async def history(subject: Subject, name: str = "w") -> list[PublishedBatch]:
    return (await page_of(subject, name=name)).entries


async def page_of(
    subject: Subject, name: str = "w", before: int | None = None, limit: int = 1000
) -> Page[PublishedBatch]:
    assert isinstance(subject.store, SqliteStore | PostgresStore)
    lists = SqlLists(subject.store.readers)
    return await lists.list_writer_history(name, before=before, limit=limit)


async def ask_forget(subject: Subject, name: str = "w", owner: str | None = None) -> Outcome:
    answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    subject.store.forget_writer(name, owner, answer.set_result)
    return await answered(answer)


async def test_a_batch_is_published_once_however_often_it_comes(subject: Subject) -> None:
    await opened(subject)

    first = await publish(subject, 0, item("s", b"a", creates=True), digest="one")
    again = await publish(subject, 0, item("s", b"a", creates=True), digest="one")
    other = await publish(subject, 0, item("s", b"b", creates=True), digest="two")
    await subject.reopen()
    later = await publish(subject, 0, item("gone", b"x"), digest="one")

    assert isinstance(first, Committed)
    assert (again, other, later) == (BatchDone(0, True), BatchDone(0, False), BatchDone(0, True))
    assert await subject.content("s") == b"a"


async def test_an_older_batch_is_compared_with_the_history(subject: Subject) -> None:
    await opened(subject)
    for number in range(4):
        await publish(subject, number, item("s", b"a", creates=True), digest=str(number))
    await subject.reopen()

    assert await publish(subject, 2, item("s", b"b"), digest="2") == BatchDone(3, True)
    assert await publish(subject, 2, item("s", b"b"), digest="x") == BatchDone(3, False)
    assert await subject.content("s") == b"aaaa"


async def test_a_batch_that_was_left_out_cannot_come_later(subject: Subject) -> None:
    await opened(subject)
    await publish(subject, 1, item("s", b"a", creates=True))
    await publish(subject, 3, item("s", b"a"))

    assert await publish(subject, 0, item("s", b"b")) == WriterHistoryGone(3)
    assert await publish(subject, 2, item("s", b"b")) == WriterHistoryGone(3)
    assert await subject.content("s") == b"aa"


async def test_a_batch_that_was_read_from_other_positions_is_refused(subject: Subject) -> None:
    """A restored checkpoint: batch 1 again, planned over more rows than it had."""
    await opened(subject)
    first, second, wider = PositionRange(None, 9), PositionRange(9, 19), PositionRange(9, 29)
    await publish(subject, 0, item("s", b"0", creates=True), range=first)
    await publish(subject, 1, item("s", b"1"), range=second)
    await publish(subject, 2, item("s", b"2"), range=PositionRange(19, 29))
    await subject.reopen()

    again = await publish(subject, 1, item("s", b"1"), range=second)
    other = await publish(subject, 1, item("s", b"12"), range=wider)

    assert again == BatchDone(2, True, second)
    assert other == WriterRangeMismatch(1, second, wider)
    assert await subject.content("s") == b"012"
    assert [one.range for one in await history(subject)] == [PositionRange(19, 29), second, first]


async def test_the_range_counts_for_batches_that_are_not_on_disk_yet(subject: Subject) -> None:
    opening = subject.ask(subject.store.open_writer, WriterOpen("w", "q"))
    read, other = PositionRange(0, 5), PositionRange(0, 6)
    asked = [
        publishing(subject, 0, item("s", b"0", creates=True), range=read),
        publishing(subject, 0, item("s", b"0", creates=True), range=other),
        publishing(subject, 0, item("s", b"0", creates=True), range=read),
    ]

    outcomes = [await answered(one) for one in asked]

    assert isinstance(await answered(opening), WriterOpened)
    assert isinstance(outcomes[0], Committed)
    assert outcomes[1:] == [WriterRangeMismatch(0, read, other), BatchDone(0, True, read)]


async def test_a_refused_commit_leaves_no_history(subject: Subject) -> None:
    await opened(subject)

    await publish(subject, 0, item("none", b"x"))

    assert await history(subject) == []


async def test_the_history_goes_with_its_writer_and_with_its_query(subject: Subject) -> None:
    await opened(subject)
    await publish(subject, 0, range=PositionRange(0, 5))
    await opened(subject, query="other", allow_new=True)
    anew = await history(subject)
    begun = await publish(subject, 0, query="other", epoch=2, range=PositionRange(0, 7))
    await ask_forget(subject)
    gone = await history(subject)
    await opened(subject)

    assert (anew, gone) == ([], [])
    assert begun == Committed(())
    assert await publish(subject, 0, range=PositionRange(0, 9)) == Committed(())


async def test_the_history_comes_in_pages_newest_first(subject: Subject) -> None:
    await opened(subject)
    for number in range(5):
        await publish(subject, number, digest=str(number))

    first = await page_of(subject, before=None, limit=2)
    second = await page_of(subject, before=3, limit=2)
    last = await page_of(subject, before=1, limit=2)

    assert [one.batch for one in first.entries] == [4, 3]
    assert [one.batch for one in second.entries] == [2, 1]
    assert [one.digest for one in last.entries] == ["0"]
    assert (first.next, second.next, last.next) == (("3",), ("1",), None)


async def test_batches_decided_in_one_go_are_decided_on_top_of_each_other(subject: Subject) -> None:
    opening = subject.ask(subject.store.open_writer, WriterOpen("w", "q"))
    asked = [
        publishing(subject, number, item("s", b"%d" % number, creates=True))
        for number in (0, 1, 1, 0, 2)
    ]

    outcomes = [await answered(one) for one in asked]

    assert isinstance(await answered(opening), WriterOpened)
    assert [type(one) for one in outcomes] == [
        Committed,
        Committed,
        BatchDone,
        BatchDone,
        Committed,
    ]
    assert await subject.content("s") == b"012"
    assert (await known(subject)).batch == 2


async def test_a_new_run_fences_the_one_before(subject: Subject) -> None:
    assert (await opened(subject)).epoch == 1
    await publish(subject, 0, item("s", b"a", creates=True))
    await subject.reopen()
    second = await opened(subject)

    late = await publish(subject, 1, item("s", b"x"), epoch=1)
    early = await publish(subject, 1, item("s", b"x"), epoch=3)
    good = await publish(subject, 1, item("s", b"b"), epoch=2)

    assert (second.epoch, second.batch) == (2, 0)
    assert (late, early) == (WriterFenced(2), WriterFenced(2))
    assert isinstance(good, Committed)
    assert await subject.content("s") == b"ab"


async def test_the_fence_comes_before_the_duplicate(subject: Subject) -> None:
    """A run that is over must not take a batch for done that it is no longer to decide about."""
    await opened(subject)
    await publish(subject, 0, item("s", b"a", creates=True))
    await opened(subject)

    assert await publish(subject, 0, item("s", b"a"), epoch=1) == WriterFenced(2)


async def test_a_name_is_bound_to_its_query_until_another_may_begin_anew(subject: Subject) -> None:
    await opened(subject)
    await publish(subject, 7, item("s", b"a", creates=True))

    refused = await ask_open(subject, query="other")
    foreign = await publish(subject, 8, item("s", b"x"), query="other")
    anew = await opened(subject, query="other", allow_new=True)
    begun = await publish(subject, 0, item("s", b"b"), query="other", epoch=2)

    assert refused == foreign == WriterQueryChanged("q", 7)
    assert (anew.epoch, anew.batch, anew.digest) == (2, None, None)
    assert isinstance(begun, Committed)


async def test_a_refused_commit_leaves_the_writer_as_it_was(subject: Subject) -> None:
    await opened(subject)
    before = await known(subject)

    missing = await publish(subject, 0, item("s", b"a", creates=True), item("none", b"x"))
    lost = await publish(subject, 0, item("s", parts=("never",), creates=True))
    await subject.made("t", body=b"1")
    moved = await publish(subject, 0, item("t", b"2", if_match=START))

    assert missing == CommitRefused(1, ItemMissing())
    assert lost == CommitRefused(0, PartMissing(Part("t", "never")))
    assert isinstance(moved, CommitRefused)
    assert isinstance(moved.outcome, TailMoved)
    assert await known(subject) == before
    assert isinstance(await publish(subject, 0, item("s", b"a", creates=True)), Committed)


async def test_a_batch_again_needs_neither_its_parts_nor_its_streams(subject: Subject) -> None:
    await opened(subject)
    await ask_stage(subject, "p", b"data")
    await publish(subject, 0, item("s", parts=("p",), creates=True))
    await subject.delete("s")
    await ask_stage(subject, "q", b"again")

    again = await publish(subject, 0, item("s", parts=("q", "r"), creates=True))

    assert again == BatchDone(0, True)
    assert await answered(subject.ask(subject.store.unstage, Part("t", "q"))) == PartDropped()


async def test_an_empty_batch_counts(subject: Subject) -> None:
    await opened(subject)

    assert await publish(subject, 0) == Committed(())
    assert await publish(subject, 0) == BatchDone(0, True)
    await subject.reopen()
    assert (await known(subject)).batch == 0


async def test_appends_that_were_made_before_publish_the_batch_as_well(subject: Subject) -> None:
    await opened(subject)
    made = item("s", b"a", creates=True, producer=("p", 0, 0))
    await ask_commit(subject, made)

    assert isinstance(await publish(subject, 0, made), CommitDuplicate)
    assert (await known(subject)).batch == 0


async def test_the_writer_is_asked_before_the_key(subject: Subject) -> None:
    await opened(subject)
    await publish(subject, 0, item("s", b"a", creates=True), key="k")

    assert await publish(subject, 0, item("s", b"a", creates=True), key="k") == BatchDone(0, True)


async def test_nobody_publishes_for_a_writer_that_was_never_opened_or_is_forgotten(
    subject: Subject,
) -> None:
    assert await publish(subject, 0) == WriterMissing()
    await opened(subject)
    await publish(subject, 4)

    assert await ask_forget(subject) == WriterForgotten()
    assert await ask_forget(subject) == WriterMissing()
    assert await publish(subject, 5) == WriterMissing()
    assert await subject.store.find_writer("w") == WriterMissing()
    await subject.reopen()
    assert (await opened(subject)).epoch == 1


async def test_a_writer_is_its_principals(subject: Subject) -> None:
    await opened(subject, principal="ann")

    assert await ask_open(subject, principal="ben") == WriterHeld()
    assert await publish(subject, 0, principal="ben") == WriterHeld()
    assert await ask_forget(subject, owner="ben") == WriterMissing()
    over = await opened(subject, principal="root", overrides=True)
    assert (over.principal, over.epoch) == ("ann", 2)
    assert await ask_forget(subject, owner="ann") == WriterForgotten()


async def test_there_are_at_most_so_many_writers(tmp_path: Path, clock: SimClock) -> None:
    engine = SqliteEngine(tmp_path / "few", clock)
    engine._settings = SqliteSettings(folder=tmp_path / "few", writers_max=2)
    subject = Subject(engine, clock)
    await opened(subject, "a")
    await opened(subject, "b")

    assert await ask_open(subject, "c") == WritersFull(2)
    assert (await opened(subject, "a")).epoch == 2
    await ask_forget(subject, "b")
    assert (await opened(subject, "c")).epoch == 1
    await subject.close()


async def test_a_history_holds_at_least_so_many_batches_and_not_many_more(
    tmp_path: Path, clock: SimClock
) -> None:
    engine = SqliteEngine(tmp_path / "short", clock)
    engine._settings = SqliteSettings(folder=tmp_path / "short", writer_history_max=3)
    subject = Subject(engine, clock)
    await opened(subject)
    for number in range(TRIM_BATCHES + 4):
        assert await publish(subject, number, range=PositionRange(number, number + 1))

    assert [one.batch for one in await history(subject)] == [103, 102, 101]
    assert await publish(subject, 100) == WriterHistoryGone(103)
    assert isinstance(await publish(subject, 101, range=PositionRange(101, 102)), BatchDone)
    await subject.close()


async def test_a_part_is_dropped_unless_a_commit_used_it(subject: Subject) -> None:
    async def drop(name: str) -> Outcome:
        return await answered(subject.ask(subject.store.unstage, Part("t", name)))

    await ask_stage(subject, "used", b"1")
    await ask_stage(subject, "idle", b"2")
    await ask_stage(subject, "idle", b"3", ordinal=1)
    done = await ask_commit(subject, item("s", parts=("used",), creates=True))
    assert isinstance(done, Committed)

    assert await drop("used") == PartUsed(Part("t", "used"), done.outcomes[0].position)
    assert await drop("idle") == PartDropped()
    assert await drop("idle") == PartMissing(Part("t", "idle"))
    assert await drop("none") == PartMissing(Part("t", "none"))
    await subject.reopen()
    assert await drop("idle") == PartMissing(Part("t", "idle"))
    refused = await ask_commit(subject, item("s", parts=("idle",)))
    assert refused == CommitRefused(0, PartMissing(Part("t", "idle")))
    assert await subject.content("s") == b"1"
    assert await ask_append(subject, "s", b"!")
