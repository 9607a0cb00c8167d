"""Large commits on PostgreSQL in rare moments: who shares a turn with one, and nodes that stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from fencepost.protocol.appends import Appended
from fencepost.protocol.commits import CommittedInSlices
from fencepost.store.contract import Failed
from fencepost.store.postgres import turns
from fencepost.store.postgres.check import check
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.large import commits as large
from fencepost.store.postgres.large.locks import LARGE_COMMITS, LargeSession
from fencepost.store.postgres.requests import Request
from fencepost.store.settings import PostgresSettings
from tests.postgres.large_support import (
    PATHS,
    STOP,
    WAIT_S,
    Database,
    Node,
    answered,
    items,
    node,
)


@pytest.fixture
def database(postgres_dsn: str) -> Database:
    return Database(postgres_dsn)


@pytest.fixture
async def here(postgres_dsn: str) -> AsyncIterator[Node]:
    async with node(postgres_dsn) as made:
        await answered(made.append(STOP, b"0"))
        yield made


@pytest.fixture
async def there(postgres_dsn: str) -> AsyncIterator[Node]:
    async with node(postgres_dsn) as made:
        yield made


async def test_what_shares_the_turn_of_a_large_commits_positions_is_told_again_when_it_can_be_read(
    here: Node, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = here.store.turns.submit
    behind: list[asyncio.Future[Any]] = []
    told: list[str] = []

    def submitting(request: Request) -> None:
        submit(request)
        if isinstance(request.work, partial) and request.work.func is large._begin:
            behind.append(here.append("other"))

    monkeypatch.setattr(here.store.turns, "submit", submitting)
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        [other] = behind
        appended = await answered(other)
        assert isinstance(appended, Appended)
        assert await here.logs.head() < appended.position, "it is behind the large commit"
        here.store.listen(lambda changes: told.extend(change.info.path for change in changes))

    assert isinstance(await answered(done), CommittedInSlices)
    await database.until(lambda: "other" in told, "readers of the log are told that it is there")


async def test_a_large_commit_is_undone_when_an_older_server_wrote_to_one_of_its_streams_first(
    here: Node, there: Node, database: Database, postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the middle of an upgrade: what it wrote comes before the commit in the stream, and
    behind it in the log."""

    async def knows_of_no_holds(_connection: Any, _large: int, batch: list[Request]) -> Any:
        return batch

    monkeypatch.setattr(there.store.turns, "_hold_back", knows_of_no_holds)
    monkeypatch.setattr(turns, "lists_all_changes", lambda _group: False)
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        assert isinstance(await answered(there.append("other")), Appended)
        assert isinstance(await answered(there.append(PATHS[-1], b"0")), Appended)

    assert await answered(done) == Failed(full=False)
    assert await here.content(PATHS[-1]) == b"0"
    assert check(PostgresSettings(url=postgres_dsn)).findings == []
    assert isinstance(await answered(here.commit(*items(2))), CommittedInSlices)


async def test_a_large_commit_whose_node_stopped_while_it_was_sending_is_ended(
    postgres_dsn: str,
) -> None:
    settings = PostgresSettings(url=postgres_dsn)
    session = await LargeSession.connect(settings)
    watching = await WritingConnection.connect(settings)
    try:
        await session.live(600_000)
        await session.open()
        # The database has a part of a stretch, and waits for the rest of it without a limit.
        raw = session.raw.pgconn
        raw.enter_pipeline_mode()
        raw.send_query_params(b"SELECT 1", [])
        raw.flush()

        ended: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while not ended:
                rows = await watching.fetch("end_stuck_turns", (1, LARGE_COMMITS))
                ended = [pid for pid, _ in rows]
        assert ended == [raw.backend_pid]
    finally:
        await watching.close()
        await session.close()
