"""The rules of subscriptions: wakes, leases, fences, acks and backoff, without clock or disk."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.subscriptions import (
    BACKOFF_MS_MAX,
    BACKOFF_MS_MIN,
    IDLE,
    Ack,
    AlreadyClaimed,
    BadAck,
    Claimed,
    Config,
    Fenced,
    Link,
    NothingPending,
    Seen,
    Subscription,
    Wake,
    backoff_ms,
    check_fence,
    decide_acks,
    decide_announced,
    decide_claim,
    decide_delivered,
    decide_failed,
    decide_heartbeat,
    decide_wake,
    normalised,
    snapshot_acks,
)

NOW_MS = 1_000_000
LEASE_MS = 30_000
TAIL = Offset(2, 20)
SNAPSHOT = (Seen("events/a", 7, Offset(2, 20)),)
AT_IT = Wake(3, "w_3", "ann", NOW_MS + LEASE_MS, snapshot=SNAPSHOT)


def config(**changes: object) -> Config:
    fields: dict[str, object] = {
        "pattern": "events/*",
        "streams": ["b", "a", "b"],
        "webhook_url": "https://worker.example/hook",
        "wake_stream": None,
        "lease_ttl_ms": None,
        "description": None,
    }
    return normalised("webhook", **{**fields, **changes})  # type: ignore[arg-type]


def claim(
    wake: Wake, *, snapshot: tuple[Seen, ...] = SNAPSHOT, now_ms: int = NOW_MS
) -> Claimed | AlreadyClaimed | NothingPending:
    return decide_claim(
        wake,
        worker="bob",
        wake_id="w_new",
        snapshot=snapshot,
        lease_ttl_ms=LEASE_MS,
        now_ms=now_ms,
    )


def test_the_order_and_repetition_of_streams_do_not_make_another_configuration() -> None:
    assert config().digest() == config(streams=["a", "b"]).digest()
    assert config().streams == ("a", "b")


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": "events/**"},
        {"pattern": None},
        {"streams": ["a"]},
        {"webhook_url": "https://worker.example/other"},
        {"lease_ttl_ms": 1000},
        {"description": "mine"},
    ],
)
def test_every_field_counts_in_the_comparison(change: dict[str, object]) -> None:
    assert config().digest() != config(**change).digest()


def test_what_the_type_does_not_use_is_not_part_of_the_configuration() -> None:
    assert config(wake_stream="wake/pool") == config()


def test_the_default_lease_said_or_unsaid_is_the_same() -> None:
    assert config(lease_ttl_ms=30_000) == config()


def test_each_wake_has_the_next_generation_and_is_due_at_once() -> None:
    wake = decide_wake(Wake(4), wake_id="w_5", snapshot=SNAPSHOT, now_ms=NOW_MS)

    assert (wake.generation, wake.wake_id, wake.due_ms()) == (5, "w_5", NOW_MS)
    assert wake.status == "active"


def test_an_announced_wake_waits_for_a_claim_without_a_deadline() -> None:
    due = decide_wake(IDLE, wake_id="w_1", snapshot=SNAPSHOT, now_ms=NOW_MS)

    assert decide_announced(due).due_ms() is None


def test_a_failed_delivery_is_the_same_wake_again_later() -> None:
    due = decide_wake(IDLE, wake_id="w_1", snapshot=SNAPSHOT, now_ms=NOW_MS)

    failed = decide_failed(due, now_ms=NOW_MS, random=0.5)

    assert (failed.wake_id, failed.generation, failed.attempts) == ("w_1", 1, 1)
    assert failed.due_ms() == NOW_MS + 1000
    assert failed.status == "failed"
    assert not failed.expired(NOW_MS + 10**9)


def test_the_lease_of_a_webhook_runs_since_its_attempt_began() -> None:
    due = decide_wake(IDLE, wake_id="w_1", snapshot=SNAPSHOT, now_ms=NOW_MS)

    leased = decide_delivered(due, started_ms=NOW_MS, lease_ttl_ms=LEASE_MS)

    assert leased.due_ms() == NOW_MS + LEASE_MS
    assert leased.status == "active"
    assert not leased.expired(NOW_MS + LEASE_MS - 1)
    assert leased.expired(NOW_MS + LEASE_MS)


def test_a_callback_before_the_answer_keeps_its_longer_lease() -> None:
    due = decide_wake(IDLE, wake_id="w_1", snapshot=SNAPSHOT, now_ms=NOW_MS)
    called_back = decide_heartbeat(due, lease_ttl_ms=LEASE_MS, now_ms=NOW_MS + 900)

    answered = decide_delivered(called_back, started_ms=NOW_MS, lease_ttl_ms=LEASE_MS)

    assert answered.lease_until_ms == NOW_MS + 900 + LEASE_MS


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_stays_within_its_bounds_and_its_jitter(attempts: int, random: float) -> None:
    """However many attempts failed, the wait is 1 to 60 s and within 20% of the doubled base."""
    wait_ms = backoff_ms(attempts, random)

    base_ms = min(BACKOFF_MS_MIN * 2 ** (attempts - 1), BACKOFF_MS_MAX)
    assert BACKOFF_MS_MIN <= wait_ms <= BACKOFF_MS_MAX
    assert 0.8 * base_ms - 1 <= wait_ms <= 1.2 * base_ms


def test_a_waiting_wake_is_claimed_under_its_own_generation() -> None:
    waiting = decide_announced(
        decide_wake(IDLE, wake_id="w_1", snapshot=SNAPSHOT, now_ms=NOW_MS - 5)
    )

    outcome = claim(waiting)

    assert outcome == Claimed(
        Wake(1, "w_1", "bob", NOW_MS + LEASE_MS, snapshot=SNAPSHOT), fresh=False
    )


def test_pending_work_is_enough_for_a_claim() -> None:
    outcome = claim(Wake(4))

    assert isinstance(outcome, Claimed)
    assert (outcome.wake.generation, outcome.wake.wake_id, outcome.fresh) == (5, "w_new", True)


def test_a_held_lease_is_not_given_away_not_even_to_its_holder() -> None:
    assert claim(AT_IT) == AlreadyClaimed("ann", 3)
    assert claim(AT_IT._replace(holder="bob")) == AlreadyClaimed("bob", 3)


def test_a_lease_that_ran_out_is_claimed_under_a_new_generation() -> None:
    outcome = claim(AT_IT, now_ms=NOW_MS + LEASE_MS)

    assert isinstance(outcome, Claimed)
    assert (outcome.wake.generation, outcome.wake.wake_id) == (4, "w_new")


def test_there_is_nothing_to_claim_without_pending_work() -> None:
    assert claim(Wake(4), snapshot=()) == NothingPending()


def fence(wake: Wake, *, token: int = 3, generation: int = 3, wake_id: str = "w_3") -> bool:
    outcome = check_fence(
        wake, token_generation=token, generation=generation, wake_id=wake_id, now_ms=NOW_MS
    )
    assert outcome in (None, Fenced(wake.generation))
    return outcome is not None


def test_the_holder_of_the_current_wake_passes_the_fence() -> None:
    assert not fence(AT_IT)


def test_whoever_is_wrong_about_anything_is_fenced() -> None:
    assert fence(AT_IT, token=2)
    assert fence(AT_IT, token=4)
    assert fence(AT_IT, generation=2)
    assert fence(AT_IT, wake_id="w_2")
    assert fence(AT_IT.ended())
    assert fence(AT_IT._replace(lease_until_ms=NOW_MS))


def test_a_webhook_may_report_although_its_answer_got_lost() -> None:
    retrying = Wake(3, "w_3", attempts=1, next_attempt_ms=NOW_MS + 5, snapshot=SNAPSHOT)

    assert not fence(retrying)


def linked(acked: Offset = START, tail: Offset = TAIL, stream_id: int = 7) -> Link:
    return Link("events/a", explicit=False, glob=True, stream_id=stream_id, acked=acked, tail=tail)


def test_an_ack_moves_the_cursor_forward_only() -> None:
    ahead = {"events/a": linked(acked=Offset(1, 10))}

    assert decide_acks(ahead, SNAPSHOT, [Ack("events/a", Offset(2, 20))]) == {
        "events/a": Offset(2, 20)
    }
    assert decide_acks(ahead, SNAPSHOT, [Ack("events/a", START)]) == {}


def test_of_several_acks_for_a_stream_the_furthest_counts() -> None:
    acks = [Ack("events/a", Offset(2, 20)), Ack("events/a", Offset(1, 10))]

    assert decide_acks({"events/a": linked()}, SNAPSHOT, acks) == {"events/a": Offset(2, 20)}


@pytest.mark.parametrize("offset", [Offset(3, 30), Offset(9, 20)])
def test_an_ack_past_the_tail_is_refused_because_it_would_hide_messages(offset: Offset) -> None:
    outcome = decide_acks({"events/a": linked()}, SNAPSHOT, [Ack("events/a", offset)])

    assert isinstance(outcome, BadAck)
    assert outcome.path == "events/a"


def test_an_ack_for_a_stream_that_is_no_longer_linked_is_passed_over() -> None:
    assert decide_acks({}, SNAPSHOT, [Ack("events/a", Offset(2, 20))]) == {}


def test_an_ack_for_a_former_stream_of_the_same_name_is_passed_over() -> None:
    again = {"events/a": linked(stream_id=8, tail=Offset(5, 50))}

    assert decide_acks(again, SNAPSHOT, snapshot_acks(SNAPSHOT)) == {}


def test_done_acks_what_the_wake_showed_and_not_what_came_after() -> None:
    grown = {"events/a": linked(tail=Offset(9, 90))}

    assert decide_acks(grown, SNAPSHOT, snapshot_acks(SNAPSHOT)) == {"events/a": Offset(2, 20)}


def test_a_wake_lists_the_longest_waiting_streams_first_and_no_more_than_the_limit() -> None:
    subscription = Subscription(1, "s", config(), base_url="", created_ms=0)
    for number in range(3):
        link = Link(f"events/{number}", explicit=False, glob=True, stream_id=number)
        link.tail = Offset(1, 5)
        subscription.links[link.path] = link
        subscription.note(link)
    subscription.note(subscription.links["events/0"])

    seen = subscription.snapshot(2)

    assert [stream.path for stream in seen] == ["events/1", "events/2"]


def test_a_subscription_does_not_watch_its_own_wake_stream() -> None:
    everything = normalised(
        "pull-wake",
        pattern="**",
        streams=(),
        webhook_url=None,
        wake_stream="wake/pool",
        lease_ttl_ms=None,
        description=None,
    )
    subscription = Subscription(1, "s", everything, base_url="", created_ms=0)

    assert subscription.matches("events/a")
    assert not subscription.matches("wake/pool")
