"""The connection to a real PostgreSQL: transactions, settings, schema, and what its errors mean."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

from fencepost.store.contract import StoreAwayError
from fencepost.store.postgres import migrate as schema
from fencepost.store.postgres.driver import connection as database
from fencepost.store.postgres.driver.connection import (
    NotDurableError,
    PostgresConnection,
    StandbyError,
    UnusableDatabaseError,
    connect,
    is_away,
    is_full,
    judge,
)
from fencepost.store.postgres.migrate import migrate, migrate_database, schema_of
from fencepost.store.settings import PostgresSettings
from fencepost.store.sql import SchemaTooNewError
from fencepost.testing.postgres import PostgresServer

WAIT_SECONDS = 20
GOOD = (160_000, "UTF8", False, "on", "on")


def at(dsn: str, **options: Any) -> PostgresSettings:
    return PostgresSettings(url=dsn, **options)


@pytest.fixture
def writing(postgres_dsn: str) -> Iterator[PostgresConnection]:
    with closing(connect(at(postgres_dsn))) as connection:
        yield connection


@pytest.fixture
def reading(postgres_dsn: str) -> Iterator[PostgresConnection]:
    with closing(connect(at(postgres_dsn), readonly=True)) as connection:
        yield connection


def parts(connection: PostgresConnection) -> int:
    [(count,)] = connection.fetch("count_waiting_parts")
    assert isinstance(count, int)
    return count


def part(name: str) -> tuple[str, str, str, int]:
    return ("t", name, "text/plain", 1)


# Transactions


def test_what_is_written_together_is_committed_together(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    with writing:
        writing.execute("save_part", part("a"))
        assert parts(reading) == 0
        writing.execute("save_part", part("b"))

    assert parts(reading) == 2


def test_an_error_undoes_everything_and_the_connection_goes_on(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    def write_twice() -> None:
        with writing:
            writing.execute("save_part", part("a"))
            writing.execute("save_part", part("a"))

    with pytest.raises(errors.UniqueViolation):
        write_twice()
    assert parts(reading) == 0

    writing.execute("save_part", part("a"))
    assert parts(reading) == 1


def test_a_transaction_inside_another_belongs_to_it(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    with writing:
        with writing:
            writing.execute("save_part", part("a"))
        assert parts(reading) == 0
    assert parts(reading) == 1

    writing.begin()
    with writing:
        writing.execute("save_part", part("b"))
    writing.rollback()
    assert not writing.in_transaction
    assert parts(reading) == 1


def test_a_transaction_whose_statement_failed_is_not_committed_silently(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    writing.begin()
    writing.execute("save_part", part("a"))
    with pytest.raises(errors.UniqueViolation):
        writing.execute("save_part", part("a"))

    with pytest.raises(errors.InFailedSqlTransaction):
        writing.commit()

    assert parts(reading) == 0
    assert not writing.in_transaction


def test_a_reader_sees_one_moment_for_as_long_as_it_asks(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    with reading:
        assert parts(reading) == 0
        writing.execute("save_part", part("a"))
        assert parts(reading) == 0

    assert parts(reading) == 1


def test_a_reader_cannot_write_inside_its_transaction(reading: PostgresConnection) -> None:
    with pytest.raises(errors.ReadOnlySqlTransaction), reading:
        reading.execute("save_part", part("a"))


# Statements


def test_a_statement_says_how_many_rows_it_changed(writing: PostgresConnection) -> None:
    writing.execute_many("save_part", [part(name) for name in "abc"])

    assert writing.execute("drop_part", ("t", "a")) == 1
    assert writing.execute("drop_part", ("t", "a")) == 0
    assert writing.execute("purge_keys", (5,)) == 0


def test_a_pipeline_sends_statements_without_waiting_for_each(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    with writing.pipeline():
        writing.begin()
        assert writing.in_transaction
        [counters] = writing.fetch("take_turn")
        writing.execute_many("save_part", [part("a"), part("b")])
        writing.send("drop_part", ("t", "a"))
        writing.send("end_turn", (1, 10, 2, 5, 3, "node", [4, 5], [4], [], True))
        writing.commit()

    assert counters[:5] == (0, 0, 1, 0, 1)
    assert parts(reading) == 1
    assert reading.fetch("load_counters") == [(10, 2, 5)]
    [turn] = reading.fetch("turns_after", (0, 10, 10))
    assert turn == (1, "node", 5, 9, [4, 5], [4], [], None)


def test_an_error_in_a_pipeline_undoes_its_transaction(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    def write_and_commit() -> None:
        with writing.pipeline():
            writing.begin()
            writing.execute_many("save_part", [part("a"), part("a")])
            writing.send("save_part", part("b"))
            writing.commit()

    with pytest.raises(errors.UniqueViolation):
        write_and_commit()
    writing.rollback()

    assert parts(reading) == 0
    writing.execute("save_part", part("a"))
    assert parts(reading) == 1


def test_the_same_statement_is_prepared_once_whatever_its_values(
    writing: PostgresConnection,
) -> None:
    row = (1, "p", 0, 0, b"f", 7, 5, "", 0, b"")
    for number in (1, 70_000, 2**40):
        writing.execute_many("save_producer", [(number, *row[1:])])
        writing.fetch("find_producer", (number, "p"))

    [(prepared,)] = writing.raw.execute(
        "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE '%producers%'",
        prepare=False,
    ).fetchall()
    assert prepared == 2


def test_what_comes_after_every_text_does(writing: PostgresConnection) -> None:
    longest = "\U0010ffff" * 256
    row = (0, 5, None, 0, 0, 0, 0, False, None, None, 0, None, 1, longest, "text/plain", 5)
    writing.execute("insert_stream", (*row, None, None, None, None, None, "ann"))

    bounds = {"first": "", "last": writing.after_every_text, "limit": 5}
    assert writing.fetch("candidate_paths", bounds) == [(longest,)]


def test_records_of_a_turn_are_found_many_at_once(writing: PostgresConnection) -> None:
    row = (1, "p", 0, 0, b"f", 7, 5, "", 0, b"recent")
    key = (1, "me", "k", b"d" * 16, 0, 0, 1, 1, False, 3, 5, None, b"answer")
    writing.execute_many("save_producer", [row, (2, "q", *row[2:])])
    writing.execute("save_key", key)

    producers = writing.fetch("find_producers", ([1, 1, 2], ["p", "q", "q"]))
    keys = writing.fetch("find_keys", ([1, 1], ["me", "you"], ["k", "k"]))

    assert sorted(producers) == [row, (2, "q", *row[2:])]
    assert keys == [(*key[:11], b"answer")]
    assert writing.fetch("find_producers", ([], [])) == []


# The server


@pytest.mark.parametrize(
    ("server", "error", "told"),
    [
        ((130_012, *GOOD[1:]), UnusableDatabaseError, "PostgreSQL 13.*14 or newer"),
        ((160_000, "LATIN1", *GOOD[2:]), UnusableDatabaseError, "LATIN1.*UTF8"),
        ((160_000, "UTF8", True, "on", "on"), StandbyError, "primary"),
        ((160_000, "UTF8", False, "off", "on"), NotDurableError, "fsync = on"),
        ((160_000, "UTF8", False, "on", "off"), NotDurableError, "synchronous_commit is off"),
        ((160_000, "UTF8", False, "on", "local"), NotDurableError, "synchronous_commit is local"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_apart(
    server: tuple[object, ...], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        judge(server, writes=True)


def test_durability_matters_only_to_who_writes() -> None:
    judge((160_000, "UTF8", False, "off", "off"), writes=False)
    for durable in database.DURABLE:
        judge((160_000, "UTF8", False, "on", durable), writes=True)


def test_a_role_that_does_not_wait_for_the_disk_is_refused(postgres_dsn: str) -> None:
    hasty = make_conninfo(postgres_dsn, options="-c synchronous_commit=off")

    with pytest.raises(NotDurableError, match="set it to on") as caught:
        connect(at(hasty))
    with pytest.raises(NotDurableError):
        schema_of(at(hasty))
    # A server that is running goes on trying: another one may answer after a failover.
    assert is_away(caught.value)
    connect(at(hasty), readonly=True).close()


def test_a_session_has_our_settings(postgres_dsn: str) -> None:
    with closing(connect(at(postgres_dsn, turn_wait_ms=1_234, turn_idle_ms=5_678))) as connection:
        rows = connection.raw.execute(
            "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name"
        ).fetchall()

    assert dict(rows) == {
        "TimeZone": "UTC",
        "default_transaction_isolation": "read committed",
        "idle_in_transaction_session_timeout": "5678",
        **database.PLANNING,
        "lock_timeout": "1234",
        "statement_timeout": "30000",
        "synchronous_commit": "on",
    }


# Errors


def test_a_lock_that_is_not_to_be_had_in_time_does_not_mean_that_the_database_is_away(
    writing: PostgresConnection, postgres_dsn: str
) -> None:
    with writing, closing(connect(at(postgres_dsn, turn_wait_ms=50))) as other:
        writing.fetch("take_turn")

        with pytest.raises(errors.LockNotAvailable) as caught, other:
            other.fetch("take_turn")

    assert not is_away(caught.value)


def test_a_session_that_the_server_ends_is_away(
    writing: PostgresConnection, reading: PostgresConnection
) -> None:
    reading.raw.execute("SELECT pg_terminate_backend($1::int)", [writing.raw.info.backend_pid])

    with pytest.raises(psycopg.OperationalError) as first:
        parts(writing)
    with pytest.raises(psycopg.Error) as then:
        parts(writing)

    assert is_away(first.value)
    assert is_away(then.value)
    with pytest.raises(psycopg.Error), writing:
        parts(writing)


def test_a_place_where_no_server_listens_is_away() -> None:
    settings = at("postgresql://nobody@127.0.0.1:1/nothing", connect_timeout_s=2)

    with pytest.raises(psycopg.OperationalError) as caught:
        connect(settings)
    assert is_away(caught.value)
    with pytest.raises(StoreAwayError):
        schema_of(settings)


def test_errors_are_told_apart_by_what_can_be_done() -> None:
    away: list[type[psycopg.Error]] = [errors.AdminShutdown, errors.CannotConnectNow]
    away += [
        errors.TooManyConnections,
        errors.ReadOnlySqlTransaction,
        errors.CrashShutdown,
        errors.ConnectionFailure,
    ]
    refused = [errors.SerializationFailure, errors.DeadlockDetected, errors.QueryCanceled]
    neither = [errors.UniqueViolation, errors.UndefinedTable, errors.PipelineAborted]

    assert all(is_away(kind("")) for kind in away)
    assert is_away(StandbyError())
    assert is_away(psycopg.InterfaceError())
    assert not any(is_away(kind("")) for kind in (*refused, *neither))
    assert is_full(errors.DiskFull(""))
    assert not is_full(errors.UniqueViolation(""))
    assert not is_away(ValueError())


# The schema


def test_servers_that_start_at_once_agree_on_the_schema(empty_postgres_dsn: str) -> None:
    together = threading.Barrier(4)

    def start() -> int:
        with closing(connect(at(empty_postgres_dsn))) as connection:
            together.wait(WAIT_SECONDS)
            return migrate(connection).newest

    with ThreadPoolExecutor(4) as pool:
        newest = [future.result(WAIT_SECONDS) for future in [pool.submit(start) for _ in range(4)]]

    assert newest == [schema.STEPS[-1][0]] * 4
    assert not schema_of(at(empty_postgres_dsn)).is_older
    with closing(connect(at(empty_postgres_dsn), readonly=True)) as connection:
        steps = connection.raw.execute("SELECT number FROM migrations ORDER BY 1").fetchall()
        assert steps == [(number,) for number, _, _ in schema.STEPS]
        assert connection.fetch("load_counters") == [(0, 1, 0)]


def test_looking_at_a_schema_changes_nothing(empty_postgres_dsn: str) -> None:
    settings = at(empty_postgres_dsn)

    assert schema_of(settings).current == 0
    assert schema_of(settings).pending
    assert migrate_database(settings).current == 0
    assert not migrate_database(settings).pending


def test_a_step_that_fails_leaves_nothing_behind(
    empty_postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [(1, "broken", "CREATE TABLE half (id int); SELECT 1 / 0")]
    monkeypatch.setattr(schema, "STEPS", broken)

    with closing(connect(at(empty_postgres_dsn))) as connection:
        with pytest.raises(errors.DivisionByZero):
            migrate(connection)

        tables = connection.raw.execute("SELECT to_regclass('half'), to_regclass('migrations')")
        assert tables.fetchall() == [(None, None)]


def test_a_step_does_not_wait_long_for_a_table_that_somebody_uses_and_says_so(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers would wait behind it, as long as a dump takes."""
    step = (9999, "waiting", "ALTER TABLE turns ADD COLUMN more bigint")
    monkeypatch.setattr(schema, "STEPS", [*schema.STEPS, step])
    monkeypatch.setattr(schema, "TABLE_LOCK_TIMEOUT_S", 0.05)

    with psycopg.connect(postgres_dsn) as dump, closing(connect(at(postgres_dsn))) as connection:
        dump.execute("LOCK TABLE turns IN ACCESS SHARE MODE")

        with pytest.raises(UnusableDatabaseError, match=r"9999 \(waiting\).*nothing was changed"):
            migrate(connection)

        dump.rollback()
        assert migrate(connection).pending
        assert not migrate(connection).pending


def test_a_database_of_a_newer_version_is_refused(postgres_dsn: str) -> None:
    with closing(connect(at(postgres_dsn))) as connection:
        connection.raw.execute("INSERT INTO migrations VALUES (9999, 'later', now())")

        with pytest.raises(SchemaTooNewError, match="schema version 9999"):
            migrate(connection)


# The server for tests


def test_a_killed_server_comes_back_with_what_was_committed() -> None:
    with PostgresServer() as server:
        dsn = server.new_database()
        with closing(connect(at(dsn))) as connection:
            connection.execute("save_part", part("kept"))
            connection.begin()
            connection.execute("save_part", part("lost"))
            server.kill()
            assert not server.is_running
            with pytest.raises(psycopg.Error) as caught:
                parts(connection)
        assert is_away(caught.value)

        server.start()

        with closing(connect(at(dsn))) as connection:
            assert parts(connection) == 1
        server.restart()
        with closing(connect(at(dsn))) as connection:
            assert parts(connection) == 1


def test_a_given_server_is_not_ours_to_stop(postgres_server: PostgresServer) -> None:
    given = PostgresServer(postgres_server.dsn)
    given.start()

    dsn = given.new_database()
    connect(at(dsn)).close()
    with pytest.raises(Exception, match="FENCEPOST_TEST_POSTGRES"):
        given.stop()
    given.close()

    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(at(dsn))
