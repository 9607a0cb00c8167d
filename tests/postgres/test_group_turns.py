"""Turns with requests about groups: what is loaded in which round trip."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from fencepost.protocol.acks import Ack
from fencepost.store.group_contract import AckDone, AckLeases, ClaimDone
from fencepost.store.postgres.driver.pipeline import Pipeline
from fencepost.store.postgres.driver.statements import Parcel
from fencepost.testing.clock import SimClock
from tests.contract.grouping import (
    a,
    acked,
    ask,
    claimed,
    claiming,
    operating,
    ref,
    rows_of,
    with_work,
)
from tests.contract.subject import PostgresEngine, Subject, answered

TURN = 2
"""Round trips of a turn that needs nothing else: it is waited for, it is written and ended."""


@pytest.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    clock = SimClock()
    made = Subject(PostgresEngine(tmp_path / "data", clock), clock)
    yield made
    await made.close()


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[Pipeline]:
    """The connection of each round trip."""
    counted: list[Pipeline] = []
    exchange = Pipeline.exchange

    async def counting(pipeline: Pipeline, stretch: Iterable[Parcel]) -> Any:
        counted.append(pipeline)
        return await exchange(pipeline, stretch)

    monkeypatch.setattr(Pipeline, "exchange", counting)
    return counted


async def test_rows_of_waiting_requests_come_with_the_turn(
    subject: Subject, trips: list[Pipeline]
) -> None:
    group = await with_work(subject, "orders/1", "orders/2", "orders/3")
    await claimed(subject, group, streams_max=1)
    trips.clear()

    [row] = await claimed(subject, group, streams_max=1)
    assert trips.count(trips[0]) == TURN  # another connection tells other nodes
    trips.clear()
    again = AckLeases(group.name, [(ref(group, row), Ack(row.token, row.work_to))], 0.5)
    done = a(AckDone, await ask(subject, again._replace(claim=claiming(group))))

    assert [item.outcome for item in done.items] == ["acked"]
    assert done.claimed is not None
    assert len(done.claimed.leases) == 1
    assert trips.count(trips[0]) == TURN  # another connection tells other nodes


async def test_requests_that_come_while_the_turn_is_waited_for_have_their_rows(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = await with_work(subject, *(f"orders/{n}" for n in range(8)))
    [row] = await claimed(subject, group, streams_max=1)
    late: list[Any] = []
    exchange = Pipeline.exchange

    async def with_more(pipeline: Pipeline, stretch: Iterable[Parcel]) -> Any:
        results = await exchange(pipeline, stretch)
        if not late:
            more = [
                claiming(group, streams_max=4),
                operating(group, "prioritize", "orders/7", priority=9),
                claiming(group, streams_max=1),
            ]
            late.extend(subject.ask(subject.store.work, request) for request in more)
        return results

    monkeypatch.setattr(Pipeline, "exchange", with_more)
    first = await claimed(subject, group, streams_max=1)
    four, _, last = [await answered(one) for one in late]

    taken = [*first, *rows_of(four.leases), *rows_of(last.leases), row]
    assert len({one.target for one in taken}) == len(taken) == 7
    assert await acked(subject, group, row) == "acked"


async def test_the_next_end_is_told_when_all_that_has_one_was_not_loaded(
    subject: Subject,
) -> None:
    group = await with_work(subject, *(f"orders/{n}" for n in range(4)))
    rows = await claimed(subject, group)

    done = a(ClaimDone, await ask(subject, claiming(group, "bob", streams_max=1)))

    assert not done.leases
    assert done.due_ms == rows[0].lease_until_ms
