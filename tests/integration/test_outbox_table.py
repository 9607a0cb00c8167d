"""Sends in the caller's own transaction: every kind of connection, every state of a known id."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from fencepost.client.errors import InvalidArgumentError, UnencodableError
from fencepost.outbox import (
    IdUsedError,
    NoTransactionError,
    Outbox,
    TableOutbox,
    UnknownConnectionError,
    dm,
    queue,
    topic,
)
from fencepost.outbox.migrations import alembic_migration, django_migration
from fencepost.outbox.states import STATUSES
from tests.integration.outbox_support import (
    POSTGRES,
    SQLITE,
    connect,
    database_of,
    dialect_of,
    execute,
    is_postgres,
    select,
    sent,
)

PAID = "insert into orders (id, paid) values (7, 1)"
BOTH = (1, 1)
NEITHER = (0, 0)


@pytest.fixture(params=[SQLITE, POSTGRES])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with database_of(request.param, tmp_path) as address:
        yield address


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[str]:
    with database_of(POSTGRES, tmp_path) as address:
        yield address


@pytest.fixture(name="outbox")
def _outbox() -> TableOutbox:
    return Outbox.table("shop")


def counts(address: str) -> tuple[int, int]:
    """Orders and sends that are committed."""
    orders = select(address, "select count(*) from orders")[0][0]
    return orders, len(sent(address))


def alchemy(address: str) -> str:
    if is_postgres(address):
        return address.replace("postgresql://", "postgresql+psycopg://")
    return f"sqlite:///{address}"


def test_a_send_is_committed_with_the_callers_change_or_not_at_all(
    database: str, outbox: TableOutbox
) -> None:
    """With the plain drivers, whatever rows their connections are set to return."""
    connection = connect(database)
    connection.row_factory = dict_row if is_postgres(database) else sqlite3.Row

    for message_id in ("lost", "paid-7"):
        connection.execute(PAID)
        outbox.send(connection, topic("orders"), {"paid": 7}, id=message_id)
        assert counts(database) == NEITHER
        connection.rollback() if message_id == "lost" else connection.commit()
    connection.close()

    assert counts(database) == BOTH
    assert sent(database) == ["paid-7"]


def test_sqlalchemy_connections_and_sessions_carry_sends(
    database: str, outbox: TableOutbox
) -> None:
    engine = sqlalchemy.create_engine(alchemy(database))
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(PAID))
        outbox.send(connection, topic("orders"), {"paid": 7}, id="paid-7")
        assert outbox.send(connection, topic("orders"), {"paid": 7}, id="paid-7").duplicate
        connection.rollback()
    with Session(engine) as session, session.begin():
        session.execute(sqlalchemy.text(PAID))
        outbox.send(session, topic("orders"), {"paid": 7}, id="in-session")
    engine.dispose()

    assert counts(database) == BOTH
    assert sent(database) == ["in-session"]


async def test_async_connections_carry_sends(postgres: str, outbox: TableOutbox) -> None:
    async with await psycopg.AsyncConnection.connect(postgres) as connection:
        await outbox.send(connection, topic("orders"), 1, id="psycopg")
    plain = await asyncpg.connect(postgres)
    async with plain.transaction():
        await outbox.send(plain, topic("orders"), 2, id="asyncpg")
        assert (await outbox.send(plain, topic("orders"), 2, id="asyncpg")).duplicate
    await plain.close()
    engine = create_async_engine(alchemy(postgres))
    async with engine.begin() as alchemist:
        await outbox.send(alchemist, topic("orders"), 3, id="sqlalchemy")
    async with AsyncSession(engine) as session, session.begin():
        await outbox.send(session, topic("orders"), 4, id="session")
    await engine.dispose()

    assert sent(postgres) == ["psycopg", "asyncpg", "sqlalchemy", "session"]


async def test_async_sends_are_rolled_back_with_the_callers_change(
    postgres: str, outbox: TableOutbox
) -> None:
    async with await psycopg.AsyncConnection.connect(postgres) as connection:
        await connection.execute(PAID)
        await outbox.send(connection, topic("orders"), 1)
        await connection.rollback()
    plain = await asyncpg.connect(postgres)
    transaction = plain.transaction()
    await transaction.start()
    await outbox.send(plain, topic("orders"), 2)
    await transaction.rollback()
    await plain.close()

    assert counts(postgres) == NEITHER


DJANGO = """
import sys
import django
from django.conf import settings
from fencepost.outbox import NoTransactionError, Outbox, topic
from psycopg.conninfo import conninfo_to_dict

address = sys.argv[1]
if address.startswith("postgresql"):
    parts = conninfo_to_dict(address)
    options = {"NAME": parts["dbname"], "USER": parts["user"], "HOST": parts["host"]}
    options |= {"PORT": parts["port"], "ENGINE": "django.db.backends.postgresql"}
else:
    options = {"NAME": address, "ENGINE": "django.db.backends.sqlite3"}
settings.configure(DATABASES={"default": options})
django.setup()
from django.db import connection, transaction

outbox = Outbox.table("shop")
with transaction.atomic():
    connection.cursor().execute("insert into orders (id, paid) values (7, 1)")
    outbox.send(connection, topic("orders"), {"paid": 7}, id="paid-7")
    assert outbox.send(connection, topic("orders"), {"paid": 7}, id="paid-7").duplicate
try:
    with transaction.atomic():
        outbox.send(connection, topic("orders"), 8, id="paid-8")
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
try:
    outbox.send(connection, topic("orders"), 9, id="paid-9")
except NoTransactionError:
    print("refused")
"""


def test_django_connections_carry_sends(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, database], capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == ("refused\n", "")
    assert counts(database) == BOTH
    assert sent(database) == ["paid-7"]


async def test_a_connection_that_commits_by_itself_is_refused(
    database: str, postgres: str, outbox: TableOutbox
) -> None:
    alone = sqlite3.connect(":memory:", isolation_level=None)
    engine = sqlalchemy.create_engine(alchemy(database), isolation_level="AUTOCOMMIT")
    plain = await asyncpg.connect(postgres)
    with psycopg.connect(postgres, autocommit=True) as psycopg_alone, engine.connect() as alchemist:
        for connection in (alone, psycopg_alone, alchemist, plain):
            with pytest.raises(NoTransactionError, match="begin a transaction first"):
                outbox.send(connection, topic("orders"), 1)
        with psycopg_alone.transaction():
            outbox.send(psycopg_alone, topic("orders"), 1, id="inside")
    engine.dispose()
    await plain.close()
    alone.close()

    assert sent(postgres) == ["inside"]
    assert database == postgres or sent(database) == []


@pytest.mark.parametrize("connection", [None, 7, "shop.db"], ids=repr)
def test_what_is_no_connection_is_refused(connection: Any, outbox: TableOutbox) -> None:
    with pytest.raises(UnknownConnectionError, match="no connection that the outbox knows"):
        outbox.send(connection, topic("orders"), 1)


@pytest.mark.parametrize("status", STATUSES)
def test_a_known_id_is_answered_by_the_state_of_its_row(
    database: str, outbox: TableOutbox, status: str
) -> None:
    """Scenario 5: every cell of the lookup table."""
    connection = connect(database)
    outbox.send(connection, queue("jobs"), "resize", id="job-1")
    connection.commit()
    extra = ", broker_message_id = 'm1'" if status == "done" else ", last_error = 'gone'"
    execute(database, f"update fencepost_outbox set status = '{status}'{extra}")

    if status in ("pending", "inflight", "done"):
        again = outbox.send(connection, queue("jobs"), "resize", id="job-1")
        assert again.duplicate
        assert again.broker_message_id == ("m1" if status == "done" else None)
    else:
        with pytest.raises(IdUsedError) as same:
            outbox.send(connection, queue("jobs"), "resize", id="job-1")
        assert same.value.conflict == f"outbox_{status}_fingerprint_match"
        assert same.value.reason == ("gone" if status == "dead" else None)
    with pytest.raises(IdUsedError) as other:
        outbox.send(connection, queue("jobs"), "crop", id="job-1")
    connection.commit()
    connection.close()

    assert other.value.conflict == f"outbox_{status}_fingerprint_mismatch"
    assert len(other.value.fingerprint_prefix) == 16
    assert sent(database) == ["job-1"]


def test_the_same_id_in_two_meshes_is_two_sends(database: str) -> None:
    """Scenario 19."""
    connection = connect(database)
    for mesh in ("shop", "depot"):
        assert not Outbox.table(mesh).send(connection, topic("a"), 1, id="one").duplicate
    connection.commit()
    connection.close()

    found = select(database, "select mesh, lane from fencepost_outbox order by id")
    assert found == [("shop", "shop/topic:a/1"), ("depot", "depot/topic:a/1")]


def test_fifty_transactions_with_one_id_write_one_row(database: str, outbox: TableOutbox) -> None:
    """Scenario 5: those that find the id taken wait until it is decided who has it."""
    outcomes: list[bool] = []
    ready = threading.Barrier(50)

    def pay(number: int) -> None:
        connection = connect(database)
        ready.wait()
        accepted = outbox.send(connection, topic("orders"), {"paid": 7}, id="paid-7")
        # Every third one changes its mind; the id then goes to another.
        if number % 3:
            connection.commit()
            outcomes.append(accepted.duplicate)
        else:
            connection.rollback()
        connection.close()

    threads = [threading.Thread(target=pay, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(outcomes)[:2] == [False, True]
    assert sent(database) == ["paid-7"]


def test_a_send_of_another_meaning_under_an_id_is_seen_field_by_field(
    database: str, outbox: TableOutbox
) -> None:
    """Scenario 6."""
    connection = connect(database)
    meta = {"a": 1, "b": 2.0}
    outbox.send(connection, topic("orders"), "x", id="1", priority="low", meta=meta, reply_to="m")
    same: dict[str, Any] = {
        "to": topic("orders"),
        "body": "x",
        "priority": "low",
        "meta": meta,
        "reply_to": "m",
    }

    assert outbox.send(connection, id="1", **(same | {"meta": {"b": 2, "a": 1.0}})).duplicate
    changes: list[dict[str, Any]] = [
        {"to": topic("other")},
        {"to": queue("orders")},
        {"body": "y"},
        {"body": b"y"},
        {"priority": "now"},
        {"meta": {"a": 1}},
        {"reply_to": "n"},
    ]
    for change in changes:
        with pytest.raises(IdUsedError, match="fingerprint_mismatch"):
            outbox.send(connection, id="1", **(same | change))
    connection.rollback()
    connection.close()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"id": ""}, "empty"),
    ({"id": "x" * 257}, "256 bytes"),
    ({"id": "a\0b"}, "control character"),
    ({"priority": "soon"}, "priority"),
    ({"reply_to": "a\nb"}, "reply_to"),
    ({"meta": {"n": 2**60}}, "integer beyond"),
    ({"to": "nowhere"}, "kind"),
    ({"to": "topic:"}, "name"),
    ({"body": "x" * (1 << 20)}, "at most"),
]


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[str(reason) for _, reason in BAD])
def test_a_bad_send_raises_and_writes_nothing(
    tmp_path: Path, outbox: TableOutbox, change: dict[str, Any], reason: str
) -> None:
    with database_of(SQLITE, tmp_path) as address:
        connection = connect(address)
        given: dict[str, Any] = {"to": topic("orders"), "body": 1} | change
        with pytest.raises(InvalidArgumentError, match=reason):
            outbox.send(connection, **given)

        assert not connection.in_transaction
        connection.close()


def test_bodies_and_destinations_that_cannot_be_are_refused(outbox: TableOutbox) -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(UnencodableError):
        outbox.send(connection, topic("orders"), object())
    for make in (topic, queue, dm):
        with pytest.raises(InvalidArgumentError):
            make("a/b")
    with pytest.raises(InvalidArgumentError, match="name of a mesh"):
        Outbox.table("a/b").send(connection, topic("orders"), 1)
    connection.close()


def test_the_mesh_is_named_or_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FENCEPOST_MESH", raising=False)
    with database_of(SQLITE, tmp_path) as address:
        connection = connect(address)
        with pytest.raises(InvalidArgumentError, match="which mesh"):
            Outbox.table().send(connection, topic("orders"), 1)
        monkeypatch.setenv("FENCEPOST_MESH", "depot")
        Outbox.table().send(connection, topic("orders"), 1)
        connection.commit()
        connection.close()

        assert select(address, "select mesh from fencepost_outbox") == [("depot",)]


def test_alembic_and_django_run_the_printed_migrations(
    database: str, tmp_path: Path, outbox: TableOutbox
) -> None:
    """Up, used, down again; with Django in a process of its own."""
    for table in ("fencepost_outbox", "fencepost_outbox_state"):
        execute(database, f"drop table {table}")
    migrations = tmp_path / "alembic"
    (migrations / "versions").mkdir(parents=True)
    (migrations / "versions" / "outbox.py").write_text(alembic_migration(dialect_of(database)))
    app = tmp_path / "shop" / "migrations"
    app.mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").touch()
    (app / "__init__.py").touch()
    (app / "0001_outbox.py").write_text(django_migration(dialect_of(database)))

    for script in (ALEMBIC, DJANGO_MIGRATES):
        for direction in ("up", "down"):
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(script), alchemy(database), direction],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            if direction == "up":
                connection = connect(database)
                outbox.send(connection, topic("orders"), 1, id="sent")
                connection.commit()
                connection.close()
                assert sent(database) == ["sent"]


ALEMBIC = """
    import sys
    import sqlalchemy
    from alembic.migration import MigrationContext
    from alembic.operations import Operations
    from alembic.script import ScriptDirectory

    script = ScriptDirectory("alembic")
    revision = script.get_revision("fencepost_outbox_1").module
    engine = sqlalchemy.create_engine(sys.argv[1])
    with engine.begin() as connection:
        with Operations.context(MigrationContext.configure(connection)):
            revision.upgrade() if sys.argv[2] == "up" else revision.downgrade()
"""
DJANGO_MIGRATES = """
    import sys
    sys.path.insert(0, "")
    import django
    from django.conf import settings
    from sqlalchemy.engine import make_url

    url = make_url(sys.argv[1])
    kind = "sqlite3" if url.drivername == "sqlite" else "postgresql"
    options = {"NAME": url.database, "ENGINE": f"django.db.backends.{kind}"}
    options |= {"USER": url.username or "", "HOST": url.host or "", "PORT": url.port or ""}
    settings.configure(DATABASES={"default": options}, INSTALLED_APPS=["shop"])
    django.setup()
    from django.core.management import call_command

    call_command("migrate", "shop", *(["zero"] if sys.argv[2] == "down" else []), verbosity=0)
"""


def test_the_send_of_a_cancelled_task_is_not_committed(postgres: str, outbox: TableOutbox) -> None:
    async def pay() -> None:
        async with await psycopg.AsyncConnection.connect(postgres) as connection:
            await outbox.send(connection, topic("orders"), 1)
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(pay())

    assert sent(postgres) == []
