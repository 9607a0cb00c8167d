"""Which of the claims that wait are woken, and that no wake is lost on the way."""

from __future__ import annotations

import asyncio

from fencepost.server.groups.waiting import Lines


def test_one_of_each_line_is_woken() -> None:
    lines = Lines()
    with lines.join("a") as first, lines.join("a") as second, lines.join("b") as other:
        lines.wake()
        lines.wake()

        assert [one.is_called for one in (first, second, other)] == [True, False, True]
        assert lines.count == 3
    assert lines.count == 0


def test_a_claim_that_found_something_wakes_the_next_one() -> None:
    lines = Lines()
    leaving = lines.join("a")
    first = leaving.__enter__()
    with lines.join("a") as second:
        lines.wake()
        first.begin()
        assert not second.is_called
        leaving.__exit__(None, None, None)

        assert second.is_called


def test_a_claim_that_leaves_before_it_looks_wakes_the_next_one() -> None:
    lines = Lines()
    leaving = lines.join("a")
    first = leaving.__enter__()
    with lines.join("a") as second:
        lines.wake()
        assert first.is_called
        leaving.__exit__(None, None, None)

        assert second.is_called


def test_a_claim_that_found_nothing_wakes_none() -> None:
    lines = Lines()
    leaving = lines.join("a")
    first = leaving.__enter__()
    with lines.join("a") as second:
        lines.wake()
        first.begin()
        first.found_nothing()
        leaving.__exit__(None, None, None)

        assert not second.is_called


def test_what_comes_while_a_claim_looks_is_looked_for_again() -> None:
    lines = Lines()
    with lines.join("a") as first:
        lines.wake()
        first.begin()
        lines.wake()
        first.found_nothing()

        assert first.is_called


def test_all_are_woken_when_the_server_goes_down() -> None:
    lines = Lines()
    with lines.join("a") as first, lines.join("a") as second:
        lines.wake_all()

        assert first.is_called
        assert second.is_called


def test_a_commit_wakes_one_claim_of_all_lines() -> None:
    lines = Lines()
    with lines.join("a") as first, lines.join("b") as other:
        lines.wake_one()

        assert [one.is_called for one in (first, other)] == [True, False]


def test_the_last_of_a_line_passes_its_wake_on_to_another_line() -> None:
    """What woke it may be for any of them: it is not correlated yet."""
    lines = Lines()
    leaving = lines.join("a")
    leaving.__enter__()
    with lines.join("b") as other:
        lines.wake_one()
        leaving.__exit__(None, None, None)

        assert other.is_called


async def test_the_sooner_time_counts() -> None:
    lines = Lines()
    now = asyncio.get_running_loop().time()
    with lines.join("a") as first:
        lines.wake_at(now + 3_600)
        lines.wake_at(now)
        lines.wake_at(now + 3_600)

        async with asyncio.timeout(10):
            await first.wait(now + 3_600)

        assert first.is_called


async def test_waiting_ends_with_its_time() -> None:
    with Lines().join("a") as first:
        await first.wait(asyncio.get_running_loop().time())

        assert not first.is_called
