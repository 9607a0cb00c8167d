"""`fencepost check` on a database finds what it finds in a data folder, and the same by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psycopg
import pytest

from fencepost.protocol.commits import CommittedInSlices
from fencepost.store.postgres.check import check
from fencepost.store.settings import PostgresSettings
from fencepost.testing.postgres import shared_server
from tests.integration.damages import PLANTED, PLANTED_IN_A_DATABASE, in_postgres
from tests.integration.folders import furnish_database
from tests.postgres.large_support import STOP, Database, answered, items, node


@pytest.fixture(scope="module")
def furnished() -> str:
    return asyncio.run(furnish_database())


@pytest.fixture
def settings(furnished: str) -> Iterator[PostgresSettings]:
    """A copy that a test may damage."""
    copy = shared_server().copy_database(furnished)
    yield PostgresSettings(url=copy)
    shared_server().drop_database(copy)


def damage(settings: PostgresSettings, *statements: str) -> None:
    with psycopg.connect(settings.url) as connection:
        for statement in statements:
            done = connection.execute(in_postgres(statement).encode())
            assert done.rowcount, f"there was nothing to damage: {statement}"


def test_a_whole_database_has_no_findings(settings: PostgresSettings) -> None:
    report = check(settings)

    assert report.findings == []
    assert report.counts["streams"] >= 12
    assert report.counts["keys"] == 5
    assert report.counts["producers"] >= 4
    assert report.counts["subscriptions"] == 1


@pytest.mark.parametrize("name", PLANTED | PLANTED_IN_A_DATABASE)
def test_planted_damage_is_found(settings: PostgresSettings, name: str) -> None:
    expected, statements = (PLANTED | PLANTED_IN_A_DATABASE)[name]
    damage(settings, *statements)

    report = check(settings)

    assert expected in report.codes, report.findings


def test_a_cursor_may_name_a_stream_until_the_subscriptions_have_heard_of_its_end(
    settings: PostgresSettings,
) -> None:
    expected, statements = PLANTED["a cursor in a stream that is gone"]
    damage(settings, *statements)
    assert check(settings).codes == {expected: 1}

    damage(settings, "UPDATE followed SET turn = 0")

    assert check(settings).findings == []


async def test_a_large_commit_on_its_way_is_no_finding(postgres_dsn: str) -> None:
    database, settings = Database(postgres_dsn), PostgresSettings(url=postgres_dsn)
    async with node(postgres_dsn) as here:
        await answered(here.append(STOP, b"0"))
        with database.stopping():
            done = here.commit(*items())
            await database.until_stopped()
            await answered(here.append("beside"))
            assert database.rows("SELECT 1 FROM large_commits"), "it has its positions"

            report = await asyncio.to_thread(check, settings)

        assert isinstance(await answered(done), CommittedInSlices)
    assert report.findings == []
    assert check(settings).findings == []
