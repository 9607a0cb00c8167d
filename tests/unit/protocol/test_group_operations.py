"""What operators do to targets: unblock, reset, skip, defer, prioritize, park, replay."""

from fencepost.protocol.group_operations import (
    ParkDecision,
    decide_defer,
    decide_park,
    decide_prioritize,
    decide_replay,
    decide_reset,
    decide_skip,
    decide_unblock,
    unparked_by_reset,
)
from fencepost.protocol.leases import Parked, Target, lease_is_current
from tests.unit.protocol.group_samples import NOW_MS, group, leased, waiting

STUCK = waiting(
    at=4, token=5, blocked=True, error="boom", failed=6, retry=4, lost=1, deferred_until_ms=7
)
AFRESH = waiting(at=4, token=6, updated_ms=NOW_MS)


def test_an_unblocked_target_goes_on_where_it_stopped() -> None:
    assert decide_unblock(STUCK, now_ms=NOW_MS) == AFRESH


def test_a_target_that_is_not_blocked_is_not_counted_as_unblocked() -> None:
    assert decide_unblock(leased(), now_ms=NOW_MS) is None


def test_a_reset_goes_to_the_beginning_of_the_group_or_to_a_position() -> None:
    late = group()._replace(start=2)

    assert decide_reset(late, STUCK, at=None, now_ms=NOW_MS) == AFRESH._replace(at=2, waits_from=3)
    assert decide_reset(late, STUCK, at=3, now_ms=NOW_MS) == AFRESH._replace(at=3, waits_from=4)


def test_a_reset_message_is_still_only_that_message() -> None:
    row = leased("jobs@9", at=8)

    assert decide_reset(group(targets="message"), row, at=None, now_ms=NOW_MS).at == 8


def test_a_reset_gives_parked_events_out_again_in_their_order() -> None:
    row = decide_reset(group(), STUCK, at=3, now_ms=NOW_MS)
    events = [Parked("orders/7", "orders/7", position, "x", 1, 1) for position in (3, 4, 9, 10)]

    assert [event.position for event in events if unparked_by_reset(row, event)] == [4, 9]


def test_a_worker_that_holds_the_lease_loses_it_by_a_reset_or_a_skip() -> None:
    for row in (
        decide_reset(group(), leased(), at=None, now_ms=NOW_MS),
        decide_skip(leased(), position=3, now_ms=NOW_MS),
    ):
        assert row is not None
        assert row.token == 5
        assert not lease_is_current(row, 4)


def test_a_skip_moves_past_the_event_that_failed() -> None:
    row = decide_skip(STUCK, position=None, now_ms=NOW_MS)

    assert row == AFRESH._replace(at=6, waits_from=7)


def test_a_skip_without_an_event_to_skip_changes_nothing() -> None:
    assert decide_skip(waiting(), position=None, now_ms=NOW_MS) is None
    assert decide_skip(STUCK, position=4, now_ms=NOW_MS) is None
    assert decide_skip(STUCK, position=10, now_ms=NOW_MS) is None


def test_defer_and_prioritize_leave_the_lease_alone() -> None:
    later = decide_defer(leased(), until_ms=NOW_MS + 9, now_ms=NOW_MS)
    urgent = decide_prioritize(leased(), priority=3, now_ms=NOW_MS)

    assert later is not None
    assert urgent is not None
    assert (later.deferred_until_ms, urgent.priority) == (NOW_MS + 9, 3)
    assert lease_is_current(later, 4)
    assert lease_is_current(urgent, 4)


def test_what_is_so_already_is_not_counted() -> None:
    assert decide_defer(waiting(), until_ms=0, now_ms=NOW_MS) is None
    assert decide_prioritize(waiting(), priority=0, now_ms=NOW_MS) is None


def test_parking_the_event_that_failed_lets_the_target_go_on() -> None:
    decision = decide_park(group(), STUCK, position=6, now_ms=NOW_MS)

    assert decision == ParkDecision(
        Parked("orders/7", "orders/7", 6, "boom", 4, NOW_MS), AFRESH._replace(at=6, waits_from=7)
    )


def test_parking_an_event_further_on_moves_over_nothing() -> None:
    decision = decide_park(group(), leased(), position=8, now_ms=NOW_MS)

    assert decision is not None
    assert decision.row is not None
    assert decision.row.at == -1
    assert not lease_is_current(decision.row, 4)
    assert decision.event.error == "parked by an operator"


def test_an_event_that_is_processed_or_yet_to_come_cannot_be_parked() -> None:
    assert decide_park(group(), STUCK, position=4, now_ms=NOW_MS) is None
    assert decide_park(group(), STUCK, position=10, now_ms=NOW_MS) is None


def test_parking_a_message_ends_its_target_and_replaying_it_brings_it_back() -> None:
    queue = group(targets="message")._replace(token_floor=7)
    row = waiting("jobs@9", first=9, at=8, source="jobs")
    parked = decide_park(queue, row, position=9, now_ms=NOW_MS)
    assert parked is not None
    assert parked.row is None

    replayed = decide_replay(queue, None, parked.event, now_ms=NOW_MS)

    assert replayed is not None
    assert replayed.event is not None
    assert replayed.event.replaying
    assert replayed.row == Target(
        "jobs@9", "jobs", at=9, work_to=9, waits_from=9, token=7, replaying=1, updated_ms=NOW_MS
    )
    assert replayed.row.has_work


def test_an_event_is_replayed_once_at_a_time_and_at_does_not_move() -> None:
    event = Parked("orders/7", "orders/7", 2, "boom", 4, 1)

    decision = decide_replay(group(), waiting(at=9), event, now_ms=NOW_MS)

    assert decision is not None
    assert decision.event is not None
    assert (decision.row.at, decision.row.replaying) == (9, 1)
    assert decide_replay(group(), decision.row, decision.event, now_ms=NOW_MS) is None


def test_an_event_ahead_is_parked_no_more_and_the_lease_that_left_it_out_is_lost() -> None:
    event = Parked("orders/7", "orders/7", 5, "parked by an operator", 0, 1)

    decision = decide_replay(group(), leased(at=3), event, now_ms=NOW_MS)

    assert decision is not None
    assert decision.event is None
    assert (decision.row.at, decision.row.replaying, decision.row.token) == (3, 0, 5)
    assert decision.row.worker is None
