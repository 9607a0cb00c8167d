"""The breaker of a worker: while the server fails it waits, longer each time."""

from __future__ import annotations

from fencepost.client.group_worker import Breaker


def test_a_breaker_is_closed_until_something_fails() -> None:
    breaker = Breaker()

    assert not breaker.is_open
    assert breaker.pause_s == 0


def test_each_failure_in_a_row_opens_it_for_longer() -> None:
    breaker = Breaker(first_s=0.5, longest_s=3.0)

    pauses = []
    for _ in range(5):
        breaker.failed(OSError("away"))
        pauses.append(breaker.pause_s)

    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert breaker.is_open


def test_an_answer_closes_it() -> None:
    breaker = Breaker()
    breaker.failed(OSError("away"))

    breaker.succeeded()

    assert (breaker.is_open, breaker.pause_s) == (False, 0)


def test_it_waits_no_longer_than_the_longest_pause_after_any_number_of_failures() -> None:
    breaker = Breaker(longest_s=7.0)
    for _ in range(5_000):
        breaker.failed(OSError("away"))

    assert breaker.pause_s == 7.0
