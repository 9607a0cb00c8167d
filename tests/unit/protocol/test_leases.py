"""Claims, renewals, releases and correlation: the rules of leases, row by row."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.groups import Group, GroupInvalid, LimitExceeded
from fencepost.protocol.leases import (
    LOST,
    SHARE_AT_FIRST,
    SHARE_MAX,
    SHARE_MIN,
    BeyondHead,
    Claim,
    ClaimDecision,
    Correlated,
    CorrelationDecision,
    CorrelationMoved,
    InboxHeld,
    InboxShared,
    LeaseRef,
    Target,
    check_lease,
    decide_claim,
    decide_correlate,
    decide_release,
    decide_renew,
    decide_take,
    lease_is_current,
    message_target,
    next_due_ms,
    next_share,
    share_slots,
)
from fencepost.protocol.meshes import Policy
from tests.unit.protocol.group_samples import LEASE_MS, NOW_MS, group, leased, waiting

BOB = Claim("bob", streams_max=10, lease_ms=LEASE_MS)
EXPIRED_MS = NOW_MS + LEASE_MS


def claim(
    *rows: Target, asked: Claim = BOB, lost_max: int = 5, now_ms: int = NOW_MS
) -> ClaimDecision:
    return decide_claim(rows, asked, lost_max=lost_max, now_ms=now_ms)


def names(decision: ClaimDecision) -> set[str]:
    return {lease.row.target for lease in decision.leases}


def test_a_claim_takes_a_target_with_work_and_its_number_grows() -> None:
    [taken] = claim(waiting(token=3)).leases

    assert taken.row == waiting(
        token=4, worker="bob", lease_until_ms=NOW_MS + LEASE_MS, updated_ms=NOW_MS
    )


@pytest.mark.parametrize(
    ("policy", "worker", "now_ms", "taken"),
    [
        ("prefer_newest", "bob", NOW_MS, True),
        ("prefer_oldest", "bob", NOW_MS, InboxHeld()),
        ("prefer_oldest", leased().worker, NOW_MS, True),
        ("prefer_oldest", "bob", EXPIRED_MS * 2, True),
        ("allow_concurrent", "bob", NOW_MS, InboxShared()),
    ],
)
def test_the_policy_says_who_gets_an_inbox(
    policy: Policy, worker: str, now_ms: int, taken: object
) -> None:
    asked = Claim(worker, 1, LEASE_MS, take=True)

    decision = decide_take(leased(), asked, policy=policy, now_ms=now_ms)

    if taken is not True:
        assert decision == taken
        return
    assert isinstance(decision, ClaimDecision)
    [lease] = decision.leases
    assert (lease.row.worker, lease.row.token) == (worker, leased().token + 1)


@pytest.mark.parametrize(
    "row",
    [
        waiting(at=9),
        waiting(blocked=True),
        waiting(deferred_until_ms=NOW_MS + 1),
        leased(),
    ],
    ids=["no work", "blocked", "deferred", "held"],
)
def test_a_claim_passes_over_what_it_may_not_take(row: Target) -> None:
    assert claim(row) == ClaimDecision([], [])


def test_a_deferred_target_is_taken_when_its_time_has_come() -> None:
    [taken] = claim(waiting(deferred_until_ms=NOW_MS)).leases

    assert taken.row.deferred_until_ms == 0


def test_a_target_whose_parked_events_are_replayed_has_work() -> None:
    assert names(claim(waiting(at=9, replaying=1))) == {"orders/7"}


def test_an_expired_lease_goes_to_the_next_claim_and_counts_a_lost_worker() -> None:
    [taken] = claim(leased(retry=2), now_ms=EXPIRED_MS).leases

    assert (taken.row.worker, taken.row.token, taken.row.lost) == ("bob", 5, 1)
    assert taken.row.retry == 2


def test_a_target_that_keeps_losing_its_workers_is_blocked_and_says_so() -> None:
    decision = claim(leased(lost=5), now_ms=EXPIRED_MS)

    [blocked] = decision.blocked
    assert not decision.leases
    assert (blocked.blocked, blocked.worker, blocked.token) == (True, None, 5)
    assert blocked.error is not None
    assert "6 workers in a row" in blocked.error


def test_a_target_that_lost_two_workers_comes_alone() -> None:
    suspect, first = waiting("suspect", first=5, lost=2), waiting("first", first=4)
    others = [waiting(f"other-{n}", first=6 + n, lost=1) for n in range(3)]

    assert names(claim(suspect, first, *others)) == {"first", "other-0", "other-1", "other-2"}
    assert names(claim(suspect, *others)) == {"suspect"}
    assert names(claim(leased(lost=1), waiting("other"), now_ms=EXPIRED_MS)) == {"orders/7"}
    assert names(claim(leased(lost=0), waiting("other"), now_ms=EXPIRED_MS, lost_max=1)) == {
        "orders/7"
    }


def test_a_released_target_is_not_blocked_for_workers_lost_earlier() -> None:
    assert names(claim(waiting(lost=5))) == {"orders/7"}


def test_a_claim_of_one_lane_takes_no_target_of_another() -> None:
    rows = waiting("a", lane="slow"), waiting("b", lane="fast")

    assert names(claim(*rows, asked=BOB._replace(lane="slow"))) == {"a"}


@given(st.integers(1, 1_000), st.floats(0, 1), st.integers(0, 100))
def test_the_shares_add_up_to_what_was_asked_for(
    streams_max: int, share: float, cycle: int
) -> None:
    """And from four targets on each of the three reasons has at least one."""
    slots = share_slots(streams_max, share, cycle)

    assert sum(slots) == streams_max
    assert min(slots) >= (1 if streams_max >= 4 else 0)


@pytest.mark.parametrize("streams_max", [1, 2, 3])
def test_small_claims_give_every_reason_its_turn(streams_max: int) -> None:
    turns = [share_slots(streams_max, 0.5, cycle) for cycle in range(4)]

    totals = [sum(column) for column in zip(*turns, strict=True)]
    assert totals == [streams_max, 2 * streams_max, streams_max]


def test_a_claim_takes_the_urgent_the_oldest_and_the_newest() -> None:
    middle = [waiting(f"m{n}", first=100 + n, last=200) for n in range(50)]
    old, new = waiting("old", first=1, last=200), waiting("new", first=190, last=200)
    urgent = [waiting(f"u{n}", first=150, last=200, priority=9) for n in range(2)]

    taken = names(claim(*middle, old, new, *urgent, asked=BOB._replace(streams_max=6)))

    assert {"old", "new", "u0", "u1"} <= taken
    assert len(taken) == 6


def test_among_equally_urgent_targets_the_oldest_comes_first() -> None:
    rows = [waiting(f"t{n:02}", first=n, last=200) for n in range(20)]

    decision = claim(*rows, asked=BOB._replace(streams_max=10, lagging_share=0.8))

    lagging = {lease.row.target for lease in decision.leases if not lease.leading}
    assert lagging == {f"t{n:02}" for n in range(8)}


def test_the_lagging_share_follows_where_the_work_is() -> None:
    assert next_share(0, 0, 0, 0) == SHARE_AT_FIRST
    assert next_share(100, 5, 0, 5) == SHARE_MAX
    assert next_share(0, 5, 100, 5) == SHARE_MIN
    assert next_share(30, 5, 30, 5) == 0.5


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=30))
def test_a_target_without_priority_is_claimed_however_many_urgent_ones_come(
    urgent: list[tuple[int, int]],
) -> None:
    """The oldest target is taken by the first claim of four, whatever the others' priorities."""
    others = [
        waiting(f"u{n}", first=2 + age, last=100, priority=priority + 1)
        for n, (priority, age) in enumerate(urgent)
    ]

    decision = claim(waiting("patient", first=1), *others, asked=BOB._replace(streams_max=4))

    assert "patient" in names(decision)


def test_the_next_target_comes_due_when_its_wait_or_its_lease_ends() -> None:
    rows = [
        leased("a"),
        waiting("b", deferred_until_ms=NOW_MS + 50),
        waiting("c", deferred_until_ms=NOW_MS + 10, blocked=True),
        waiting("d", deferred_until_ms=NOW_MS + 5, at=9),
    ]

    assert next_due_ms(rows, NOW_MS) == NOW_MS + 50
    assert next_due_ms([waiting()], NOW_MS) is None


# The fence


def test_a_lease_is_current_while_its_number_is_the_rows() -> None:
    assert lease_is_current(leased(), 4)
    assert not lease_is_current(leased(), 3)
    assert not lease_is_current(leased(), 5)
    assert not lease_is_current(None, 4)


def test_a_lease_that_ended_is_not_current_although_no_worker_has_claimed_since() -> None:
    assert not lease_is_current(leased().free(NOW_MS), 4)


def test_an_expired_lease_that_no_worker_took_still_fits() -> None:
    row = leased(lease_until_ms=NOW_MS - 1)

    assert lease_is_current(row, 4)
    renewed = decide_renew(row, 4, lease_ms=LEASE_MS, now_ms=NOW_MS)
    assert renewed is not None
    assert renewed.lease_until_ms == NOW_MS + LEASE_MS


def test_a_lease_of_an_earlier_incarnation_of_the_group_is_lost() -> None:
    ref = LeaseRef("billing", 7, "orders/7", 4)

    assert check_lease(group(), leased(), ref) is None
    assert check_lease(group()._replace(id=8), leased(), ref) is LOST
    assert check_lease(None, leased(), ref) is LOST


def test_renewing_leaves_the_number_and_never_shortens_a_lease() -> None:
    renewed = decide_renew(leased(), 4, lease_ms=1_000, now_ms=NOW_MS)

    assert renewed is not None
    assert (renewed.token, renewed.lease_until_ms) == (4, NOW_MS + LEASE_MS)


def test_a_stale_number_renews_and_releases_nothing() -> None:
    assert decide_renew(leased(), 3, lease_ms=LEASE_MS, now_ms=NOW_MS) is None
    assert decide_release(leased(), 3, now_ms=NOW_MS) is None
    assert decide_release(None, 3, now_ms=NOW_MS) is None


def test_a_released_target_can_be_claimed_at_once_and_keeps_its_counts() -> None:
    released = decide_release(leased(retry=1, lost=2), 4, now_ms=NOW_MS)

    assert released is not None
    assert (released.worker, released.retry, released.lost, released.token) == (None, 1, 2, 4)
    assert names(claim(released)) == {"orders/7"}


# Correlation


def correlate(
    owner: Group, *found: Correlated, rows: tuple[Target, ...] = (), **changes: Any
) -> object:
    bounds = {"after": -1, "until": 20, "head": 20, "targets_max": 100, "lanes_max": 3}
    return decide_correlate(
        owner,
        {row.target: row for row in rows},
        found,
        **{**bounds, **changes},
        now_ms=NOW_MS,
    )


def test_correlation_makes_rows_and_moves_the_watermark() -> None:
    found = (Correlated("a", "orders/1", 3), Correlated("a", "orders/1", 8, priority=2))

    decision = correlate(group(), *found)

    assert isinstance(decision, CorrelationDecision)
    assert (decision.group.watermark, decision.group.targets_count, decision.new) == (20, 1, 1)
    row = decision.rows["a"]
    assert (row.at, row.work_to, row.waits_from, row.priority) == (-1, 8, 3, 2)


def test_new_work_of_a_target_that_was_done_waits_from_its_own_position() -> None:
    decision = correlate(group(), Correlated("a", "a", 15), rows=(waiting("a", at=9),))

    assert isinstance(decision, CorrelationDecision)
    assert (decision.rows["a"].waits_from, decision.rows["a"].work_to) == (15, 15)


def test_a_target_that_stands_inside_new_work_waits_from_where_it_stands() -> None:
    """Of many events of a stream a correlation names the first and the last."""
    ends = (Correlated("a", "a", 5), Correlated("a", "a", 15))

    decision = correlate(group(), *ends, rows=(waiting("a", last=3, at=9),))

    assert isinstance(decision, CorrelationDecision)
    assert (decision.rows["a"].waits_from, decision.rows["a"].work_to) == (10, 15)


def test_correlation_leaves_a_lease_alone() -> None:
    decision = correlate(group(), Correlated("a", "a", 15), rows=(leased("a"),))

    assert isinstance(decision, CorrelationDecision)
    assert decision.rows["a"] == leased("a", work_to=15, updated_ms=NOW_MS)


def test_of_two_workers_that_correlate_the_same_piece_one_is_told_that_it_moved() -> None:
    first = correlate(group(), Correlated("a", "a", 3))
    assert isinstance(first, CorrelationDecision)

    assert correlate(first.group, Correlated("a", "a", 3)) == CorrelationMoved(20)


def test_correlation_never_passes_the_head_of_the_log() -> None:
    assert correlate(group(), until=21) == BeyondHead(20)


@pytest.mark.parametrize("position", [-1, 21])
def test_a_position_outside_the_piece_is_refused(position: int) -> None:
    assert isinstance(correlate(group(), Correlated("a", "a", position)), GroupInvalid)


def test_a_piece_that_ends_before_it_begins_is_refused() -> None:
    ahead = group()._replace(watermark=10)

    assert isinstance(correlate(ahead, after=10, until=9), GroupInvalid)


def test_a_target_keeps_its_source() -> None:
    refused = correlate(group(), Correlated("a", "other", 3), rows=(waiting("a"),))

    assert isinstance(refused, GroupInvalid)


@pytest.mark.parametrize(
    ("first", "second", "wider"),
    [
        ("orders/7", "orders/*", "orders/*"),
        ("orders/*", "orders/7", "orders/*"),
        ("stock/tea", "**", "**"),
        ("orders/*", "**", "**"),
        ("**", "orders/*", "**"),
    ],
)
def test_a_source_grows_to_one_that_holds_it(first: str, second: str, wider: str) -> None:
    row = waiting("a")._replace(source=first)

    decided = correlate(group(), Correlated("a", second, 3), rows=(row,))

    assert isinstance(decided, CorrelationDecision)
    assert decided.rows["a"].source == wider


def test_targets_and_lanes_are_bounded() -> None:
    found = [Correlated(f"t{n}", "s", 1, lane=f"l{n}") for n in range(4)]

    assert correlate(group(), *found) == LimitExceeded("lanes_max", 3)
    assert correlate(group(), *found, targets_max=3) == LimitExceeded("group_targets_max", 3)


def test_a_message_is_a_target_of_its_own_that_begins_just_before_it() -> None:
    name = message_target("jobs", 5)

    decision = correlate(group(targets="message"), Correlated(name, "jobs", 5))

    assert isinstance(decision, CorrelationDecision)
    row = decision.rows["jobs@5"]
    assert (row.at, row.work_to, row.waits_from) == (4, 5, 5)
