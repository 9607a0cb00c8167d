"""What tests of the pipeline share: one Spark for all of them, and a server.

A Spark session takes seconds to start, so there is one for the whole run; a test that needs another
one starts it in a process of its own. Tests that share the server keep to streams of their own,
named after the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from fencepost.pipeline import session
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Spark on two cores, four attempts a task, with `.format("fencepost")`."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    made = session(
        "fencepost-tests",
        master="local[2,4]",
        conf={
            "spark.ui.enabled": False,
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
