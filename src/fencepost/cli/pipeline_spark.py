"""Start Spark for the commands of `fencepost pipeline`, show progress, say errors in a sentence.

Spark logs to the stderr of the process that started it. Here that is a temporary file, or the file
of --spark-log, so that people see our own sentence on stderr. Nothing of Spark is imported before a
command needs it: `--help` works without PySpark.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

import fencepost
from fencepost.cli.profile import resolve
from fencepost.cli.render import REFUSED, CommandError, progress, talking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS = 0.3

Master = Annotated[
    str | None,
    typer.Option(
        help="Where Spark runs, as in local[4] or spark://host:7077. Default: all cores here."
    ),
]
SparkLog = Annotated[
    Path | None, typer.Option(help="A file for Spark's logs; without it they are dropped.")
]
Pattern = Annotated[str, typer.Argument(help="Which streams: * is one segment, ** any.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


class Running(NamedTuple):
    """The Spark session and the client that a command works with."""

    spark: SparkSession
    client: fencepost.Client
    options: dict[str, str]
    """How executors reach the server, as options of `.format("fencepost")`."""


@contextmanager
def running(
    name: str,
    url: str | None,
    token: str | None,
    *,
    master: str | None,
    log: Path | None,
    as_json: bool,
) -> Iterator[Running]:
    """Spark and a client for a command, with an end in words for every failure."""
    with talking(url, token, as_json=as_json) as client:
        profile = resolve(url, token, os.environ)
        options = {"url": profile.url}
        if profile.token is not None:
            options["token"] = profile.token
        # Find out that the server is away before Spark takes its seconds to start.
        client.log_head()
        with _session(name, master, log) as spark:
            yield Running(spark, client, options)


@contextmanager
def _session(name: str, master: str | None, log: Path | None) -> Iterator[SparkSession]:
    from fencepost.pipeline.sessions import check_pyspark

    check_pyspark()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from fencepost.pipeline import session

    warnings.filterwarnings("ignore", "PySpark does not yet fully support", FutureWarning)
    # A program that runs commands inside itself may have a session already, and keeps it.
    running_before = SparkSession.getActiveSession() is not None
    with _spark_log(log) as file:
        try:
            with _stderr_to(file):
                spark = session(f"fencepost-{name}", master=master)
            try:
                yield spark
            finally:
                if not running_before:
                    spark.stop()
        except PySparkException as error:
            raise CommandError(_sentence(error), REFUSED) from None


@contextmanager
def _spark_log(wanted: Path | None) -> Iterator[int]:
    """A file for the process of Spark to log to."""
    if wanted is not None:
        try:
            opened = wanted.open("ab")
        except OSError as error:
            raise CommandError(f"{wanted} cannot be written: {error.strerror}") from None
    else:
        opened = tempfile.TemporaryFile()  # type: ignore[assignment]  # noqa: SIM115
    with opened:
        yield opened.fileno()


@contextmanager
def _stderr_to(file: int) -> Iterator[None]:
    """Let what is started now have another stderr: it keeps it when we take ours back."""
    sys.stderr.flush()
    ours = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _sentence(error: Exception) -> str:
    """The error in one sentence, without its trace: for a task's error that is its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "Error: " in line and not line.startswith("at ")]
    shown = said[-1] if said else (lines[0] if lines else type(error).__name__)
    return f"Spark could not do it: {shown}. --spark-log FILE keeps what Spark says"


@contextmanager
def bar(spark: SparkSession, what: str, *, hidden: bool) -> Iterator[Callable[[str], None]]:
    """A bar for as long as Spark is at work, with the tasks of its present step.

    Call what it gives with what is being done now.
    """
    with progress(hidden=hidden) as bars:
        task = bars.add_task(what, total=None)

        def step(text: str) -> None:
            bars.update(task, description=text)

        if bars.disable:
            yield step
            return
        stop = threading.Event()

        def poll() -> None:
            from fencepost.pipeline.metrics import tasks

            while not stop.wait(POLL_SECONDS):
                now = tasks(spark)
                if now is not None:
                    bars.update(task, completed=now.done, total=now.all)

        thread = threading.Thread(target=poll, daemon=True, name="spark-progress")
        thread.start()
        try:
            yield step
        finally:
            stop.set()
            thread.join()
