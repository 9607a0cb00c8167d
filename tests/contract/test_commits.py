"""What a store promises about commits: all of their appends or none, in one step, once."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.appends import (
    Appended,
    Duplicate,
    KeyReused,
    ProducerMoved,
    Replayed,
    SeqRegression,
    SequenceGap,
    StaleEpoch,
    StreamClosed,
    TailMoved,
    TypeMismatch,
)
from fencepost.protocol.commits import (
    CommitDuplicate,
    CommitKeyReused,
    CommitPartial,
    CommitRefused,
    CommitReplayed,
    Committed,
    ItemDeleted,
    ItemMissing,
    describe_commit,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Lifetime
from fencepost.store.contract import Missing, Published
from fencepost.store.settings import SqliteSettings
from fencepost.testing.clock import SimClock
from tests.contract.conditional import JSON, ask_append, ask_commit, commit, conditional, item
from tests.contract.sliced import also_in_slices
from tests.contract.subject import SqliteEngine, Subject, answered

subject = also_in_slices


async def test_a_commit_appends_to_all_its_streams(subject: Subject) -> None:
    await subject.made("a", body=b"1")
    await subject.made("b")

    done = await ask_commit(
        subject, item("a", b"2"), item("b", b"3"), item("c", b"4", creates=True)
    )

    assert isinstance(done, Committed)
    assert [outcome.start for outcome in done.outcomes] == [Offset(1, 1), START, START]
    positions = [outcome.position for outcome in done.outcomes]
    assert positions == sorted(set(positions))
    for _ in range(2):
        assert [await subject.content(path) for path in "abc"] == [b"12", b"3", b"4"]
        await subject.reopen()


async def test_a_commit_is_published_to_all_its_readers_at_once(subject: Subject) -> None:
    for path in "ab":
        await subject.made(path)
    told: list[list[str]] = []

    def listen(changes: Any) -> None:
        told.append(sorted(change.info.path for change in changes if isinstance(change, Published)))

    subject.store.listen(listen)
    await ask_commit(subject, item("a", b"2"), item("b", b"3"), item("c", b"4", creates=True))

    assert [paths for paths in told if paths] == [["a", "b", "c"]]


REFUSED: dict[str, tuple[Any, Any]] = {
    "missing": (item("none", b"x"), ItemMissing()),
    "must exist": (item("none", b"x", creates=True, if_match="*"), ItemMissing()),
    "soft-deleted": (item("gone", b"x"), ItemDeleted()),
    "closed": (item("closed", b"x"), StreamClosed(START)),
    "type": (item("a", b"1", content_type=JSON), TypeMismatch("text/plain")),
    "tail": (item("a", b"x", if_match=Offset(5, 5)), TailMoved(Offset(2, 2))),
    "not empty": (item("a", b"x", creates=True, if_empty=True), TailMoved(Offset(2, 2))),
    "stale": (item("a", b"x", producer=("p", 2, 0)), StaleEpoch(3)),
    "gap": (item("a", b"x", producer=("p", 3, 4)), SequenceGap(1, 4)),
    "producer": (
        item("a", b"x", producer=("p", 4, 0), producer_if=(3, 7)),
        ProducerMoved(3, 0),
    ),
    "seq": (item("a", b"x", seq="a"), SeqRegression("m")),
    "key": (item("a", b"x", key="used"), KeyReused),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_refused_append_leaves_nothing_of_the_commit(
    subject: Subject, name: str, place: int
) -> None:
    await subject.made("a")
    await subject.appended("a", b"1", producer=("p", 3, 0), seq="m")
    assert isinstance(await ask_append(subject, "a", b"2", key="used"), Appended)
    await subject.made("b")
    await subject.made("closed", closed=True)
    await subject.made("gone")
    await subject.fork("fork", "gone")
    await subject.delete("gone")
    bad, expected = REFUSED[name]
    good = [
        item("b", b"x", producer=("q", 0, 0), key="new", seq="a"),
        item("new", b"x", creates=True, closes=True),
    ]

    outcome = await ask_commit(subject, *good[:place], bad, *good[place:], key="whole")

    assert isinstance(outcome, CommitRefused)
    assert outcome.item == place
    assert outcome.outcome == expected or type(outcome.outcome) is expected
    for _ in range(2):
        assert (await subject.info("b")).tail == START
        assert await subject.content("a") == b"12"
        assert await subject.look("new") == Missing()
        await subject.reopen()
    # Nothing was used up either: neither the producer's number nor a key.
    assert isinstance(await ask_commit(subject, *good, key="whole", mark=b"other"), Committed)


async def test_a_commit_made_before_is_a_duplicate_as_a_whole(subject: Subject) -> None:
    await subject.made("a")
    items = (
        item("a", b"x", producer=("p", 0, 0), if_match=START),
        item("b", b"y", producer=("p", 0, 0), creates=True, if_empty=True, closes=True),
        item("a", b"z", key="k", seq="s"),
    )
    done = await ask_commit(subject, *items)
    assert isinstance(done, Committed)
    await subject.appended("a", b"later")
    for _ in range(2):
        again = await ask_commit(subject, *items)
        assert isinstance(again, CommitDuplicate)
        first, second, third = again.outcomes
        assert isinstance(first, Duplicate)
        assert isinstance(second, Duplicate)
        assert isinstance(third, Replayed)
        assert first.original is not None
        assert second.original is not None
        assert (first.matches, second.matches) == (True, True)
        assert [first.original.offset, second.original.offset, third.original.start] == [
            outcome.start for outcome in done.outcomes
        ]
        await subject.reopen()
    assert await subject.content("a") == b"xzlater"


async def test_a_commit_made_before_in_part_is_refused(subject: Subject) -> None:
    await subject.made("a")
    await subject.appended("a", b"x", producer=("p", 0, 0))

    outcome = await ask_commit(
        subject, item("a", b"n"), item("a", b"x", producer=("p", 0, 0)), item("a", b"m")
    )

    assert outcome == CommitPartial((1,))
    assert await subject.content("a") == b"x"


async def test_appends_of_one_commit_to_one_stream_stand_on_each_other(subject: Subject) -> None:
    await subject.made("s")

    done = await ask_commit(
        subject,
        item("s", b"a", if_match=START, seq="1"),
        item("s", b"b", if_match=Offset(1, 1), seq="2"),
        item("s", b"c", if_match=Offset(2, 2), seq="3", closes=True),
    )

    assert isinstance(done, Committed)
    assert await subject.content("s") == b"abc"
    assert (await subject.info("s")).closed


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (item("s", b"b", if_match=START), TailMoved(Offset(1, 1))),
        (item("s", b"b", seq="1"), SeqRegression("1")),
        (item("s", b"b", producer=("p", 0, 2)), SequenceGap(1, 2)),
        (item("s", b"b", creates=True, if_empty=True), TailMoved(Offset(1, 1))),
        (item("s", b"b", key="k"), KeyReused),
    ],
    ids=["tail", "seq", "gap", "not empty", "key"],
)
@pytest.mark.parametrize("exists", [True, False])
async def test_an_append_is_refused_for_what_an_earlier_one_of_the_same_commit_did(
    subject: Subject, second: Any, expected: Any, exists: bool
) -> None:
    if exists:
        await subject.made("s")
    first = item("s", b"a", seq="1", producer=("p", 0, 0), key="k", creates=True)

    outcome = await ask_commit(subject, first, second)

    assert isinstance(outcome, CommitRefused)
    assert outcome.item == 1
    assert outcome.outcome == expected or type(outcome.outcome) is expected


async def test_an_append_after_a_close_in_the_same_commit_is_refused(subject: Subject) -> None:
    await subject.made("s")

    outcome = await ask_commit(subject, item("s", b"a", closes=True), item("s", b"b"))

    assert outcome == CommitRefused(1, StreamClosed(Offset(1, 1)))
    assert not (await subject.info("s")).closed


async def test_the_same_request_twice_in_one_commit_is_no_commit(subject: Subject) -> None:
    await subject.made("s")
    twice = item("s", b"a", producer=("p", 0, 0))
    keyed = item("s", b"a", key="k")

    assert await ask_commit(subject, twice, twice) == CommitPartial((1,))
    assert await ask_commit(subject, keyed, keyed) == CommitPartial((1,))
    assert (await subject.info("s")).tail == START


async def test_several_batches_of_one_producer_are_remembered_one_by_one(subject: Subject) -> None:
    await subject.made("s")
    for n in range(3):
        await subject.appended("s", b"%d" % n, producer=("p", 0, n))

    done = await ask_commit(
        subject,
        item("s", b"3", producer=("p", 0, 3)),
        item("t", b"other stream", producer=("p", 0, 0), creates=True),
        item("s", b"4", producer=("p", 0, 4)),
        item("s", b"5", producer=("p", 0, 5)),
    )
    assert isinstance(done, Committed)
    for _ in range(2):
        for n in range(6):
            again = await ask_append(subject, "s", b"%d" % n, producer=("p", 0, n))
            assert isinstance(again, Duplicate)
            assert again.matches
            assert again.original is not None
            assert again.original.offset == Offset(n, n)
        await subject.reopen()


async def test_a_key_answers_for_the_whole_commit(subject: Subject) -> None:
    await subject.made("a")
    items = (item("a", b"x"), item("b", b"y", creates=True, if_empty=True))
    request = commit(*items, key="k")
    done = await ask_commit(subject, *items, key="k")
    assert isinstance(done, Committed)
    await subject.delete("b")
    for _ in range(2):
        assert await ask_commit(subject, *items, key="k") == CommitReplayed(
            describe_commit(request, done)
        )
        assert isinstance(await ask_commit(subject, *items, key="k", mark=b"b"), CommitKeyReused)
        await subject.reopen()
    assert await subject.content("a") == b"x"


async def test_of_many_commits_with_one_key_at_once_one_is_made(subject: Subject) -> None:
    await subject.made("a")
    await subject.made("b")
    request = commit(item("a", b"x"), item("b", b"y"), key="k")
    asked = [subject.ask(subject.store.commit, request) for _ in range(20)]

    first, *others = [await answered(one) for one in asked]

    assert isinstance(first, Committed)
    assert set(others) == {CommitReplayed(describe_commit(request, first))}
    assert (await subject.content("a"), await subject.content("b")) == (b"x", b"y")


async def test_the_keys_of_commits_and_of_appends_are_apart(subject: Subject) -> None:
    await subject.made("a")

    assert isinstance(await ask_append(subject, "a", b"x", key="k"), Appended)
    assert isinstance(await ask_commit(subject, item("a", b"y"), key="k"), Committed)
    assert isinstance(await ask_append(subject, "a", b"x", key="k"), Replayed)


async def test_positions_are_told_right_when_streams_expire_during_the_decision(
    subject: Subject,
) -> None:
    """The end of each old stream takes a position too, before those of the commit."""
    await subject.made("keep")
    for path in ("one", "two"):
        await subject.made(path, lifetime=Lifetime(ttl_s=1), body=b"old")
    subject.clock.advance(5_000)

    done = await ask_commit(
        subject,
        item("keep", b"0", producer=("p", 0, 0)),
        item("one", b"1", creates=True, producer=("p", 0, 0)),
        item("two", b"2", creates=True, producer=("p", 0, 0)),
        item("keep", b"3", producer=("p", 0, 1)),
    )
    assert isinstance(done, Committed)
    after = await subject.appended("keep", b"4", producer=("p", 0, 2))
    assert after.position == done.outcomes[-1].position + 1
    assert await subject.content("one") == b"1"

    await subject.reopen()
    for n, body in enumerate((b"0", b"3", b"4")):
        again = await ask_append(subject, "keep", body, producer=("p", 0, n))
        assert isinstance(again, Duplicate)
        assert again.matches
        assert again.original is not None
        assert again.original.offset == Offset(n, n)


async def test_commits_and_plain_appends_of_one_producer_follow_each_other_in_flight(
    subject: Subject,
) -> None:
    await subject.made("a")
    await subject.made("b")
    asked = []
    for n in range(0, 20, 2):
        asked.append(subject.appending("a", b"%d," % n, producer=("p", 0, n)))
        both = commit(item("a", b"%d," % (n + 1), producer=("p", 0, n + 1)), item("b", b"x"))
        asked.append(subject.ask(subject.store.commit, both))
        asked.append(
            subject.ask(subject.store.append, conditional("b", b"y", if_match=Offset(n + 1, n + 1)))
        )

    outcomes = [await answered(one) for one in asked]

    assert all(isinstance(outcome, Appended | Committed) for outcome in outcomes)
    assert await subject.content("a") == b"".join(b"%d," % n for n in range(20))
    assert await subject.content("b") == b"xy" * 10


async def test_a_commit_over_more_than_the_memory_holds_forgets_nothing(tmp_path: Path) -> None:
    """What is evicted while a commit is decided comes back from disk before it is carried out."""
    clock = SimClock()
    small = Subject(SmallEngine(tmp_path / "data", clock), clock)
    paths = [f"s{number}" for number in range(6)]
    for path in paths:
        await small.made(path)
    producers = ("p", "q", "r")
    for seq, path, producer in itertools.product(range(3), paths, producers):
        await small.appended(path, b"%d" % seq, producer=(producer, 0, seq))
    last = [item(path, b"3", producer=(producer, 0, 3)) for path in paths for producer in producers]
    assert isinstance(await ask_commit(small, *last), Committed)

    await small.reopen()

    for path in paths:
        for number, producer in enumerate(producers):
            for seq in range(4):
                again = await ask_append(small, path, b"%d" % seq, producer=(producer, 0, seq))
                assert isinstance(again, Duplicate)
                assert again.original is not None, (path, producer, seq)
                assert again.original.offset == Offset(seq * 3 + number, seq * 3 + number)
                assert again.matches
    await small.close()


class SmallEngine(SqliteEngine):
    """The embedded store with room for next to nothing."""

    def __init__(self, folder: Path, clock: SimClock) -> None:
        super().__init__(folder, clock)
        self._settings = SqliteSettings(folder=folder, streams_cached_max=2, producers_cached_max=2)
