"""Groups through the client, sync and async: typed calls, fenced effects, the worker's loop."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import fencepost
from fencepost import CommitAppend, EventFailure, Lease, LeaseAck, PermanentError, ReplayedEvent
from tests.engines import engine as engine
from tests.serving import ServerProcess

_names = itertools.count()
NO_WAIT = {"kind": "fixed", "base_ms": 0, "cap_ms": 1_000, "jitter": 0.0}


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[fencepost.Client]:
    with fencepost.connect(server_process.url) as found:
        yield found


@pytest.fixture
def group(client: fencepost.Client) -> fencepost.Group:
    name = f"crew-{next(_names)}"
    found = client.group(name)
    found.make([f"{name}/**"], backoff=NO_WAIT, retries_max=1, on_exhausted="park")
    return found


def fill(client: fencepost.Client, group: fencepost.Group, streams: int, each: int = 1) -> None:
    for n in range(streams * each):
        path = f"{group.name}/{n % streams}"
        client.stream(path).append({"n": n}, auto_create=True)


def test_a_group_is_made_shown_listed_and_deleted(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    info = group.info()

    assert (info.group, info.on_exhausted, info.correlated) == (group.name, "park", -1)
    assert [found.group for found in client.groups(match=group.name)] == [group.name]
    with pytest.raises(fencepost.GroupExistsError):
        group.make(["other"])
    group.delete()
    with pytest.raises(fencepost.GroupNotFoundError):
        group.info()


def test_a_lease_is_renewed_acked_and_then_lost(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1, each=2)

    [lease] = group.claim("ann").leases
    [renewed] = group.renew([lease.token])
    acked = group.ack(LeaseAck(token=lease.token, at=lease.read_to))
    again = group.ack(LeaseAck(token=lease.token, at=lease.read_to))

    assert [event.data for event in lease.events] == [{"n": 0}, {"n": 1}]
    assert renewed.outcome == "renewed"
    assert [item.outcome for item in acked.items] == ["acked"]
    assert [item.outcome for item in again.items] == ["lost"]
    assert not again.uncertain


def test_effects_are_stored_only_while_the_lease_is_current(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1)
    [lease] = group.claim("ann").leases
    out = f"{group.name}-out"
    effect = CommitAppend(stream=out, messages=[1], auto_create=True)

    client.stream(out).append(0, auto_create=True, lease=lease.token)
    client.commit([effect], leases=[(lease.token, lease.read_to)])

    with pytest.raises(fencepost.LeaseLostError):
        client.commit([effect], leases=[(lease.token, lease.read_to)])
    with pytest.raises(fencepost.LeaseLostError):
        client.stream(out).append(2, lease=lease.token)
    assert list(client.stream(out).read()) == [0, 1]


def test_parked_events_are_listed_and_replayed(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1)
    [lease] = group.claim("ann").leases
    failure = EventFailure(position=lease.events[0].position, error="boom", park=True)
    group.ack(LeaseAck(token=lease.token, failure=failure))

    [parked] = group.parked()
    assert (parked.error, group.replay(filter={})) == ("boom", 1)
    [again] = group.claim("ann").leases
    assert [event.replayed for event in again.events] == [True]
    done = ReplayedEvent(position=again.events[0].position)
    group.ack(LeaseAck(token=again.token, replayed=[done]))
    assert list(group.parked()) == []


def test_operators_change_targets_by_name_and_by_filter(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 3)
    leases = group.claim("ann").leases

    assert group.prioritize(4, filter={}) == 3
    assert group.reset([leases[0].target]) == 1
    assert [worker.leases for worker in group.workers()] == [2]
    assert group.skip(filter={"target": f"{group.name}/*"}, at=leases[0].until) >= 0
    assert {target.priority for target in group.streams()} == {4}
    assert group.stats()["targets"] == 3
    assert group.unblock(filter={"blocked": True}) == 0


def test_a_worker_handles_every_event_in_order_and_retries_what_fails(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 5, each=4)
    handled: dict[str, list[int]] = {}
    failures = itertools.count()
    guard = threading.Lock()

    def handle(event: fencepost.GroupEvent, lease: Lease) -> None:
        if event.data["n"] == 7 and next(failures) == 0:
            raise RuntimeError("the first time")
        if event.data["n"] == 11:
            raise PermanentError("never")
        with guard:
            handled.setdefault(lease.target, []).append(event.data["n"])

    group.work(handle, worker="ann", streams=3, until_idle=True)

    assert sorted(n for ns in handled.values() for n in ns) == sorted({*range(20)} - {11})
    assert all(ns == sorted(ns) for ns in handled.values())
    assert [event.error for event in group.parked()] == ["PermanentError: never"]


async def test_async_workers_share_the_targets(server_process: ServerProcess) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        group = client.group(f"crew-{next(_names)}")
        await group.make([f"{group.name}/**"])
        for n in range(12):
            await client.stream(f"{group.name}/{n % 6}").append(n, auto_create=True)
        handled: list[Any] = []

        async def handle(event: fencepost.GroupEvent, _lease: Lease) -> None:
            await asyncio.sleep(0)
            handled.append(event.data)

        async with asyncio.TaskGroup() as workers:
            for name in ("ann", "bob", "cid"):
                workers.create_task(group.work(handle, worker=name, streams=2, until_idle=True))

        assert sorted(handled) == list(range(12))
