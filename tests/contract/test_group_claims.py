"""Whom a claim may never give what: chance against a model, then fairness and waits one by one.

FENCEPOST_SEED replays a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from fencepost.protocol.acks import Ack, Failure
from fencepost.protocol.appends import Append, Appended, Conditions
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, LeaseLost, Target
from fencepost.store.group_contract import AckDone, AckLeases, Changed, ClaimDone
from fencepost.testing.clock import SimClock
from tests.contract.grouping import (
    LEASE_MS,
    a,
    acked,
    ask,
    claimed,
    claiming,
    correlate,
    failed,
    made,
    operating,
    ref,
    rows_of,
    with_events,
    with_work,
)
from tests.contract.subject import Subject, answered, append

STEPS = 150
Ending = Callable[[Subject, Group, Target], Awaitable[str]]
LANES = ("fast", "slow")


class Held:
    """What the model knows of a target."""

    def __init__(self) -> None:
        self.at = -1
        self.token = 0
        self.lease: Target | None = None
        """The lease that no other worker took, expired or not."""
        self.blocked = False
        self.deferred_until_ms = 0


class Walk:
    """Workers and an operator, who do what chance says to one group."""

    def __init__(self, subject: Subject, group: Group, chance: random.Random) -> None:
        self.subject = subject
        self.group = group
        self.chance = chance
        self.model: dict[str, Held] = {}
        self.old: list[Target] = []
        """Every lease that was ever given, current or not."""

    @property
    def now_ms(self) -> int:
        return self.subject.clock.now_ms()

    async def write(self) -> None:
        path = f"orders/{self.chance.randrange(8)}"
        [position] = await with_events(self.subject, path)
        lane, priority = self.chance.choice(LANES), self.chance.randrange(3)
        lane = lane if path not in self.model else None  # type: ignore[assignment]
        self.model.setdefault(path, Held())
        found = Correlated(path, path, position, lane, priority)
        self.group = await correlate(self.subject, self.group, found, until=position)

    async def claim(self) -> None:
        """Two workers claim in one commit."""
        lane = self.chance.choice((None, *LANES))
        asked = [claiming(self.group, name, self.chance.randint(1, 5), lane=lane) for name in "ab"]
        answers = [self.subject.ask(self.subject.store.work, request) for request in asked]
        outcomes = await asyncio.gather(*map(answered, answers))
        rows = [row for outcome in outcomes for row in rows_of(a(ClaimDone, outcome).leases)]
        assert len({row.target for row in rows}) == len(rows), "two workers have one target"
        for row in rows:
            held = self.model[row.target]
            assert not held.blocked
            assert held.deferred_until_ms <= self.now_ms
            assert held.lease is None or held.lease.lease_until_ms <= self.now_ms
            assert row.at == held.at
            assert row.token > held.token
            assert lane in (None, row.lane)
            held.token, held.lease, held.deferred_until_ms = row.token, row, 0
            self.old.append(row)

    async def end(self) -> None:
        """A worker ends a lease, with which it may be too late."""
        if not self.old:
            return
        row = self.chance.choice(self.old)
        held = self.model[row.target]
        is_current = held.lease is not None and held.lease.token == row.token
        failure = Failure(row.work_to, "boom", permanent=self.chance.random() < 0.3)
        fails = self.chance.random() < 0.4
        ack = Ack(row.token, None if fails else row.work_to, failure if fails else None)
        outcome = await ask(
            self.subject, AckLeases(self.group.name, [(ref(self.group, row), ack)], 0.5)
        )
        [item] = a(AckDone, outcome).items
        assert (item.outcome != "lost") == is_current
        if not is_current:
            return
        held.lease = None
        assert item.at is not None
        assert item.at >= held.at, "at went back"
        held.at = item.at
        held.blocked = item.outcome == "blocked"
        if held.blocked:
            held.token += 1
        if item.outcome == "failed":
            held.deferred_until_ms = max(held.deferred_until_ms, self.now_ms + 1_000)

    async def operate(self) -> None:
        if not self.model:
            return
        target = self.chance.choice(sorted(self.model))
        held = self.model[target]
        if self.chance.random() < 0.5:
            until_ms = self.now_ms + self.chance.randrange(3_000)
            await ask(self.subject, operating(self.group, "defer", target, until_ms=until_ms))
            held.deferred_until_ms = until_ms
            return
        changed = await ask(self.subject, operating(self.group, "unblock", target))
        assert (a(Changed, changed).targets == [target]) == held.blocked
        if held.blocked:
            held.blocked, held.deferred_until_ms, held.token = False, 0, held.token + 1

    async def step(self) -> None:
        kind = self.chance.random()
        if kind < 0.25:
            await self.write()
        elif kind < 0.5:
            await self.claim()
        elif kind < 0.8:
            await self.end()
        elif kind < 0.9:
            await self.operate()
        elif kind < 0.99:
            self.subject.clock.advance(self.chance.randrange(LEASE_MS))
        else:
            await self.subject.reopen()


async def test_no_claim_gets_what_is_held_blocked_or_deferred_and_at_never_goes_back(
    subject: Subject,
) -> None:
    seed = int(os.environ.get("FENCEPOST_SEED", str(random.randrange(2**32))))
    sys.stderr.write(f"FENCEPOST_SEED={seed}\n")
    group = await made(subject, lost_max=1_000)
    walk = Walk(subject, group, random.Random(seed))

    for _ in range(STEPS):
        await walk.step()


@pytest.mark.parametrize("streams_max", [1, 3, 10])
async def test_urgent_work_that_never_ends_starves_no_other_target(
    subject: Subject, streams_max: int
) -> None:
    group = await with_work(subject, "orders/patient")
    busy = [f"orders/busy-{n}" for n in range(12)]
    positions = await with_events(subject, *busy)
    found = [
        Correlated(path, path, at, priority=9) for path, at in zip(busy, positions, strict=True)
    ]
    group = await correlate(subject, group, *found, until=positions[-1])

    taken: list[str] = []
    for cycle in range(4):
        rows = await claimed(subject, group, streams_max=streams_max, cycle=cycle)
        taken += [row.target for row in rows]
        # Whatever was urgent has new work before the next claim.
        for row in rows:
            await acked(subject, group, row)
        again = [row.target for row in rows if row.target != "orders/patient"]
        if again:
            positions = await with_events(subject, *again)
            found = [
                Correlated(p, p, at, priority=9) for p, at in zip(again, positions, strict=True)
            ]
            group = await correlate(subject, group, *found, until=positions[-1])

    assert "orders/patient" in taken


async def test_a_deferred_target_is_claimed_at_its_time_and_not_before(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    until_ms = clock.now_ms() + 5_000
    await ask(subject, operating(group, "defer", "orders/1", until_ms=until_ms))

    clock.advance(4_999)
    early = a(ClaimDone, await ask(subject, claiming(group)))
    await subject.reopen()
    clock.advance(1)
    rows = await claimed(subject, group)

    assert (early.leases, early.due_ms) == ([], until_ms)
    assert [row.target for row in rows] == ["orders/1"]


@pytest.mark.parametrize("ends", [acked, failed])
async def test_a_wait_that_an_operator_sets_outlasts_the_lease_that_runs(
    subject: Subject, clock: SimClock, ends: Ending
) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)
    await ask(subject, operating(group, "defer", "orders/1", until_ms=clock.now_ms() + 5_000))

    await ends(subject, group, row)
    [position] = await with_events(subject, "orders/1")
    found = Correlated("orders/1", "orders/1", position)
    group = await correlate(subject, group, found, until=position)
    clock.advance(4_999)

    assert await claimed(subject, group) == []
    clock.advance(1)
    assert len(await claimed(subject, group)) == 1


async def test_a_failure_counts_the_progress_before_it_and_waits_as_it_asks_up_to_the_cap(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    [first] = await claimed(subject, group, streams_max=1)
    [position] = await with_events(subject, "orders/1")
    group = await correlate(
        subject, group, Correlated("orders/1", "orders/1", position), until=position
    )

    failure = Failure(position, "boom", delay_ms=10**9)
    word = await acked(subject, group, first, at=first.work_to, failure=failure)
    waiting = a(ClaimDone, await ask(subject, claiming(group)))

    assert word == "failed"
    assert waiting.due_ms == clock.now_ms() + 60_000
    clock.advance(60_000)
    [row] = await claimed(subject, group)
    assert (row.at, row.retry, row.failed) == (first.work_to, 1, position)


async def test_an_append_under_a_lease_is_stored_until_another_worker_has_the_target(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    await subject.create("out", "application/json")
    [old] = await claimed(subject, group)

    def fenced(row: Target) -> Append:
        made = append("out", b"1", "application/json")
        return msgspec.structs.replace(made, conditions=Conditions(lease=ref(group, row)))

    clock.advance(LEASE_MS)
    late = await answered(subject.ask(subject.store.append, fenced(old)))
    [new] = await claimed(subject, group, "bob")
    lost = await answered(subject.ask(subject.store.append, fenced(old)))
    current = await answered(subject.ask(subject.store.append, fenced(new)))

    assert isinstance(late, Appended), "time alone ends no lease"
    assert isinstance(lost, LeaseLost)
    assert isinstance(current, Appended)
    assert await subject.messages("out") == [1, 1]


async def test_a_blocked_target_is_not_claimed_whatever_happens_but_unblock(
    subject: Subject, clock: SimClock
) -> None:
    group = await with_work(subject, "orders/1")
    [row] = await claimed(subject, group)
    assert await failed(subject, group, row, permanent=True) == "blocked"

    [position] = await with_events(subject, "orders/1")
    found = Correlated("orders/1", "orders/1", position, priority=9)
    group = await correlate(subject, group, found, until=position)
    await ask(subject, operating(group, "prioritize", "orders/1", priority=5))
    await ask(subject, operating(group, "defer", "orders/1", until_ms=0))
    clock.advance(10**7)

    assert await claimed(subject, group) == []
    await ask(subject, operating(group, "unblock", "orders/1"))
    assert len(await claimed(subject, group)) == 1
