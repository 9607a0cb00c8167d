"""Retries of reactions: how long they wait, and what happens after the last one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.events import EventTooNewError, NonRetryableError, Retry, UnknownEventError
from fencepost.events.retry import OnExhausted

ERROR = ValueError("no such customer")


def test_a_failure_waits_longer_each_time() -> None:
    retry = Retry(5, "exponential", base_ms=100, jitter=0.0)

    waits = [retry.failure(7, ERROR, retry=n, dice=0.5).delay_ms for n in range(4)]

    assert waits == [100, 200, 400, 800]


def test_linear_and_fixed_waits() -> None:
    linear, fixed = Retry(5, "linear", 100, jitter=0.0), Retry(5, "fixed", 100, jitter=0.0)

    assert [linear.failure(7, ERROR, retry=n, dice=0).delay_ms for n in range(3)] == [100, 200, 300]
    assert [fixed.failure(7, ERROR, retry=n, dice=0).delay_ms for n in range(3)] == [100, 100, 100]


@given(retries=st.integers(0, 2_000), dice=st.floats(0, 1, exclude_max=True))
def test_no_wait_is_longer_than_the_cap(retries: int, dice: float) -> None:
    """Whatever the attempt and the dice, the wait lies between nothing and the cap."""
    found = Retry(5_000, "exponential", 100, 60_000, 1.0).failure(
        7, ERROR, retry=retries, dice=dice
    )

    assert found.delay_ms is not None
    assert 0 <= found.delay_ms <= 60_000


@pytest.mark.parametrize(
    ("on_exhausted", "permanent", "park"), [("block", True, False), ("park", False, True)]
)
def test_after_the_last_retry_the_target_blocks_or_the_event_is_parked(
    on_exhausted: OnExhausted, permanent: bool, park: bool
) -> None:
    retry = Retry(3, on_exhausted=on_exhausted)

    before, last = (retry.failure(7, ERROR, retry=n, dice=0.5) for n in (2, 3))

    assert (before.permanent, before.park) == (False, False)
    assert (last.permanent, last.park) == (permanent, park)
    assert last.error == "ValueError: no such customer"


def test_a_reaction_may_go_on_for_ever_at_the_cap() -> None:
    found = Retry(3, cap_ms=9_000, on_exhausted="retry").failure(7, ERROR, retry=50, dice=0.5)

    assert (found.permanent, found.park, found.delay_ms) == (False, False, 9_000)


def test_a_non_retryable_error_does_not_wait_for_the_attempts() -> None:
    found = Retry(3).failure(7, NonRetryableError("never"), retry=0, dice=0.5)

    assert found.permanent


@pytest.mark.parametrize(
    "error",
    [
        UnknownEventError("Shipped", "orders/7", version=3),
        EventTooNewError("its schema is 2", "orders/7", version=3),
    ],
)
def test_what_newer_code_can_handle_is_tried_until_that_runs(error: Exception) -> None:
    """In a deploy that rolls, a worker of the old code blocks and parks nothing."""
    for on_exhausted in ("block", "park"):
        retry = Retry(1, "fixed", base_ms=10, cap_ms=50, jitter=0, on_exhausted=on_exhausted)

        first = retry.failure(7, error, retry=0, dice=0.5)
        spent = retry.failure(7, error, retry=9, dice=0.5)

        assert (spent.permanent, spent.park) == (False, False)
        assert first.delay_ms is not None
        assert spent.delay_ms is not None
        assert 500 <= first.delay_ms <= 1_500 < spent.delay_ms <= 60_000


def test_an_error_is_cut_to_what_the_server_takes() -> None:
    found = Retry(3).failure(7, ValueError("x\0" * 5_000), retry=0, dice=0.5)

    assert len(found.error) <= 1_000
    assert "\0" not in found.error


@pytest.mark.parametrize("values", [{"retries": -1}, {"base_ms": -1}, {"jitter": 2.0}])
def test_values_that_cannot_be_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is"):
        Retry(**values)  # type: ignore[arg-type]
