"""Fixtures that every floor of the tests may ask for."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.engines import SQLITE, serving_on
from tests.postgres_support import empty_postgres_dsn as empty_postgres_dsn
from tests.postgres_support import postgres_dsn as postgres_dsn
from tests.postgres_support import postgres_server as postgres_server
from tests.serving import ServerProcess

# How long an example takes says how busy the machine is. What fails is printed so that it can be
# repeated on another one.
settings.register_profile(
    "fencepost", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fencepost")


# Every JVM that a test starts, however deep below, lives for seconds and sees little: what it does
# to be fast later is half of what it costs. One of them with a query takes 8 s of CPU so, else 15.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM)
os.environ.setdefault("SPARK_LAUNCHER_OPTS", JVM)


@pytest.fixture(scope="module")
def engine() -> str:
    """The store of `server_process`; a module that imports `tests.engines.engine` has both."""
    return SQLITE


@pytest.fixture(scope="module")
def server_process(
    engine: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A real server on an empty store, shared by the tests of one module.

    Its long-polls end after half a second, so that a test which waits for nothing waits briefly.
    """
    with serving_on(engine, tmp_path_factory.mktemp("data"), "--long-poll-ms", "500") as server:
        yield server


@pytest.fixture
def path(request: pytest.FixtureRequest) -> str:
    """A path for a stream that no other test of the module uses."""
    return request.node.name.replace("[", "-").removesuffix("]")  # type: ignore[no-any-return]


@pytest.fixture(name="tmp_path")
def _tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder with a short path for a test of the outbox: that of a socket has 104 bytes at most.

    pytest's own has the names of the user and of the test in it, and grows when tests run side by
    side. Other tests get that one, which stays there when they fail.
    """
    if "outbox" not in request.node.nodeid:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="fp-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


ON_BOTH_LOOPS = (
    "integration/test_client_*",
    "integration/test_coordination_*",
    "integration/test_edge_*",
    "integration/test_state.py",
    "faults/test_client_*",
)
"""Modules of async client tests: users run the client on asyncio's own loop and on uvloop."""
LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> LoopFactories:
    """The event loops that an async test runs on, each in a test of its own."""
    if any(item.path.match(pattern) for pattern in ON_BOTH_LOOPS):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what no UTF-8 can carry in captured output: a worker of xdist died of reporting it."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each operation of the OpenAPI document a test with a name of its own: tests that run
    side by side are told apart by their names, and those of one name would be run once.

    Leave soaks out, unless this is the long run (`just faults`), or the command asks for them: by
    `-m soak`, or by the name of a test.
    """
    for item in items:
        operation = getattr(item, "operation_label", None)
        if operation is not None and operation not in item.nodeid:
            item._id = item.id.with_params(operation)
    assert len({item.nodeid for item in items}) == len(items), "two tests have one name"
    asked = "FENCEPOST_FAULT_KILLS" in os.environ or "soak" in config.option.markexpr
    if not asked and not any("::" in argument for argument in config.args):
        soaks = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soaks)
        items[:] = [item for item in items if item not in soaks]
