"""Targets with more parked events than one look takes, and parked events that are gone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fencepost.protocol.acks import ReplayResult
from fencepost.protocol.groups import Filter, Group, make_filter
from fencepost.protocol.leases import Correlated, message_target
from fencepost.server.groups.bodies import place_of
from fencepost.server.groups.feed import Feed
from fencepost.server.groups.working import Working
from fencepost.store.group_contract import Changed, ClaimDone, SpanEvents
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.read.groups import SqlGroupReads
from fencepost.store.write import group_decider, group_operator
from fencepost.testing.clock import SimClock
from tests.contract.grouping import (
    a,
    acked,
    ask,
    claimed,
    claiming,
    correlate,
    failed,
    made,
    parking,
    with_events,
    with_work,
)
from tests.contract.subject import Subject

PATH = "orders/1"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks of four events, so that a few are many."""
    monkeypatch.setattr(group_decider, "ASIDE_MAX", 4)
    monkeypatch.setattr(group_operator, "ROWS_MAX", 4)


async def with_stream(subject: Subject, count: int) -> tuple[Group, list[int]]:
    """A group with one target of so many events, and their positions."""
    group = await made(subject, on_exhausted="park")
    positions = await with_events(subject, *([PATH] * count))
    found = [Correlated(PATH, PATH, at) for at in (positions[0], positions[-1])]
    return await correlate(subject, group, *found, until=positions[-1]), positions


async def test_an_event_behind_many_parked_ones_is_replayed(subject: Subject) -> None:
    group, positions = await with_stream(subject, 9)
    for position in positions:
        await ask(subject, parking(group, (PATH, position)))
    claim = a(ClaimDone, await ask(subject, claiming(group)))
    for lease in claim.leases:
        await acked(subject, group, lease.row)

    await ask(subject, parking(group, (PATH, positions[-1]), replay=True))
    claim = a(ClaimDone, await ask(subject, claiming(group)))

    [lease], [aside] = claim.leases, claim.aside
    assert aside.replayed == (positions[-1],)
    result = ReplayResult(positions[-1])
    assert await acked(subject, group, lease.row, at=None, replayed=[result]) == "acked"
    assert a(ClaimDone, await ask(subject, claiming(group))).leases == []


async def test_a_lease_ends_before_parked_events_that_were_not_looked_at(subject: Subject) -> None:
    group, positions = await with_stream(subject, 9)
    ahead = positions[2:8]
    await ask(subject, parking(group, *((PATH, position) for position in ahead)))

    first = a(ClaimDone, await ask(subject, claiming(group)))
    [lease], [aside] = first.leases, first.aside
    assert (aside.left_out, aside.until) == (frozenset(ahead[:4]), ahead[3])
    await acked(subject, group, lease.row, at=aside.until)
    second = a(ClaimDone, await ask(subject, claiming(group)))

    [aside] = second.aside
    assert (aside.left_out, aside.until) == (frozenset(ahead[4:]), None)


async def test_a_filter_parks_what_failed_however_far_behind_it_lies(subject: Subject) -> None:
    paths = [f"orders/{n}" for n in range(9)]
    group = await with_work(subject, *paths)
    claim = a(ClaimDone, await ask(subject, claiming(group)))
    [row] = [lease.row for lease in claim.leases if lease.row.target == paths[-1]]
    assert await failed(subject, group, row) == "failed"

    changed, after = 0, ("", -1)
    while True:
        page = a(Changed, await ask(subject, parking(group, limit=2, after=after)))
        changed += page.events
        if page.next is None:
            break
        after = (page.next, -1)

    assert changed == 1
    parked = a(Changed, await ask(subject, parking(group, replay=True)))
    assert parked.targets == [paths[-1]]


async def test_a_filter_replays_piece_by_piece(subject: Subject) -> None:
    group, positions = await with_stream(subject, 6)
    others = [f"other/{n}" for n in range(6)]
    group = await with_parked(subject, group, others, positions)
    chosen = make_filter(target="other/*")
    assert isinstance(chosen, Filter)

    changed, pieces, after = 0, 0, ("", -1)
    while True:
        request = parking(group, replay=True, filter=chosen, limit=5, after=after)
        page = a(Changed, await ask(subject, request))
        changed, pieces = changed + page.events, pieces + 1
        if page.next is None:
            break
        after = place_of(page.next)

    assert (changed, pieces > 1) == (6, True)


async def with_parked(
    subject: Subject, group: Group, others: list[str], positions: list[int]
) -> Group:
    """Every event of the first target parked, and one of each of some others."""
    last = await with_events(subject, PATH)
    found = [Correlated(name, PATH, last[0]) for name in others]
    group = await correlate(subject, group, *found, until=last[0])
    await ask(subject, parking(group, *((PATH, position) for position in positions)))
    await ask(subject, parking(group, *((name, last[0]) for name in others)))
    return group


# Events that are gone


def server_of(subject: Subject, clock: SimClock) -> Working:
    """What a server does with claims."""
    reads = SqlGroupReads(cast(Any, subject.store).readers)
    return Working(subject.store, reads, clock, Feed(), is_shared=False)


async def purge(subject: Subject, clock: SimClock) -> None:
    """Delete the stream, and let the log forget it."""
    await subject.delete(PATH)
    clock.advance(subject.kept.settings.log_retention_ms)
    upkeep = Upkeep(subject.kept, clock)
    while await upkeep.purge():
        pass


async def given(working: Working, group: Group) -> tuple[ClaimDone, list[SpanEvents]]:
    """What a worker gets."""
    done = a(ClaimDone, await working.claim(claiming(group), wait_ms=0))
    return done, await working.events(done, 10, 1 << 20)


async def test_a_lease_tells_of_events_that_are_gone_and_its_ack_passes_them(
    subject: Subject, clock: SimClock
) -> None:
    group, positions = await with_stream(subject, 3)
    working = server_of(subject, clock)
    await purge(subject, clock)

    done, [span] = await given(working, group)

    assert (span.events, span.pruned) == ([], (0, positions[-1]))
    assert span.read_to == positions[-1]
    assert working.known[group.name].count("default").pruned == 1
    assert await acked(subject, group, done.leases[0].row, at=span.read_to) == "acked"
    assert (await given(working, group))[1] == []


@pytest.mark.parametrize("targets", ["stream", "message"])
async def test_a_parked_event_that_is_gone_is_told_and_replayed_no_more(
    subject: Subject, clock: SimClock, targets: str
) -> None:
    group = await made(subject, targets=targets)
    [position] = await with_events(subject, PATH)
    name = PATH if targets == "stream" else message_target(PATH, position)
    group = await correlate(subject, group, Correlated(name, PATH, position), until=position)
    [row] = await claimed(subject, group)
    assert await failed(subject, group, row, park=True) == "parked"
    working = server_of(subject, clock)
    await purge(subject, clock)
    await ask(subject, parking(group, replay=True))

    done, [span] = await given(working, group)
    [lease] = done.leases
    assert (span.events, span.pruned) == ([], (position, position))
    assert await acked(subject, group, lease.row, at=span.read_to) == "acked"

    done, spans = await given(working, group)
    assert (spans, done.group.parked_count) == ([], 0)
    assert done.group.targets_count == (targets == "stream")


async def test_replayed_events_leave_room_for_each_other(subject: Subject, clock: SimClock) -> None:
    group, positions = await with_stream(subject, 3)
    await ask(subject, parking(group, *((PATH, position) for position in positions)))
    await ask(subject, parking(group, replay=True))
    working = server_of(subject, clock)

    done = a(ClaimDone, await working.claim(claiming(group), wait_ms=0))
    [span] = await working.events(done, 10, 150)

    assert [(event.position, event.replayed) for event in span.events] == [(positions[0], True)]
