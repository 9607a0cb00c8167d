"""What a store promises about groups: rows that survive, claims that never share a target."""

import asyncio
from typing import Any

import msgspec
import pytest

from fencepost.protocol.acks import Ack, ReplayResult
from fencepost.protocol.groups import Filter, GroupExists, GroupInvalid, GroupMade, make_filter
from fencepost.protocol.leases import BeyondHead, Correlated, CorrelationMoved
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    AckRefused,
    Changed,
    ClaimDone,
    Correlate,
    DeleteGroup,
    GroupDeleted,
    GroupMissing,
    MakeGroup,
    RenewDone,
    RenewLeases,
    TargetMissing,
)
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.write import group_decider, groups
from fencepost.testing.clock import SimClock
from tests.contract.grouping import (
    LEASE_MS,
    SETTINGS,
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
    ref,
    rows_of,
    with_events,
    with_work,
)
from tests.contract.subject import Subject, answered

PATHS = ("orders/1", "orders/2", "orders/3")


async def test_a_group_is_made_once_and_kept(subject: Subject) -> None:
    group = await made(subject)
    await subject.reopen()

    again = await ask(subject, MakeGroup("billing", SETTINGS))
    other = await ask(subject, MakeGroup("billing", msgspec.structs.replace(SETTINGS, lost_max=9)))

    assert again == GroupMade(group, fresh=False)
    assert other == GroupExists(group)


async def test_a_deleted_group_is_missing_and_the_next_of_its_name_is_another(
    subject: Subject,
) -> None:
    group = await with_work(subject, *PATHS)
    [row, *_] = await claimed(subject, group)

    assert await ask(subject, DeleteGroup("billing")) == GroupDeleted()
    assert await ask(subject, claiming(group)) == GroupMissing()
    assert await ask(subject, DeleteGroup("billing")) == GroupMissing()

    later = await made(subject)
    assert later.id > group.id
    assert await claimed(subject, later) == []
    assert a(AckDone, await ask(subject, acking(group, row))).items[0].outcome == "lost"


async def test_claims_in_one_commit_get_different_targets(subject: Subject) -> None:
    group = await with_work(subject, *(f"orders/{n}" for n in range(6)))

    answers = [subject.ask(subject.store.work, claiming(group, f"w{n}", 2)) for n in range(4)]
    outcomes = await asyncio.gather(*map(answered, answers))

    taken = [row.target for outcome in outcomes for row in rows_of(a(ClaimDone, outcome).leases)]
    assert sorted(taken) == [f"orders/{n}" for n in range(6)]
    assert a(ClaimDone, outcomes[-1]).due_ms == subject.clock.now_ms() + LEASE_MS


async def test_a_lease_survives_a_restart_and_its_ack_moves_at(subject: Subject) -> None:
    group = await with_work(subject, *PATHS)
    rows = await claimed(subject, group)
    await subject.reopen()

    assert await claimed(subject, group, "bob") == []
    assert [await acked(subject, group, row) for row in rows] == ["acked"] * 3

    await subject.reopen()
    assert await claimed(subject, group, "bob") == []
    assert await acked(subject, group, rows[0]) == "lost"


async def test_an_expired_lease_goes_to_exactly_one_claim_and_the_old_number_is_lost(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    [old] = await claimed(subject, group)
    clock.advance(LEASE_MS)

    answers = [subject.ask(subject.store.work, claiming(group, name)) for name in ("bob", "cid")]
    outcomes = await asyncio.gather(*map(answered, answers))

    rows = [row for outcome in outcomes for row in rows_of(a(ClaimDone, outcome).leases)]
    assert [(row.worker, row.lost) for row in rows] == [("bob", 1)]
    assert await acked(subject, group, old) == "lost"
    assert await acked(subject, group, rows[0]) == "acked"


async def test_renewing_keeps_a_lease_and_releasing_gives_it_back(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)
    clock.advance(LEASE_MS - 1)

    renewed = await ask(subject, RenewLeases(group.name, [ref(group, row)], LEASE_MS))
    clock.advance(1)

    assert renewed == RenewDone([clock.now_ms() - 1 + LEASE_MS])
    assert await claimed(subject, group, "bob") == []
    released = await ask(subject, RenewLeases(group.name, [ref(group, row)], None))
    assert released == RenewDone([0])
    assert len(await claimed(subject, group, "bob")) == 1
    assert await ask(subject, RenewLeases(group.name, [ref(group, row)], 5)) == RenewDone([None])


async def test_an_ack_and_the_next_claim_are_one_request(subject: Subject) -> None:
    group = await with_work(subject, "orders/1", "orders/2")
    [row] = await claimed(subject, group, streams_max=1)

    outcome = await ask(subject, acking(group, row)._replace(claim=claiming(group)))

    done = a(AckDone, outcome)
    assert [item.outcome for item in done.items] == ["acked"]
    assert done.claimed is not None
    assert [lease.row.target for lease in done.claimed.leases] != [row.target]
    assert len(done.claimed.leases) == 1


async def test_an_ack_past_the_head_does_nothing_to_the_others_of_its_request(
    subject: Subject,
) -> None:
    group = await with_work(subject, "orders/1", "orders/2")
    one, two = await claimed(subject, group)
    items = [(ref(group, one), Ack(one.token, one.work_to)), (ref(group, two), Ack(two.token, 999))]

    assert isinstance(await ask(subject, AckLeases(group.name, items, 0.5)), AckRefused)
    assert await acked(subject, group, one) == "acked"


async def test_a_failure_waits_is_retried_and_then_blocks(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)

    assert await failed(subject, group, row) == "failed"
    waiting = a(ClaimDone, await ask(subject, claiming(group)))
    assert (waiting.leases, waiting.due_ms) == ([], clock.now_ms() + 1_000)
    clock.advance(1_000)
    [row] = await claimed(subject, group)
    assert (row.retry, row.error) == (1, "boom")
    assert await failed(subject, group, row) == "blocked"
    clock.advance(10**6)
    assert await claimed(subject, group) == []

    await subject.reopen()
    unblocked = await ask(subject, operating(group, "unblock", filter=Filter(blocked=True)))
    assert unblocked == Changed(["orders/1"])
    [row] = await claimed(subject, group)
    assert (row.retry, row.error, row.blocked) == (0, None, False)


async def test_a_target_that_kills_its_workers_is_blocked(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1", lost_max=1)
    for _ in range(2):
        assert len(await claimed(subject, group)) == 1
        clock.advance(LEASE_MS)

    outcome = a(ClaimDone, await ask(subject, claiming(group)))

    assert outcome.leases == []
    [row] = outcome.blocked
    assert row.error is not None
    assert "2 workers in a row" in row.error


async def test_a_target_that_kills_its_workers_takes_none_that_they_held_beside_it_along(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, *(f"orders/{n}" for n in range(9)), "orders/poison")
    acked_targets: list[str] = []
    blocked: list[str] = []
    for _ in range(30):
        outcome = a(ClaimDone, await ask(subject, claiming(group)))
        rows = rows_of(outcome.leases)
        blocked += [row.target for row in outcome.blocked]
        if any(row.target == "orders/poison" for row in rows):
            clock.advance(LEASE_MS)  # the worker dies of it, with all that it holds
            continue
        for row in rows:
            assert await acked(subject, group, row) == "acked"
            acked_targets.append(row.target)

    assert blocked == ["orders/poison"]
    assert sorted(acked_targets) == [f"orders/{n}" for n in range(9)]


async def test_correlation_is_a_compare_and_swap_that_never_passes_the_head(
    subject: Subject,
) -> None:
    group = await made(subject)
    [position] = await with_events(subject, "orders/1")
    found = [Correlated("orders/1", "orders/1", position)]

    assert await ask(subject, Correlate("billing", -1, position + 1, found)) == BeyondHead(position)
    await correlate(subject, group, *found, until=position)
    moved = await ask(subject, Correlate("billing", -1, position, found))
    assert moved == CorrelationMoved(position)


async def test_a_message_is_a_target_that_goes_with_its_ack(subject: Subject) -> None:
    group = await made(subject, targets="message")
    positions = await with_events(subject, "orders/1", "orders/1")
    found = [Correlated(f"orders/1@{at}", "orders/1", at) for at in positions]
    group = await correlate(subject, group, *found, until=positions[-1])
    rows = await claimed(subject, group)

    outcomes = [a(AckDone, await ask(subject, acking(group, row))) for row in rows]

    assert [outcome.group.targets_count for outcome in outcomes] == [1, 0]
    page = await ask(subject, operating(group, "defer", until_ms=9))
    assert page == Changed([])


async def test_a_parked_event_is_replayed_under_a_lease_and_parked_again_when_it_fails(
    subject: Subject,
) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)
    assert await failed(subject, group, row, park=True) == "parked"
    assert await claimed(subject, group) == []

    for error, handled in (("again", 0), (None, 1)):
        replay = await ask(subject, parking(group, replay=True))
        assert replay == Changed(["orders/1"], None, 1)
        await subject.reopen()
        claim = a(ClaimDone, await ask(subject, claiming(group)))
        [lease], [aside] = claim.leases, claim.aside
        [position] = aside.replayed
        assert (position, lease.row.at) == (row.work_to, row.work_to)
        result = ReplayResult(position, error)
        assert await acked(subject, group, lease.row, at=None, replayed=[result]) == "acked"
        missing = await ask(subject, parking(group, ("orders/1", position), replay=True))
        assert isinstance(missing, TargetMissing) == bool(handled)
        if not handled:
            assert missing == Changed(["orders/1"], None, 1)
            claim = a(ClaimDone, await ask(subject, claiming(group)))
            again = ReplayResult(position, "third")
            row2 = claim.leases[0].row
            assert await acked(subject, group, row2, at=None, replayed=[again]) == "acked"


async def test_an_operator_changes_the_targets_of_a_filter_page_by_page(subject: Subject) -> None:
    group = await with_work(subject, *PATHS, "orders/deep/4")
    chosen = make_filter(target="orders/*")
    assert isinstance(chosen, Filter)
    changed: list[str] = []
    after: str | None = ""
    while after is not None:
        request = operating(group, "defer", until_ms=10**15, filter=chosen, after=after, rows_max=2)
        outcome = a(Changed, await ask(subject, request))
        changed += outcome.targets
        after = outcome.next

    assert changed == list(PATHS)
    assert [row.target for row in await claimed(subject, group)] == ["orders/deep/4"]


@pytest.mark.parametrize("operation", ["reset", "skip"])
async def test_a_target_does_not_go_past_the_head(subject: Subject, operation: Any) -> None:
    group = await with_work(subject, *PATHS)
    head = group.watermark

    beyond = await ask(subject, operating(group, operation, PATHS[0], at=head + 1))
    by_filter = await ask(subject, operating(group, operation, at=head + 1))

    assert beyond == by_filter == BeyondHead(head)
    assert len(await claimed(subject, group)) == len(PATHS)


async def test_a_skip_without_a_position_needs_an_event_that_failed(subject: Subject) -> None:
    group = await with_work(subject, *PATHS)
    [row, *_] = await claimed(subject, group)

    unfailed = await ask(subject, operating(group, "skip", row.target))
    await failed(subject, group, row)
    done = await ask(subject, operating(group, "skip", row.target))

    assert isinstance(unfailed, GroupInvalid)
    assert row.target in unfailed.detail
    assert a(Changed, done).targets == [row.target]


@pytest.mark.parametrize("operation", ["reset", "skip"])
async def test_an_operator_takes_the_lease_from_a_worker(subject: Subject, operation: str) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)

    outcome = await ask(subject, operating(group, operation, "orders/1", at=row.work_to))

    assert outcome == Changed(["orders/1"])
    assert await acked(subject, group, row) == "lost"
    assert await claimed(subject, group) == []


async def test_a_reset_begins_again(subject: Subject) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)
    await acked(subject, group, row)

    await ask(subject, operating(group, "reset", "orders/1"))

    [again] = await claimed(subject, group)
    assert (again.at, again.work_to) == (-1, row.work_to)


async def test_an_unknown_target_is_refused(subject: Subject) -> None:
    group = await made(subject)

    assert await ask(subject, operating(group, "unblock", "x")) == TargetMissing("x")
    assert await ask(subject, parking(group, ("x", 1))) == TargetMissing("x")


async def test_a_park_that_names_an_unknown_target_parks_nothing(subject: Subject) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)

    refused = await ask(subject, parking(group, ("orders/1", row.work_to), ("x", 1)))

    assert refused == TargetMissing("x")
    assert await acked(subject, group, row) == "acked"


@pytest.mark.parametrize("held", [False, True])
async def test_an_event_that_is_replayed_before_its_turn_is_handled_once(
    subject: Subject, held: bool
) -> None:
    group = await made(subject)
    first, second = await with_events(subject, "orders/1", "orders/1")
    found = [Correlated("orders/1", "orders/1", at) for at in (first, second)]
    group = await correlate(subject, group, *found, until=second)
    await ask(subject, parking(group, ("orders/1", second)))
    holding = await claimed(subject, group) if held else []

    replayed = await ask(subject, parking(group, ("orders/1", second), replay=True))

    assert replayed == Changed(["orders/1"], None, 1)
    # It left the event out, so its ack would pass it.
    assert [await acked(subject, group, row) for row in holding] == ["lost"] * held
    done = a(ClaimDone, await ask(subject, claiming(group)))
    [lease] = done.leases
    assert (lease.row.replaying, done.group.parked_count, list(done.aside)) == (0, 0, [])
    assert await acked(subject, group, lease.row) == "acked"
    assert await claimed(subject, group) == []


async def test_a_reset_takes_back_more_parked_events_than_one_page(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.store.write.group_operator.ROWS_MAX", 1)
    group = await made(subject)
    positions = await with_events(subject, "orders/1", "orders/1", "orders/1")
    found = [Correlated("orders/1", "orders/1", at) for at in positions]
    group = await correlate(subject, group, *found, until=positions[-1])
    for position in positions:
        await ask(subject, parking(group, ("orders/1", position)))

    await ask(subject, operating(group, "reset", "orders/1"))

    claim = a(ClaimDone, await ask(subject, claiming(group)))
    assert claim.group.parked_count == 0


async def test_a_claim_passes_over_what_its_worker_may_not_read(subject: Subject) -> None:
    group = await with_work(subject, *PATHS)

    request = claiming(group)._replace(may_read=lambda source: source == "orders/2")
    outcome = a(ClaimDone, await ask(subject, request))

    assert [lease.row.target for lease in outcome.leases] == ["orders/2"]


async def test_what_a_worker_may_not_read_hides_nothing_that_it_may(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_decider, "CANDIDATES_MIN", 4)
    others = [f"orders/{n}" for n in range(20)]
    group = await with_work(subject, *others[:10], "orders/mine", *others[10:])

    def may_read(path: str) -> bool:
        return path == "orders/mine"

    outcome = await ask(subject, claiming(group)._replace(may_read=may_read))

    assert [row.target for row in rows_of(a(ClaimDone, outcome).leases)] == ["orders/mine"]


async def test_looks_at_many_rows_take_a_bounded_share_of_the_time(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that may read nothing of a large group asks again and again: each of its claims
    looked at 16,000 rows, and all other requests waited."""
    monkeypatch.setattr(group_decider, "CANDIDATES_MIN", 4)
    monkeypatch.setattr(groups, "ROWS_PER_MS", 0.001)
    group = await with_work(subject, *(f"orders/{n}" for n in range(20)))
    looked_at = 0

    def may_read(_path: str) -> bool:
        nonlocal looked_at
        looked_at += 1
        return False

    async def claim(principal: str) -> ClaimDone:
        nonlocal looked_at
        looked_at = 0
        asked = claiming(group)._replace(may_read=may_read, principal=principal)
        return a(ClaimDone, await ask(subject, asked))

    await claim("mallory")
    wide = looked_at
    done = await claim("mallory")
    narrow = looked_at
    await claim("ann")

    assert wide > 20
    assert narrow < 10
    assert done.due_ms is not None
    assert done.due_ms > done.now_ms, "it is told when to look at more"
    assert looked_at == wide, "another principal has looks of its own"


async def test_urgent_targets_come_first_and_lanes_are_kept_apart(subject: Subject) -> None:
    group = await made(subject)
    paths = [f"orders/{n}" for n in range(8)]
    positions = await with_events(subject, *paths)
    found = [
        Correlated(path, path, at, lane="slow" if n == 7 else "fast", priority=n)
        for n, (path, at) in enumerate(zip(paths, positions, strict=True))
    ]
    group = await correlate(subject, group, *found, until=positions[-1])

    [urgent] = await claimed(subject, group, streams_max=1, lane="fast")
    slow = await claimed(subject, group, lane="slow")

    assert urgent.target == "orders/6"
    assert [row.target for row in slow] == ["orders/7"]


async def test_the_upkeep_removes_the_rows_of_a_deleted_group_and_no_others(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, *PATHS)
    [row, *_] = await claimed(subject, group)
    await failed(subject, group, row, park=True)
    await ask(subject, DeleteGroup("billing"))
    await made(subject)
    upkeep = Upkeep(subject.kept, clock)

    dropped = [await upkeep.drop_groups() for _ in range(3)]

    assert dropped == [4, 0, 0]
    again = await ask(subject, MakeGroup("billing", SETTINGS))
    assert not a(GroupMade, again).fresh


async def test_what_an_older_group_of_the_name_looked_for_is_not_taken_for_the_new_one(
    subject: Subject,
) -> None:
    """Its targets are found by its sources: the new group would never see its own events."""
    older = await made(subject)
    [position] = await with_events(subject, "orders/1")
    await ask(subject, DeleteGroup(older.name))
    newer = await made(subject, sources=("invoices/**",))
    found = [Correlated("orders/1", "orders/1", position)]

    late = await ask(subject, Correlate(older.name, -1, position, found, older.id))

    assert late == CorrelationMoved(-1)
    await correlate(subject, newer, until=position)
