"""What a store promises a writer: exactly once, in order, durable, and said so."""

import asyncio
from collections.abc import Sequence

import pytest

from fencepost.protocol.appends import (
    AlreadyClosed,
    Appended,
    Duplicate,
    SeqRegression,
    SequenceGap,
    StaleEpoch,
    StreamClosed,
    TypeMismatch,
)
from fencepost.protocol.creates import ConfigConflict, Created, Exists
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Deleted, Missing, Published
from tests.contract.subject import Subject, answered

JSON = "application/json"


async def test_a_created_stream_is_there_and_empty(subject: Subject) -> None:
    made = await subject.made("a/b", "text/plain; charset=utf-8")

    info = await subject.info("a/b")
    assert (info.path, info.content_type, info.is_json) == (
        "a/b",
        "text/plain; charset=utf-8",
        False,
    )
    assert (info.tail, info.first, info.closed) == (START, START, False)
    assert (info.id, info.created_ms) == (made.stream.id, subject.clock.now_ms())
    assert await subject.content("a/b") == b""


async def test_a_stream_may_be_created_with_content_and_closed_at_once(subject: Subject) -> None:
    made = await subject.made("s", body=b"all of it", closed=True)

    assert (made.start, made.tail, made.closed) == (START, Offset(1, 9), True)
    assert (await subject.info("s")).closed
    assert await subject.content("s") == b"all of it"


async def test_creating_again_is_success_and_changes_nothing(subject: Subject) -> None:
    made = await subject.made("s", body=b"one")
    await subject.appended("s", b"two")

    again = await subject.create("s", body=b"one")

    assert isinstance(again, Exists)
    assert (again.stream.id, again.tail) == (made.stream.id, Offset(2, 6))
    assert await subject.content("s") == b"onetwo"


async def test_creating_another_stream_at_a_taken_path_is_a_conflict(subject: Subject) -> None:
    await subject.made("s")

    assert isinstance(await subject.create("s", JSON), ConfigConflict)
    assert isinstance(await subject.create("s", lifetime=Lifetime(ttl_s=5)), ConfigConflict)
    assert isinstance(await subject.create("s", closed=True), ConfigConflict)
    assert (await subject.info("s")).content_type == "text/plain"


async def test_of_sixteen_creates_at_once_one_creates(subject: Subject) -> None:
    outcomes = await asyncio.gather(*(subject.create("s", body=b"x") for _ in range(16)))

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Created"] + ["Exists"] * 15
    assert len({outcome.stream.id for outcome in outcomes}) == 1
    assert await subject.content("s") == b"x"


async def test_appends_are_kept_in_the_order_they_were_sent(subject: Subject) -> None:
    await subject.made("s")

    sent = [subject.appending("s", b"%d;" % number) for number in range(50)]
    outcomes = [await answered(answer) for answer in sent]

    assert await subject.content("s") == b"".join(b"%d;" % number for number in range(50))
    assert [outcome.start for outcome in outcomes[1:]] == [o.tail for o in outcomes[:-1]]
    assert (await subject.info("s")).tail == outcomes[-1].tail


async def test_a_json_batch_is_stored_message_by_message(subject: Subject) -> None:
    await subject.made("s", JSON)

    outcome = await subject.append("s", b'[1, {"a":[]}, "x"]', JSON)

    assert isinstance(outcome, Appended)
    assert (outcome.start, outcome.tail, outcome.closed) == (START, Offset(3, 12), False)
    assert await subject.messages("s") == [1, {"a": []}, "x"]


async def test_an_append_to_nothing_is_missing_and_makes_nothing(subject: Subject) -> None:
    assert await subject.append("s", b"x") == Missing()
    assert await subject.look("s") == Missing()


async def test_an_append_of_another_type_is_refused_and_changes_nothing(subject: Subject) -> None:
    await subject.made("s")

    assert await subject.append("s", b"1", JSON) == TypeMismatch("text/plain")
    assert (await subject.info("s")).tail == START


# Producers


async def test_a_repeated_request_is_stored_once(subject: Subject) -> None:
    await subject.made("s")
    first = await subject.appended("s", b"x", producer=("p", 0, 0))

    again = await subject.append("s", b"x", producer=("p", 0, 0))

    assert isinstance(again, Duplicate)
    assert again.original is not None
    assert (again.original.offset, again.matches, again.tail) == (first.start, True, first.tail)
    assert await subject.content("s") == b"x"


async def test_a_repeat_sent_before_the_first_answer_is_a_duplicate_too(subject: Subject) -> None:
    await subject.made("s")

    first = subject.appending("s", b"x", producer=("p", 0, 0))
    again = subject.appending("s", b"x", producer=("p", 0, 0))

    assert isinstance(await answered(first), Appended)
    assert isinstance(await answered(again), Duplicate)
    assert await subject.content("s") == b"x"


async def test_requests_in_flight_count_for_the_ones_after_them(subject: Subject) -> None:
    await subject.made("s")

    sent = [subject.appending("s", b"%d" % seq, producer=("p", 0, seq)) for seq in range(10)]

    assert [type(await answered(answer)) for answer in sent] == [Appended] * 10
    assert await subject.content("s") == b"0123456789"


async def test_interleaved_producers_each_keep_their_own_order(subject: Subject) -> None:
    await subject.made("s")

    sent = [
        subject.appending("s", b"%s%d," % (name.encode(), seq), producer=(name, 0, seq))
        for seq in range(8)
        for name in ("a", "b", "c")
    ]
    for answer in sent:
        assert isinstance(await answered(answer), Appended)

    items = (await subject.content("s")).decode().split(",")[:-1]
    for name in ("a", "b", "c"):
        assert [item for item in items if item[0] == name] == [f"{name}{seq}" for seq in range(8)]


async def test_producers_of_different_streams_do_not_know_each_other(subject: Subject) -> None:
    await subject.made("one")
    await subject.made("two")
    await subject.appended("one", b"x", producer=("p", 5, 0))

    assert isinstance(await subject.append("two", b"x", producer=("p", 0, 0)), Appended)


async def test_gaps_and_stale_epochs_are_refused_and_change_nothing(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"x", producer=("p", 1, 0))

    assert await subject.append("s", b"y", producer=("p", 1, 2)) == SequenceGap(1, 2)
    assert await subject.append("s", b"y", producer=("p", 0, 1)) == StaleEpoch(1)
    assert await subject.content("s") == b"x"
    assert isinstance(await subject.append("s", b"y", producer=("p", 1, 1)), Appended)


async def test_a_refused_request_does_not_use_its_number_up(subject: Subject) -> None:
    await subject.made("s")
    await subject.append("s", b"1", JSON, producer=("p", 0, 0))  # another content type

    assert isinstance(await subject.append("s", b"x", producer=("p", 0, 0)), Appended)


async def test_stream_seq_must_grow_and_is_remembered(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"x", seq="b")

    assert await subject.append("s", b"y", seq="a") == SeqRegression("b")
    await subject.reopen()
    assert await subject.append("s", b"y", seq="b") == SeqRegression("b")
    assert isinstance(await subject.append("s", b"y", seq="c"), Appended)


# Closing


async def test_a_closed_stream_takes_nothing_more_and_stays_readable(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"last", closes=True)

    assert await subject.append("s", b"x") == StreamClosed(Offset(1, 4))
    assert await subject.append("s", closes=True) == AlreadyClosed(Offset(1, 4))
    assert (await subject.info("s")).closed
    assert await subject.content("s") == b"last"


async def test_an_append_sent_right_behind_a_close_is_refused(subject: Subject) -> None:
    await subject.made("s")

    close = subject.appending("s", closes=True)
    late = subject.appending("s", b"x")

    assert isinstance(await answered(close), Appended)
    assert await answered(late) == StreamClosed(START)


async def test_the_closing_append_repeated_is_a_duplicate(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"x", closes=True, producer=("p", 0, 0))

    again = await subject.append("s", b"x", closes=True, producer=("p", 0, 0))

    assert isinstance(again, Duplicate)
    assert (again.closed, again.matches) == (True, True)


# Deleting


async def test_a_deleted_stream_is_gone(subject: Subject) -> None:
    await subject.made("s", body=b"x")

    assert await subject.delete("s") == Deleted()
    assert await subject.look("s") == Missing()
    assert await subject.append("s", b"x") == Missing()
    assert await subject.delete("s") == Missing()


async def test_a_stream_made_again_is_another_incarnation(subject: Subject) -> None:
    first = await subject.made("s", body=b"old")
    await subject.append("s", b"x", producer=("p", 3, 0), seq="z")
    await subject.delete("s")

    second = await subject.made("s", "application/octet-stream")

    assert second.stream.id != first.stream.id
    info = await subject.info("s")
    assert (info.tail, info.content_type) == (START, "application/octet-stream")
    fresh = await subject.append(
        "s", b"x", "application/octet-stream", producer=("p", 0, 0), seq="a"
    )
    assert isinstance(fresh, Appended)


async def test_delete_and_create_in_one_breath_leave_the_new_stream(subject: Subject) -> None:
    first = await subject.made("s", body=b"old")

    deleting = asyncio.ensure_future(subject.delete("s"))
    creating = asyncio.ensure_future(subject.create("s", body=b"new"))

    assert await deleting == Deleted()
    second = await creating
    assert isinstance(second, Created)
    assert second.stream.id != first.stream.id
    await subject.reopen()
    assert await subject.content("s") == b"new"


async def test_create_delete_and_create_at_once_come_in_that_order(subject: Subject) -> None:
    outcomes = await asyncio.gather(
        subject.create("s", body=b"1"), subject.delete("s"), subject.create("s", body=b"2")
    )

    assert [type(outcome) for outcome in outcomes] == [Created, Deleted, Created]
    await subject.reopen()
    assert await subject.content("s") == b"2"


async def test_the_numbers_of_incarnations_never_come_back(subject: Subject) -> None:
    seen: set[int] = set()
    for _ in range(3):
        made = await subject.made("s")
        assert made.stream.id not in seen
        seen.add(made.stream.id)
        await subject.delete("s")
        await subject.reopen()


# What a restart finds


async def test_everything_answered_is_there_after_a_restart(subject: Subject) -> None:
    made = await subject.made("s", JSON, body=b"[1]", lifetime=Lifetime(ttl_s=600))
    await subject.append("s", b"[2,3]", JSON, producer=("p", 4, 0), seq="m")
    await subject.append("s", b"4", JSON, producer=("p", 4, 1), closes=True)
    before = await subject.info("s")

    await subject.reopen()

    assert await subject.info("s") == before
    assert before.id == made.stream.id
    assert await subject.messages("s") == [1, 2, 3, 4]
    again = await subject.append("s", b"4", JSON, producer=("p", 4, 1), closes=True)
    assert isinstance(again, Duplicate)
    assert (again.closed, again.matches) == (True, True)


@pytest.mark.parametrize("restarts", [False, True], ids=["while open", "after a restart"])
async def test_a_producers_first_and_last_sixteen_batches_are_remembered(
    subject: Subject, restarts: bool
) -> None:
    await subject.made("s")
    starts = []
    for seq in range(20):
        done = await subject.appended("s", b"%d," % seq, producer=("p", 7, seq))
        starts.append(done.start)
    if restarts:
        await subject.reopen()

    for seq in range(20):
        again = await subject.append("s", b"%d," % seq, producer=("p", 7, seq))
        assert isinstance(again, Duplicate)
        assert (again.producer_epoch, again.producer_seq) == (7, 19)
        if seq == 0 or seq >= 4:
            assert again.original is not None
            assert (again.original.offset, again.matches) == (starts[seq], True)
        else:
            assert (again.original, again.matches) == (None, None)
    other = await subject.append("s", b"other", producer=("p", 7, 19))
    assert isinstance(other, Duplicate)
    assert other.matches is False


async def test_a_new_epoch_forgets_the_batches_of_the_old_one(subject: Subject) -> None:
    await subject.made("s")
    for seq in range(3):
        await subject.appended("s", b"x", producer=("p", 0, seq))
    await subject.appended("s", b"y", producer=("p", 1, 0))
    await subject.reopen()

    outcome = await subject.append("s", b"y", producer=("p", 1, 1))
    again = await subject.append("s", b"y", producer=("p", 1, 0))

    assert isinstance(outcome, Appended)
    assert isinstance(again, Duplicate)
    assert again.original is not None
    assert again.original.offset == Offset(3, 3)


async def test_a_producer_that_only_closed_is_recognised_after_a_restart(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"x", producer=("p", 0, 0))
    assert isinstance(await subject.append("s", closes=True, producer=("p", 0, 1)), Appended)
    await subject.reopen()

    again = await subject.append("s", closes=True, producer=("p", 0, 1))

    assert isinstance(again, Duplicate)
    assert again.matches is True


async def test_deleted_stays_deleted_after_a_restart(subject: Subject) -> None:
    await subject.made("s", body=b"x")
    await subject.delete("s")

    await subject.reopen()

    assert await subject.look("s") == Missing()


async def test_what_was_sent_but_not_awaited_is_committed_by_a_close(subject: Subject) -> None:
    await subject.made("s")
    answer = subject.appending("s", b"x")

    await subject.reopen()

    assert isinstance(await answered(answer), Appended)
    assert await subject.content("s") == b"x"


# Being told


async def test_a_listener_hears_of_every_commit_in_order_before_its_answer(
    subject: Subject,
) -> None:
    await subject.made("s")
    heard: list[tuple[Offset, Offset, bytes]] = []

    def listener(changes: Sequence[Published]) -> None:
        for change in changes:
            parts = b"".join(change.parts or ())
            heard.append((change.start, change.info.tail, parts))

    subject.store.listen(listener)
    for number in range(5):
        outcome = await subject.appended("s", b"%d" % number)
        assert heard[-1][1] == outcome.tail

    assert b"".join(part for _, _, part in heard) == b"01234"
    assert [start for start, _, _ in heard[1:]] == [tail for _, tail, _ in heard[:-1]]


async def test_a_listener_hears_of_closing_and_deleting(subject: Subject) -> None:
    await subject.made("s")
    heard: list[tuple[bool, bool]] = []
    subject.store.listen(
        lambda changes: heard.extend((change.info.closed, change.gone) for change in changes)
    )

    await subject.append("s", closes=True)
    await subject.delete("s")

    assert heard == [(True, False), (True, True)]


async def test_a_refusal_is_no_news(subject: Subject) -> None:
    await subject.made("s")
    heard: list[Published] = []
    subject.store.listen(heard.extend)

    await subject.append("s", b"1", JSON)
    await subject.append("other", b"x")

    assert heard == []


async def test_the_store_says_that_it_can_write(subject: Subject) -> None:
    assert await subject.store.probe() is None
