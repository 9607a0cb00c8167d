"""Metrics of streaming queries for Prometheus and for Spark, and the progress of running stages.

`watch(spark, port=...)` is all that a program needs: from then on it measures every query of the
session that reads Fencepost, and serves the numbers on the port. The lag is also among Spark's own
metrics, as `fencepost.QUERY.SOURCE.lag_positions`, so that it is on Spark's UI at `/metrics/json`
and in every sink that `metrics.properties` names (JMX, Graphite, Prometheus).

| metric | labels | |
|---|---|---|
| `fencepost_query_active` | query | 1 while it runs |
| `fencepost_query_position` | query, source | everything up to here has been read |
| `fencepost_query_head` | query, source | where the server's log ended at that time |
| `fencepost_query_lag_positions` | query, source | the difference: at least the messages behind |
| `fencepost_query_rows_total` | query | rows that were read |
| `fencepost_query_batches_total` | query | batches that were done |
| `fencepost_query_batch_seconds` | query | how long batches took |
| `fencepost_query_failures_total` | query | runs that ended with an error |

`tasks` is for progress bars in a terminal: how many tasks of the stages that run now are done. A
job is many stages, one after the other, so the numbers are those of the present stage. Spark
Connect sessions offer neither Spark's metrics nor the tasks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from fencepost.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class PortError(PipelineError):
    """Metrics cannot be served on this port. Choose another one."""


class QueryMetrics(StreamingQueryListener):
    """A listener that turns the progress of queries into metrics of a registry."""

    def __init__(
        self, registry: CollectorRegistry | None = None, gauges: SparkGauges | None = None
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._gauges = gauges
        self._names: dict[str, str] = {}
        home, query, source = self.registry, ("query",), ("query", "source")
        self._active = Gauge("fencepost_query_active", "1 while it runs.", query, registry=home)
        self._position = Gauge("fencepost_query_position", "Read to here.", source, registry=home)
        self._head = Gauge("fencepost_query_head", "The end of the log.", source, registry=home)
        self._lag = Gauge(
            "fencepost_query_lag_positions", "Positions not read yet.", source, registry=home
        )
        self._rows = Counter("fencepost_query_rows", "Rows that were read.", query, registry=home)
        self._batches = Counter("fencepost_query_batches", "Batches done.", query, registry=home)
        self._failures = Counter(
            "fencepost_query_failures", "Runs that ended with an error.", query, registry=home
        )
        self._seconds = Histogram(
            "fencepost_query_batch_seconds",
            "How long batches took.",
            query,
            buckets=SECONDS,
            registry=home,
        )

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """A query began to run."""
        name = self._names[str(event.id)] = event.name or str(event.id)
        self._active.labels(name).set(1)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """A batch is done."""
        progress = event.progress
        name = self._name(str(progress.id), progress.name)
        self._rows.labels(name).inc(max(0, progress.numInputRows))
        self._batches.labels(name).inc()
        self._seconds.labels(name).observe(progress.batchDuration / 1000)
        for index, place in enumerate(places(progress.sources)):
            if place is None:
                continue
            labels = (name, str(index))
            self._position.labels(*labels).set(place.position)
            if place.head is not None:
                behind = max(0, place.head - place.position)
                self._head.labels(*labels).set(place.head)
                self._lag.labels(*labels).set(behind)
                if self._gauges is not None:
                    self._gauges.set(f"{name}.{index}.lag_positions", behind)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """No batch ran, so the numbers of the last one still hold."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """A query ended, by itself or with an error."""
        name = self._name(str(event.id), None)
        self._active.labels(name).set(0)
        if event.exception is not None:
            self._failures.labels(name).inc()

    def _name(self, query: str, given: str | None) -> str:
        return self._names.setdefault(query, given or query)


class Place(NamedTuple):
    """How far a source was read, and where the log ended, if the source said so."""

    position: int
    head: int | None


def places(sources: list[Any]) -> Iterator[Place | None]:
    """Where each source of a query is; None for those that are not Fencepost's."""
    for source in sources:
        end = _position(source.endOffset)
        yield None if end is None else Place(end, _position(source.latestOffset))


def _position(offset: str | None) -> int | None:
    """The position in an offset as Spark reports it: JSON in a text, perhaps quoted once more."""
    found: Any = offset
    for _layer in range(2):
        if not isinstance(found, str):
            break
        try:
            found = json.loads(found)
        except ValueError:
            return None
    position = found.get("position") if isinstance(found, dict) else None
    return position if isinstance(position, int) else None


class Watching:
    """Metrics of a session, for as long as it is not closed; a context manager."""

    def __init__(self, spark: SparkSession, port: int | None, address: str) -> None:
        self._spark = spark
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.metrics = QueryMetrics(gauges=SparkGauges(spark))
        if port is not None:
            try:
                self._server, self._thread = start_http_server(
                    port, address, registry=self.metrics.registry
                )
            except OSError as error:
                raise PortError(
                    f"metrics cannot be served on {address}:{port} ({error.strerror}):"
                    " choose another port"
                ) from None
        spark.streams.addListener(self.metrics)

    @property
    def port(self) -> int | None:
        """Where the metrics can be fetched."""
        return None if self._server is None else self._server.server_port

    def close(self) -> None:
        """Stop listening and serving."""
        self._spark.streams.removeListener(self.metrics)
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def watch(spark: SparkSession, *, port: int | None = None, address: str = "127.0.0.1") -> Watching:
    """Measure every query of a session from now on; with a port, serve the numbers there.

    Port 0 takes any that is free; `Watching.port` says which.
    """
    return Watching(spark, port, address)


_PREFIX = "fencepost"
_registered: dict[tuple[str, str], Any] = {}
"""By application and name: Spark takes a name once, and keeps it while the application runs."""


class SparkGauges:
    """Gauges of one session among Spark's metrics; on Spark Connect `set` does nothing."""

    def __init__(self, spark: SparkSession) -> None:
        self._jvm: Any = getattr(spark, "_jvm", None)
        if self._jvm is not None:
            self._context: Any = spark.sparkContext._jsc.sc()
            self._application = str(spark.sparkContext.applicationId)

    def set(self, name: str, value: int) -> None:
        """Show a value under a name, from now on."""
        if self._jvm is None:
            return
        place = (self._application, name)
        if place not in _registered:
            _registered[place] = self._register(f"{_PREFIX}.{name}")
        _registered[place].setValue(value)

    def _register(self, name: str) -> Any:
        # Accumulators are the only thing that Spark lets programs add to its metrics.
        accumulator = self._context.longAccumulator()
        java = self._jvm.org.apache.spark
        named = java.api.python.PythonUtils.toScalaMap({name: accumulator})
        # A Scala object: what Python sees under the plain name is the class beside it.
        source = getattr(getattr(java.metrics.source, "LongAccumulatorSource$"), "MODULE$")
        source.register(self._context, named)
        return accumulator


class Tasks(NamedTuple):
    """Tasks of the stages that are running now."""

    done: int
    all: int


def tasks(spark: SparkSession) -> Tasks | None:
    """How far the running stages are; None when nothing runs or the session does not say."""
    from pyspark.errors import PySparkException

    try:
        tracker = spark.sparkContext.statusTracker()
    except PySparkException:
        return None
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    known = [stage for stage in stages if stage is not None]
    if not known:
        return None
    return Tasks(
        sum(stage.numCompletedTasks for stage in known), sum(stage.numTasks for stage in known)
    )
