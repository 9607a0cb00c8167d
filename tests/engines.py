"""Servers on either store, for tests that hold for both.

A module that imports `engine` has all its tests which ask for `server_process` run twice: on a data
folder, and on a database of its own. Others get the folder, as `conftest.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from fencepost.testing.postgres import shared_server
from tests.serving import ServerProcess

SQLITE, POSTGRES = "sqlite", "postgres"


@pytest.fixture(scope="module", params=[SQLITE, POSTGRES])
def engine(request: pytest.FixtureRequest) -> str:
    """The store that a module is run on, one after the other."""
    chosen: str = request.param
    return chosen


@contextmanager
def emptied(engine: str, folder: Path) -> Iterator[Path | str]:
    """An empty store of this engine: a folder, or the address of a database."""
    if engine == SQLITE:
        yield folder
        return
    postgres = shared_server()
    url = postgres.new_database()
    try:
        yield url
    finally:
        postgres.drop_database(url)


@pytest.fixture
def empty_store(engine: str, tmp_path: Path) -> Iterator[Path | str]:
    """Where the servers of a test keep everything, one after the other."""
    with emptied(engine, tmp_path) as store:
        yield store


def server_at(
    store: Path | str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """A server on a store, to be started."""
    if isinstance(store, Path):
        return ServerProcess(store, arguments=arguments, environment=environment)
    return ServerProcess(store=store, arguments=arguments, environment=environment)


@contextmanager
def serving_on(engine: str, folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server on an empty store of this engine."""
    with emptied(engine, folder) as store, server_at(store, arguments) as server:
        yield server
