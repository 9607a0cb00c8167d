"""What a store promises about books: closed ones take nothing, and no group's work is cut off."""

from typing import Any, cast

import pytest

from fencepost.protocol.acks import Ack
from fencepost.protocol.appends import Duplicate, Replayed, StreamClosed, TailMoved
from fencepost.protocol.books import BooksClosed, BooksPending, BooksRequest, CutInvalid
from fencepost.protocol.commits import (
    Commit,
    CommitDuplicate,
    CommitItem,
    CommitRefused,
    CommitReplayed,
    Committed,
)
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, Target
from fencepost.protocol.offsets import START, Offset
from fencepost.store.contract import Truncated
from fencepost.store.read.groups import SqlGroupReads
from tests.contract.conditional import JSON, ask_append, ask_commit, ask_stage, item
from tests.contract.grouping import (
    acked,
    ask,
    claimed,
    correlate,
    made,
    operating,
    parking,
    ref,
    with_events,
    with_work,
)
from tests.contract.sliced import also_in_slices
from tests.contract.subject import Outcome, Subject, answered

sliced = also_in_slices
"""Stores of each kind, those that carry out every commit in slices included."""

PATH = "orders/1"
EVENT = b'{"n":1}'
ONE = Offset(1, 7)
CLOSE, OPEN = BooksRequest("close"), BooksRequest("open")
RETIRE = BooksRequest(truncate_before="now")


def event(path: str = PATH, **options: Any) -> CommitItem:
    return item(path, EVENT, content_type=JSON, **options)


async def closed(subject: Subject, path: str = PATH) -> None:
    """A stream with one event and closed books."""
    await with_events(subject, path)
    assert isinstance(await ask_commit(subject, item(path, books=CLOSE)), Committed)


def reads(subject: Subject) -> SqlGroupReads:
    """The groups of the store, as committed."""
    return SqlGroupReads(cast(Any, subject.store).readers)


async def row_of(subject: Subject, group: Group, target: str = PATH) -> Target | None:
    return await reads(subject).target(group.id, target)


def refused(outcome: Outcome) -> object:
    """Why the first append of a commit was refused."""
    assert isinstance(outcome, CommitRefused), outcome
    assert outcome.item == 0
    return outcome.outcome


# Closing and opening


async def test_closed_books_take_no_append_of_any_kind_and_stay_closed(sliced: Subject) -> None:
    await closed(sliced)
    for _ in range(2):
        assert (await sliced.info(PATH)).books_closed
        assert not (await sliced.info(PATH)).closed

        plain = await sliced.append(PATH, EVENT, content_type=JSON)
        sent = await sliced.append(PATH, EVENT, content_type=JSON, producer=("p", 0, 0))
        keyed = await ask_append(sliced, PATH, EVENT, content_type=JSON, key="k")
        ending = await sliced.append(PATH, closes=True)

        assert [plain, sent, keyed, ending] == [BooksClosed(ONE)] * 4
        for one in (event(), event(books=CLOSE), item(PATH, books=CLOSE), item(PATH, closes=True)):
            assert refused(await ask_commit(sliced, one)) == BooksClosed(ONE)
        assert await sliced.messages(PATH) == [{"n": 1}]
        await sliced.reopen()


@pytest.mark.parametrize("tail", [ONE, 0], ids=["offset", "version"])
async def test_only_an_append_that_names_the_tail_opens_books(
    subject: Subject, tail: Offset | int
) -> None:
    await closed(subject)

    unnamed = await ask_commit(subject, event(books=OPEN))
    existing = await ask_commit(subject, event(books=OPEN, if_match="*"))
    moved = await ask_commit(subject, event(books=OPEN, if_match=Offset(9, 9)))
    named = await ask_commit(subject, event(books=OPEN, if_match=tail))

    assert refused(unnamed) == refused(existing) == BooksClosed(ONE)
    assert refused(moved) == TailMoved(ONE)
    assert isinstance(named, Committed)
    assert not (await subject.info(PATH)).books_closed
    await subject.reopen()
    await subject.appended(PATH, EVENT, content_type=JSON)


async def test_books_close_and_open_without_a_message_and_beside_one(subject: Subject) -> None:
    await with_events(subject, PATH)

    said = await ask_commit(subject, event(books=CLOSE, if_match=ONE))
    opened = await ask_commit(subject, item(PATH, books=OPEN, if_match=1))
    again = await ask_commit(subject, item(PATH, books=OPEN))

    assert isinstance(said, Committed)
    assert isinstance(opened, Committed)
    assert opened.outcomes[0].start == opened.outcomes[0].tail == Offset(2, 14)
    assert isinstance(again, Committed), "they are open, so there is nothing to protect"
    assert await subject.messages(PATH) == [{"n": 1}, {"n": 1}]


async def test_a_later_append_of_the_same_commit_finds_the_books_as_the_earlier_left_them(
    sliced: Subject,
) -> None:
    await with_events(sliced, PATH)

    outcome = await ask_commit(sliced, item(PATH, books=CLOSE), event())
    both = await ask_commit(
        sliced, item(PATH, books=CLOSE), event(books=OPEN, if_match=ONE), event()
    )

    assert outcome == CommitRefused(1, BooksClosed(ONE))
    assert isinstance(both, Committed)
    assert not (await sliced.info(PATH)).books_closed


async def test_a_retry_of_what_was_accepted_is_a_duplicate_although_the_books_are_closed(
    subject: Subject,
) -> None:
    await subject.made(PATH, JSON)
    sent = event(producer=("p", 0, 0))
    keyed = event("orders/2", creates=True, key="k")
    await ask_commit(subject, sent)
    await ask_commit(subject, keyed)
    whole = (item(PATH, books=CLOSE), item("orders/2", books=CLOSE))
    assert isinstance(await ask_commit(subject, *whole, key="all"), Committed)

    again = await ask_commit(subject, sent)
    key_again = await ask_commit(subject, keyed)
    all_again = await ask_commit(subject, *whole, key="all")

    assert isinstance(again, CommitDuplicate)
    assert isinstance(again.outcomes[0], Duplicate)
    assert isinstance(key_again, CommitDuplicate)
    assert isinstance(key_again.outcomes[0], Replayed)
    assert isinstance(all_again, CommitReplayed)


async def test_a_stream_that_ended_says_so_before_its_books(subject: Subject) -> None:
    await subject.made(PATH, JSON)
    outcome = await ask_commit(subject, event(books=CLOSE, closes=True))

    assert isinstance(outcome, Committed)
    assert await subject.append(PATH, EVENT, content_type=JSON) == StreamClosed(ONE)
    assert refused(await ask_commit(subject, item(PATH, books=OPEN, if_match=ONE))) == (
        StreamClosed(ONE)
    )


async def test_forks_and_the_next_stream_at_a_path_have_open_books(subject: Subject) -> None:
    await closed(subject)

    await subject.fork("fork", PATH)
    assert not (await subject.info("fork")).books_closed
    await subject.appended("fork", EVENT, content_type=JSON)
    await subject.delete("fork")
    await subject.delete(PATH)
    await subject.made(PATH, JSON)

    assert not (await subject.info(PATH)).books_closed
    await subject.appended(PATH, EVENT, content_type=JSON)


async def test_an_append_may_make_a_stream_whose_books_are_closed(sliced: Subject) -> None:
    done = await ask_commit(sliced, event(creates=True, books=CLOSE))
    await sliced.reopen()

    assert isinstance(done, Committed)
    assert await sliced.append(PATH, EVENT, content_type=JSON) == BooksClosed(ONE)


# Where a stream begins


async def test_a_stream_begins_where_the_append_begins_and_versions_go_on(
    subject: Subject,
) -> None:
    await with_events(subject, PATH, PATH, PATH)
    tail = Offset(3, 21)

    done = await ask_commit(subject, event(books=BooksRequest(truncate_before="now")))

    assert isinstance(done, Committed)
    assert done.outcomes[0].start == tail
    for _ in range(2):
        info = await subject.info(PATH)
        assert (info.first, info.tail) == (tail, Offset(4, 28))
        assert await subject.read(PATH) == Truncated(tail)
        assert await subject.messages(PATH) == [{"n": 1}]
        await subject.reopen()


@pytest.mark.parametrize("cut", [Offset(1, 7), Offset(2, 14), Offset(5, 35)])
async def test_a_stream_begins_at_a_place_between_two_messages(
    sliced: Subject, cut: Offset
) -> None:
    await sliced.made(PATH, JSON)
    await sliced.appended(PATH, b'[{"n":1},{"n":2},{"n":3}]', content_type=JSON)
    await sliced.appended(PATH, b'[{"n":4},{"n":5}]', content_type=JSON)

    done = await ask_commit(sliced, item(PATH, books=BooksRequest(truncate_before=cut)))

    assert isinstance(done, Committed)
    assert (await sliced.info(PATH)).first == cut
    assert len(await sliced.messages(PATH)) == 5 - cut.messages


async def test_a_stream_is_cut_at_none_of_its_places_or_behind_its_end(subject: Subject) -> None:
    await subject.made(PATH, JSON)
    await subject.appended(PATH, b'[{"n":1},{"n":2}]', content_type=JSON)
    tail = Offset(2, 14)

    for at in (Offset(1, 3), Offset(1, 8), Offset(2, 7), Offset(3, 14), Offset(3, 21)):
        outcome = await ask_commit(subject, event(books=BooksRequest(truncate_before=at)))
        assert refused(outcome) == CutInvalid(tail), at
    assert (await subject.info(PATH)).tail == tail


async def test_a_fork_is_cut_in_what_it_inherited(sliced: Subject) -> None:
    await with_events(sliced, PATH, PATH)
    await sliced.fork("fork", PATH)
    await sliced.appended("fork", EVENT, content_type=JSON)

    wrong = await ask_commit(sliced, item("fork", books=BooksRequest("close", Offset(1, 9))))
    done = await ask_commit(sliced, item("fork", books=BooksRequest("close", ONE)))

    assert refused(wrong) == CutInvalid(Offset(3, 21))
    assert isinstance(done, Committed)
    assert (await sliced.info("fork")).first == ONE
    assert (await sliced.info(PATH)).first == START


async def test_to_cut_what_is_gone_already_changes_nothing(sliced: Subject) -> None:
    await with_events(sliced, PATH, PATH)
    cut = BooksRequest(truncate_before=ONE)
    await ask_commit(sliced, item(PATH, books=cut))

    again = await ask_commit(sliced, item(PATH, books=cut), item(PATH, books=RETIRE))
    empty = await ask_commit(sliced, item(PATH, books=RETIRE))

    assert isinstance(again, Committed)
    assert isinstance(empty, Committed)
    info = await sliced.info(PATH)
    assert info.first == info.tail == Offset(2, 14)
    await sliced.appended(PATH, EVENT, content_type=JSON)


async def test_staged_messages_close_books_too(sliced: Subject) -> None:
    await with_events(sliced, PATH)
    await ask_stage(sliced, "part", b"[1,2]", content_type=JSON)

    done = await ask_commit(
        sliced, item(PATH, parts=("part",), content_type=JSON, books=BooksRequest("close", "now"))
    )

    assert isinstance(done, Committed)
    assert await sliced.messages(PATH) == [1, 2]
    assert (await sliced.info(PATH)).books_closed


# Groups that lag


async def test_books_do_not_close_while_a_target_lags(sliced: Subject) -> None:
    group = await with_work(sliced, PATH, "orders/2")
    [one, _] = await claimed(sliced, group)
    while_held = await ask_commit(sliced, event(books=CLOSE))
    await acked(sliced, group, one)

    assert refused(while_held) == BooksPending("billing")
    other = await ask_commit(sliced, event("orders/2", books=CLOSE))
    done = await ask_commit(sliced, event(books=CLOSE))

    assert refused(other) == BooksPending("billing")
    assert isinstance(done, Committed)
    assert not (await sliced.info("orders/2")).books_closed


async def test_books_do_not_close_before_it_is_known_whom_the_events_concern(
    subject: Subject,
) -> None:
    group = await made(subject)
    other = await made(subject, "elsewhere", sources=("bills/**",))
    [position] = await with_events(subject, PATH)

    unknown = await ask_commit(subject, item(PATH, books=CLOSE))
    group = await correlate(subject, group, until=position)
    known = await ask_commit(subject, item(PATH, books=CLOSE))

    assert refused(unknown) == BooksPending("billing")
    assert isinstance(known, Committed)
    assert other.watermark < position


async def test_a_group_that_began_behind_the_events_does_not_lag(subject: Subject) -> None:
    await with_events(subject, PATH)
    await made(subject, start="now")

    assert isinstance(await ask_commit(subject, item(PATH, books=CLOSE)), Committed)


@pytest.mark.parametrize("source", [PATH, "orders/*", "**", "*/1"])
async def test_targets_with_other_names_hold_books_open_by_their_source(
    subject: Subject, source: str
) -> None:
    group = await made(subject, targets="computed")
    [position, _] = await with_events(subject, PATH, "elsewhere")
    found = Correlated("totals/all", source, position)
    group = await correlate(subject, group, found, until=position)

    waiting = await ask_commit(subject, item(PATH, books=CLOSE))
    unconcerned = await ask_commit(subject, item("elsewhere", books=CLOSE))
    [row] = await claimed(subject, group)
    await acked(subject, group, row)
    done = await ask_commit(subject, item(PATH, books=CLOSE))

    assert refused(waiting) == BooksPending("billing")
    if source != "**":
        assert isinstance(unconcerned, Committed)
    assert isinstance(done, Committed)


async def test_messages_that_are_targets_hold_books_open_until_they_are_acked(
    subject: Subject,
) -> None:
    group = await made(subject, targets="message")
    [position] = await with_events(subject, PATH)
    found = Correlated(f"{PATH}@{position}", PATH, position)
    group = await correlate(subject, group, found, until=position)

    waiting = await ask_commit(subject, item(PATH, books=CLOSE))
    [row] = await claimed(subject, group)
    await acked(subject, group, row)

    assert refused(waiting) == BooksPending("billing")
    assert isinstance(await ask_commit(subject, item(PATH, books=CLOSE)), Committed)


async def test_what_a_group_consumed_may_go_and_the_rest_may_not(subject: Subject) -> None:
    group = await made(subject)
    positions = await with_events(subject, PATH, PATH)
    found = [Correlated(PATH, PATH, position) for position in positions]
    group = await correlate(subject, group, *found, until=positions[-1])
    [row] = await claimed(subject, group)
    await acked(subject, group, row, at=positions[0])

    all_of_it = await ask_commit(subject, item(PATH, books=RETIRE))
    consumed = await ask_commit(subject, item(PATH, books=BooksRequest(truncate_before=ONE)))

    assert refused(all_of_it) == BooksPending("billing")
    assert isinstance(consumed, Committed)
    assert (await subject.info(PATH)).first == ONE


async def test_messages_of_the_commit_itself_are_not_consumed_yet(sliced: Subject) -> None:
    group = await with_work(sliced, PATH)
    [row] = await claimed(sliced, group)
    await acked(sliced, group, row)

    outcome = await ask_commit(sliced, event(), item(PATH, books=CLOSE))
    alone = await ask_commit(sliced, event(books=CLOSE))

    assert outcome == CommitRefused(1, BooksPending("billing"))
    assert isinstance(alone, Committed), "the message beside the close says why"


async def test_an_ack_of_the_same_commit_counts(sliced: Subject) -> None:
    group = await with_work(sliced, PATH)
    [row] = await claimed(sliced, group)
    lease = (ref(group, row), Ack(row.token, row.work_to))
    request = Commit((item(PATH, books=CLOSE),), None, b"m" * 16, leases=[lease])

    done = await answered(sliced.ask(sliced.store.commit, request))

    assert isinstance(done, Committed)
    assert (await sliced.info(PATH)).books_closed


async def test_a_group_that_is_reset_lags_again(subject: Subject) -> None:
    group = await with_work(subject, PATH)
    [row] = await claimed(subject, group)
    await acked(subject, group, row)
    await ask(subject, operating(group, "reset", PATH))

    assert refused(await ask_commit(subject, item(PATH, books=CLOSE))) == BooksPending("billing")


async def test_a_close_that_is_sent_with_an_append_is_decided_behind_it(subject: Subject) -> None:
    await with_events(subject, PATH)

    appended = subject.appending(PATH, EVENT, content_type=JSON)
    closing = subject.ask(subject.store.commit, Commit((item(PATH, books=CLOSE),), None, b"c" * 16))
    late = subject.appending(PATH, EVENT, content_type=JSON)

    await answered(appended)
    assert isinstance(await answered(closing), Committed)
    assert await answered(late) == BooksClosed(Offset(2, 14))


# Retirement


async def test_a_retired_stream_is_empty_and_its_targets_are_gone(sliced: Subject) -> None:
    group = await with_work(sliced, PATH, "orders/2")
    for row in await claimed(sliced, group):
        await acked(sliced, group, row)
    await ask_commit(sliced, item(PATH, books=CLOSE))

    done = await ask_commit(sliced, item(PATH, books=RETIRE))

    assert isinstance(done, Committed)
    for _ in range(2):
        info = await sliced.info(PATH)
        assert info.first == info.tail == ONE
        assert info.books_closed
        assert await row_of(sliced, group) is None
        assert await row_of(sliced, group, "orders/2") is not None
        found = await reads(sliced).find("billing")
        assert found is not None
        assert found.targets_count == 1
        await sliced.reopen()


async def test_a_stream_with_open_books_keeps_its_targets_when_all_of_it_goes(
    subject: Subject,
) -> None:
    group = await with_work(subject, PATH)
    [row] = await claimed(subject, group)
    await acked(subject, group, row)

    assert isinstance(await ask_commit(subject, item(PATH, books=RETIRE)), Committed)
    assert await row_of(subject, group) is not None


async def test_a_restart_keeps_its_targets_and_goes_on(subject: Subject) -> None:
    group = await with_work(subject, PATH)
    [row] = await claimed(subject, group)
    await acked(subject, group, row)
    await ask_commit(subject, item(PATH, books=CLOSE))

    again = BooksRequest("open", "now")
    done = await ask_commit(subject, event(books=again, if_match=ONE))

    assert isinstance(done, Committed)
    info = await subject.info(PATH)
    assert (info.first, info.tail, info.books_closed) == (ONE, Offset(2, 14), False)
    assert await row_of(subject, group) is not None


async def test_a_stream_is_not_retired_while_a_target_of_its_name_has_work(
    subject: Subject,
) -> None:
    group = await made(subject, targets="computed", sources=("bills/**",))
    await closed(subject)
    [position] = await with_events(subject, "bills/1")
    found = Correlated(PATH, "bills/1", position)
    group = await correlate(subject, group, found, until=position)

    waiting = await ask_commit(subject, item(PATH, books=RETIRE))
    [row] = await claimed(subject, group)
    await acked(subject, group, row)
    done = await ask_commit(subject, item(PATH, books=RETIRE))

    assert refused(waiting) == BooksPending("billing")
    assert isinstance(done, Committed)
    assert await row_of(subject, group) is None


async def test_a_target_with_parked_events_outlives_its_stream(subject: Subject) -> None:
    group = await with_work(subject, PATH)
    [row] = await claimed(subject, group)
    await ask(subject, parking(group, (PATH, row.work_to)))
    await ask_commit(subject, item(PATH, books=CLOSE))

    assert isinstance(await ask_commit(subject, item(PATH, books=RETIRE)), Committed)
    assert await row_of(subject, group) is not None
    found = await reads(subject).parked(group.id, ("", -1), 10)
    assert [event.position for event in found] == [row.work_to]
