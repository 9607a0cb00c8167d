"""What a store promises about staged parts: invisible, idempotent, committed once, or gone."""

import asyncio
import itertools
import random

import pytest

from fencepost.protocol.appends import Appended, Duplicate, KeyReused, TypeMismatch
from fencepost.protocol.commits import (
    CommitDuplicate,
    CommitRefused,
    CommitReplayed,
    Committed,
    Part,
    PartDropped,
    PartIncomplete,
    PartMissing,
    PartOverfull,
    PartTwice,
    PartUsed,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import Cut
from fencepost.store.contract import (
    Bundle,
    Chunk,
    ChunkConflict,
    Missing,
    PartClosed,
    Staged,
    Upload,
)
from fencepost.store.maintain import jobs
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from tests.contract.conditional import (
    JSON,
    TEXT,
    ask_append,
    ask_commit,
    ask_stage,
    chunk,
    commit,
    item,
)
from tests.contract.sliced import also_in_slices
from tests.contract.subject import Outcome, Subject, answered

subject = also_in_slices


DAY_MS = 86_400_000


async def test_a_staged_part_becomes_messages_with_its_commit_and_not_before(
    subject: Subject,
) -> None:
    await subject.made("s", body=b"before,")

    assert await ask_stage(subject, "p", b"one,") == Staged(1, 4, repeated=False)
    await ask_stage(subject, "p", b"two,", 1)
    assert await subject.content("s") == b"before,"

    done = await ask_commit(subject, item("s", parts=("p",)))

    assert isinstance(done, Committed)
    [appended] = done.outcomes
    assert (appended.start, appended.tail) == (Offset(1, 7), Offset(3, 15))
    await subject.appended("s", b"after")
    for _ in range(2):
        assert await subject.content("s") == b"before,one,two,after"
        await subject.reopen()


async def test_parts_become_messages_in_the_given_order_and_chunks_in_theirs(
    subject: Subject,
) -> None:
    for part in "abc":
        for ordinal in (2, 0, 1):
            await ask_stage(subject, part, b"%b%d " % (part.encode(), ordinal), ordinal)

    done = await ask_commit(
        subject,
        item("s", parts=("c", "a"), content_type=TEXT, creates=True),
        item("t", parts=("b",), content_type=TEXT, creates=True),
    )

    assert isinstance(done, Committed)
    assert await subject.content("s") == b"c0 c1 c2 a0 a1 a2 "
    assert await subject.content("t") == b"b0 b1 b2 "


async def test_a_chunk_may_be_sent_again_but_not_changed(subject: Subject) -> None:
    for _ in range(2):
        await ask_stage(subject, "p", b"same")
        assert await ask_stage(subject, "p", b"same") == Staged(1, 4, repeated=True)
        assert isinstance(await ask_stage(subject, "p", b"other"), ChunkConflict)
        await subject.reopen()

    await ask_commit(subject, item("s", parts=("p",), creates=True))

    assert await subject.content("s") == b"same"


async def test_chunks_sent_twice_at_once_are_staged_once(subject: Subject) -> None:
    asked = [subject.ask(subject.store.stage, chunk("p", b"same")) for _ in range(8)]
    other = subject.ask(subject.store.stage, chunk("p", b"other"))

    outcomes = [await answered(one) for one in asked]

    assert [outcome.repeated for outcome in outcomes] == [False] + [True] * 7
    assert isinstance(await answered(other), ChunkConflict)
    await ask_commit(subject, item("s", parts=("p",), creates=True))
    assert await subject.content("s") == b"same"


async def ask_bundle(subject: Subject, *uploads: Upload) -> Outcome:
    return await answered(subject.ask(subject.store.stage_all, Bundle(uploads)))


async def test_the_chunks_of_a_bundle_are_each_decided_on_top_of_those_before(
    subject: Subject,
) -> None:
    await ask_stage(subject, "here", b"1")
    await ask_stage(subject, "used", b"x")
    await ask_commit(subject, item("s", parts=("used",), creates=True))

    outcomes = await ask_bundle(
        subject,
        chunk("new", b"one,", 0),
        chunk("new", b"two", 1),
        chunk("new", b"two", 1),
        chunk("new", b"3", 2, JSON),
        chunk("here", b"1"),
        chunk("here", b"other"),
        chunk("here", b",2", 1),
        chunk("used", b"y", 1),
    )

    assert outcomes[:2] == [Staged(1, 4, repeated=False), Staged(1, 3, repeated=False)]
    assert outcomes[2] == Staged(1, 3, repeated=True)
    assert isinstance(outcomes[3], ChunkConflict)
    assert outcomes[4] == Staged(1, 1, repeated=True)
    assert isinstance(outcomes[5], ChunkConflict)
    assert outcomes[6] == Staged(1, 2, repeated=False)
    assert isinstance(outcomes[7], PartClosed)
    await subject.reopen()
    await ask_commit(subject, item("new", parts=("new",), creates=True))
    await ask_commit(subject, item("here", parts=("here",), creates=True))
    assert await subject.content("new") == b"one,two"
    assert await subject.content("here") == b"1,2"


async def test_a_bundle_and_the_commit_of_its_parts_may_share_a_transaction(
    subject: Subject,
) -> None:
    staged = subject.ask(
        subject.store.stage_all, Bundle([chunk("p", b"1,"), chunk("q", b"2"), chunk("p", b"3,", 1)])
    )
    dropped = subject.ask(subject.store.unstage, Part("t", "q"))
    again = subject.ask(subject.store.stage_all, Bundle([chunk("q", b"4"), chunk("r", b"5")]))
    done = subject.ask(subject.store.commit, commit(item("s", parts=("p", "q"), creates=True)))
    late = subject.ask(subject.store.stage_all, Bundle([chunk("q", b"6", 1), chunk("r", b",6", 1)]))

    assert {type(outcome) for outcome in await answered(staged)} == {Staged}
    assert isinstance(await answered(dropped), PartDropped)
    assert {type(outcome) for outcome in await answered(again)} == {Staged}
    assert isinstance(await answered(done), Committed)
    closed, added = await answered(late)
    assert (type(closed), type(added)) == (PartClosed, Staged)
    for _ in range(2):
        assert await subject.content("s") == b"1,3,4"
        await subject.reopen()


async def test_a_part_holds_one_type_even_while_its_chunks_are_in_flight(subject: Subject) -> None:
    first = subject.ask(subject.store.stage, chunk("p", b"1", 0))
    second = subject.ask(subject.store.stage, chunk("p", b"2", 1, JSON))

    assert isinstance(await answered(first), Staged)
    assert isinstance(await answered(second), ChunkConflict)
    assert isinstance(await ask_stage(subject, "p", b"2", 1, JSON), ChunkConflict)


async def test_a_commit_counts_the_chunks_still_in_flight(subject: Subject) -> None:
    await ask_stage(subject, "p", b"0,")
    staged = [subject.ask(subject.store.stage, chunk("p", b"%d," % n, n)) for n in range(1, 4)]
    staged += [subject.ask(subject.store.stage, chunk("q", b"new,", 0))]
    done = subject.ask(subject.store.commit, commit(item("s", parts=("p", "q"), creates=True)))

    assert {type(await answered(one)) for one in staged} == {Staged}
    assert isinstance(await answered(done), Committed)
    for _ in range(2):
        assert await subject.content("s") == b"0,1,2,3,new,"
        await subject.reopen()


async def test_a_part_is_committed_once(subject: Subject) -> None:
    await subject.made("s")
    await ask_stage(subject, "p", b"x")
    asked = [subject.ask(subject.store.commit, commit(item("s", parts=("p",)))) for _ in range(3)]

    first, *others = [await answered(one) for one in asked]

    assert isinstance(first, Committed)
    used = CommitRefused(0, PartUsed(Part("t", "p"), first.outcomes[0].position))
    assert others == [used, used]
    await subject.reopen()
    assert await ask_commit(subject, item("s", parts=("p",))) == used
    assert await subject.content("s") == b"x"


async def test_nothing_is_added_to_a_part_that_was_committed(subject: Subject) -> None:
    await ask_stage(subject, "p", b"x")
    done = subject.ask(subject.store.commit, commit(item("s", parts=("p",), creates=True)))
    late = subject.ask(subject.store.stage, chunk("p", b"y", 1))

    assert isinstance(await answered(done), Committed)
    assert isinstance(await answered(late), PartClosed)
    assert isinstance(await ask_stage(subject, "p", b"y", 1), PartClosed)
    # The same chunk again is still only the same chunk again.
    assert await ask_stage(subject, "p", b"x") == Staged(1, 1, repeated=True)


async def test_a_part_that_was_never_staged_is_missed(subject: Subject) -> None:
    await subject.made("s")

    outcome = await ask_commit(subject, item("s", b"x"), item("s", parts=("p",)))

    assert outcome == CommitRefused(1, PartMissing(Part("t", "p")))
    assert (await subject.info("s")).tail == START


@pytest.mark.parametrize(("ordinals", "missing"), [((1,), 0), ((0, 2), 1), ((0, 1, 3, 4), 2)])
async def test_a_part_with_a_missing_chunk_is_not_committed(
    subject: Subject, ordinals: tuple[int, ...], missing: int
) -> None:
    await subject.made("s")
    for ordinal in ordinals:
        await ask_stage(subject, "p", b"x", ordinal)

    assert await ask_commit(subject, item("s", parts=("p",))) == CommitRefused(
        0, PartIncomplete(Part("t", "p"), missing)
    )

    await ask_stage(subject, "p", b"x", missing)
    assert isinstance(await ask_commit(subject, item("s", parts=("p",))), Committed)


async def test_a_part_has_as_many_chunks_as_the_commit_says(subject: Subject) -> None:
    """More of them are those of another attempt under the same name."""
    await subject.made("s")
    for ordinal in range(2):
        await ask_stage(subject, "p", b"x", ordinal)
    counted = {count: item("s", parts=("p",))._replace(chunks=(count,)) for count in (1, 2, 3)}

    more = CommitRefused(0, PartOverfull(Part("t", "p"), 2, 1))
    assert await ask_commit(subject, counted[1]) == more
    fewer = CommitRefused(0, PartIncomplete(Part("t", "p"), 2))
    assert await ask_commit(subject, counted[3]) == fewer
    assert await subject.content("s") == b""
    assert isinstance(await ask_commit(subject, counted[2]), Committed)


async def test_a_commit_names_a_part_once(subject: Subject) -> None:
    await subject.made("s")
    await ask_stage(subject, "p", b"x")
    part = Part("t", "p")

    same_item = await ask_commit(subject, item("s", parts=("p", "p")))
    two_items = await ask_commit(subject, item("s", parts=("p",)), item("s", parts=("p",)))

    assert same_item == CommitRefused(0, PartTwice(part))
    assert two_items == CommitRefused(1, PartTwice(part))
    assert isinstance(await ask_commit(subject, item("s", parts=("p",))), Committed)


async def test_a_refused_commit_leaves_its_parts_for_another_one(subject: Subject) -> None:
    await subject.made("s")
    await ask_stage(subject, "p", b"x")

    refused = await ask_commit(subject, item("s", parts=("p",)), item("none", b"x"))
    assert isinstance(refused, CommitRefused)
    assert isinstance(await ask_commit(subject, item("s", parts=("p",))), Committed)
    assert await subject.content("s") == b"x"


async def test_parts_of_another_type_than_the_stream_are_refused(subject: Subject) -> None:
    await subject.made("s", JSON)
    await ask_stage(subject, "text", b"x")

    outcome = await ask_commit(subject, item("s", parts=("text",)))

    assert outcome == CommitRefused(0, TypeMismatch(JSON))


@pytest.mark.parametrize("order", [("text", "json"), ("json", "text")])
async def test_parts_of_mixed_types_are_refused(subject: Subject, order: tuple[str, str]) -> None:
    await subject.made("s", JSON)
    await subject.made("b")
    await ask_stage(subject, "text", b"x")
    await ask_stage(subject, "json", b"[1,2]", 0, JSON)

    for path in ("s", "b"):
        outcome = await ask_commit(subject, item(path, parts=order))
        assert isinstance(outcome, CommitRefused)
        assert (await subject.info(path)).tail == START


async def test_a_retry_of_a_commit_with_parts_is_a_duplicate(subject: Subject) -> None:
    """By producer, by the append's key, or by the commit's key: never `used before`."""
    await subject.made("s")
    for part in ("p", "q", "r"):
        await ask_stage(subject, part, part.encode())
    by_producer = (item("s", parts=("p",), producer=("w", 0, 0)),)
    by_key = (item("s", parts=("q",), key="k"),)
    by_commit = (item("s", parts=("r",)),)
    in_flight = [
        subject.ask(subject.store.commit, commit(*items, key=key))
        for items, key in ((by_producer, None), (by_key, None), (by_commit, "c"))
        for _ in range(2)
    ]
    outcomes = [await answered(one) for one in in_flight]
    kinds = [Committed, CommitDuplicate, Committed, CommitDuplicate, Committed, CommitReplayed]
    assert [type(outcome) for outcome in outcomes] == kinds
    for _ in range(2):
        again = await ask_commit(subject, *by_producer)
        assert isinstance(again, CommitDuplicate)
        [outcome] = again.outcomes
        assert isinstance(outcome, Duplicate)
        assert outcome.matches
        assert isinstance(await ask_commit(subject, *by_key), CommitDuplicate)
        assert isinstance(await ask_commit(subject, *by_commit, key="c"), CommitReplayed)
        await subject.reopen()
    assert await subject.content("s") == b"pqr"


async def test_a_retry_of_a_commit_with_parts_is_a_duplicate_when_its_messages_are_purged(
    subject: Subject,
) -> None:
    upkeep = _upkeep(subject)
    await subject.made("s")
    for part, body in (("p", b"one"), ("q", b"two")):
        await ask_stage(subject, part, body)
        await ask_stage(subject, part, body, 1)
    counted = item("s", parts=("p",), producer=("w", 0, 0), strict=True)._replace(chunks=(2,))
    keyed = item("s", parts=("q",), key="k")
    for made in (counted, keyed):
        assert isinstance(await ask_commit(subject, made), Committed)
    await _truncate(subject, "s")
    subject.clock.advance(7 * DAY_MS)
    assert await upkeep._keeper.purge() == 4

    for made in (counted, keyed):
        assert isinstance(await ask_commit(subject, made), CommitDuplicate)
    assert await ask_stage(subject, "p", b"one") == Staged(1, 3, repeated=True)
    refused = await ask_commit(subject, item("s", parts=("p",), key="k"))
    assert isinstance(refused, CommitRefused)
    assert isinstance(refused.outcome, KeyReused)


async def test_a_producer_knows_its_batch_again_when_its_parts_are_forgotten(
    subject: Subject,
) -> None:
    upkeep = _upkeep(subject)
    await subject.made("s")
    await ask_stage(subject, "p", b"x")
    by_producer = item("s", parts=("p",), producer=("w", 0, 0))
    await ask_commit(subject, by_producer)
    await _truncate(subject, "s")
    subject.clock.advance(8 * DAY_MS)
    assert await upkeep._keeper.purge() == 1
    assert await upkeep.forget_parts() == 1

    again = await ask_commit(subject, by_producer)
    assert isinstance(again, CommitDuplicate)
    [outcome] = again.outcomes
    assert isinstance(outcome, Duplicate)
    assert outcome.matches is None, "there is nothing to compare it with"
    missing = CommitRefused(0, PartMissing(Part("t", "p")))
    assert await ask_commit(subject, item("s", parts=("p",), producer=("w", 0, 1))) == missing
    assert await ask_stage(subject, "p", b"x") == Staged(1, 1, repeated=False)


async def test_a_staged_batch_is_one_batch_of_its_producer(subject: Subject) -> None:
    await subject.made("s", JSON)
    await subject.appended("s", b"0", content_type=JSON, producer=("w", 0, 0))
    for ordinal in range(3):
        await ask_stage(subject, "p", b"[1,2]", ordinal, JSON)
    await ask_commit(subject, item("s", parts=("p",), producer=("w", 0, 1)))
    await ask_append(subject, "s", b"9", content_type=JSON, producer=("w", 0, 2))
    for _ in range(2):
        for seq, start in ((0, START), (1, Offset(1, 1)), (2, Offset(7, 7))):
            again = await ask_append(subject, "s", b"?", content_type=TEXT, producer=("w", 0, seq))
            assert isinstance(again, Duplicate)
            assert again.original is not None
            assert again.original.offset == start
        await subject.reopen()
    assert await subject.messages("s") == [0, 1, 2, 1, 2, 1, 2, 9]


@pytest.mark.parametrize("kind", [TEXT, JSON])
async def test_staged_and_ordinary_rows_read_the_same_in_chunks_of_any_size(
    subject: Subject, kind: str
) -> None:
    dice = random.Random(7)
    await subject.made("staged", kind)
    await subject.made("plain", kind)
    number = itertools.count()

    def body() -> bytes:
        count = dice.randint(1, 5)
        values = ",".join(str(next(number) * 37) for _ in range(count))
        return f"[{values}]".encode() if kind == JSON else values.encode()

    for round_number in range(12):
        bodies = [body() for _ in range(dice.randint(1, 4))]
        if dice.random() < 0.6:
            for ordinal, data in enumerate(bodies):
                await ask_stage(subject, f"p{round_number}", data, ordinal, kind)
            await ask_commit(subject, item("staged", parts=(f"p{round_number}",)))
        else:
            for data in bodies:
                await subject.appended("staged", data, content_type=kind)
        for data in bodies:
            await subject.appended("plain", data, content_type=kind)

    plain, staged = await subject.info("plain"), await subject.info("staged")
    assert staged.tail == plain.tail
    whole = await subject.content("plain")
    for bytes_max in (1, 2, 3, 5, 8, 13, 40, 100, 10_000):
        assert await subject.content("staged", bytes_max=bytes_max) == whole
        at = START
        while at != plain.tail:
            one = await subject.store.read(plain, at, bytes_max=bytes_max)
            other = await subject.store.read(staged, at, bytes_max=bytes_max)
            assert isinstance(one, Chunk)
            assert isinstance(other, Chunk)
            assert (other.data, other.next) == (one.data, one.next)
            at = one.next


async def test_a_fork_reads_staged_rows_of_its_source(subject: Subject) -> None:
    await subject.made("s", JSON, body=b"0")
    for ordinal in range(3):
        await ask_stage(subject, "p", b"[%d,%d]" % (ordinal, ordinal), ordinal, JSON)
    await ask_commit(subject, item("s", parts=("p",)))

    await subject.fork("f", "s", Offset(1, 1), 1)
    await subject.appended("f", b"7", content_type=JSON)
    await subject.delete("s")

    assert await subject.messages("f") == [0, 0, 7]


# What the embedded store does with time


async def test_an_abandoned_part_expires_and_a_committed_one_does_not(subject: Subject) -> None:
    upkeep = _upkeep(subject)
    await ask_stage(subject, "used", b"x")
    await ask_commit(subject, item("s", parts=("used",), creates=True))
    await ask_stage(subject, "abandoned", b"y")
    await ask_stage(subject, "abandoned", b"z", 1)
    await upkeep.sweep_parts()
    assert await ask_stage(subject, "abandoned", b"y") == Staged(1, 1, repeated=True)

    subject.clock.advance(DAY_MS)
    await ask_stage(subject, "fresh", b"w")
    await upkeep.sweep_parts()

    missing = CommitRefused(0, PartMissing(Part("t", "abandoned")))
    assert await ask_commit(subject, item("s", parts=("abandoned",))) == missing
    assert isinstance(await ask_commit(subject, item("s", parts=("used",))), CommitRefused)
    assert isinstance(await ask_commit(subject, item("s", parts=("fresh",))), Committed)
    assert await subject.content("s") == b"xw"
    # The name is free again.
    assert await ask_stage(subject, "abandoned", b"other") == Staged(1, 5, repeated=False)


async def test_a_committed_part_is_forgotten_when_its_data_is_gone_and_its_time_over(
    subject: Subject,
) -> None:
    upkeep = _upkeep(subject)
    for name, path in (("kept", "kept"), ("gone", "gone")):
        await ask_stage(subject, name, b"x")
        await ask_commit(subject, item(path, parts=(name,), creates=True))
    await ask_stage(subject, "waits", b"x")
    await subject.delete("gone")
    subject.clock.advance(7 * DAY_MS)
    await upkeep.purge()

    assert await upkeep.forget_parts() == 0, "the data is gone, its time is not over"
    subject.clock.advance(DAY_MS)
    assert await upkeep.forget_parts() == 1
    assert await upkeep.forget_parts() == 0

    refused = await ask_commit(subject, item("kept", parts=("kept",)))
    assert isinstance(refused, CommitRefused)
    assert isinstance(refused.outcome, PartUsed)
    missing = CommitRefused(0, PartMissing(Part("t", "gone")))
    assert await ask_commit(subject, item("kept", parts=("gone",))) == missing
    assert await ask_stage(subject, "waits", b"x") == Staged(1, 1, repeated=True)
    assert await subject.content("kept") == b"x"


async def test_used_parts_are_looked_at_piece_by_piece_and_then_again(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PARTS_PER_LOOK_MAX", 2)
    upkeep = _upkeep(subject)
    for number in range(5):
        await ask_stage(subject, f"p{number}", b"x")
        await ask_commit(subject, item(f"s{number}", parts=(f"p{number}",), creates=True))
    for number in (0, 3, 4):
        await subject.delete(f"s{number}")
    subject.clock.advance(8 * DAY_MS)
    await upkeep.purge()

    assert [await upkeep.forget_parts() for _ in range(3)] == [1, 1, 1]
    await subject.delete("s1")
    subject.clock.advance(8 * DAY_MS)
    await upkeep.purge()

    assert [await upkeep.forget_parts() for _ in range(2)] == [1, 0]


async def test_a_part_taken_by_a_commit_in_flight_is_not_swept(subject: Subject) -> None:
    upkeep = _upkeep(subject)
    await ask_stage(subject, "p", b"x")
    subject.clock.advance(DAY_MS)
    done = subject.ask(subject.store.commit, commit(item("s", parts=("p",), creates=True)))

    await upkeep.sweep_parts()

    assert isinstance(await answered(done), Committed)
    await upkeep.sweep_parts()
    assert await subject.content("s") == b"x"


async def test_a_part_being_swept_takes_no_chunk_for_the_same(subject: Subject) -> None:
    """A chunk said to be staged must be there for the commit, or else be staged again."""
    store = subject.store
    for ordinal in range(2):
        await ask_stage(subject, "p", b"x", ordinal)
    dropping = asyncio.create_task(
        subject.kept.decide(lambda decider: decider.drop_part(Part("t", "p")))
    )
    await asyncio.sleep(0)  # let it begin: what follows is decided before it is on disk
    again = subject.ask(store.stage, chunk("p", b"x", 0))
    late = subject.ask(store.commit, commit(item("s", parts=("p",), creates=True)))

    assert await answered(again) == Staged(1, 1, repeated=False)
    assert isinstance(await answered(late), Committed)
    await dropping
    assert await subject.content("s") == b"x"


async def test_a_key_is_remembered_until_it_is_swept(subject: Subject) -> None:
    upkeep = _upkeep(subject)
    await subject.made("s")
    await ask_append(subject, "s", b"x", key="old")
    await ask_commit(subject, item("s", b"y"), key="old")
    subject.clock.advance(4 * DAY_MS)
    await ask_append(subject, "s", b"z", key="new")
    subject.clock.advance(3 * DAY_MS)

    await upkeep.sweep_keys()

    assert isinstance(await ask_append(subject, "s", b"other", key="old"), Appended)
    assert isinstance(await ask_commit(subject, item("s", b"other"), key="old"), Committed)
    again = await ask_append(subject, "s", b"z", key="new")
    assert not isinstance(again, Appended | Missing)
    assert await subject.content("s") == b"xyzotherother"


async def _truncate(subject: Subject, path: str) -> None:
    cut = asyncio.get_running_loop().create_future()
    subject.store.truncate(path, None, cut.set_result)
    assert isinstance(await answered(cut), Cut)


def _upkeep(subject: Subject) -> Upkeep:
    store = subject.kept
    if isinstance(store, SqliteStore):
        return SqliteUpkeep(store, subject.clock)
    return Upkeep(store, subject.clock)
