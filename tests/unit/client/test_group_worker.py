"""A worker while the server fails: its breaker waits, longer each time, and it can be stopped."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from fencepost.client import group_tasks
from fencepost.client.group_tasks import AsyncWork, async_work_leases
from fencepost.client.group_worker import Breaker, Working
from fencepost.client.groups import Lease, LeaseAck


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


class AwayGroup:
    """A group of a server that is away: each request is repeated without end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given_up: list[str] = []

    async def info(self) -> object:
        return await self._ask("info")

    async def claim(self, _worker: str, **_options: Any) -> object:
        return await self._ask("claim")

    async def _ask(self, name: str) -> object:
        self.asked.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            self.given_up.append(name)


@pytest.mark.parametrize(("lease_ms", "request_name"), [(None, "info"), (10_000, "claim")])
async def test_a_worker_that_is_to_stop_gives_up_a_request_without_an_answer(
    monkeypatch: pytest.MonkeyPatch, lease_ms: int | None, request_name: str
) -> None:
    monkeypatch.setattr(group_tasks, "STOP_SECONDS", 0.01)
    group, stopping = AwayGroup(), asyncio.Event()

    async def handle(_lease: Lease) -> LeaseAck | None:
        raise AssertionError

    options = Working(worker="w", streams=1, events=1, lane=None, lease_ms=lease_ms)
    working = asyncio.create_task(
        async_work_leases(cast("AsyncWork", group), handle, options, stopping=stopping)
    )
    await group.asked.wait()

    stopping.set()

    assert await asyncio.wait_for(working, 30) is None
    assert group.given_up == [request_name]
