"""Fixtures that every floor of the tests may ask for."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_support import empty_postgres_dsn as empty_postgres_dsn
from tests.postgres_support import postgres_dsn as postgres_dsn
from tests.postgres_support import postgres_server as postgres_server
from tests.serving import ServerProcess


@pytest.fixture(scope="module")
def server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server on an empty data folder, shared by the tests of one module.

    Its long-polls end after half a second, so that a test which waits for nothing waits briefly.
    """
    data: Path = tmp_path_factory.mktemp("data")
    with ServerProcess(data, arguments=["--long-poll-ms", "500"]) as server:
        yield server
