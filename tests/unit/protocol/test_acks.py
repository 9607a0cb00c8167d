"""Acks, failures, retries, blocks, parked and replayed events."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.acks import (
    LOST_ACK,
    Ack,
    AckDecision,
    Failure,
    Lost,
    ReplayResult,
    decide_ack,
)
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import AckInvalid, Parked, Target
from fencepost.protocol.timing import Backoff
from tests.unit.protocol.group_samples import NOW_MS, group, leased

HEAD = 50
BOOM = Failure(5, "boom")


def ack(
    row: Target | None,
    sent: Ack,
    owner: Group | None = None,
    *,
    parked: tuple[Parked, ...] = (),
    parked_max: int = 100,
) -> AckDecision | Lost | AckInvalid:
    return decide_ack(
        owner or group(),
        row,
        sent,
        parked={event.position: event for event in parked},
        parked_max=parked_max,
        head=HEAD,
        random=0.5,
        now_ms=NOW_MS,
    )


def decided(*args: Any, **options: Any) -> AckDecision:
    decision = ack(*args, **options)
    assert isinstance(decision, AckDecision)
    return decision


def fail(row: Target, failure: Failure = BOOM, owner: Group | None = None) -> Target:
    """The row after a failure, which must not have removed it."""
    after = decided(row, Ack(row.token, failure=failure), owner).row
    assert after is not None
    return after


def test_an_ack_moves_at_and_ends_the_lease() -> None:
    decision = decided(leased(retry=2, lost=1, error="boom", failed=5), Ack(4, at=6))

    row = decision.row
    assert row is not None
    assert (decision.outcome, decision.at, row.at, row.waits_from) == ("acked", 6, 6, 7)
    assert (row.worker, row.retry, row.lost, row.error, row.failed) == (None, 0, 0, None, None)
    assert row.has_work


def test_an_ack_may_keep_the_lease_unless_something_failed() -> None:
    kept = decided(leased(), Ack(4, at=6, keep_ms=700)).row
    failed = decided(leased(), Ack(4, failure=BOOM, keep_ms=700)).row

    assert kept is not None
    assert failed is not None
    assert (kept.token, kept.worker) == (4, leased().worker)
    assert (kept.at, kept.lease_until_ms) == (6, NOW_MS + 700)
    assert failed.worker is None


def test_an_older_at_is_no_error_and_moves_nothing() -> None:
    decision = decided(leased(at=6), Ack(4, at=2))

    assert (decision.outcome, decision.at) == ("acked", 6)


def test_an_ack_up_to_what_was_read_leaves_no_work() -> None:
    row = decided(leased(), Ack(4, at=30)).row

    assert row is not None
    assert not row.has_work


@pytest.mark.parametrize("number", [3, 5])
def test_a_stale_or_invented_number_is_lost_and_changes_nothing(number: int) -> None:
    assert ack(leased(), Ack(number, at=6)) is LOST_ACK


def test_an_ack_after_the_lease_ended_is_lost() -> None:
    assert ack(leased().free(NOW_MS), Ack(4, at=6)) is LOST_ACK
    assert ack(None, Ack(4, at=6)) is LOST_ACK


@pytest.mark.parametrize(
    "sent",
    [
        Ack(4, at=HEAD + 1),
        Ack(4, at=-2),
        Ack(4, failure=Failure(HEAD + 1, "boom")),
        Ack(4, failure=Failure(-1, "boom")),
        Ack(4, at=6, failure=Failure(6, "boom")),
        Ack(4, failure=Failure(10, "boom")),
        Ack(4, replayed=[ReplayResult(2)]),
        Ack(4, replayed=[ReplayResult(2), ReplayResult(2)]),
    ],
)
def test_an_ack_that_says_what_cannot_be_is_refused(sent: Ack) -> None:
    assert isinstance(ack(leased(), sent), AckInvalid)


def test_an_ack_past_the_head_is_refused_whatever_its_lease() -> None:
    assert isinstance(ack(None, Ack(3, at=HEAD + 1)), AckInvalid)


# Failures


def test_a_failure_counts_the_progress_before_it_and_waits() -> None:
    decision = decided(leased(), Ack(4, at=4, failure=BOOM))

    row = decision.row
    assert row is not None
    assert (decision.outcome, row.at, row.retry, row.failed) == ("failed", 4, 1, 5)
    assert (row.worker, row.error) == (None, "boom")
    assert row.deferred_until_ms == NOW_MS + 1_000


def test_progress_gives_the_next_event_a_budget_of_its_own() -> None:
    decision = decided(leased(retry=3, failed=4), Ack(4, at=4, failure=BOOM))

    assert decision.row is not None
    assert (decision.outcome, decision.row.retry) == ("failed", 1)


def test_a_reactions_own_delay_is_bounded_by_the_groups_cap() -> None:
    assert fail(leased(), BOOM._replace(delay_ms=5)).deferred_until_ms == NOW_MS + 5
    assert fail(leased(), BOOM._replace(delay_ms=10**9)).deferred_until_ms == NOW_MS + 60_000


@given(st.integers(0, 20), st.sampled_from(["block", "park"]))
def test_an_event_is_tried_once_more_than_it_may_be_retried(retries: int, word: str) -> None:
    """Whatever else happens to its lease in between, without progress."""
    owner = group(retries_max=retries, on_exhausted=word)
    row = leased(lost=2)
    attempts, outcome = 0, ""
    while outcome not in ("blocked", "parked"):
        decision = decided(row, Ack(4, failure=BOOM), owner)
        attempts, outcome = attempts + 1, decision.outcome
        assert decision.row is not None
        row = decision.row._replace(worker="ann", token=4)

    assert attempts == retries + 1
    assert outcome == f"{word}ed"


def test_a_blocked_target_keeps_error_and_place_and_its_number_grows() -> None:
    row = fail(leased(retry=3))

    assert (row.blocked, row.error, row.failed, row.at) == (True, "boom", 5, -1)
    assert (row.token, row.worker) == (5, None)


def test_a_group_that_retries_for_ever_waits_as_long_as_it_may() -> None:
    owner = group(on_exhausted="retry", backoff=Backoff("exponential", 10, 7_000, 0.0))

    row = fail(leased(retry=9), owner=owner)

    assert (row.blocked, row.retry, row.deferred_until_ms) == (False, 10, NOW_MS + 7_000)


def test_a_permanent_failure_blocks_at_once_or_parks_where_the_group_parks() -> None:
    sent = Ack(4, failure=BOOM._replace(permanent=True))

    assert decided(leased(), sent).outcome == "blocked"
    assert decided(leased(), sent, group(on_exhausted="retry")).outcome == "blocked"
    assert decided(leased(), sent, group(on_exhausted="park")).outcome == "parked"


def test_a_parked_event_is_kept_and_the_target_goes_on_behind_it() -> None:
    decision = decided(leased(retry=1), Ack(4, at=4, failure=BOOM._replace(park=True)))

    row = decision.row
    assert row is not None
    assert (decision.outcome, row.at, row.retry, row.error) == ("parked", 5, 0, None)
    assert row.has_work
    assert decision.parked == (Parked("orders/7", "orders/7", 5, "boom", 1, NOW_MS),)


def test_an_event_is_not_dropped_when_no_more_can_be_parked() -> None:
    owner = group(on_exhausted="park")._replace(parked_count=100)

    decision = decided(leased(retry=3), Ack(4, failure=BOOM), owner)

    assert decision.outcome == "blocked"
    assert decision.row is not None
    assert decision.row.error == "parked_max is reached, so the target is blocked. boom"
    assert decision.at == -1


def test_the_row_of_a_message_goes_with_its_ack() -> None:
    queue = group(targets="message")
    row = leased("jobs@9", at=8)

    assert decided(row, Ack(4, at=9), queue).row is None
    assert decided(row, Ack(4, failure=Failure(9, "x", park=True)), queue).row is None
    assert decided(row, Ack(4, failure=Failure(9, "x")), queue).row is not None


# Replays

ASIDE = Parked("orders/7", "orders/7", 2, "boom", 4, NOW_MS - 9, replaying=True)


def test_a_replayed_event_that_was_handled_is_parked_no_more_and_moves_nothing() -> None:
    row = leased(at=9, replaying=1)

    decision = decided(row, Ack(4, replayed=[ReplayResult(2)]), parked=(ASIDE,))

    assert (decision.handled, decision.parked, decision.at) == ([2], [], 9)
    assert decision.row is not None
    assert not decision.row.has_work


def test_a_replayed_event_that_fails_again_is_parked_again_at_once() -> None:
    row = leased(at=9, replaying=2)

    decision = decided(row, Ack(4, replayed=[ReplayResult(2, "again")]), parked=(ASIDE,))

    assert decision.parked == [
        ASIDE._replace(error="again", attempts=5, parked_ms=NOW_MS, replaying=False)
    ]
    assert decision.row is not None
    assert (decision.row.at, decision.row.replaying, decision.row.has_work) == (9, 1, True)


def test_an_event_that_was_parked_but_not_given_out_cannot_be_answered() -> None:
    sent = Ack(4, replayed=[ReplayResult(2)])

    assert isinstance(ack(leased(), sent, parked=(ASIDE._replace(replaying=False),)), AckInvalid)


def test_a_replay_and_a_failure_are_answered_in_one_ack() -> None:
    sent = Ack(4, at=4, failure=BOOM._replace(park=True), replayed=[ReplayResult(2)])

    decision = decided(leased(replaying=1), sent, parked=(ASIDE,))

    assert (decision.outcome, decision.handled) == ("parked", [2])
    assert [event.position for event in decision.parked] == [5]
