"""What a store promises about conditions, duplicates and keys, before and after a restart."""

import asyncio

import pytest

from fencepost.protocol.appends import (
    Appended,
    Duplicate,
    KeyDisagrees,
    KeyReused,
    OtherContent,
    ProducerMoved,
    Replayed,
    SequenceGap,
    StaleEpoch,
    StreamClosed,
    TailMoved,
    TypeMismatch,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Missing, SoftDeleted
from tests.contract.conditional import JSON, ask_append, conditional
from tests.contract.subject import Subject, answered

# If-Match, If-None-Match, Stream-Auto-Create


async def test_an_append_on_a_tail_is_accepted_there_and_nowhere_else(subject: Subject) -> None:
    await subject.made("s", body=b"one")

    moved = await ask_append(subject, "s", b"x", if_match=START)
    met = await ask_append(subject, "s", b"two", if_match=Offset(1, 3))

    assert moved == TailMoved(Offset(1, 3))
    assert isinstance(met, Appended)
    assert await subject.content("s") == b"onetwo"


async def test_a_condition_counts_the_appends_still_in_flight(subject: Subject) -> None:
    await subject.made("s")
    sent = [
        subject.ask(subject.store.append, conditional("s", b"%d" % n, if_match=Offset(n, n)))
        for n in range(8)
    ]
    late = subject.ask(subject.store.append, conditional("s", b"x", if_match=Offset(7, 7)))

    assert {type(await answered(one)) for one in sent} == {Appended}
    assert await answered(late) == TailMoved(Offset(8, 8))


async def test_an_append_to_a_missing_stream_makes_it_only_when_told(subject: Subject) -> None:
    assert await ask_append(subject, "s", b"x", if_match=START) == Missing()
    assert await ask_append(subject, "s", b"x", if_match="*") == Missing()
    assert await ask_append(subject, "s", b"x", key="k") == Missing()

    made = await ask_append(subject, "s", b"x", creates=True)

    assert isinstance(made, Appended)
    assert (await subject.info("s")).content_type == "text/plain"
    assert await subject.content("s") == b"x"


async def test_a_stream_that_must_exist_is_not_made(subject: Subject) -> None:
    outcome = await ask_append(subject, "s", b"x", creates=True, if_match="*")

    assert outcome == Missing()
    assert await subject.look("s") == Missing()


async def test_a_refused_append_makes_no_stream(subject: Subject) -> None:
    moved = await ask_append(subject, "s", b"x", creates=True, if_match=Offset(1, 1))
    gap = await ask_append(subject, "s", b"x", creates=True, producer=("p", 0, 4))

    assert (moved, gap) == (TailMoved(START), SequenceGap(0, 4))
    assert await subject.look("s") == Missing()
    await subject.reopen()
    assert await subject.look("s") == Missing()


async def test_of_sixteen_first_writers_one_wins(subject: Subject) -> None:
    asked = [
        subject.ask(subject.store.append, conditional("s", b"%x" % n, creates=True, if_empty=True))
        for n in range(16)
    ]
    outcomes = [await answered(one) for one in asked]

    assert [type(outcome) for outcome in outcomes] == [Appended] + [TailMoved] * 15
    assert await subject.content("s") == b"0"


async def test_a_first_writer_may_find_the_stream_made_but_empty(subject: Subject) -> None:
    await subject.made("s")

    assert isinstance(await ask_append(subject, "s", b"x", creates=True, if_empty=True), Appended)
    assert await ask_append(subject, "s", b"x", creates=True, if_empty=True) == TailMoved(
        Offset(1, 1)
    )


async def test_of_many_automatic_creations_one_creates_and_all_append(subject: Subject) -> None:
    asked = [
        subject.ask(subject.store.append, conditional("s", b"%x" % n, creates=True))
        for n in range(16)
    ]
    outcomes = [await answered(one) for one in asked]

    assert all(isinstance(outcome, Appended) for outcome in outcomes)
    assert await subject.content("s") == b"0123456789abcdef"


async def test_an_automatic_creation_with_another_type_is_refused(subject: Subject) -> None:
    await subject.made("s", JSON, body=b"1")

    assert await ask_append(subject, "s", b"x", creates=True) == TypeMismatch(JSON)


async def test_a_path_that_forks_still_hold_is_not_made_anew(subject: Subject) -> None:
    await subject.made("s", body=b"x")
    await subject.fork("f", "s")
    await subject.delete("s")

    assert await ask_append(subject, "s", b"x", creates=True) == SoftDeleted()


async def test_a_stream_made_by_an_append_survives_with_all_that_came_with_it(
    subject: Subject,
) -> None:
    made = await ask_append(
        subject, "s", b"all", creates=True, if_empty=True, producer=("p", 3, 0), key="k",
        seq="a", closes=True,
    )  # fmt: skip
    assert isinstance(made, Appended)

    await subject.reopen()

    info = await subject.info("s")
    assert (info.tail, info.closed) == (Offset(1, 3), True)
    assert isinstance(await ask_append(subject, "s", b"x"), StreamClosed)
    again = await ask_append(
        subject, "s", b"all", creates=True, if_empty=True, producer=("p", 3, 0), key="k",
        seq="a", closes=True,
    )  # fmt: skip
    assert isinstance(again, Replayed)


async def test_positions_are_the_same_in_the_answer_and_on_disk_when_an_expiry_comes_between(
    subject: Subject,
) -> None:
    """The old stream's end takes a position of its own before the new stream's first message."""
    await subject.made("s", lifetime=Lifetime(ttl_s=1), body=b"old")
    subject.clock.advance(5_000)

    first = await ask_append(subject, "s", b"0", creates=True, producer=("p", 0, 0))
    second = await ask_append(subject, "s", b"1", producer=("p", 0, 1))
    assert isinstance(first, Appended)
    assert isinstance(second, Appended)
    assert second.position == first.position + 1

    await subject.reopen()
    again = await ask_append(subject, "s", b"1", producer=("p", 0, 1))
    assert isinstance(again, Duplicate)
    assert again.matches
    assert again.original is not None
    assert again.original.offset == Offset(1, 1)


async def test_a_refused_condition_still_counts_as_a_use_of_the_stream(subject: Subject) -> None:
    await subject.made("s", lifetime=Lifetime(ttl_s=10))
    for _ in range(4):
        subject.clock.advance(6_000)
        assert await ask_append(subject, "s", b"x", if_match=Offset(9, 9)) == TailMoved(START)

    assert (await subject.info("s")).tail == START


# What a duplicate says


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("closes", [False, True])
async def test_a_duplicate_says_the_same_before_and_after_a_restart(
    subject: Subject, restarts: bool, closes: bool
) -> None:
    await subject.made("s", JSON)
    bodies = [b"[%d,%d,%d]" % (n, n, n) if n % 3 else b"%d" % n for n in range(40)]
    starts = []
    for n, body in enumerate(bodies):
        sent = await subject.appended("s", body, content_type=JSON, producer=("p", 2, n))
        starts.append(sent.start)
        await subject.appended("s", b"0", content_type=JSON, producer=("q", 0, n))
    if closes:
        await subject.appended("s", b"", closes=True)
    if restarts:
        await subject.reopen()

    for n, body in enumerate(bodies):
        same = await ask_append(subject, "s", body, content_type=JSON, producer=("p", 2, n))
        other = await ask_append(subject, "s", b"99", content_type=JSON, producer=("p", 2, n))
        assert isinstance(same, Duplicate)
        assert isinstance(other, Duplicate)
        if n == 0 or n >= 24:
            assert same.original is not None
            assert same.original.offset == starts[n]
            assert (same.matches, other.matches) == (True, False)
        else:
            assert (same.original, same.matches, other.matches) == (None, None, None)
        strict = await ask_append(
            subject, "s", body, content_type=JSON, producer=("p", 2, n), strict=True
        )
        assert isinstance(strict, Duplicate if n == 0 or n >= 24 else OtherContent)


async def test_a_close_by_a_producer_is_remembered_like_a_batch(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"x", producer=("p", 0, 0))
    await ask_append(subject, "s", closes=True, producer=("p", 0, 1))
    for _ in range(2):
        again = await ask_append(subject, "s", closes=True, producer=("p", 0, 1))
        assert isinstance(again, Duplicate)
        assert (again.matches, again.closed) == (True, True)
        assert again.original is not None
        assert again.original.offset == Offset(1, 1)
        await subject.reopen()


async def test_a_raised_epoch_forgets_the_batches_of_the_old_one(subject: Subject) -> None:
    await subject.made("s")
    for n in range(5):
        await subject.appended("s", b"%d" % n, producer=("p", 0, n))
    await subject.appended("s", b"new", producer=("p", 1, 0))
    await subject.reopen()

    assert await ask_append(subject, "s", b"4", producer=("p", 0, 4)) == StaleEpoch(1)
    again = await ask_append(subject, "s", b"new", producer=("p", 1, 0))
    assert isinstance(again, Duplicate)
    assert again.matches
    assert await ask_append(subject, "s", b"x", producer=("p", 1, 3)) == SequenceGap(1, 3)


async def test_of_two_reclaimers_in_one_group_one_wins(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"claim", producer=("task", 0, 0))
    asked = [
        subject.ask(
            subject.store.append,
            conditional("s", b"mine %d" % n, producer=("task", 1 + n, 0), producer_if=(0, 0)),
        )
        for n in range(2)
    ]

    first, second = [await answered(one) for one in asked]

    assert isinstance(first, Appended)
    assert second == ProducerMoved(1, 0)


async def test_a_reclaimer_loses_against_a_worker_that_just_finished(subject: Subject) -> None:
    await subject.made("s")
    await subject.appended("s", b"claim", producer=("task", 0, 0))
    finished = subject.appending("s", b"done", producer=("task", 0, 1))
    reclaimed = subject.ask(
        subject.store.append,
        conditional("s", b"mine", producer=("task", 1, 0), producer_if=(0, 0)),
    )

    assert isinstance(await answered(finished), Appended)
    assert await answered(reclaimed) == ProducerMoved(0, 1)


# Keys


async def test_a_key_used_again_gets_the_answer_of_the_first_time(subject: Subject) -> None:
    await subject.made("s")
    first = await ask_append(subject, "s", b"x", key="k")
    assert isinstance(first, Appended)
    await subject.appended("s", b"y")

    for _ in range(2):
        again = await ask_append(subject, "s", b"x", key="k")
        assert isinstance(again, Replayed)
        record = again.original
        assert (record.start, record.tail, record.position, record.closed) == (
            first.start,
            first.tail,
            first.position,
            first.closed,
        )
        assert isinstance(await ask_append(subject, "s", b"z", key="k"), KeyReused)
        await subject.reopen()
    assert await subject.content("s") == b"xy"


async def test_a_key_stands_for_the_closing_as_well(subject: Subject) -> None:
    await subject.made("s")
    await ask_append(subject, "s", b"x", key="k", closes=True)

    assert isinstance(await ask_append(subject, "s", b"x", key="k", closes=True), Replayed)
    assert isinstance(await ask_append(subject, "s", b"x", key="k"), KeyReused)
    assert isinstance(await ask_append(subject, "s", b"x", key="other"), StreamClosed)


async def test_fifty_requests_with_one_key_at_once_store_one_message(subject: Subject) -> None:
    await subject.made("s")
    asked = [subject.ask(subject.store.append, conditional("s", b"x", key="k")) for _ in range(50)]

    first, *others = [await answered(one) for one in asked]

    assert isinstance(first, Appended)
    assert all(isinstance(other, Replayed) for other in others)
    assert {(other.original.start, other.original.position) for other in others} == {
        (first.start, first.position)
    }
    assert await subject.content("s") == b"x"


@pytest.mark.parametrize(
    "refusal",
    [
        {"if_match": Offset(9, 9)},
        {"producer": ("p", 0, 7)},
        {"producer": ("p", 0, 0), "producer_if": (0, 0)},
        {"content_type": JSON},
    ],
    ids=["tail", "gap", "producer", "type"],
)
async def test_a_refused_request_does_not_use_up_its_key(
    subject: Subject, refusal: dict[str, object]
) -> None:
    await subject.made("s")

    refused = await ask_append(subject, "s", b"1", key="k", **refusal)
    assert not isinstance(refused, Appended | Replayed)

    assert isinstance(await ask_append(subject, "s", b"other", key="k"), Appended)


async def test_a_key_and_its_producer_are_kept_together(subject: Subject) -> None:
    await subject.made("s")
    await ask_append(subject, "s", b"x", key="k", producer=("p", 0, 0))
    for _ in range(2):
        again = await ask_append(subject, "s", b"x", key="k", producer=("p", 0, 0))
        assert isinstance(again, Replayed)
        # Either name alone is enough to be recognised.
        assert isinstance(await ask_append(subject, "s", b"x", key="k"), Replayed)
        assert isinstance(await ask_append(subject, "s", b"x", producer=("p", 0, 0)), Duplicate)
        # A key that belongs to another request of the producer contradicts it.
        assert await ask_append(subject, "s", b"x", key="k", producer=("p", 0, 1)) == KeyDisagrees()
        await subject.reopen()


async def test_a_key_belongs_to_one_stream_and_one_incarnation_of_it(subject: Subject) -> None:
    for path in ("a", "b"):
        await subject.made(path)
        assert isinstance(await ask_append(subject, path, b"x", key="k"), Appended)
    await subject.delete("a")
    await subject.made("a")

    assert isinstance(await ask_append(subject, "a", b"y", key="k"), Appended)
    assert isinstance(await ask_append(subject, "b", b"x", key="k"), Replayed)
    await subject.reopen()
    assert isinstance(await ask_append(subject, "a", b"y", key="k"), Replayed)


async def test_a_stream_deleted_and_made_in_the_same_breath_knows_no_keys(subject: Subject) -> None:
    await subject.made("s")
    await ask_append(subject, "s", b"x", key="k")
    deleted = asyncio.create_task(subject.delete("s"))
    await asyncio.sleep(0)
    made = await ask_append(subject, "s", b"y", key="k", creates=True)

    assert isinstance(made, Appended)
    assert made.start == START
    await deleted
