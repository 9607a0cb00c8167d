"""Groups in tests of the contract: requests in a line, answers that must be of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from fencepost.protocol.acks import Ack, Failure
from fencepost.protocol.groups import Filter, Group, GroupMade, GroupSettings
from fencepost.protocol.leases import Claim, Claimed, Correlated, LeaseRef, Target
from fencepost.protocol.timing import Backoff
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    ClaimDone,
    ClaimTargets,
    Correlate,
    CorrelationDone,
    GroupRequest,
    MakeGroup,
    Operate,
    ParkEvents,
)
from tests.contract.subject import Outcome, Subject, answered

LEASE_MS = 10_000
SETTINGS = GroupSettings(
    sources=("orders/**",), backoff=Backoff("fixed", 1_000, 60_000, 0.0), retries_max=1
)
KindT = TypeVar("KindT")


def a(kind: type[KindT], outcome: Outcome) -> KindT:
    """The outcome, which must be of a kind."""
    assert isinstance(outcome, kind), outcome
    return outcome


async def ask(subject: Subject, request: GroupRequest) -> Outcome:
    return await answered(subject.ask(subject.store.work, request))


async def made(subject: Subject, name: str = "billing", **changes: Any) -> Group:
    settings = msgspec.structs.replace(SETTINGS, **changes)
    return a(GroupMade, await ask(subject, MakeGroup(name, settings))).group


async def with_events(subject: Subject, *paths: str) -> list[int]:
    """Append one event to each of these streams, in order; their positions."""
    positions = []
    for path in paths:
        await subject.create(path, "application/json")
        outcome = await subject.appended(path, b'{"n":1}', content_type="application/json")
        positions.append(outcome.position)
    return positions


async def correlate(subject: Subject, group: Group, *found: Correlated, until: int) -> Group:
    request = Correlate(group.name, group.watermark, until, found)
    return a(CorrelationDone, await ask(subject, request)).group


async def with_work(subject: Subject, *paths: str, **changes: Any) -> Group:
    """A group whose targets are these streams, each with one event."""
    group = await made(subject, **changes)
    positions = await with_events(subject, *paths)
    found = [Correlated(path, path, at) for path, at in zip(paths, positions, strict=True)]
    return await correlate(subject, group, *found, until=max(positions))


def claiming(group: Group, worker: str = "ann", streams_max: int = 10, **more: Any) -> ClaimTargets:
    return ClaimTargets(group.name, Claim(worker, streams_max, LEASE_MS, **more))


async def claimed(subject: Subject, group: Group, *args: Any, **more: Any) -> list[Target]:
    """The rows that a worker has now."""
    outcome = await ask(subject, claiming(group, *args, **more))
    return rows_of(a(ClaimDone, outcome).leases)


def rows_of(leases: Sequence[Claimed]) -> list[Target]:
    return [lease.row for lease in leases]


def ref(group: Group, row: Target) -> LeaseRef:
    return LeaseRef(group.name, group.id, row.target, row.token)


def acking(group: Group, row: Target, **more: Any) -> AckLeases:
    ack = Ack(row.token, more.pop("at", row.work_to), more.pop("failure", None), **more)
    return AckLeases(group.name, [(ref(group, row), ack)], 0.5)


async def acked(subject: Subject, group: Group, row: Target, **more: Any) -> str:
    """What a worker's ack came to."""
    outcome = await ask(subject, acking(group, row, **more))
    return a(AckDone, outcome).items[0].outcome


async def failed(subject: Subject, group: Group, row: Target, **more: Any) -> str:
    failure = Failure(row.work_to, "boom", **more)
    return await acked(subject, group, row, at=None, failure=failure)


def operating(group: Group, operation: Any, *targets: str, **more: Any) -> Operate:
    return Operate(group.name, operation, targets or None, more.pop("filter", Filter()), **more)


def parking(
    group: Group, *events: tuple[str, int], replay: bool = False, **more: Any
) -> ParkEvents:
    return ParkEvents(group.name, replay, events or None, more.pop("filter", Filter()), **more)
