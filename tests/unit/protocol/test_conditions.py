"""Conditions on an append: what wins over what, pair by pair, and retries that stay duplicates."""

from dataclasses import dataclass, field, replace
from itertools import combinations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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

TEXT = "text/plain"
TAIL = Offset(3, 30)
ELSEWHERE = Offset(2, 20)


def mark(body: bytes, *, closes: bool = False) -> bytes:
    return digest(TEXT, closes, body)


@dataclass(frozen=True)
class Case:
    """A stream and a request to it that is accepted; a violation changes one thing about them.

    The producer is in epoch 5 and has sent the batches 0 to 2, of ten bytes each.
    """

    epoch: int = 5
    seq: int = 3
    closed: bool = False
    media_type: str = TEXT
    key_known: bytes | None = None
    stream_seq: str = "n"
    body: bytes = b"x"
    conditions: Conditions = field(
        default_factory=lambda: Conditions(if_match=TAIL, producer_if=(5, 2))
    )

    def decide(self) -> AppendOutcome:
        at = Stream(1, "s", TEXT, created_ms=0, tail=TAIL)
        at.closed = self.closed
        at.seq = "m"
        request = Append(
            "s",
            bytes_batch(self.body),
            self.media_type,
            False,
            ProducerTuple("p", self.epoch, self.seq),
            self.stream_seq,
            digest(self.media_type, False, self.body),
            self.conditions,
        )
        key = None
        if self.key_known is not None:
            key = KeyRecord(self.key_known, START, Offset(1, 10), False, 0, 77)
        return decide_append(at, producer(), request, key=key, position=9, now_ms=1000)

    def on(self, **changes: object) -> "Case":
        conditions = {name: getattr(self.conditions, name) for name in CONDITION_FIELDS}
        return replace(self, conditions=Conditions(**{**conditions, **changes}))


CONDITION_FIELDS = Conditions.__struct_fields__


def producer(seq: int = 2) -> Producer:
    state = Producer.opening("p", 5, pack(START, mark(b"0")), position=0, now_ms=0)
    for number in range(1, seq + 1):
        packed = pack(Offset(number, number * 10), mark(b"%d" % number))
        state = state.next(number, packed, position=number, now_ms=0)
    return state


@dataclass(frozen=True)
class Violation:
    """Something wrong with a request; those that change the same field cannot meet."""

    name: str
    changes: dict[str, object]
    conditions: dict[str, object]
    outcome: type

    def spoil(self, case: Case) -> Case:
        return replace(case, **self.changes).on(**self.conditions)  # type: ignore[arg-type]

    def meets(self, other: "Violation") -> bool:
        return not (set(self.changes) & set(other.changes)) and not (
            set(self.conditions) & set(other.conditions)
        )


# In the order of the table in docs/reference/http.md; existence is the store's to know.
VIOLATIONS = [
    Violation("key used before", {"key_known": b"?" * 16}, {"key": "k"}, KeyReused),
    Violation("stale epoch", {"epoch": 4}, {}, StaleEpoch),
    Violation("producer duplicate", {"seq": 2, "body": b"2"}, {}, Duplicate),
    Violation("closed", {"closed": True}, {}, StreamClosed),
    Violation("content type", {"media_type": "application/json"}, {}, TypeMismatch),
    Violation("gap", {"seq": 9}, {}, SequenceGap),
    Violation("producer elsewhere", {}, {"producer_if": (5, 1)}, ProducerMoved),
    Violation("tail elsewhere", {}, {"if_match": ELSEWHERE}, TailMoved),
    Violation("not empty", {}, {"if_match": None, "if_empty": True}, TailMoved),
    Violation("stream seq", {"stream_seq": "m"}, {}, SeqRegression),
]
PAIRS = [(first, second) for first, second in combinations(VIOLATIONS, 2) if first.meets(second)]


def test_without_a_violation_the_request_is_accepted() -> None:
    assert isinstance(Case().decide(), Appended)


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda violation: violation.name)
def test_each_violation_alone_has_its_own_outcome(violation: Violation) -> None:
    assert isinstance(violation.spoil(Case()).decide(), violation.outcome)


@pytest.mark.parametrize(
    ("earlier", "later"), PAIRS, ids=[f"{first.name} + {second.name}" for first, second in PAIRS]
)
def test_of_two_violations_the_earlier_in_the_table_wins(
    earlier: Violation, later: Violation
) -> None:
    both = later.spoil(earlier.spoil(Case()))

    assert isinstance(both.decide(), earlier.outcome)


def test_every_pair_that_one_request_can_violate_is_tried() -> None:
    left_out = {
        (first.name, second.name)
        for first, second in combinations(VIOLATIONS, 2)
        if not first.meets(second)
    }

    # A sequence number is not both old and too new; a tail is not both named and said to be 0.
    assert left_out == {("producer duplicate", "gap"), ("tail elsewhere", "not empty")}


def test_a_new_epoch_that_does_not_begin_at_zero_wins_over_preconditions() -> None:
    case = replace(Case(), epoch=6).on(producer_if=(5, 1), if_match=ELSEWHERE)

    assert case.decide() == EpochStart(6, 3)


def test_with_everything_wrong_the_key_wins() -> None:
    case = Case()
    for violation in VIOLATIONS:
        if violation.name != "producer duplicate":
            case = violation.spoil(case)

    assert case.decide() == KeyReused(77)


# Producer-If


def test_producer_if_raises_an_epoch_over_the_state_one_has_seen() -> None:
    outcome = replace(Case(), epoch=6, seq=0).decide()

    assert isinstance(outcome, Appended)
    assert outcome.producer is not None
    assert (outcome.producer.epoch, outcome.producer.seq) == (6, 0)


@pytest.mark.parametrize("seen", [(5, 1), (5, 3), (4, 2), (6, 2)])
def test_producer_if_refuses_any_other_state_and_tells_the_real_one(seen: tuple[int, int]) -> None:
    outcome = replace(Case(), epoch=7, seq=0).on(producer_if=seen).decide()

    assert outcome == ProducerMoved(5, 2)


def test_producer_if_of_an_unknown_producer_says_that_it_is_unknown() -> None:
    request = Append(
        "s",
        bytes_batch(b"x"),
        TEXT,
        producer=ProducerTuple("q", 0, 0),
        digest=mark(b"x"),
        conditions=Conditions(producer_if=(0, 0)),
    )
    at = Stream(1, "s", TEXT, created_ms=0)

    assert decide_append(at, None, request, position=0, now_ms=0) == ProducerMoved(None, None)


# What a duplicate says


def duplicate(seq: int, body: bytes, *, at: Producer, strict: bool = False) -> AppendOutcome:
    request = Append(
        "s",
        bytes_batch(body),
        TEXT,
        producer=ProducerTuple("p", 5, seq),
        digest=mark(body),
        conditions=Conditions(strict=True) if strict else None,
    )
    stream = Stream(1, "s", TEXT, created_ms=0, tail=TAIL)
    return decide_append(stream, at, request, position=0, now_ms=0)


@pytest.mark.parametrize("seq", [0, 5, 13, 20])
def test_a_remembered_duplicate_says_where_the_original_is_and_whether_it_is_the_same(
    seq: int,
) -> None:
    known = producer(20)

    same = duplicate(seq, b"%d" % seq, at=known)
    other = duplicate(seq, b"other", at=known)

    assert isinstance(same, Duplicate)
    assert isinstance(other, Duplicate)
    assert same.original == Remembered(Offset(seq, seq * 10), mark(b"%d" % seq))
    assert (same.matches, other.matches) == (True, False)
    assert (same.producer_epoch, same.producer_seq) == (5, 20)


@pytest.mark.parametrize("last", [0, 1, 15, 16, 17, 40])
def test_seq_0_and_the_last_16_batches_are_remembered_and_nothing_else(last: int) -> None:
    known = producer(last)

    remembered = {seq for seq in range(last + 1) if known.remembered(seq) is not None}

    assert remembered == {0} | set(range(max(0, last - RECENT_BATCHES + 1), last + 1))


def test_a_duplicate_too_old_to_be_compared_is_a_duplicate_that_says_less() -> None:
    outcome = duplicate(3, b"3", at=producer(40))

    assert isinstance(outcome, Duplicate)
    assert (outcome.original, outcome.matches) == (None, None)


def test_a_strict_duplicate_must_be_the_same_and_not_too_old() -> None:
    known = producer(40)

    assert isinstance(duplicate(40, b"40", at=known, strict=True), Duplicate)
    assert isinstance(duplicate(0, b"0", at=known, strict=True), Duplicate)
    assert duplicate(40, b"other", at=known, strict=True) == OtherContent(
        Remembered(Offset(40, 400), mark(b"40"))
    )
    assert duplicate(3, b"3", at=known, strict=True) == OtherContent(None)


# Keys beside producers


def keyed(
    claim: tuple[int, int] | None,
    *,
    body: bytes = b"2",
    start: Offset | None = ELSEWHERE,
    known: Producer | None = None,
) -> AppendOutcome:
    """A request with a key that stands for the batch at `start`, or (None) for nothing yet."""
    request = Append(
        "s",
        bytes_batch(body),
        TEXT,
        producer=None if claim is None else ProducerTuple("p", *claim),
        digest=mark(body),
        conditions=Conditions(key="k"),
    )
    key = None if start is None else KeyRecord(mark(b"2"), start, TAIL, False, 2, 77)
    stream = Stream(1, "s", TEXT, created_ms=0, tail=TAIL)
    return decide_append(stream, known, request, key=key, position=9, now_ms=0)


def test_a_key_alone_replays_the_original_answer() -> None:
    outcome = keyed(None)

    assert isinstance(outcome, Replayed)
    assert (outcome.original.start, outcome.original.tail) == (Offset(2, 20), TAIL)


def test_a_key_with_another_content_is_refused_whoever_sends() -> None:
    for claim in (None, (5, 2), (5, 3), (4, 0), (6, 0)):
        assert keyed(claim, body=b"other", known=producer()) == KeyReused(77)


def test_a_key_and_a_producer_that_agree_are_a_replay() -> None:
    assert isinstance(keyed((5, 2), known=producer()), Replayed)


def test_a_key_still_answers_for_an_epoch_that_was_raised_since() -> None:
    raised = Producer.opening("p", 6, pack(TAIL, mark(b"z")), position=8, now_ms=0)

    assert isinstance(keyed((5, 2), known=raised), Replayed)


def test_a_key_still_answers_for_a_batch_that_its_producer_has_forgotten() -> None:
    assert isinstance(keyed((5, 2), known=producer(40)), Replayed)


@pytest.mark.parametrize(
    ("claim", "known"),
    [
        pytest.param((5, 3), producer(), id="the producer says it is new"),
        pytest.param((6, 0), producer(), id="the producer opens an epoch with it"),
        pytest.param((0, 0), None, id="the producer is unknown"),
        pytest.param((5, 1), producer(), id="the producer put it elsewhere"),
    ],
)
def test_a_key_and_a_producer_that_disagree_are_refused(
    claim: tuple[int, int], known: Producer | None
) -> None:
    assert keyed(claim, known=known) == KeyDisagrees()


def test_an_unused_key_on_a_duplicate_with_another_content_is_a_disagreement() -> None:
    assert keyed((5, 2), body=b"other", start=None, known=producer()) == KeyDisagrees()


def test_a_key_that_was_forgotten_does_not_keep_a_duplicate_from_being_one() -> None:
    assert isinstance(keyed((5, 2), start=None, known=producer()), Duplicate)


# Retries of accepted requests, against a model


@dataclass(frozen=True)
class Sent:
    """A request that was accepted, and where it went."""

    request: Append
    start: Offset


PRODUCERS = ("p", "q")
BODIES = (b"a", b"bb", b"ccc")


class Retries(RuleBasedStateMachine):
    """Whatever has happened since, a retry of an accepted request is a duplicate, and counts once.

    The machine is the smallest store there is: a stream, its producers and its keys, changed only
    by what the rule says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream(1, "s", TEXT, created_ms=0)
        self.producers: dict[str, Producer] = {}
        self.keys: dict[str, KeyRecord] = {}
        self.sent: list[Sent] = []
        self.stored: list[bytes] = []
        self.numbers = 0

    def ask(self, request: Append) -> AppendOutcome:
        claim, conditions = request.producer, request.conditions
        name = None if conditions is None else conditions.key
        outcome = decide_append(
            self.stream,
            None if claim is None else self.producers.get(claim.id),
            request,
            key=None if name is None else self.keys.get(name),
            position=0,
            now_ms=0,
        )
        if not isinstance(outcome, Appended):
            return outcome
        if request.batch is not None:
            self.stored.append(request.batch.data)
        self.stream.tail = outcome.tail
        self.stream.closed = outcome.closed
        self.stream.seq = request.seq or self.stream.seq
        if outcome.producer is not None:
            self.producers[outcome.producer.id] = outcome.producer
        if name is not None:
            self.keys[name] = KeyRecord(
                request.digest, outcome.start, outcome.tail, outcome.closed, 0, 0
            )
        self.sent.append(Sent(request, outcome.start))
        return outcome

    def claim(self, producer_id: str | None, *, raises: bool) -> ProducerTuple | None:
        """The next request of a producer, in its epoch or in a new one."""
        if producer_id is None:
            return None
        known = self.producers.get(producer_id)
        if known is None:
            return ProducerTuple(producer_id, 0, 0)
        if raises:
            return ProducerTuple(producer_id, known.epoch + 1, 0)
        return ProducerTuple(producer_id, known.epoch, known.seq + 1)

    @precondition(lambda self: not self.stream.closed)
    @rule(
        body=st.sampled_from(BODIES),
        producer_id=st.sampled_from((None, *PRODUCERS)),
        raises=st.booleans(),
        has_key=st.booleans(),
        checks_tail=st.booleans(),
        checks_producer=st.booleans(),
        has_seq=st.booleans(),
        strict=st.booleans(),
        closes=st.integers(0, 19).map(lambda number: number == 0),
    )
    def accepted(
        self,
        body: bytes,
        producer_id: str | None,
        raises: bool,
        has_key: bool,
        checks_tail: bool,
        checks_producer: bool,
        has_seq: bool,
        strict: bool,
        closes: bool,
    ) -> None:
        self.numbers += 1
        claim = self.claim(producer_id, raises=raises)
        known = None if producer_id is None else self.producers.get(producer_id)
        request = Append(
            "s",
            bytes_batch(body),
            TEXT,
            closes,
            claim,
            f"{self.numbers:06d}" if has_seq else None,
            mark(body, closes=closes),
            Conditions(
                if_match=self.stream.tail if checks_tail else None,
                if_empty=self.stream.tail == START and not checks_tail,
                producer_if=(known.epoch, known.seq) if known and checks_producer else None,
                strict=strict,
                key=f"key-{self.numbers}" if has_key else None,
            ),
        )

        assert isinstance(self.ask(request), Appended)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def retried(self, data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(self.sent))
        request = sent.request
        claim, conditions = request.producer, request.conditions
        assert conditions is not None
        if claim is None and conditions.key is None:
            return
        before = len(self.stored)

        outcome = self.ask(request)

        assert len(self.stored) == before
        if conditions.key is not None:
            assert isinstance(outcome, Replayed)
            assert outcome.original.start == sent.start
            return
        assert claim is not None
        known = self.producers[claim.id]
        if known.epoch > claim.epoch:
            assert outcome == StaleEpoch(known.epoch)
        elif claim.seq == 0 or known.seq - claim.seq < RECENT_BATCHES:
            assert isinstance(outcome, Duplicate)
            assert outcome.original == Remembered(sent.start, request.digest)
            assert outcome.matches
        elif conditions.strict:
            assert outcome == OtherContent(None)
        else:
            assert isinstance(outcome, Duplicate)
            assert outcome.original is None

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), body=st.sampled_from(BODIES))
    def key_used_for_something_else(self, data: st.DataObject, body: bytes) -> None:
        if not self.keys:
            return
        key = data.draw(st.sampled_from(sorted(self.keys)))
        request = Append(
            "s",
            bytes_batch(body),
            TEXT,
            digest=mark(body + b" other"),
            conditions=Conditions(key=key, if_match=ELSEWHERE),
        )

        assert isinstance(self.ask(request), KeyReused)

    @rule(
        body=st.sampled_from(BODIES),
        how=st.sampled_from(("tail", "gap", "type", "producer")),
    )
    def refused(self, body: bytes, how: str) -> None:
        """A refusal uses up neither its key nor its place in the sequence."""
        keys, producers = dict(self.keys), dict(self.producers)
        claim = self.claim("p", raises=False)
        assert claim is not None
        if how == "gap":
            claim = ProducerTuple("p", claim.epoch, claim.seq + 1)
        request = Append(
            "s",
            bytes_batch(body),
            "text/html" if how == "type" else TEXT,
            False,
            claim,
            digest=mark(body),
            conditions=Conditions(
                key="never",
                if_match=Offset(999, 999) if how == "tail" else None,
                producer_if=(99, 99) if how == "producer" else None,
            ),
        )

        outcome = self.ask(request)

        assert isinstance(
            outcome, TailMoved | SequenceGap | TypeMismatch | ProducerMoved | StreamClosed
        )
        assert (self.keys, self.producers) == (keys, producers)

    @precondition(lambda self: self.stream.closed)
    @rule()
    def closed_again(self) -> None:
        close = Append("s", None, None, True, digest=mark(b"", closes=True))

        assert self.ask(close) == AlreadyClosed(self.stream.tail)

    @invariant()
    def everything_is_stored_once(self) -> None:
        size = sum(map(len, self.stored))
        assert self.stream.tail == Offset(len(self.stored), size)
        assert self.stored == [
            sent.request.batch.data for sent in self.sent if sent.request.batch is not None
        ]


TestRetries = Retries.TestCase
