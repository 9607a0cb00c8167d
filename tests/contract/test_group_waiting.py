"""Claims that wait for work: few of them look when something comes, and none is forgotten."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any, cast

import pytest

from fencepost.protocol.globs import Glob
from fencepost.protocol.grants import READ, Grant, Principal, ProducerRules
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, Target
from fencepost.server.groups import working
from fencepost.server.groups.feed import Feed
from fencepost.server.groups.working import Working
from fencepost.store.group_contract import (
    ClaimDone,
    ClaimTargets,
    Correlate,
    DeleteGroup,
    GroupMissing,
)
from fencepost.store.read import groups as reading
from fencepost.store.read.groups import SqlGroupReads
from fencepost.testing.clock import SimClock
from tests.contract.grouping import acked, claiming, made, operating, rows_of, with_events
from tests.contract.grouping import ask as asked
from tests.contract.subject import WAIT_SECONDS, Subject

WORKERS = 40


class Crew:
    """Workers of a group that ask one server."""

    def __init__(self, subject: Subject, clock: SimClock, group: Group) -> None:
        self.subject, self.group = subject, group
        reads = SqlGroupReads(cast(Any, subject.store).readers)
        self.working = Working(subject.store, reads, clock, Feed(), is_shared=False)
        self.looks = 0
        self._ended: asyncio.Queue[None] = asyncio.Queue()
        work = self.working.work

        async def counted(request: Any) -> Any:
            outcome = await work(request)
            if isinstance(request, ClaimTargets):
                self.looks += 1
                self._ended.put_nowait(None)
            return outcome

        self.working.work = counted  # type: ignore[method-assign]  # counts, and does the same

    def starts(self, worker: str, wait_ms: int = 60_000, **more: Any) -> asyncio.Task[list[Target]]:
        """A worker that waits for one target."""
        return asyncio.create_task(self.claim(worker, wait_ms, **more))

    async def claim(self, worker: str, wait_ms: int = 60_000, **more: Any) -> list[Target]:
        request = claiming(self.group, worker, 1, **more)
        done = await self.working.claim(request, wait_ms=wait_ms)
        assert isinstance(done, ClaimDone), done
        return rows_of(done.leases)

    async def looked(self, times: int) -> None:
        """So many looks have ended since this was asked last."""
        async with asyncio.timeout(WAIT_SECONDS):
            for _ in range(times):
                await self._ended.get()


async def test_an_event_wakes_as_many_workers_as_it_has_takers(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    tasks = [crew.starts(f"w{n}") for n in range(WORKERS)]
    await crew.looked(WORKERS)
    before = crew.looks

    await with_events(subject, "orders/1")
    done, waiting = await asyncio.wait(
        tasks, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_SECONDS
    )
    for name in ("orders/2", "orders/3"):
        await with_events(subject, name)
        more, waiting = await asyncio.wait(
            waiting, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_SECONDS
        )
        done |= more

    assert sorted(row.target for task in done for row in task.result()) == [
        "orders/1",
        "orders/2",
        "orders/3",
    ]
    # Each event: the claim that takes it, one or two that find nothing behind it.
    assert crew.looks - before <= 12
    crew.working.stop_waiting()
    assert [rows for task in waiting for rows in await task] == []


async def test_a_worker_that_goes_away_when_it_is_woken_loses_no_wake(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    leaving, staying = crew.starts("ann"), crew.starts("bob")
    await crew.looked(2)

    crew.working._published = _ignored  # type: ignore[method-assign, assignment]  # the test wakes by itself
    await with_events(subject, "orders/1")
    crew.working._news += 1
    crew.working.known[group.name].waiting.wake()
    leaving.cancel()

    async with asyncio.timeout(WAIT_SECONDS):
        assert [row.target for row in await staying] == ["orders/1"]


def _ignored(_changes: object) -> None:
    """Nothing is told."""


async def test_each_lane_is_woken_for_itself(subject: Subject, clock: SimClock) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    elsewhere, everywhere = crew.starts("ann", lane="express"), crew.starts("bob")
    await crew.looked(2)

    await with_events(subject, "orders/1")

    async with asyncio.timeout(WAIT_SECONDS):
        assert [row.target for row in await everywhere] == ["orders/1"]
    crew.working.stop_waiting()
    assert await elsewhere == []


async def test_claims_for_lanes_that_the_group_does_not_have_look_as_one(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    await with_events(subject, "orders/1")
    crew = Crew(subject, clock, group)
    assert len(await crew.claim("bob", 0)) == 1
    tasks = [crew.starts(f"w{n}", lane=f"lane-{n}") for n in range(WORKERS)]
    await crew.looked(WORKERS + 1)
    before = crew.looks

    for n in range(2, 6):
        await with_events(subject, f"orders/{n}")
        assert len(await crew.claim("bob")) == 1

    # Each event: the claim that takes it, and a few looks of one that stands for all the others.
    assert crew.looks - before < WORKERS
    crew.working.stop_waiting()
    assert [rows for task in tasks for rows in await task] == []


async def test_a_claim_for_a_lane_takes_from_it_as_soon_as_there_is_one(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject, targets="computed")
    crew = Crew(subject, clock, group)
    express = crew.starts("ann", lane="express")
    await crew.looked(1)
    [at] = await with_events(subject, "orders/1")

    found = [Correlated("orders/1", "orders/1", at, "express")]
    await crew.working.work(Correlate(group.name, group.watermark, at, found))

    async with asyncio.timeout(WAIT_SECONDS):
        assert [row.target for row in await express] == ["orders/1"]


async def test_workers_of_a_principal_wait_in_one_line_and_only_for_what_it_may_read(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject, sources=("orders/**", "secrets/**"))
    crew = Crew(subject, clock, group)
    ann = Principal(
        "ann", [Grant((Glob("orders/**"),), READ)], producers=(), rules=ProducerRules(())
    )
    tasks = [
        asyncio.create_task(
            crew.working.claim(
                claiming(group, f"w{n}", 1)._replace(may_read=lambda path: ann.may_read(path)),
                wait_ms=60_000,
                principal=ann,
            )
        )
        for n in range(WORKERS)
    ]
    await crew.looked(WORKERS)
    before = crew.looks

    await with_events(subject, "secrets/1")
    assert crew.looks == before
    await with_events(subject, "orders/1")
    [done], waiting = await asyncio.wait(
        tasks, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_SECONDS
    )

    outcome = done.result()
    assert isinstance(outcome, ClaimDone)
    assert [row.target for row in rows_of(outcome.leases)] == ["orders/1"]
    assert crew.looks - before <= 4
    crew.working.stop_waiting()
    await asyncio.wait(waiting)


async def test_what_an_operator_lets_go_on_goes_to_a_worker_that_waits(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    await with_events(subject, "orders/1")
    [row] = await crew.claim("ann")
    await crew.looked(1)
    await asked(subject, operating(group, "defer", row.target, until_ms=clock.now_ms() + 10**9))
    assert await acked(subject, group, row, at=None) == "acked"
    waiting = crew.starts("bob")
    await crew.looked(1)

    await crew.working.work(operating(group, "defer", row.target, until_ms=0))

    async with asyncio.timeout(WAIT_SECONDS):
        assert [found.target for found in await waiting] == ["orders/1"]


async def test_a_claim_that_does_not_wait_looks_through_all_of_the_log(
    subject: Subject, clock: SimClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_POSITIONS", 2)
    monkeypatch.setattr(working, "CATCH_UP_S", WAIT_SECONDS)
    group = await made(subject)
    await with_events(subject, *(f"foreign/{n}" for n in range(9)), "orders/1")

    assert [row.target for row in await Crew(subject, clock, group).claim("ann", 0)] == ["orders/1"]


async def test_a_claim_that_has_not_looked_through_the_log_says_so(
    subject: Subject, clock: SimClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE_POSITIONS", 4)
    monkeypatch.setattr(working, "CATCH_UP_S", 0)
    group = await made(subject)
    await with_events(subject, *(f"foreign/{n}" for n in range(6)), "orders/1")
    crew = Crew(subject, clock, group)

    first = await crew.working.claim(claiming(group), wait_ms=0)
    second = await crew.working.claim(claiming(group), wait_ms=0)

    assert isinstance(first, ClaimDone)
    assert (rows_of(first.leases), first.due_ms) == ([], 0)
    assert isinstance(second, ClaimDone)
    assert [row.target for row in rows_of(second.leases)] == ["orders/1"]


async def made_again(subject: Subject, group: Group, **changes: Any) -> Group:
    """The group deleted and made anew behind the back of the server that works for it."""
    await asked(subject, DeleteGroup(group.name))
    return await made(subject, group.name, **changes)


async def test_a_group_that_another_server_made_again_gets_the_events_of_its_own_sources(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    await with_events(subject, "orders/1")
    [row] = await crew.claim("ann", 0)
    assert await acked(subject, group, row) == "acked"
    await made_again(subject, group, sources=("invoices/**",), start="now")

    await with_events(subject, "invoices/1", "orders/2")
    found = await crew.claim("ann", 0)

    assert [row.target for row in found] == ["invoices/1"]


async def test_a_group_that_another_server_made_again_is_looked_through_again(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    await with_events(subject, "orders/1")
    [row] = await crew.claim("ann", 0)
    assert await acked(subject, group, row) == "acked"
    assert await crew.claim("ann", 0) == []

    await made_again(subject, group)
    found = await crew.claim("ann", 0)

    assert [row.target for row in found] == ["orders/1"]


async def test_a_group_that_another_server_deleted_is_forgotten(
    subject: Subject, clock: SimClock
) -> None:
    group = await made(subject)
    crew = Crew(subject, clock, group)
    assert await crew.claim("ann", 0) == []

    await asked(subject, DeleteGroup(group.name))

    assert await crew.working.claim(claiming(group), wait_ms=60_000) == GroupMissing()
    assert crew.working.known == {}


async def test_claims_that_wait_at_many_groups_look_again_less_often(
    subject: Subject, clock: SimClock
) -> None:
    """Else idle workers at three hundred groups on PostgreSQL take all of a server's time."""
    reads = SqlGroupReads(cast(Any, subject.store).readers)
    shared = Working(subject.store, reads, clock, Feed(), is_shared=True)
    group = await made(subject)

    def wait_at(groups: int, stack: ExitStack) -> float:
        for number in range(groups):
            known = shared.known.setdefault(f"g{number}", working.Known(group))
            stack.enter_context(known.waiting.join(("ann", None)))
        return shared._look_again_s()

    with ExitStack() as stack:
        few_s, many_s = wait_at(5, stack), wait_at(300, stack)

    assert few_s == working.LOOK_AGAIN_S
    assert 300 / many_s <= working.LOOKS_AGAIN_PER_S
    assert shared._look_again_s() == working.LOOK_AGAIN_S
