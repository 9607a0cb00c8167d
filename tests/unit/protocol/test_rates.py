"""How fast a principal may go, as functions of a state and a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.rates import (
    ABANDON_CLAIMS_MIN,
    ABANDON_HALF_LIFE_MS,
    NEW,
    UNLIMITED,
    Bucket,
    Pace,
    Rate,
    Standing,
    Tally,
    TooFast,
    Wait,
    decide_append_pace,
    decide_claim_pace,
    ended,
    take,
)


def spend(rate: Rate, times_ms: list[int]) -> list[bool]:
    """Which of the requests at these times are let through."""
    bucket: Bucket | None = None
    let_through = []
    for now_ms in times_ms:
        taken = take(bucket, rate, now_ms)
        let_through.append(isinstance(taken, Bucket))
        if isinstance(taken, Bucket):
            bucket = taken
    return let_through


def test_a_full_bucket_lets_its_burst_through_and_then_says_how_long_to_wait() -> None:
    assert spend(Rate(1, 3), [0, 0, 0, 0]) == [True, True, True, False]

    assert take(Bucket(0.0, 1000), Rate(2, 3), 1000) == Wait(500)


def test_whoever_waits_as_long_as_it_was_told_is_let_through() -> None:
    waited = take(Bucket(0.25, 0), Rate(0.3, 1), 0)

    assert isinstance(waited, Wait)
    assert isinstance(take(Bucket(0.25, 0), Rate(0.3, 1), waited.ms), Bucket)
    assert isinstance(take(Bucket(0.25, 0), Rate(0.3, 1), waited.ms - 2), Wait)


def test_a_bucket_never_holds_more_than_its_burst() -> None:
    assert spend(Rate(10, 2), [0, 0, 1_000_000, 1_000_000, 1_000_000]) == [
        *(True, True),
        *(True, True, False),
    ]


def test_a_clock_that_went_back_refills_nothing() -> None:
    assert isinstance(take(Bucket(0.0, 10_000), Rate(1, 1), 0), Wait)


@given(
    st.floats(0.1, 100),
    st.integers(1, 50),
    st.lists(st.integers(0, 60_000), min_size=1, max_size=300).map(sorted),
)
def test_over_any_stretch_no_more_goes_through_than_burst_and_rate(
    per_s: float, burst: int, times_ms: list[int]
) -> None:
    """Whatever the arrivals: in any stretch of time at most burst + rate x length of them pass."""
    passed = [
        at for at, good in zip(times_ms, spend(Rate(per_s, burst), times_ms), strict=True) if good
    ]

    for first in range(0, len(passed), 7):
        for last in range(first, len(passed), 5):
            length_s = (passed[last] - passed[first]) / 1000
            assert last - first + 1 <= burst + per_s * length_s + 1e-6


def test_a_principal_without_limits_is_never_held_up_but_counted() -> None:
    assert decide_append_pace(NEW, UNLIMITED, 5) is NEW

    after = decide_claim_pace(NEW, UNLIMITED, claims=True, raises=True, now_ms=5)

    assert isinstance(after, Standing)
    assert after.open_claims == 1


@pytest.mark.parametrize(
    ("pace", "claims", "raises", "limit"),
    [
        (Pace(claims=Rate(1, 1)), True, False, "claims_per_s"),
        (Pace(raises=Rate(1, 1)), False, True, "raises_per_s"),
        (Pace(claims=Rate(9, 9), raises=Rate(1, 1)), True, True, "raises_per_s"),
        (Pace(open_claims_max=1), True, False, "open_claims_max"),
    ],
)
def test_the_second_at_once_is_too_fast_and_told_which_limit_it_was(
    pace: Pace, claims: bool, raises: bool, limit: str
) -> None:
    once = decide_claim_pace(NEW, pace, claims=claims, raises=raises, now_ms=0)
    assert isinstance(once, Standing)

    twice = decide_claim_pace(once, pace, claims=claims, raises=raises, now_ms=0)

    assert isinstance(twice, TooFast)
    assert twice.limit == limit
    assert twice.retry_after_ms > 0


def test_appends_have_a_rate_of_their_own() -> None:
    pace = Pace(appends=Rate(1, 1))
    once = decide_append_pace(NEW, pace, 0)
    assert isinstance(once, Standing)

    assert decide_append_pace(once, pace, 400) == TooFast("appends_per_s", 600)
    assert isinstance(decide_append_pace(once, pace, 1000), Standing)


def test_a_refusal_leaves_the_other_rates_as_they_were() -> None:
    """A claim that is refused for its raise has not spent a claim."""
    pace = Pace(claims=Rate(0.001, 2), raises=Rate(1, 1))
    once = decide_claim_pace(NEW, pace, claims=True, raises=True, now_ms=0)
    assert isinstance(once, Standing)
    for _ in range(5):
        refused = decide_claim_pace(once, pace, claims=True, raises=True, now_ms=1)
        assert isinstance(refused, TooFast)

    again = decide_claim_pace(once, pace, claims=True, raises=False, now_ms=1)

    assert isinstance(again, Standing)


def claimed_and_lost(claims: int, lost: int) -> Standing:
    standing = NEW
    for _ in range(claims):
        after = decide_claim_pace(standing, UNLIMITED, claims=True, raises=False, now_ms=0)
        assert isinstance(after, Standing)
        standing = after
    for number in range(claims):
        standing = ended(standing, abandoned=number < lost, now_ms=0)
    return standing


def test_who_abandons_too_many_claims_waits_until_they_are_long_ago() -> None:
    standing = claimed_and_lost(2 * ABANDON_CLAIMS_MIN, ABANDON_CLAIMS_MIN + 1)
    pace = Pace(abandon_ratio_max=0.5)

    refused = decide_claim_pace(standing, pace, claims=True, raises=False, now_ms=0)

    assert standing.open_claims == 0
    assert standing.abandon_ratio(0) == pytest.approx(0.55)
    assert isinstance(refused, TooFast)
    assert refused.limit == "abandon_ratio_max"
    assert refused.retry_after_ms == ABANDON_HALF_LIFE_MS + 1
    later = decide_claim_pace(
        standing, pace, claims=True, raises=False, now_ms=refused.retry_after_ms
    )
    assert isinstance(later, Standing)


def test_a_few_abandoned_claims_say_nothing_yet() -> None:
    standing = claimed_and_lost(ABANDON_CLAIMS_MIN - 1, ABANDON_CLAIMS_MIN - 1)

    assert standing.abandon_ratio(0) == 0


def test_a_tally_halves_with_time() -> None:
    assert Tally(8, 0).at(ABANDON_HALF_LIFE_MS) == 4
    assert Tally(8, 1000).at(0) == 8
    assert Tally(8, 0).more(ABANDON_HALF_LIFE_MS) == Tally(5, ABANDON_HALF_LIFE_MS)


def test_open_claims_never_go_below_none() -> None:
    assert ended(NEW, abandoned=False, now_ms=0).open_claims == 0
