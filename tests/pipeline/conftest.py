"""What tests of the pipeline share: one Spark for all of them, and a server.

A Spark session takes seconds to start, so there is one for the whole run; a test that needs another
one starts it in a process of its own. Tests that share the server keep to streams of their own,
named after the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fencepost.pipeline import session
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


HERE = Path(__file__).parent
# The first test of a run also waits for Spark: 90 seconds were seen on a machine that had ten times
# more to do than cores.
TEST_SECONDS_MAX = 300
WARNINGS = (
    # PySpark says so of pandas 3, whatever is done with it.
    "ignore:PySpark does not yet fully support pandas:FutureWarning",
    # Its gateway leaves sockets to the garbage collector.
    "ignore:unclosed <socket:ResourceWarning",
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let PySpark's own warnings pass in the tests of this folder; all others stay errors."""
    for item in items:
        if item.path.is_relative_to(HERE):
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_SECONDS_MAX))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark on two cores, four attempts a task, with `.format("fencepost")`."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    made = session(
        "fencepost-tests",
        master="local[2,4]",
        conf={
            "spark.ui.port": 0,
            "spark.sql.shuffle.partitions": 2,
            "spark.sql.warehouse.dir": str(warehouse),
            "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server that the tests of the pipeline share; its long-polls are short."""
    data = tmp_path_factory.mktemp("server")
    with ServerProcess(data, arguments=["--long-poll-ms", "500"]) as process:
        yield process


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that belongs to one test alone."""
    with ServerProcess(tmp_path / "own", arguments=["--long-poll-ms", "500"]) as process:
        yield process
