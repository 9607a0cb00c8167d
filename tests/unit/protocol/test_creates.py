"""Deciding a create: idempotence, forks, and the table of lifetimes that a fork gets."""

import pytest

from fencepost.protocol.batches import bytes_batch
from fencepost.protocol.creates import (
    ConfigConflict,
    Create,
    Created,
    CreateOutcome,
    Exists,
    ForkFrom,
    ForkPoint,
    PathBlocked,
    SourceTypeMismatch,
    decide_create,
    inherited,
)
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.streams import Fork, Lifetime, Segment, Stream

NOW_MS = 5_000
FOREVER = Lifetime()
TTL = Lifetime(ttl_s=60)
OTHER_TTL = Lifetime(ttl_s=90)
UNTIL = Lifetime(expires_at_ms=100_000)
OTHER_UNTIL = Lifetime(expires_at_ms=200_000)


def decide(
    request: Create, existing: Stream | None = None, point: ForkPoint | None = None
) -> CreateOutcome:
    return decide_create(existing, request, stream_id=9, fork_point=point, now_ms=NOW_MS)


def created(request: Create, point: ForkPoint | None = None) -> Stream:
    outcome = decide(request, None, point)
    assert isinstance(outcome, Created), outcome
    return outcome.stream


def source(lifetime: Lifetime = FOREVER, content_type: str = "text/plain") -> Stream:
    tail = Offset(3, 30)
    return Stream(4, "source", content_type, created_ms=0, lifetime=lifetime, tail=tail)


def test_a_new_stream_is_open_empty_and_of_bytes_unless_it_says_otherwise() -> None:
    outcome = decide(Create("s"))

    assert isinstance(outcome, Created)
    stream = outcome.stream
    assert (stream.id, stream.path, stream.content_type) == (9, "s", "application/octet-stream")
    assert (outcome.start, outcome.tail, outcome.closed) == (START, START, False)
    assert (stream.created_ms, stream.touched_ms, stream.lifetime) == (NOW_MS, NOW_MS, FOREVER)


def test_a_new_stream_may_begin_with_a_batch_and_be_closed_at_once() -> None:
    outcome = decide(Create("s", batch=bytes_batch(b"abc"), closed=True))

    assert isinstance(outcome, Created)
    assert (outcome.start, outcome.tail, outcome.closed) == (START, Offset(1, 3), True)
    assert outcome.stream.closed


CONFIGURATIONS: list[tuple[str, Create]] = [
    ("plain", Create("s")),
    ("text", Create("s", content_type="text/plain")),
    ("json", Create("s", content_type="application/json")),
    ("closed", Create("s", closed=True)),
    ("ttl", Create("s", lifetime=TTL)),
    ("other ttl", Create("s", lifetime=OTHER_TTL)),
    ("until", Create("s", lifetime=UNTIL)),
    ("other until", Create("s", lifetime=OTHER_UNTIL)),
]


@pytest.mark.parametrize("first", CONFIGURATIONS, ids=lambda case: case[0])
@pytest.mark.parametrize("second", CONFIGURATIONS, ids=lambda case: case[0])
def test_the_same_configuration_again_is_success_and_another_one_is_a_conflict(
    first: tuple[str, Create], second: tuple[str, Create]
) -> None:
    existing = created(first[1])

    outcome = decide(second[1], existing)

    if first == second:
        assert isinstance(outcome, Exists)
        assert outcome.stream is existing
    else:
        assert isinstance(outcome, ConfigConflict)
        assert outcome.detail


def test_case_and_parameters_of_the_content_type_make_no_other_configuration() -> None:
    existing = created(Create("s", content_type="text/plain; charset=utf-8"))

    assert isinstance(decide(Create("s", content_type="TEXT/PLAIN"), existing), Exists)


def test_the_default_content_type_may_be_named_the_second_time() -> None:
    existing = created(Create("s"))

    again = decide(Create("s", content_type="application/octet-stream"), existing)

    assert isinstance(again, Exists)


def test_a_repeated_create_tells_the_tail_of_today_and_adds_nothing() -> None:
    existing = created(Create("s", batch=bytes_batch(b"abc")))
    existing.tail = Offset(7, 70)

    outcome = decide(Create("s", batch=bytes_batch(b"abc")), existing)

    assert outcome == Exists(existing, Offset(7, 70), False)


def test_a_stream_closed_since_conflicts_with_an_open_one() -> None:
    existing = created(Create("s"))
    existing.closed = True

    assert isinstance(decide(Create("s"), existing), ConfigConflict)
    assert isinstance(decide(Create("s", closed=True), existing), Exists)


def test_a_soft_deleted_stream_blocks_its_path() -> None:
    existing = created(Create("s"))
    existing.soft_deleted = True

    assert decide(Create("s"), existing) == PathBlocked()


@pytest.mark.parametrize(
    ("of_source", "asked", "expected"),
    [
        (FOREVER, FOREVER, FOREVER),
        (FOREVER, TTL, TTL),
        (FOREVER, UNTIL, UNTIL),
        (TTL, FOREVER, TTL),
        (TTL, OTHER_TTL, OTHER_TTL),
        (TTL, UNTIL, UNTIL),
        (UNTIL, FOREVER, UNTIL),
        (UNTIL, TTL, TTL),
        (UNTIL, OTHER_UNTIL, OTHER_UNTIL),
    ],
)
def test_a_fork_gets_the_lifetime_that_the_protocols_table_says(
    of_source: Lifetime, asked: Lifetime, expected: Lifetime
) -> None:
    request = Create("f", lifetime=asked, fork_from=ForkFrom("source"))

    fork = created(request, ForkPoint(source(of_source), Offset(3, 30)))

    assert fork.lifetime == expected
    assert fork.touched_ms == NOW_MS


def test_a_fork_goes_on_in_the_offsets_of_its_source() -> None:
    request = Create("f", batch=bytes_batch(b"abc"), fork_from=ForkFrom("source", Offset(2, 20)))

    outcome = decide(request, None, ForkPoint(source(), Offset(2, 20)))

    assert isinstance(outcome, Created)
    assert (outcome.start, outcome.tail) == (Offset(2, 20), Offset(3, 23))
    assert outcome.stream.segments == (Segment(4, Offset(2, 20)),)
    assert outcome.stream.fork == Fork(4, "source", str(Offset(2, 20)), Offset(2, 20))


def test_a_fork_takes_over_neither_closure_nor_writers() -> None:
    closed = source()
    closed.closed = True
    closed.seq = "m"

    fork = created(Create("f", fork_from=ForkFrom("source")), ForkPoint(closed, closed.tail))

    assert not fork.closed
    assert fork.seq is None
    assert fork.forks_count == 0


def test_a_fork_of_another_content_type_is_refused() -> None:
    request = Create("f", content_type="application/json", fork_from=ForkFrom("source"))

    outcome = decide(request, None, ForkPoint(source(), START))

    assert outcome == SourceTypeMismatch("text/plain")


def test_a_fork_keeps_the_sources_content_type_unless_it_names_it_otherwise() -> None:
    point = ForkPoint(source(content_type="text/plain; charset=utf-8"), START)

    inherits = created(Create("f", fork_from=ForkFrom("source")), point)
    names = created(Create("f", content_type="TEXT/plain", fork_from=ForkFrom("source")), point)

    assert inherits.content_type == "text/plain; charset=utf-8"
    assert names.content_type == "TEXT/plain"


AT = Offset(2, 20)
FORKS: list[tuple[str, Create, bool]] = [
    ("the same", Create("f", fork_from=ForkFrom("source", AT)), True),
    ("with its content type", Create("f", "text/plain", fork_from=ForkFrom("source", AT)), True),
    ("with its lifetime", Create("f", lifetime=TTL, fork_from=ForkFrom("source", AT)), True),
    ("another place", Create("f", fork_from=ForkFrom("source", Offset(1, 10))), False),
    ("the tail of then", Create("f", fork_from=ForkFrom("source")), False),
    ("another sub-offset", Create("f", fork_from=ForkFrom("source", AT, 1)), False),
    ("another source", Create("f", fork_from=ForkFrom("elsewhere", AT)), False),
    ("another type", Create("f", "image/png", fork_from=ForkFrom("source", AT)), False),
    ("another lifetime", Create("f", lifetime=OTHER_TTL, fork_from=ForkFrom("source", AT)), False),
    ("closed", Create("f", closed=True, fork_from=ForkFrom("source", AT)), False),
    ("no fork at all", Create("f", "text/plain", lifetime=TTL), False),
]


@pytest.mark.parametrize(
    ("request_", "same"), [case[1:] for case in FORKS], ids=[c[0] for c in FORKS]
)
def test_a_fork_asked_for_again_must_be_the_same_fork(request_: Create, same: bool) -> None:
    first = Create("f", fork_from=ForkFrom("source", AT))
    existing = created(first, ForkPoint(source(TTL), AT))

    outcome = decide(request_, existing)

    assert isinstance(outcome, Exists if same else ConfigConflict)


def test_a_fork_at_the_tail_is_recognised_after_the_source_has_grown() -> None:
    request = Create("f", fork_from=ForkFrom("source"))
    existing = created(request, ForkPoint(source(), Offset(3, 30)))

    assert isinstance(decide(request, existing), Exists)
    by_its_place = Create("f", fork_from=ForkFrom("source", Offset(3, 30)))
    assert isinstance(decide(by_its_place, existing), Exists)


def test_a_fork_with_a_sub_offset_is_recognised_by_the_same_question() -> None:
    request = Create("f", fork_from=ForkFrom("source", AT, 5))
    existing = created(request, ForkPoint(source(), Offset(3, 25)))

    assert isinstance(decide(request, existing), Exists)
    assert isinstance(
        decide(Create("f", fork_from=ForkFrom("source", AT)), existing), ConfigConflict
    )


def test_a_plain_stream_is_no_fork_of_anything() -> None:
    existing = created(Create("f", "text/plain"))

    outcome = decide(Create("f", fork_from=ForkFrom("source", AT)), existing)

    assert isinstance(outcome, ConfigConflict)


def test_a_fork_of_a_fork_reads_each_part_where_it_lies() -> None:
    middle = Stream(
        5,
        "middle",
        "text/plain",
        created_ms=0,
        tail=Offset(6, 60),
        segments=(Segment(4, Offset(3, 30)),),
    )

    assert inherited(middle, Offset(6, 60)) == (
        Segment(4, Offset(3, 30)),
        Segment(5, Offset(6, 60)),
    )
    assert inherited(middle, Offset(4, 40)) == (
        Segment(4, Offset(3, 30)),
        Segment(5, Offset(4, 40)),
    )
    assert inherited(middle, Offset(3, 30)) == (Segment(4, Offset(3, 30)),)
    assert inherited(middle, Offset(1, 10)) == (Segment(4, Offset(1, 10)),)
    assert inherited(middle, START) == ()
