"""Rows of `told` that servers of an older version leave: the node that leads forgets them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import psycopg
import pytest

from fencepost.protocol.leases import Correlated
from fencepost.store.postgres import maintain
from fencepost.store.postgres.maintain import PostgresUpkeep
from fencepost.store.postgres.store import PostgresStore
from fencepost.testing.clock import SimClock
from tests.contract.grouping import correlate, made, with_events
from tests.contract.subject import PostgresEngine, Subject
from tests.postgres.nodes import rows
from tests.postgres.test_leading import FollowedTo, take_lead

LOOKS = 5


@pytest.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    clock = SimClock()
    made = Subject(PostgresEngine(tmp_path / "data", clock), clock)
    yield made
    await made.close()


async def test_what_older_servers_left_of_told_is_forgotten(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ack for a target, or remove a group, and know nothing of the table."""
    monkeypatch.setattr(maintain, "TOLD_PER_LOOK_MAX", 2)
    store = cast(PostgresStore, subject.store)
    url = store.settings.url
    at = await with_events(subject, *(f"orders/{n % 3}" for n in range(9)))
    kept, gone = [await made(subject, name, targets="computed") for name in ("kept", "gone")]
    for group in (kept, gone):
        told = [
            Correlated(target, "orders/**", position, note="n")
            for target in ("a", "b")
            for position in (at[1], at[4], at[7])
        ]
        await correlate(subject, group, *told, until=at[8])
    with psycopg.connect(url) as older:
        acked = "UPDATE leases SET at_position = %s WHERE group_id = %s AND target = 'a'"
        older.execute(acked, (at[4], kept.id))
        older.execute("DELETE FROM leases WHERE group_id = %s", (gone.id,))
        older.execute("DELETE FROM groups WHERE id = %s", (gone.id,))

    upkeep = PostgresUpkeep(await take_lead(store), subject.clock, FollowedTo())
    forgotten = [await upkeep.forget_told() for _ in range(LOOKS + 2)]

    assert sum(forgotten) == 8
    left = rows(url, "SELECT group_id, target, position FROM told ORDER BY target, position")
    ahead = [("a", at[7]), ("b", at[1]), ("b", at[4]), ("b", at[7])]
    assert left == [(kept.id, *place) for place in ahead]
    assert rows(url, "SELECT group_id, told FROM told_counts") == [(kept.id, 4)]


async def test_a_table_that_was_looked_through_is_looked_at_again_after_a_while(
    subject: Subject,
) -> None:
    store = cast(PostgresStore, subject.store)
    at = await with_events(subject, "orders/0")
    group = await made(subject, targets="computed")
    told = Correlated("a", "orders/**", at[0], note="n")
    upkeep = PostgresUpkeep(await take_lead(store), subject.clock, FollowedTo())
    assert await upkeep.forget_told() == 0
    await correlate(subject, group, told, until=at[0])
    with psycopg.connect(store.settings.url) as older:
        older.execute("UPDATE leases SET at_position = work_to")

    assert await upkeep.forget_told() == 0
    subject.clock.advance(store.settings.retention_interval_ms)
    assert await upkeep.forget_told() == 1
