"""What computed targets are told of: exactly that comes with their leases, on either store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from fencepost.protocol.acks import Failure, ReplayResult
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, Target
from fencepost.store.group_contract import (
    AckDone,
    ClaimDone,
    DeleteGroup,
    EventSpan,
    SpanEvents,
)
from fencepost.store.maintain.jobs import drop_deleted_group
from fencepost.store.read.groups import SqlGroupReads
from tests.contract.grouping import (
    a,
    acked,
    acking,
    ask,
    claimed,
    claiming,
    correlate,
    failed,
    made,
    operating,
    parking,
    with_events,
)
from tests.contract.subject import Subject

SOURCE = "orders/**"


def reads(subject: Subject) -> SqlGroupReads:
    return SqlGroupReads(cast(Any, subject.store).readers)


def telling(target: str, *positions: int, note: str | None = "n") -> list[Correlated]:
    return [Correlated(target, SOURCE, position, note=note) for position in positions]


async def with_log(subject: Subject, count: int = 9, **changes: Any) -> tuple[Group, list[int]]:
    """A group with computed targets, and the positions of events of three streams."""
    group = await made(subject, targets="computed", **changes)
    positions = await with_events(subject, *(f"orders/{n % 3}" for n in range(count)))
    return group, positions


async def ahead(
    subject: Subject,
    group: Group,
    row: Target,
    *,
    replayed: Sequence[int] = (),
    events_max: int = 10,
    bytes_max: int = 1 << 20,
) -> SpanEvents:
    """What a lease of this row is about."""
    span = EventSpan(
        row.source, row.at, row.work_to, replayed=tuple(replayed), told=(group.id, row.target)
    )
    [found] = await reads(subject).events([span], (), events_max=events_max, bytes_max=bytes_max)
    return found


def positions_of(found: SpanEvents) -> list[int]:
    return [event.position for event in found.events]


async def told_count(subject: Subject, group: Group) -> int:
    return await reads(subject).told(group.id)


async def test_a_target_gets_what_it_was_told_of_and_nothing_else(subject: Subject) -> None:
    group, at = await with_log(subject)
    mine, other = telling("a", at[1], at[4], note="mine"), telling("b", at[2], at[8])
    group = await correlate(subject, group, *mine, *other, until=at[8])

    first, second = sorted(await claimed(subject, group))

    found = await ahead(subject, group, first)
    assert [(event.position, event.note) for event in found.events] == [
        (at[1], "mine"),
        (at[4], "mine"),
    ]
    assert (found.read_to, found.untold_to, found.pruned) == (at[4], None, None)
    assert positions_of(await ahead(subject, group, second)) == [at[2], at[8]]
    assert await told_count(subject, group) == 4


async def test_what_was_told_goes_when_the_target_gets_past_it(subject: Subject) -> None:
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", at[1], at[4], at[6]), until=at[8])
    [row] = await claimed(subject, group)

    found = await ahead(subject, group, row, events_max=2)
    assert (positions_of(found), found.read_to) == ([at[1], at[4]], at[6] - 1)
    await acked(subject, group, row, at=at[4])
    assert await told_count(subject, group) == 1

    await ask(subject, operating(group, "skip", "a", at=at[6]))
    assert await told_count(subject, group) == 0


async def test_positions_without_notes_are_not_known(subject: Subject) -> None:
    """Workers of before give none: their targets get the whole source, as they always did."""
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", at[1], at[3], note=None), until=at[3])
    group = await correlate(subject, group, *telling("a", at[7]), until=at[8])
    [row] = await claimed(subject, group)

    found = await ahead(subject, group, row._replace(at=row.waits_from - 1))
    assert positions_of(found) == [at[1], at[2], at[3], at[7]]
    assert [event.note for event in found.events] == [None, None, None, "n"]
    few = await ahead(subject, group, row._replace(at=row.waits_from - 1), events_max=2)
    assert (few.read_to, few.untold_to) == (at[3] - 1, at[3])


async def test_a_reset_target_gets_its_source_and_then_what_it_was_told_of(
    subject: Subject,
) -> None:
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", at[1], at[4], at[6]), until=at[8])
    [row] = await claimed(subject, group)
    await acked(subject, group, row, at=at[4])

    await ask(subject, operating(group, "reset", "a", at=at[0]))

    [row] = await claimed(subject, group)
    found = await ahead(subject, group, row)
    assert positions_of(found) == [*at[1:5], at[6]]
    assert [event.note for event in found.events] == [None, None, None, None, "n"]
    await ask(subject, operating(group, "reset", "a", at=at[7]))
    assert await told_count(subject, group) == 0


async def test_a_parked_event_keeps_its_note_when_it_is_replayed(subject: Subject) -> None:
    group, at = await with_log(subject, on_exhausted="park")
    group = await correlate(subject, group, *telling("a", at[1], note="why"), until=at[8])
    [row] = await claimed(subject, group)
    assert await failed(subject, group, row, park=True) == "parked"
    assert await told_count(subject, group) == 0

    await ask(subject, parking(group, ("a", at[1]), replay=True))

    claim = a(ClaimDone, await ask(subject, claiming(group)))
    [aside] = claim.aside
    assert aside.notes == ((at[1], "why"),)
    again = acking(group, claim.leases[0].row, at=None, replayed=[ReplayResult(at[1], "again")])
    assert a(AckDone, await ask(subject, again)).items[0].outcome == "acked"
    [parked] = await reads(subject).parked(group.id, ("", -1), 10)
    assert (parked.note, parked.attempts) == ("why", 2)


async def test_a_reset_gives_a_parked_event_back_to_the_target_that_was_told(
    subject: Subject,
) -> None:
    group, at = await with_log(subject, on_exhausted="park")
    group = await correlate(subject, group, *telling("a", at[1], at[4], note="why"), until=at[8])
    for position in (at[1], at[4]):
        [row] = await claimed(subject, group)
        failure = Failure(position, "boom", park=True)
        assert await acked(subject, group, row, at=None, failure=failure) == "parked"
    assert await told_count(subject, group) == 0

    await ask(subject, operating(group, "reset", "a", at=at[0]))

    [row] = await claimed(subject, group)
    found = await ahead(subject, group, row)
    assert [(event.position, event.note) for event in found.events] == [
        (at[1], "why"),
        (at[2], None),
        (at[3], None),
        (at[4], "why"),
    ]


async def test_an_event_parked_ahead_stays_told(subject: Subject) -> None:
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", at[1], at[4], at[6]), until=at[8])
    await ask(subject, parking(group, ("a", at[4])))
    await ask(subject, operating(group, "reset", "a", at=at[0]))

    [row] = await claimed(subject, group)

    found = await ahead(subject, group, row)
    assert [(event.position, event.note) for event in found.events] == [
        (at[1], "n"),
        (at[4], "n"),
        (at[6], "n"),
    ]


async def test_a_worker_is_not_sent_past_an_event_that_is_parked(subject: Subject) -> None:
    """Up to `untold_to` it reads the log itself, where parked events are as all the others."""
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", at[8], note=None), until=at[8])
    await ask(subject, parking(group, ("a", at[4])))
    [row] = await claimed(subject, group)

    handled: list[int] = []
    after = at[0]
    while after < row.work_to:
        span = EventSpan(SOURCE, after, at[8], frozenset({at[4]}), told=(group.id, "a"))
        [found] = await reads(subject).events([span], (), events_max=2, bytes_max=1 << 20)
        handled += positions_of(found)
        if found.untold_to is not None:
            handled += [one for one in at if found.read_to < one <= found.untold_to]
        after = found.untold_to or found.read_to

    assert handled == [*at[1:4], *at[5:]]


async def test_events_of_a_stream_that_is_no_source_are_not_given_out(subject: Subject) -> None:
    """A worker may tell of any position, and may not read every stream."""
    group, at = await with_log(subject)
    found = [Correlated("a", "orders/0", position, note="n") for position in at[:4]]
    group = await correlate(subject, group, *found, until=at[8])

    [row] = await claimed(subject, group)

    assert positions_of(await ahead(subject, group, row)) == [at[0], at[3]]


async def test_an_answer_without_room_is_gone_on_with(subject: Subject) -> None:
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", *at), until=at[8])
    [row] = await claimed(subject, group)

    handled: list[int] = []
    while row.at < row.work_to:
        found = await ahead(subject, group, row, bytes_max=200)
        assert found.untold_to is None
        handled += positions_of(found)
        row = row._replace(at=found.read_to)

    assert handled == at


async def test_what_targets_of_a_deleted_group_were_told_of_goes_with_it(subject: Subject) -> None:
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", *at), until=at[8])
    await ask(subject, DeleteGroup(group.name))

    while await subject.kept.between_commits(drop_deleted_group):
        pass

    assert await told_count(subject, group) == 0
    again = await made(subject, targets="computed")
    again = await correlate(subject, again, *telling("a", at[7]), until=at[8])
    [row] = await claimed(subject, again)
    assert positions_of(await ahead(subject, again, row)) == [at[7]]


async def test_what_is_told_outlives_a_restart(subject: Subject) -> None:
    group, at = await with_log(subject)
    group = await correlate(subject, group, *telling("a", at[1], at[4]), until=at[8])
    await subject.reopen()

    [row] = await claimed(subject, group)

    assert positions_of(await ahead(subject, group, row)) == [at[1], at[4]]


async def test_events_inside_an_append_are_the_same_as_those_of_the_source(
    subject: Subject,
) -> None:
    group = await made(subject, targets="computed")
    for number in range(2):
        await subject.create(f"orders/{number}", "application/json")
        body = b'[{"n":1},{"longer":22},3,{"n":4}]'
        await subject.appended(f"orders/{number}", body, content_type="application/json")
    group = await correlate(subject, group, *telling("a", 1, 2, 7), until=7)
    [row] = await claimed(subject, group)

    found = await ahead(subject, group, row)

    span = EventSpan(SOURCE, -1, 7)
    [every] = await reads(subject).events([span], (), events_max=10, bytes_max=1 << 20)
    told = [event._replace(note="n") for event in every.events if event.position in (1, 2, 7)]
    assert found.events == told
    assert len(told) == 3
