"""Who may do what, and who holds a producer id: the rules alone."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.appends import Append, Appended, ProducerTuple, decide_append
from fencepost.protocol.batches import Batch
from fencepost.protocol.claims import (
    Actor,
    Ending,
    EpochGuarded,
    NotHolder,
    audit,
    decide_standings,
    held,
    is_completed,
    refuse,
)
from fencepost.protocol.globs import Glob
from fencepost.protocol.grants import (
    ADMIN,
    APPEND,
    AUDIT,
    CLAIM,
    CREATE,
    READ,
    Grant,
    IdGlob,
    Narrowed,
    NarrowedSelection,
    Principal,
    ProducerRule,
    ProducerRules,
    includes,
    is_audit,
)
from fencepost.protocol.rates import NEW, UNLIMITED, Pace, Standing, TooFast
from fencepost.protocol.streams import CLAIMED, COMPLETED, RELEASED, UNCLAIMED, Producer, Stream

STALE_MS = 60_000
RULES = ProducerRules(
    [
        ProducerRule(IdGlob("task:*"), True, False, "stale", STALE_MS),
        ProducerRule(IdGlob("fixed:*"), False, False, "never", 0),
        ProducerRule(IdGlob("mine:*"), False, False, "always", 0),
    ]
)


def principal(
    name: str = "ann",
    *grants: tuple[str, int],
    producers: tuple[str, ...] = ("*",),
    pace: Pace = UNLIMITED,
) -> Principal:
    return Principal(
        name,
        [Grant((Glob(streams),), verbs) for streams, verbs in grants],
        producers=[IdGlob(text) for text in producers],
        rules=RULES,
        pace=pace,
    )


# Grants


def test_what_is_not_granted_is_not_allowed() -> None:
    ann = principal("ann", ("orders/**", READ | APPEND), ("logs/*", CREATE))

    assert ann.may(READ | APPEND, "orders/eu/1")
    assert not ann.may(CREATE, "orders/eu/1")
    assert ann.may(CREATE, "logs/a")
    assert not ann.may(CREATE, "logs/a/b")
    assert not ann.may(READ, "elsewhere")
    assert not ann.may(READ, "Orders/eu")


def test_grants_of_the_same_stream_add_up() -> None:
    ann = principal("ann", ("orders/*", READ), ("*/eu", APPEND))

    assert ann.may(READ | APPEND, "orders/eu")
    assert not ann.may(READ | APPEND, "orders/us")


def test_admin_stands_for_every_verb_on_its_streams_and_no_others() -> None:
    ann = principal("ann", ("orders/**", ADMIN))

    assert ann.may(READ | APPEND | CREATE | CLAIM | ADMIN, "orders/eu")
    assert not ann.may_read("bills")
    assert not ann.is_admin
    assert principal("root", ("**", ADMIN)).is_admin


def test_the_audit_stream_is_read_by_administrators_and_written_by_nobody() -> None:
    reader = principal("ann", ("**", READ | APPEND | CREATE))
    admin = principal("root", ("**", ADMIN))

    for path in (AUDIT, f"{AUDIT}/more"):
        assert is_audit(path)
        assert not reader.may_read(path)
        assert admin.may_read(path)
        assert not admin.may(APPEND, path)
        assert not admin.may(CREATE, path)
    assert not is_audit(f"{AUDIT}s")
    assert reader.may_read(f"{AUDIT}s")


def test_producer_ids_are_granted_by_glob_and_a_star_takes_slashes() -> None:
    ann = principal("ann", producers=("task:*", "checkout-1", "a*b*c"))

    assert ann.may_use("task:x/y")
    assert ann.may_use("checkout-1")
    assert ann.may_use("a--b--c")
    assert not ann.may_use("checkout-10")
    assert not ann.may_use("Task:x")
    assert not ann.may_use("ac")
    assert not principal("ann", producers=()).may_use("any")


@given(st.text("ab*", max_size=8), st.text("ab", max_size=8))
def test_an_id_glob_takes_what_its_pieces_spell(pattern: str, text: str) -> None:
    """The same as the obvious, slow definition: cut the text at every place for every star."""

    def slow(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(slow(pattern[1:], text[at:]) for at in range(len(text) + 1))
        return bool(text) and text[0] == pattern[0] and slow(pattern[1:], text[1:])

    assert IdGlob(pattern).matches(text) == slow(pattern, text)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ("**", "**", True),
        ("**", "a/*/b", True),
        ("a/**", "a", True),
        ("a/**", "a/**", True),
        ("a/**", "a/b/**/c", True),
        ("a/**", "**", False),
        ("a/**", "*/b", False),
        ("a/*", "a/b", True),
        ("a/*", "a/b*", True),
        ("a/*", "a/**", False),
        ("a/b*", "a/*", False),
        ("a/b*", "a/bc*d", True),
        ("a/b*d", "a/b*", False),
        ("**/end", "**/end", True),
        ("**/end", "a/**", False),
        ("a", "a", True),
        ("a", "A", False),
    ],
)
def test_a_glob_includes_a_pattern_when_whatever_that_matches_is_matched(
    outer: str, inner: str, expected: bool
) -> None:
    assert includes(Glob(outer), Glob(inner)) is expected


SEGMENTS = st.sampled_from(["a", "b", "*", "a*", "**"])
PATTERNS = st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join)
PATHS = ["/".join(p) for n in (1, 2, 3, 4) for p in itertools.product(("a", "b", "ab"), repeat=n)]


@given(PATTERNS, PATTERNS)
def test_inclusion_never_promises_too_much(outer: str, inner: str) -> None:
    """If one glob includes another, no path is matched by the inner one alone."""
    one, other = Glob(outer), Glob(inner)
    if includes(one, other):
        assert [p for p in PATHS if other.matches(p) and not one.matches(p)] == []


def test_a_pattern_may_be_watched_when_one_grant_includes_it() -> None:
    ann = principal("ann", ("orders/**", READ), ("bills/*", APPEND))

    assert ann.may_read_all_of(Glob("orders/*/new"))
    assert not ann.may_read_all_of(Glob("bills/*"))
    assert not ann.may_read_all_of(Glob("**"))


def test_a_narrowed_glob_and_selection_take_only_what_may_be_read() -> None:
    ann = principal("ann", ("orders/**", READ))
    glob = Narrowed("**", ann.may_read)
    everything = NarrowedSelection((), (), None, ann.may_read)
    some = NarrowedSelection(("bills", "orders"), (Glob("*/eu"),), None, ann.may_read)

    assert glob.matches("orders/eu")
    assert not glob.matches("bills")
    assert everything.by_path
    assert everything.takes(7, "orders/x")
    assert not everything.takes(7, "bills")
    assert [p for p in ("bills", "bills/eu", "orders", "orders/eu") if some.takes(1, p)] == [
        "orders",
        "orders/eu",
    ]


GLOBS = ["**", "a/**", "a/*", "ab*", "b/c/*", "*", "**/d", "a"]


@given(
    st.lists(st.sampled_from(GLOBS), max_size=3),
    st.lists(st.sampled_from(GLOBS), max_size=3),
    st.sampled_from(["a", "a/b", "ab", "abc", "b", "b/c/d", "c", "d", "a/b/d"]),
)
def test_all_that_a_principal_may_read_of_a_selection_lies_in_its_ranges(
    granted: list[str], asked: list[str], path: str
) -> None:
    """For any grants and patterns, a path that is taken lies in one range, as for lists."""
    ann = principal("ann", *((glob, READ) for glob in granted))
    selection = NarrowedSelection((), map(Glob, asked), None, ann.may_read, ann.read_ranges)

    ranges = selection.path_ranges()
    holding = [one for one in ranges if one[0] <= path and (one[1] is None or path < one[1])]
    first, last = Narrowed("**", ann.may_read, ann.read_ranges).within(("", None))

    assert len(holding) <= 1
    if selection.takes_path(path):
        assert holding
        assert first <= path
        assert last is None or path < last


def test_without_patterns_only_what_may_be_read_is_looked_for() -> None:
    ann = principal("ann", ("orders/**", READ), ("bills/eu/*", READ), ("notes/**", APPEND))
    everything = NarrowedSelection((), (), None, ann.may_read, ann.read_ranges)
    elsewhere = NarrowedSelection((), (Glob("notes/*"),), None, ann.may_read, ann.read_ranges)

    assert everything.path_ranges() == [("bills/eu/", "bills/eu0"), ("orders", "ordert")]
    assert elsewhere.path_ranges() == []
    assert Narrowed("notes/*", ann.may_read, ann.read_ranges).within(("notes/", "notes0")) == (
        "",
        "",
    )


def test_what_is_remembered_of_paths_does_not_grow_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fencepost.protocol.grants.REMEMBERED_MAX", 10)
    ann = principal("ann", ("a*", READ))

    answers = [ann.may_read(f"{'a' if n % 2 else 'b'}{n}") for n in range(100)]

    assert answers == [bool(n % 2) for n in range(100)]
    assert len(ann._verbs) <= 10


# Producer ids


def producer(
    name: str,
    *,
    epoch: int = 3,
    claim: int = CLAIMED,
    producer_id: str = "task:1",
    updated_ms: int = 0,
) -> Producer:
    batch = b"\0" * 32
    return Producer(producer_id, epoch, 5, batch, batch, 9, updated_ms, name, claim)


def why_not(who: Actor, before: Producer | None, epoch: int, now_ms: int = 0) -> object:
    producer_id = "task:1" if before is None else before.id
    return refuse(who, before, epoch, producer_id=producer_id, now_ms=now_ms)


ANN, BOB = Actor(principal("ann")), Actor(principal("bob"))
ADMINISTRATOR = Actor(principal("root", ("**", ADMIN)), reason="stuck", overrides=True)


def test_anybody_may_open_an_id_and_its_holder_may_go_on() -> None:
    assert why_not(ANN, None, 0) is None
    assert why_not(ANN, producer("ann"), 3) is None


def test_going_on_in_a_claim_is_for_its_holder_only() -> None:
    assert why_not(BOB, producer("ann"), 3) == NotHolder()
    assert why_not(BOB, producer("ann", producer_id="row:1", claim=UNCLAIMED), 3) is None
    assert why_not(BOB, producer("ann", producer_id="mine:1", claim=UNCLAIMED), 3) == NotHolder()


def test_a_released_claim_and_one_from_before_principals_are_anybodys() -> None:
    assert why_not(BOB, producer("ann", claim=RELEASED), 3) is None
    assert why_not(BOB, producer("ann", claim=RELEASED), 4) is None
    assert why_not(BOB, producer("", claim=UNCLAIMED), 3) is None


def test_a_claim_is_taken_over_only_when_it_is_stale_also_by_its_holder() -> None:
    fresh = producer("ann", updated_ms=1000)

    assert why_not(BOB, fresh, 4, now_ms=1001) == EpochGuarded(STALE_MS - 1)
    assert why_not(ANN, fresh, 4, now_ms=1001) == EpochGuarded(STALE_MS - 1)
    assert why_not(BOB, fresh, 4, now_ms=1000 + STALE_MS) is None


def test_a_completed_claim_is_final_for_all_but_administrators() -> None:
    done = producer("ann", claim=COMPLETED)

    assert why_not(BOB, done, 3) == NotHolder()
    assert why_not(BOB, done, 4, now_ms=10 * STALE_MS) == EpochGuarded(None)
    assert why_not(ADMINISTRATOR, done, 4) is None


def test_only_an_administrator_who_raises_the_epoch_opens_a_completed_claim_again() -> None:
    done = producer("ann", claim=COMPLETED)

    assert is_completed(ANN, done, 3)
    assert is_completed(ANN, done, 4)
    assert is_completed(ADMINISTRATOR, done, 3)
    assert not is_completed(ADMINISTRATOR, done, 4)
    assert not is_completed(ANN, producer("ann"), 3)


def test_an_id_whose_epoch_is_never_raised_stays_with_its_holder() -> None:
    fixed = producer("ann", producer_id="fixed:1", claim=UNCLAIMED)

    assert why_not(ANN, fixed, 4, now_ms=10**12) == EpochGuarded(None)
    assert why_not(ADMINISTRATOR, fixed, 4) is None
    assert why_not(BOB, producer("ann", producer_id="mine:1", claim=UNCLAIMED), 4) is None


def test_who_opens_or_retakes_an_id_holds_it() -> None:
    assert held(ANN, None, producer("")).principal == "ann"
    assert held(BOB, producer("ann"), producer("", epoch=4)).principal == "bob"
    retaken = held(BOB, producer("ann", claim=RELEASED), producer("ann", claim=RELEASED))
    assert (retaken.principal, retaken.claim) == ("bob", CLAIMED)


def test_who_goes_on_in_a_shared_epoch_does_not_take_it() -> None:
    row = producer("ann", producer_id="row:1", claim=UNCLAIMED)

    after = held(BOB, row, row)

    assert (after.principal, after.claim) == ("ann", UNCLAIMED)


@pytest.mark.parametrize(("ending", "claim"), [("released", RELEASED), ("completed", COMPLETED)])
def test_a_holder_ends_its_claim(ending: str, claim: int) -> None:
    ending_actor = Actor(ANN.principal, ending=ending)  # type: ignore[arg-type]

    assert held(ending_actor, producer("ann"), producer("ann")).claim == claim
    row = producer("ann", producer_id="row:1", claim=UNCLAIMED)
    assert held(ending_actor, row, row).claim == UNCLAIMED


def changed(who: Actor, before: Producer | None, after: Producer, **known: Standing) -> object:
    return decide_standings(known, who, before, held(who, before, after), now_ms=0)


def open_claims(found: object) -> dict[str, int]:
    assert isinstance(found, dict)
    return {name: standing.open_claims for name, standing in found.items()}


def test_a_claim_counts_as_open_until_it_ends() -> None:
    one = NEW._replace(open_claims=1)
    ends = Actor(ANN.principal, ending="completed")

    assert open_claims(changed(ANN, None, producer(""))) == {"ann": 1}
    assert open_claims(changed(ANN, producer("ann"), producer("ann"), ann=one)) == {}
    assert open_claims(changed(ends, producer("ann"), producer("ann"), ann=one)) == {"ann": 0}
    assert open_claims(changed(ends, None, producer(""))) == {"ann": 0}


def test_a_claim_that_is_taken_over_is_abandoned_by_the_one_and_open_for_the_other() -> None:
    one = NEW._replace(open_claims=1)

    found = changed(BOB, producer("ann"), producer("", epoch=4), ann=one)

    assert open_claims(found) == {"ann": 0, "bob": 1}
    assert isinstance(found, dict)
    assert found["ann"].abandoned.amount == 1
    assert found["bob"].abandoned.amount == 0


def test_a_claim_retaken_by_its_own_holder_stays_one_and_counts_as_abandoned() -> None:
    one = NEW._replace(open_claims=1)

    found = changed(ANN, producer("ann"), producer("", epoch=4), ann=one)

    assert open_claims(found) == {"ann": 1}
    assert isinstance(found, dict)
    assert found["ann"].abandoned.amount == 1


def test_a_released_claim_that_is_retaken_is_a_claim_and_nobody_abandoned_it() -> None:
    found = changed(BOB, producer("ann", claim=RELEASED), producer("ann", claim=RELEASED))

    assert open_claims(found) == {"bob": 1}


def test_ids_that_are_no_claims_are_not_counted() -> None:
    row = producer("ann", producer_id="row:1", claim=UNCLAIMED)

    assert open_claims(changed(BOB, row, row)) == {}
    assert open_claims(changed(BOB, None, row)) == {}


def test_a_claim_past_the_limit_is_too_fast() -> None:
    few = Actor(principal("ann", pace=Pace(open_claims_max=1)))

    found = changed(few, None, producer(""), ann=NEW._replace(open_claims=1))

    assert isinstance(found, TooFast)


# Audit


def test_a_raise_over_a_claim_is_told_with_who_when_and_why() -> None:
    why = Actor(BOB.principal, reason="the worker is gone")

    event = audit(why, "jobs", 4, "task:1", producer("ann"), None, 77)

    assert event is not None
    assert event._asdict() == {
        "kind": "epoch_raised",
        "at_ms": 77,
        "principal": "bob",
        "stream": "jobs",
        "producer": "task:1",
        "old_epoch": 3,
        "new_epoch": 4,
        "holder": "ann",
        "reason": "the worker is gone",
        "code": None,
        "targets": None,
    }


def test_an_override_and_a_refusal_are_told_and_ordinary_appends_are_not() -> None:
    fresh = producer("ann", updated_ms=70)

    override = audit(ADMINISTRATOR, "jobs", 4, "task:1", fresh, None, 77)
    taken = audit(ADMINISTRATOR, "jobs", 3, "task:1", fresh, None, 77)
    refused = audit(BOB, "jobs", 4, "task:1", fresh, EpochGuarded(5), 77)

    assert override is not None
    assert taken is not None
    assert refused is not None
    assert (override.kind, taken.kind) == ("override", "override")
    assert (refused.kind, refused.code) == ("refused", "epoch_guarded")
    assert audit(ANN, "jobs", 3, "task:1", fresh, None, 77) is None
    assert audit(ANN, "jobs", 0, "task:1", None, None, 77) is None
    row = producer("ann", producer_id="row:1", claim=UNCLAIMED)
    told = audit(BOB, "jobs", 4, "row:1", row, None, 77)
    assert told is not None
    assert told.kind == "epoch_raised"


# All of it together


class Book:
    """Producers and standings as a store keeps them, in a dictionary each."""

    def __init__(self) -> None:
        self.stream = Stream(1, "jobs", "application/json", created_ms=0)
        self.producers: dict[str, Producer] = {}
        self.standings: dict[str, Standing] = {}
        self.now_ms = 0

    def send(self, who: Actor, producer_id: str, epoch: int, seq: int) -> object:
        claim = ProducerTuple(producer_id, epoch, seq)
        batch = Batch(1, 1, b"1", None)
        request = Append(
            "jobs", batch, "application/json", producer=claim, digest=b"\0" * 16, actor=who
        )
        before = self.producers.get(producer_id)
        outcome = decide_append(self.stream, before, request, position=0, now_ms=self.now_ms)
        if isinstance(outcome, Appended):
            assert outcome.producer is not None
            found = decide_standings(self.standings, who, before, outcome.producer, self.now_ms)
            if isinstance(found, TooFast):
                return found
            self.standings.update(found)
            self.producers[producer_id] = outcome.producer
        return outcome


class Sent(NamedTuple):
    who: str
    producer_id: str
    raises: int
    ending: Ending | None
    overrides: bool
    waits_ms: int


SENT = st.builds(
    Sent,
    st.sampled_from(["ann", "bob"]),
    st.sampled_from(["task:1", "task:2", "row:1", "fixed:1"]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([None, None, "released", "completed"]),
    st.booleans(),
    st.sampled_from([0, 0, STALE_MS]),
)


@given(st.lists(SENT, max_size=40), st.sampled_from([None, 1, 2]))
def test_open_claims_are_those_that_somebody_holds(sent: list[Sent], most: int | None) -> None:
    """After any requests: each principal's open claims are counted exactly, and within its limit.

    A principal that is neither the holder nor an administrator never adds to an epoch that is held.
    """
    pace = Pace(open_claims_max=most)
    people = {name: principal(name, pace=pace) for name in ("ann", "bob")}
    book = Book()
    for one in sent:
        book.now_ms += one.waits_ms
        before = book.producers.get(one.producer_id)
        epoch = one.raises if before is None else before.epoch + one.raises
        seq = 0 if before is None or one.raises else before.seq + 1
        actor = Actor(people[one.who], "why", one.overrides, one.ending)

        outcome = book.send(actor, one.producer_id, epoch, seq)

        if isinstance(outcome, Appended) and before is not None and not one.overrides:
            is_held = before.claim in (CLAIMED, COMPLETED)
            if is_held and not one.raises:
                assert before.principal == one.who
            if is_held and one.raises:
                assert before.claim == CLAIMED
                assert book.now_ms - before.updated_ms >= STALE_MS
        for name in people:
            held_now = sum(
                p.claim == CLAIMED and p.principal == name for p in book.producers.values()
            )
            assert book.standings.get(name, NEW).open_claims == held_now
            assert most is None or held_now <= most
