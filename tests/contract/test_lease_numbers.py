"""What a store promises about the numbers of leases: no number comes back with a row that does.

The row of a target may go and be made again: that of a message when it is parked and replayed, that
of a stream which retires. A worker that slept through all of it still has its token.
"""

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from fencepost.protocol.acks import Ack
from fencepost.protocol.appends import Conditions
from fencepost.protocol.books import BooksRequest
from fencepost.protocol.commits import Commit, CommitLeaseLost, Committed
from fencepost.protocol.groups import Group
from fencepost.protocol.leases import Correlated, LeaseLost, LeaseRef
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    DeleteGroup,
    RenewDone,
    RenewLeases,
)
from fencepost.testing.clock import SimClock
from tests.contract.conditional import JSON, ask_commit, item
from tests.contract.grouping import (
    LEASE_MS,
    a,
    acked,
    ask,
    claimed,
    correlate,
    failed,
    made,
    operating,
    parking,
    ref,
    with_events,
    with_work,
)
from tests.contract.subject import Subject, answered, append

PATH = "orders/1"
Story = Callable[[Subject, SimClock], Awaitable[tuple[Group, LeaseRef]]]


async def message(subject: Subject) -> Group:
    """A group whose one target is a message."""
    group = await made(subject, targets="message")
    [position] = await with_events(subject, PATH)
    found = Correlated(f"{PATH}@{position}", PATH, position)
    return await correlate(subject, group, found, until=position)


async def sleeper(subject: Subject, clock: SimClock, group: Group) -> LeaseRef:
    """The lease of a worker that sleeps from now on, and past its end."""
    [row] = await claimed(subject, group, "sleeper")
    clock.advance(LEASE_MS)
    return ref(group, row)


async def parked_by_a_worker_and_replayed(
    subject: Subject, clock: SimClock
) -> tuple[Group, LeaseRef]:
    group = await message(subject)
    old = await sleeper(subject, clock, group)
    [row] = await claimed(subject, group)
    assert await failed(subject, group, row, park=True) == "parked"
    await ask(subject, parking(group, replay=True))
    return group, old


async def parked_by_an_operator_and_replayed(
    subject: Subject, clock: SimClock
) -> tuple[Group, LeaseRef]:
    group = await message(subject)
    old = await sleeper(subject, clock, group)
    await ask(subject, parking(group, (old.target, group.watermark)))
    await ask(subject, parking(group, replay=True))
    return group, old


async def skipped_and_correlated_again(subject: Subject, clock: SimClock) -> tuple[Group, LeaseRef]:
    """No event is correlated twice; this is what a row of the same name would do."""
    group = await message(subject)
    old = await sleeper(subject, clock, group)
    await ask(subject, operating(group, "skip", old.target, at=group.watermark))
    [position] = await with_events(subject, PATH)
    found = Correlated(old.target, PATH, position)
    return await correlate(subject, group, found, until=position), old


async def retired_and_begun_again(subject: Subject, clock: SimClock) -> tuple[Group, LeaseRef]:
    group = await with_work(subject, PATH)
    old = await sleeper(subject, clock, group)
    [row] = await claimed(subject, group)
    await acked(subject, group, row)
    await ask_commit(subject, item(PATH, books=BooksRequest("close")))
    await ask_commit(subject, item(PATH, books=BooksRequest(truncate_before="now")))
    opened = item(
        PATH,
        b'{"n":2}',
        content_type=JSON,
        books=BooksRequest("open"),
        if_match=(await subject.info(PATH)).tail,
    )
    done = a(Committed, await ask_commit(subject, opened))
    position = done.outcomes[0].position
    return await correlate(subject, group, Correlated(PATH, PATH, position), until=position), old


async def deleted_and_made_again(subject: Subject, clock: SimClock) -> tuple[Group, LeaseRef]:
    group = await with_work(subject, PATH)
    old = await sleeper(subject, clock, group)
    await ask(subject, DeleteGroup(group.name))
    return await with_work(subject, PATH), old


STORIES: list[Story] = [
    parked_by_a_worker_and_replayed,
    parked_by_an_operator_and_replayed,
    skipped_and_correlated_again,
    retired_and_begun_again,
    deleted_and_made_again,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_a_worker_of_a_row_that_is_gone_fits_no_row_that_is_made_again(
    subject: Subject, clock: SimClock, story: Story
) -> None:
    group, old = await story(subject, clock)
    await subject.create("out", JSON)
    await subject.reopen()
    [new] = await claimed(subject, group, "awake")
    assert new.target == old.target

    fenced = append("out", b"1", JSON)
    fenced = msgspec.structs.replace(fenced, conditions=Conditions(lease=old))
    late = await answered(subject.ask(subject.store.append, fenced))
    lease = (old, Ack(old.number, new.work_to))
    request = Commit((item("out", b"1", content_type=JSON),), None, b"m" * 16, leases=[lease])
    committed = await answered(subject.ask(subject.store.commit, request))
    renewed = a(RenewDone, await ask(subject, RenewLeases(group.name, [old], LEASE_MS)))
    acks = a(AckDone, await ask(subject, AckLeases(group.name, [lease], 0.5)))

    assert isinstance(late, LeaseLost)
    assert committed == CommitLeaseLost(0, LeaseLost())
    assert renewed.until_ms == [None]
    assert [item.outcome for item in acks.items] == ["lost"]
    assert await subject.messages("out") == []
    assert await acked(subject, group, new) == "acked", "the worker that has the lease goes on"


async def test_the_numbers_of_a_group_are_kept(subject: Subject, clock: SimClock) -> None:
    group = await message(subject)
    for _ in range(3):
        await sleeper(subject, clock, group)
    [row] = await claimed(subject, group)
    await acked(subject, group, row)
    await subject.reopen()

    [position] = await with_events(subject, PATH)
    found = Correlated(f"{PATH}@{position}", PATH, position)
    group = await correlate(subject, group, found, until=position)
    [row] = await claimed(subject, group)

    assert group.token_floor == 4
    assert row.token == 5
