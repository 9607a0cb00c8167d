"""Servers on either store, for tests that hold for both.

A module that imports `engine` has all its tests which ask for `server_process` run twice: on a data
folder, and on a database of its own. Others get the folder, as `conftest.py` says.
"""

from __future__ import annotations

from collections.abc import Iterator
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
def serving_on(engine: str, folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server on an empty store of this engine."""
    if engine == SQLITE:
        with ServerProcess(folder, arguments=arguments) as server:
            yield server
        return
    postgres = shared_server()
    url = postgres.new_database()
    try:
        with ServerProcess(store=url, arguments=arguments) as server:
            yield server
    finally:
        postgres.drop_database(url)
