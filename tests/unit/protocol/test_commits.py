"""Deciding a commit: what the outcomes of its appends come to, and how it is described."""

import json

import pytest

from fencepost.protocol.appends import (
    AlreadyClosed,
    Append,
    Appended,
    Duplicate,
    KeyDisagrees,
    KeyRecord,
    KeyReused,
    OtherContent,
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
    Commit,
    CommitDuplicate,
    CommitItem,
    CommitPartial,
    CommitRefused,
    Committed,
    ItemDeleted,
    ItemMissing,
    ItemOutcome,
    Part,
    PartIncomplete,
    PartMissing,
    PartTwice,
    PartUsed,
    decide_commit,
    describe_commit,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Remembered

DONE = Appended(START, Offset(1, 3), False, None, 7)
AGAIN = Duplicate(Offset(1, 3), False, 0, 0, Remembered(START, b"d" * 16), True)
FORGOTTEN = Duplicate(Offset(90, 300), True, 0, 80, None, None)
REPLAYED = Replayed(KeyRecord(b"d" * 16, START, Offset(2, 8), True, 5, 0))
CLOSED = AlreadyClosed(Offset(1, 3))
PART = Part("t", "p")

REFUSALS: list[ItemOutcome] = [
    ItemMissing(),
    ItemDeleted(),
    PartMissing(PART),
    PartUsed(PART, 3),
    PartIncomplete(PART, 1),
    PartTwice(PART),
    KeyReused(0),
    KeyDisagrees(),
    OtherContent(None),
    StreamClosed(START),
    StaleEpoch(3),
    SequenceGap(1, 2),
    TypeMismatch("text/plain"),
    ProducerMoved(None, None),
    TailMoved(START),
    SeqRegression("a"),
]


def commit_of(count: int) -> Commit:
    return Commit(tuple(CommitItem(Append(f"s{n}", None, None, True)) for n in range(count)))


def test_a_commit_whose_appends_are_all_accepted_is_done() -> None:
    assert decide_commit([DONE, DONE]) == Committed((DONE, DONE))


@pytest.mark.parametrize("outcomes", [[AGAIN], [AGAIN, REPLAYED, CLOSED, FORGOTTEN]])
def test_a_commit_whose_appends_were_all_made_before_is_a_duplicate(
    outcomes: list[ItemOutcome],
) -> None:
    assert decide_commit(outcomes) == CommitDuplicate(tuple(outcomes))  # type: ignore[arg-type]


def test_a_commit_that_was_made_in_part_is_refused_and_says_which_part() -> None:
    assert decide_commit([DONE, AGAIN, DONE, REPLAYED]) == CommitPartial((1, 3))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: type(refusal).__name__)
@pytest.mark.parametrize("around", [DONE, AGAIN])
def test_one_refused_append_refuses_the_commit_and_is_named(
    refusal: ItemOutcome, around: ItemOutcome
) -> None:
    assert decide_commit([around, refusal, around]) == CommitRefused(1, refusal)


def test_the_first_of_two_refused_appends_is_named() -> None:
    outcomes: list[ItemOutcome] = [DONE, TailMoved(START), ItemMissing()]

    assert decide_commit(outcomes) == CommitRefused(1, TailMoved(START))


def test_a_commit_is_described_by_where_its_appends_went() -> None:
    outcome = Committed((DONE, Appended(Offset(3, 9), Offset(5, 20), True, None, 9)))

    described = json.loads(describe_commit(commit_of(2), outcome))

    assert described == {
        "appends": [
            {
                "stream": "s0",
                "offset": str(START),
                "next_offset": str(Offset(1, 3)),
                "version": 0,
                "position": 7,
                "closed": False,
            },
            {
                "stream": "s1",
                "offset": str(Offset(3, 9)),
                "next_offset": str(Offset(5, 20)),
                "version": 4,
                "position": 9,
                "closed": True,
            },
        ]
    }


def test_a_duplicate_commit_is_described_as_far_as_it_is_remembered() -> None:
    outcome = CommitDuplicate((AGAIN, FORGOTTEN, REPLAYED, CLOSED))

    again, forgotten, replayed, closed = json.loads(describe_commit(commit_of(4), outcome))[
        "appends"
    ]

    assert (again["offset"], again["matches"]) == (str(START), True)
    assert (forgotten["offset"], forgotten["matches"]) == (None, None)
    assert (replayed["offset"], replayed["next_offset"]) == (str(START), str(Offset(2, 8)))
    assert (replayed["version"], replayed["position"], replayed["closed"]) == (1, 5, True)
    assert (closed["next_offset"], closed["closed"]) == (str(Offset(1, 3)), True)
