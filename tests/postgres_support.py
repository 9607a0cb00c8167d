"""Fixtures for tests on a real PostgreSQL: one server for the whole run, a fresh database for each.

Which server that is, and what to do when there is none, is in `fencepost.testing.postgres`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fencepost.testing.postgres import PostgresServer, shared_server


@pytest.fixture(scope="session")
def postgres_server() -> PostgresServer:
    """The server of this run; who stops it starts it again."""
    return shared_server()


@pytest.fixture
def postgres_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """The address of a database with our schema and nothing in it."""
    dsn = postgres_server.new_database()
    yield dsn
    postgres_server.drop_database(dsn)


@pytest.fixture
def empty_postgres_dsn(postgres_server: PostgresServer) -> Iterator[str]:
    """The address of a database without any tables."""
    dsn = postgres_server.new_database(migrated=False)
    yield dsn
    postgres_server.drop_database(dsn)
