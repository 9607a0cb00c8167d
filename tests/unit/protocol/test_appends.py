"""Deciding an append: every outcome, which refusal wins over which, and exactly-once by a model."""

from itertools import combinations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fencepost.protocol.appends import (
    AlreadyClosed,
    Append,
    Appended,
    AppendOutcome,
    Conditions,
    Duplicate,
    EpochStart,
    KeyDisagrees,
    KeyRecord,
    KeyReused,
    OtherContent,
    ProducerMoved,
    ProducerTuple,
    Replayed,
    SeqRegression,
    SequenceGap,
    StaleEpoch,
    StreamClosed,
    TailMoved,
    TypeMismatch,
    decide_append,
)
from fencepost.protocol.batches import bytes_batch, digest
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import RECENT_BATCHES, Producer, Remembered, Stream, pack

NOW_MS = 1_000_000
TEXT = "text/plain"


def stream(*, closed: bool = False, seq: str | None = None, tail: Offset = START) -> Stream:
    made = Stream(1, "s", "text/plain; charset=utf-8", created_ms=0, tail=tail)
    made.closed = closed
    made.seq = seq
    return made


def producer(epoch: int, seq: int) -> Producer:
    """A producer that has sent the batches 0 to `seq` of `epoch`, each one byte long."""
    state = Producer.opening("p", epoch, pack(START, mark(b"0")), position=0, now_ms=0)
    for number in range(1, seq + 1):
        packed = pack(Offset(number, number), mark(b"0"))
        state = state.next(number, packed, position=number, now_ms=0)
    return state


def mark(body: bytes) -> bytes:
    return digest(TEXT, False, body)


def append(
    body: bytes = b"0",
    *,
    media_type: str | None = TEXT,
    closes: bool = False,
    claim: tuple[int, int] | None = None,
    seq: str | None = None,
    conditions: Conditions | None = None,
) -> Append:
    return Append(
        "s",
        bytes_batch(body) if body else None,
        media_type,
        closes,
        None if claim is None else ProducerTuple("p", *claim),
        seq,
        mark(body),
        conditions,
    )


def decide(
    request: Append,
    at: Stream | None = None,
    known: Producer | None = None,
    key: KeyRecord | None = None,
) -> AppendOutcome:
    return decide_append(at or stream(), known, request, key=key, position=77, now_ms=NOW_MS)


def accepted(outcome: AppendOutcome) -> tuple[Offset, Offset, bool, Producer | None]:
    assert isinstance(outcome, Appended), outcome
    return outcome.start, outcome.tail, outcome.closed, outcome.producer


def test_a_plain_append_starts_at_the_tail_and_moves_it() -> None:
    outcome = decide(append(b"abc"), stream(tail=Offset(2, 10)))

    assert accepted(outcome) == (Offset(2, 10), Offset(3, 13), False, None)


def test_an_append_may_close_in_the_same_step() -> None:
    outcome = decide(append(b"abc", closes=True))

    assert accepted(outcome) == (START, Offset(1, 3), True, None)


def test_a_close_without_a_body_moves_nothing() -> None:
    at = stream(tail=Offset(2, 10))

    outcome = decide(append(b"", closes=True, media_type=None), at)

    assert accepted(outcome) == (Offset(2, 10), Offset(2, 10), True, None)


def test_a_close_without_a_body_may_name_any_content_type() -> None:
    outcome = decide(append(b"", closes=True, media_type="application/json"))

    assert isinstance(outcome, Appended)


def test_parameters_of_the_content_type_do_not_count() -> None:
    assert isinstance(decide(append(media_type=TEXT)), Appended)


def test_closing_a_closed_stream_again_is_success() -> None:
    at = stream(closed=True, tail=Offset(1, 3))

    assert decide(append(b"", closes=True), at) == AlreadyClosed(Offset(1, 3))


@pytest.mark.parametrize("closes", [False, True])
def test_a_closed_stream_takes_no_more_bytes_and_tells_its_end(closes: bool) -> None:
    at = stream(closed=True, tail=Offset(1, 3))

    assert decide(append(b"x", closes=closes), at) == StreamClosed(Offset(1, 3))


def test_another_content_type_is_refused_with_the_right_one() -> None:
    outcome = decide(append(media_type="application/json"))

    assert outcome == TypeMismatch("text/plain; charset=utf-8")


@pytest.mark.parametrize(
    ("last", "sent", "refused"),
    [
        (None, "a", False),
        ("a", "b", False),
        ("a", "aa", False),
        ("9", "10", True),  # by bytes, not as numbers
        ("a", "a", True),
        ("b", "a", True),
        ("a", "B", True),
        ("z", "é", False),
        ("\uffff", "\U00010000", False),  # code points order as their UTF-8 does
    ],
)
def test_stream_seq_must_grow_byte_by_byte(last: str | None, sent: str, refused: bool) -> None:
    outcome = decide(append(seq=sent), stream(seq=last))

    assert isinstance(outcome, SeqRegression) == refused
    if refused:
        assert outcome == SeqRegression(last or "")
    elif last is not None:
        assert last.encode() < sent.encode()


@pytest.mark.parametrize(
    ("known", "claim", "expected"),
    [
        (None, (0, 0), "accepted"),
        (None, (7, 0), "accepted"),  # an unknown producer starts at 0 in any epoch
        (None, (0, 1), SequenceGap(0, 1)),
        (None, (7, 3), SequenceGap(0, 3)),
        ((0, 0), (0, 1), "accepted"),
        ((0, 0), (0, 2), SequenceGap(1, 2)),
        ((0, 5), (0, 7), SequenceGap(6, 7)),
        ((0, 5), (0, 6), "accepted"),
        ((0, 5), (0, 5), "duplicate"),
        ((0, 5), (0, 0), "duplicate"),
        ((0, 5), (1, 0), "accepted"),
        ((0, 5), (9, 0), "accepted"),
        ((0, 5), (1, 1), EpochStart(1, 1)),
        ((0, 5), (1, 6), EpochStart(1, 6)),
        ((3, 5), (2, 0), StaleEpoch(3)),
        ((3, 5), (2, 6), StaleEpoch(3)),
        ((3, 5), (0, 99), StaleEpoch(3)),
        ((0, 0), (2**53 - 1, 0), "accepted"),
    ],
)
def test_a_producers_request_is_new_known_stale_or_out_of_order(
    known: tuple[int, int] | None, claim: tuple[int, int], expected: str | AppendOutcome
) -> None:
    state = None if known is None else producer(*known)

    outcome = decide(append(claim=claim), known=state)

    if expected == "accepted":
        assert isinstance(outcome, Appended)
        assert outcome.producer is not None
        assert (outcome.producer.epoch, outcome.producer.seq) == claim
        assert (outcome.producer.position, outcome.producer.updated_ms) == (77, NOW_MS)
    elif expected == "duplicate":
        assert isinstance(outcome, Duplicate)
        assert (outcome.producer_epoch, outcome.producer_seq) == known
    else:
        assert outcome == expected


def test_a_duplicate_tells_where_the_original_went_and_whether_it_said_the_same() -> None:
    state = producer(0, 5)
    at = stream(tail=Offset(6, 6))

    same = decide(append(b"0", claim=(0, 4)), at, state)
    other = decide(append(b"other", claim=(0, 4)), at, state)

    assert isinstance(same, Duplicate)
    assert isinstance(other, Duplicate)
    assert (same.tail, same.original, same.matches) == (
        Offset(6, 6),
        Remembered(Offset(4, 4), mark(b"0")),
        True,
    )
    assert other.original == same.original
    assert other.matches is False


def test_a_duplicate_from_long_ago_is_one_still_but_nobody_knows_what_it_said() -> None:
    outcome = decide(append(claim=(0, 1)), known=producer(0, RECENT_BATCHES + 1))

    assert isinstance(outcome, Duplicate)
    assert outcome.original is None
    assert outcome.matches is None


def test_the_first_batch_of_an_epoch_is_never_forgotten() -> None:
    outcome = decide(append(b"other", claim=(0, 0)), known=producer(0, 5 * RECENT_BATCHES))

    assert isinstance(outcome, Duplicate)
    assert outcome.original == Remembered(START, mark(b"0"))
    assert outcome.matches is False


def test_a_retry_of_the_closing_append_is_a_duplicate() -> None:
    at = stream(closed=True, tail=Offset(1, 1))

    outcome = decide(append(claim=(0, 0), closes=True), at, producer(0, 0))

    assert isinstance(outcome, Duplicate)
    assert outcome.closed


def test_a_retry_of_an_append_from_before_the_close_is_a_duplicate_too() -> None:
    outcome = decide(append(claim=(0, 2)), stream(closed=True), producer(0, 4))

    assert isinstance(outcome, Duplicate)


def test_a_new_request_of_a_producer_to_a_closed_stream_is_refused() -> None:
    outcome = decide(append(b"", claim=(0, 5), closes=True), stream(closed=True), producer(0, 4))

    assert outcome == StreamClosed(START)


# What wins over what: each condition changes a request that would otherwise be accepted. The
# list is in the order of the contract, and of any two conditions the earlier one must answer.

PRECEDENCE: list[tuple[str, type[object]]] = [
    ("key used", KeyReused),
    ("stale", StaleEpoch),
    ("duplicate", Duplicate),
    ("closed", StreamClosed),
    ("content type", TypeMismatch),
    ("gap", SequenceGap),
    ("epoch start", EpochStart),
    ("Producer-If", ProducerMoved),
    ("If-Match", TailMoved),
    ("Stream-Seq", SeqRegression),
]

CLAIMS = {"stale": (2, 6), "duplicate": (3, 5), "gap": (3, 8), "epoch start": (4, 1)}


def outcome_under(conditions: set[str]) -> AppendOutcome:
    claims = [claim for name, claim in CLAIMS.items() if name in conditions]
    claim = claims[0] if claims else (3, 6)
    at = stream(closed="closed" in conditions, seq="m")
    request = append(
        media_type="image/png" if "content type" in conditions else TEXT,
        claim=claim,
        seq="a" if "Stream-Seq" in conditions else "z",
        conditions=Conditions(
            producer_if=(3, 4) if "Producer-If" in conditions else (3, 5),
            if_match=Offset(9, 9) if "If-Match" in conditions else START,
            key="k",
        ),
    )
    key = KEY_OF_ANOTHER if "key used" in conditions else None
    return decide(request, at, producer(3, 5), key=key)


KEY_OF_ANOTHER = KeyRecord(
    mark(b"another"), START, Offset(1, 1), closed=False, position=0, created_ms=0
)


def test_without_any_of_the_conditions_the_request_is_accepted() -> None:
    assert isinstance(outcome_under(set()), Appended)


@pytest.mark.parametrize(("condition", "expected"), PRECEDENCE)
def test_each_condition_alone_has_its_own_answer(condition: str, expected: type[object]) -> None:
    assert type(outcome_under({condition})) is expected


PAIRS = [
    (first, second)
    for first, second in combinations(PRECEDENCE, 2)
    # One claim cannot be two of these at once.
    if not (first[0] in CLAIMS and second[0] in CLAIMS)
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda pair: pair[0])
def test_of_two_conditions_the_earlier_one_in_the_contract_answers(
    first: tuple[str, type[object]], second: tuple[str, type[object]]
) -> None:
    assert type(outcome_under({first[0], second[0]})) is first[1]


def test_all_conditions_that_can_meet_at_once_answer_stale() -> None:
    outcome = outcome_under(
        {"stale", "closed", "content type", "Producer-If", "If-Match", "Stream-Seq"}
    )

    assert outcome == StaleEpoch(3)


# What may be asked of an append beyond the public protocol


@pytest.mark.parametrize(
    ("conditions", "at", "met"),
    [
        (Conditions(if_match=Offset(2, 10)), Offset(2, 10), True),
        (Conditions(if_match=Offset(2, 10)), Offset(3, 11), False),
        (Conditions(if_match=START), START, True),
        (Conditions(if_match="*"), Offset(2, 10), True),
        (Conditions(if_empty=True), START, True),
        (Conditions(if_empty=True), Offset(1, 1), False),
    ],
)
def test_an_append_may_ask_for_a_tail(conditions: Conditions, at: Offset, met: bool) -> None:
    outcome = decide(append(conditions=conditions), stream(tail=at))

    assert isinstance(outcome, Appended) if met else outcome == TailMoved(at)


@pytest.mark.parametrize(
    ("known", "claim", "wanted", "expected"),
    [
        ((0, 5), (1, 0), (0, 5), "accepted"),  # taking over the session that was seen
        ((0, 6), (1, 0), (0, 5), ProducerMoved(0, 6)),
        ((2, 0), (3, 0), (0, 5), ProducerMoved(2, 0)),
        (None, (0, 0), (0, 5), ProducerMoved(None, None)),
        ((0, 5), (0, 6), (0, 5), "accepted"),
    ],
)
def test_an_append_may_ask_for_the_state_of_its_producer(
    known: tuple[int, int] | None,
    claim: tuple[int, int],
    wanted: tuple[int, int],
    expected: str | AppendOutcome,
) -> None:
    request = append(claim=claim, conditions=Conditions(producer_if=wanted))

    outcome = decide(request, known=None if known is None else producer(*known))

    assert isinstance(outcome, Appended) if expected == "accepted" else outcome == expected


def test_a_retry_of_a_takeover_is_a_duplicate_although_its_condition_no_longer_holds() -> None:
    request = append(claim=(1, 0), conditions=Conditions(producer_if=(0, 5)))

    assert isinstance(decide(request, known=producer(1, 0)), Duplicate)


def test_a_strict_duplicate_must_say_the_same() -> None:
    strict = Conditions(strict=True)
    state = producer(0, RECENT_BATCHES + 4)

    same = decide(append(b"0", claim=(0, 10), conditions=strict), known=state)
    other = decide(append(b"1", claim=(0, 10), conditions=strict), known=state)
    forgotten = decide(append(b"0", claim=(0, 1), conditions=strict), known=state)

    assert isinstance(same, Duplicate)
    assert isinstance(other, OtherContent)
    assert forgotten == OtherContent(None)


def test_a_key_used_for_the_same_request_answers_as_then_whatever_has_changed() -> None:
    used = KeyRecord(mark(b"0"), START, Offset(1, 1), closed=False, position=3, created_ms=0)
    keyed = Conditions(key="k", if_match=START)

    outcome = decide(append(conditions=keyed), stream(closed=True, tail=Offset(7, 7)), key=used)

    assert outcome == Replayed(used)


@pytest.mark.parametrize(
    ("start", "claim", "agree"),
    [
        (Offset(4, 4), (0, 4), True),
        (Offset(3, 3), (0, 4), False),  # another batch of the same producer
        (Offset(4, 4), (0, 6), False),  # a request that the producer has not made
        (Offset(4, 4), (1, 0), False),
    ],
)
def test_a_key_and_a_producer_must_speak_of_the_same_request(
    start: Offset, claim: tuple[int, int], agree: bool
) -> None:
    used = KeyRecord(mark(b"0"), start, Offset(9, 9), closed=False, position=3, created_ms=0)
    request = append(claim=claim, conditions=Conditions(key="k"))

    outcome = decide(request, known=producer(0, 5), key=used)

    assert outcome == (Replayed(used) if agree else KeyDisagrees())


def test_a_new_key_on_another_content_of_an_accepted_request_disagrees() -> None:
    request = append(b"1", claim=(0, 4), conditions=Conditions(key="new"))

    assert decide(request, known=producer(0, 5)) == KeyDisagrees()


class ExactlyOnce(RuleBasedStateMachine):
    """Producers that number, retry, reorder and restart, against a list of what was stored.

    The property: each (producer, epoch, seq) is stored at most once and in order within its epoch,
    one that was stored is a duplicate when it comes again, and nothing refused is stored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream = stream()
        self.producers: dict[str, Producer] = {}
        self.stored: list[ProducerTuple] = []
        self.starts: dict[ProducerTuple, Offset] = {}
        self.epochs: dict[str, int] = {}
        self.next: dict[str, int] = {}

    @rule(
        name=st.sampled_from("ab"),
        epoch_shift=st.sampled_from([-1, 0, 0, 0, 0, 1]),
        seq_shift=st.integers(-20, 2),
        size=st.integers(1, 9),
        closes=st.sampled_from([False] * 20 + [True]),
    )
    def send(self, name: str, epoch_shift: int, seq_shift: int, size: int, closes: bool) -> None:
        epoch = max(0, self.epochs.get(name, 0) + epoch_shift)
        seq = 0 if epoch_shift > 0 else max(0, self.next.get(name, 0) + seq_shift)
        batch = bytes_batch(b"x" * size)
        claim = ProducerTuple(name, epoch, seq)
        request = Append("s", batch, TEXT, closes, claim, None, mark(batch.data))

        outcome = decide_append(
            self.stream, self.producers.get(name), request, position=len(self.stored), now_ms=0
        )

        known, expected = self.epochs.get(name), self.next.get(name, 0)
        if known is not None and epoch < known:
            assert outcome == StaleEpoch(known)
        elif epoch == known and seq < expected:
            assert isinstance(outcome, Duplicate)
            assert claim in self.stored
            if outcome.original is not None:
                assert outcome.original.offset == self.starts[claim]
        elif self.stream.closed:
            assert outcome == StreamClosed(self.stream.tail)
        elif seq == (expected if epoch == known else 0):
            assert isinstance(outcome, Appended)
            assert outcome.start == self.stream.tail
            assert outcome.producer is not None
            self.stored.append(claim)
            self.starts[claim] = outcome.start
            self.epochs[name], self.next[name] = epoch, seq + 1
            self.producers[name] = outcome.producer
            self.stream.tail, self.stream.closed = outcome.tail, closes
        else:
            assert isinstance(outcome, SequenceGap)

    @invariant()
    def each_is_stored_once_and_in_order(self) -> None:
        assert len(set(self.stored)) == len(self.stored)
        for name in self.producers:
            own = [(claim.epoch, claim.seq) for claim in self.stored if claim.id == name]
            assert own == sorted(own)
            for epoch in {epoch for epoch, _ in own}:
                seqs = [seq for of, seq in own if of == epoch]
                assert seqs == list(range(len(seqs)))


TestExactlyOnce = ExactlyOnce.TestCase
