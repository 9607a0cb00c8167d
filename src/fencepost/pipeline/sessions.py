"""Starting a Spark session after `pip install` alone, and adding our format to any session.

`session()` finds a Java, makes the running interpreter the one of Spark's workers, and sets what
measurably helps a query over Fencepost. `register()` adds `.format("fencepost")` to a session that
another program made: a notebook, a cluster, Spark Connect.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepost.pipeline.errors import SessionError, SparkMissingError
from fencepost.pipeline.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WANTED = ("4.0", "4.1", "4.2", "4.3")
"""The versions of Spark that this is made for; `python -m tools.spark_smoke` tries each."""
MADE_FOR = f"{WANTED[0]} to {WANTED[-1]}"
INSTALL = "pip install 'fencepost[spark]'"
MASTER_DEFAULT = "local[*,4]"
"""All cores, and four attempts for each task: plain `local[*]` would fail the query with the first
task that meets a server which is just being restarted for too long."""

_AT_START: dict[str, str] = {
    # Python workers and the JVM talk through files instead of TCP: no copy through the network.
    "spark.python.unix.domain.socket.enabled": "true",
    # Spark's progress line would be drawn over our own bars.
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL_ONLY: dict[str, str] = {
    # Spark's 200 are for clusters: a small batch would be 200 tasks behind every exchange.
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 2)),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def _local_only() -> dict[str, str]:
    from pyspark.version import __version__ as found

    folder = "streaming" if _minor(found) == "4.0" else "streaming.checkpointing"
    manager = f"org.apache.spark.sql.execution.{folder}.FileSystemBasedCheckpointFileManager"
    # Plain renames: a micro-batch took 204 ms instead of 260. Right on a local disk.
    return {**_LOCAL_ONLY, "spark.sql.streaming.checkpointFileManagerClass": manager}


SOCKET_PATH_BYTES_MAX = 103
"""The longest path of a socket that Linux (107) and macOS (103) take."""


def fits_sockets(folder: str) -> bool:
    """Whether Spark can put its sockets, which it names by a UUID, into this folder."""
    longest = os.path.join(folder, ".00000000-0000-0000-0000-000000000000.sock")
    return len(os.fsencode(longest)) <= SOCKET_PATH_BYTES_MAX


def session(
    app: str = "fencepost",
    *,
    master: str | None = None,
    conf: Mapping[str, Any] | None = None,
) -> SparkSession:
    """A Spark session with `.format("fencepost")` in it.

    If one is running already it is given back, provided that it is as asked for.

    Args:
        app: Its name in Spark's pages.
        master: Where it runs: all cores of this machine by default, or what `spark-submit` said.
        conf: Settings of Spark; they win over those of this function.
    """
    check_pyspark()
    wanted = {name: _shown(value) for name, value in (conf or {}).items()}
    if master is not None:
        wanted["spark.master"] = master
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession() or _default_session()
    if running is not None:
        _adopt(running, wanted)
        register(running)
        return running
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted:
        wanted.setdefault("spark.master", MASTER_DEFAULT)
        check_home(os.environ)
        os.environ.update(find_java().environment())
    local = wanted.get("spark.master", "").startswith("local")
    if local:
        # Workers of another Python would not find this package.
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = {**_AT_START, **(_local_only() if local else {}), **wanted}
    builder = SparkSession.builder.appName(app)
    for name, value in settings.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        # PySpark warns of a pandas that is newer than it, even in programs without pandas.
        warnings.filterwarnings("ignore", "PySpark does not yet fully support", FutureWarning)
        made = builder.getOrCreate()
    register(made)
    return made


def register(spark: SparkSession) -> None:
    """Add `.format("fencepost")` to a session that exists."""
    check_pyspark()
    if not _is_wanted(spark.version):
        raise SparkMissingError(
            f"this session runs on Spark {spark.version}, and this is made for {MADE_FOR}"
        )
    from pyspark.errors import AnalysisException

    from fencepost.pipeline.datasource import FencepostDataSource

    with _active(spark):
        if _is_registered(spark, FencepostDataSource.name()):
            return
        try:
            spark.dataSource.register(FencepostDataSource)
        except AnalysisException as refusal:
            # Spark Connect 4.0 refuses a name that its server has found by itself.
            if refusal.getCondition() != "DATA_SOURCE_ALREADY_EXISTS":
                raise


def check_pyspark() -> None:
    """Raise `SparkMissingError` unless the PySpark that this is made for is there."""
    try:
        # Not asked of pip: clusters bring theirs without it, and that of Connect has another name.
        from pyspark.version import __version__ as found
    except ImportError:
        raise SparkMissingError(f"PySpark is not installed: {INSTALL}") from None
    if not _is_wanted(found):
        raise SparkMissingError(
            f"PySpark {found} is installed, and this is made for {MADE_FOR}: {INSTALL}"
        )


def check_home(environment: Mapping[str, str]) -> None:
    """Raise `SparkMissingError` if SPARK_HOME is of another Spark: PySpark would start that one."""
    from pyspark.version import __version__ as installed

    home = environment.get("SPARK_HOME", "")
    for jar in Path(home, "jars").glob("spark-core_*.jar") if home else ():
        found = jar.stem.split("-", 2)[2]
        if _minor(found) != _minor(installed):
            raise SparkMissingError(
                f"SPARK_HOME is {home}, which is Spark {found}, and PySpark is {installed}:"
                " unset it, so that PySpark starts its own"
            )


def _is_wanted(version: str) -> bool:
    return _minor(version) in WANTED


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _is_registered(spark: SparkSession, name: str) -> bool:
    """Whether a session has the format already: Spark warns of every further registration."""
    if getattr(spark, "_jvm", None) is None:  # Spark Connect does not say
        return False
    manager = spark._jsparkSession.sessionState().dataSourceManager()
    return bool(manager.dataSourceExists(name))


@contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make a session the active one for a while.

    Spark looks in the active session whether the name is taken, not in the one it registers in.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # Spark Connect: each session is by itself
        yield
        return
    home = jvm.org.apache.spark.sql.classic.SparkSession
    before = home.getActiveSession()
    home.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            home.setActiveSession(before.get())
        else:
            home.clearActiveSession()


def _default_session() -> SparkSession | None:
    from pyspark.sql import SparkSession

    found: SparkSession | None = SparkSession._instantiatedSession
    if found is None or found._sc._jsc is None:
        return None
    return found


def _adopt(running: SparkSession, wanted: Mapping[str, str]) -> None:
    """Take a running session as it is, if what is asked for can still be had."""
    for name, value in wanted.items():
        current = running.conf.get(name, None)
        if current == value:
            continue
        if not running.conf.isModifiable(name):
            raise SessionError(
                f"a Spark session is running with {name} = {current!r}, and {value!r} was asked"
                " for: stop it first (spark.stop()), or take it as it is"
            )
    for name, value in wanted.items():
        if running.conf.isModifiable(name):
            running.conf.set(name, value)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
