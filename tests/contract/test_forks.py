"""Forks: inherited without copying, independent from then on, and holding their sources alive."""

import pytest

from fencepost.protocol.appends import Appended, SequenceGap
from fencepost.protocol.creates import (
    BadForkPoint,
    ConfigConflict,
    Created,
    Exists,
    PathBlocked,
    SourceDeleted,
    SourceMissing,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Deleted, Missing, SoftDeleted
from tests.contract.subject import Subject, answered

JSON = "application/json"


async def test_a_fork_begins_with_its_sources_content_and_goes_its_own_way(
    subject: Subject,
) -> None:
    await subject.made("source", body=b"one,")
    await subject.appended("source", b"two,")

    forked = await subject.fork("fork", "source", Offset(1, 4))
    await subject.appended("fork", b"other")
    await subject.appended("source", b"three")

    assert isinstance(forked, Created)
    assert (forked.tail, forked.stream.content_type) == (Offset(1, 4), "text/plain")
    assert await subject.content("fork") == b"one,other"
    assert await subject.content("source") == b"one,two,three"


async def test_a_fork_without_an_offset_takes_all_there_is(subject: Subject) -> None:
    await subject.made("source", body=b"one,")
    await subject.appended("source", b"two,")

    await subject.fork("fork", "source")

    assert await subject.content("fork") == b"one,two,"


async def test_a_fork_at_the_tail_counts_what_is_still_on_its_way_to_disk(
    subject: Subject,
) -> None:
    await subject.made("source", body=b"one,")
    sent = subject.appending("source", b"two,")

    forked = await subject.fork("fork", "source")

    assert sent.done()
    assert forked.tail == Offset(2, 8)
    assert await subject.content("fork") == b"one,two,"


async def test_a_fork_at_the_committed_tail_does_not_mind_an_append_in_flight(
    subject: Subject,
) -> None:
    await subject.made("source")
    known = (await subject.appended("source", b"one,")).tail
    sent = subject.appending("source", b"two,")

    forked = await subject.fork("fork", "source", known)

    assert isinstance(await answered(sent), Appended)
    assert isinstance(forked, Created), forked
    assert await subject.content("fork") == b"one,"


async def test_a_fork_may_begin_with_a_body_of_its_own(subject: Subject) -> None:
    await subject.made("source", body=b"one,")

    forked = await subject.fork("fork", "source", body=b"mine")

    assert (forked.start, forked.tail) == (Offset(1, 4), Offset(2, 8))
    assert await subject.content("fork") == b"one,mine"


async def test_a_fork_of_nothing_inherits_nothing(subject: Subject) -> None:
    await subject.made("source", body=b"one")

    await subject.fork("fork", "source", START)
    await subject.appended("fork", b"mine")

    assert await subject.content("fork") == b"mine"


async def test_a_sub_offset_cuts_inside_the_next_append(subject: Subject) -> None:
    await subject.made("bytes", body=b"0123456789")
    await subject.made("json", JSON, body=b"[1,2,3]")

    cut = await subject.fork("cut", "bytes", START, 4)
    between = await subject.fork("between", "json", START, 2)

    assert cut.tail == Offset(1, 4)
    assert await subject.content("cut") == b"0123"
    assert between.tail == Offset(2, 2)
    assert await subject.messages("between") == [1, 2]


@pytest.mark.parametrize(
    ("offset", "sub_offset"),
    [
        (Offset(3, 6), 0),  # beyond the tail
        (Offset(9, 2), 0),
        (Offset(0, 2), 0),
        (Offset(2, 1), 0),
        (START, 3),  # past the end of the append at the offset
        (Offset(2, 2), 2),
        (Offset(3, 3), 1),  # past the tail
        (Offset(7, 2**53), 0),
    ],
)
async def test_a_place_that_the_source_does_not_have_is_refused(
    subject: Subject, offset: Offset, sub_offset: int
) -> None:
    await subject.made("source", JSON, body=b"[1,2]")
    await subject.append("source", b"3", JSON)

    outcome = await subject.fork("fork", "source", offset, sub_offset)

    assert isinstance(outcome, BadForkPoint)
    assert await subject.look("fork") == Missing()


async def test_a_fork_inside_an_append_counts_the_message_that_it_cuts(subject: Subject) -> None:
    """A reader cut off by the size of its chunk knows such an offset; versions must not repeat."""
    await subject.made("source", body=b"abcdef")

    forked = await subject.fork("fork", "source", Offset(0, 4))
    appended = await subject.appended("fork", b"XY")

    assert isinstance(forked, Created)
    assert forked.tail == Offset(1, 4)
    assert appended.tail == Offset(2, 6)
    assert await subject.content("fork") == b"abcdXY"
    assert isinstance(await subject.fork("fork", "source", Offset(0, 4)), Exists)


async def test_a_fork_of_a_missing_source_is_refused(subject: Subject) -> None:
    assert await subject.fork("fork", "source") == SourceMissing("source")
    assert await subject.look("fork") == Missing()


async def test_a_fork_knows_no_producers_and_no_stream_seq(subject: Subject) -> None:
    await subject.made("source")
    await subject.appended("source", b"x", producer=("p", 5, 0), seq="z")
    await subject.fork("fork", "source")

    assert await subject.append("fork", b"y", producer=("p", 5, 1)) == SequenceGap(0, 1)
    assert isinstance(await subject.append("fork", b"y", producer=("p", 0, 0), seq="a"), Appended)


async def test_a_closed_source_gives_an_open_fork(subject: Subject) -> None:
    await subject.made("source", body=b"x", closed=True)

    await subject.fork("fork", "source")

    assert isinstance(await subject.append("fork", b"y"), Appended)


async def test_a_fork_asked_for_again_is_there_already(subject: Subject) -> None:
    await subject.made("source", body=b"x")
    first = await subject.fork("fork", "source")
    await subject.appended("source", b"y")

    again = await subject.fork("fork", "source")
    elsewhere = await subject.fork("fork", "source", START)

    assert isinstance(again, Exists)
    assert again.stream.id == first.stream.id
    assert isinstance(elsewhere, ConfigConflict)


async def test_a_deleted_source_lives_on_in_its_fork_only(subject: Subject) -> None:
    await subject.made("source", body=b"one,")
    await subject.fork("fork", "source")

    assert await subject.delete("source") == Deleted()

    assert await subject.look("source") == SoftDeleted()
    assert await subject.append("source", b"x") == SoftDeleted()
    assert await subject.delete("source") == SoftDeleted()
    assert await subject.create("source") == PathBlocked()
    assert await subject.fork("another", "source") == SourceDeleted("source")
    assert await subject.content("fork") == b"one,"
    await subject.reopen()
    assert await subject.look("source") == SoftDeleted()
    assert await subject.content("fork") == b"one,"


async def test_the_last_fork_takes_its_soft_deleted_sources_along(subject: Subject) -> None:
    await subject.made("one", body=b"1")
    await subject.fork("two", "one", body=b"2")
    await subject.fork("three", "two", body=b"3")
    await subject.delete("one")
    await subject.delete("two")
    assert await subject.content("three") == b"123"

    await subject.delete("three")

    for path in ("one", "two", "three"):
        assert await subject.look(path) == Missing()
    await subject.reopen()
    assert isinstance(await subject.create("one"), Created)
    assert await subject.content("one") == b""


async def test_a_fork_read_after_its_deletion_is_missing_though_its_source_is_there(
    subject: Subject,
) -> None:
    await subject.made("source", body=b"abc")
    await subject.fork("fork", "source")
    info = await subject.info("fork")
    await subject.delete("fork")

    outcome = await subject.store.read(info, START, bytes_max=10)

    assert outcome == Missing()
    assert await subject.content("source") == b"abc"


async def test_a_source_with_two_forks_stays_until_both_are_gone(subject: Subject) -> None:
    await subject.made("source", body=b"x")
    await subject.fork("a", "source")
    await subject.fork("b", "source")
    await subject.delete("source")

    await subject.delete("a")
    assert await subject.look("source") == SoftDeleted()
    assert await subject.content("b") == b"x"

    await subject.delete("b")
    assert await subject.look("source") == Missing()


async def test_an_open_source_outlives_its_forks(subject: Subject) -> None:
    await subject.made("source", body=b"x")
    await subject.fork("fork", "source")
    await subject.delete("fork")

    assert await subject.content("source") == b"x"
    assert await subject.delete("source") == Deleted()
    assert await subject.look("source") == Missing()


async def test_an_expired_source_keeps_its_content_for_its_forks(subject: Subject) -> None:
    await subject.made("source", body=b"x", lifetime=Lifetime(ttl_s=10))
    await subject.fork("fork", "source", lifetime=Lifetime(ttl_s=1000))

    subject.clock.advance(11_000)

    assert await subject.look("source") == SoftDeleted()
    assert await subject.content("fork") == b"x"


async def test_a_fork_that_expires_takes_its_soft_deleted_source_along(subject: Subject) -> None:
    await subject.made("source", body=b"x")
    await subject.fork("fork", "source", lifetime=Lifetime(ttl_s=10))
    await subject.delete("source")

    subject.clock.advance(11_000)

    assert await subject.look("fork") == Missing()
    assert await subject.look("source") == Missing()


async def test_forks_survive_a_restart_with_their_places(subject: Subject) -> None:
    await subject.made("source", body=b"0123456789")
    await subject.fork("cut", "source", START, 4, body=b"abc")
    await subject.fork("again", "cut", body=b"!")

    await subject.reopen()

    assert await subject.content("cut", bytes_max=3) == b"0123abc"
    assert await subject.content("again", bytes_max=2) == b"0123abc!"
    assert (await subject.appended("again", b"?")).start == Offset(3, 8)
