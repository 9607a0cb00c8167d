"""The time rules that subscriptions and groups share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.protocol.timing import Backoff, BackoffKind, delay_ms, fence_fits, has_passed

kinds = st.sampled_from(["fixed", "linear", "exponential"])


@pytest.mark.parametrize(
    ("kind", "waits"),
    [
        ("fixed", [100, 100, 100, 100]),
        ("linear", [100, 200, 300, 400]),
        ("exponential", [100, 200, 400, 450]),
    ],
)
def test_a_wait_grows_as_its_kind_says_up_to_the_cap(kind: BackoffKind, waits: list[int]) -> None:
    backoff = Backoff(kind, 100, 450, jitter=0.0)

    assert [delay_ms(backoff, failures, 0.5) for failures in (1, 2, 3, 4)] == waits


@given(kinds, st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1))
def test_no_wait_is_longer_than_the_cap_or_below_zero(
    kind: BackoffKind, failures: int, jitter: float, random: float
) -> None:
    """For any number of failures and any random number."""
    wait_ms = delay_ms(Backoff(kind, 1_000, 60_000, jitter), failures, random)

    assert 0 <= wait_ms <= 60_000


def test_jitter_spreads_a_wait_around_its_middle() -> None:
    backoff = Backoff("fixed", 1_000, 60_000, jitter=0.2)

    assert [delay_ms(backoff, 1, random) for random in (0.0, 0.5, 1.0)] == [800, 1_000, 1_200]


def test_a_lease_is_over_at_its_end_and_one_without_an_end_never() -> None:
    assert has_passed(1_000, 1_000)
    assert not has_passed(1_001, 1_000)
    assert not has_passed(None, 1_000)


def test_a_fence_fits_when_every_number_is_the_current_one() -> None:
    assert fence_fits(4, 4, 4)
    assert not fence_fits(4, 4, 3)
