"""Metrics of streaming queries for Prometheus and for Spark, and the progress of running stages.

`watch(spark, port=...)` is all that a program needs: from then on it measures every query of the
session that reads Fencepost, and serves the numbers on the port. The lag is also among Spark's own
metrics, as `fencepost.QUERY.SOURCE.lag_rows` and so on, so that it is on Spark's UI at
`/metrics/json` and in every sink that `metrics.properties` names (JMX, Graphite, Prometheus).

Spark tells of a query when a batch is done. Between two batches, which may be hours, `watch` asks
the server itself how far each running query is behind.

| metric | labels | |
|---|---|---|
| `fencepost_query_active` | query | 1 while it runs |
| `fencepost_query_position` | query, source | everything up to here has been read |
| `fencepost_query_head` | query, source | where the server's log ended at that time |
| `fencepost_query_lag_positions` | query, source | the difference, other streams included |
| `fencepost_query_lag_rows` | query, source | messages of its streams that it has not read |
| `fencepost_query_lag_bytes` | query, source | their payload |
| `fencepost_query_lag_seconds` | query, source | the age of the oldest of them |
| `fencepost_query_rows_total` | query | rows that were read |
| `fencepost_query_bytes_total` | query | payload bytes that were read |
| `fencepost_query_losses_total` | query | rows that had left the log unread |
| `fencepost_query_retries_total` | query | attempts of the driver's requests that failed |
| `fencepost_query_batches_total` | query | batches that were done |
| `fencepost_query_batch_seconds` | query | how long batches took |
| `fencepost_query_failures_total` | query | runs that ended with an error |

`tasks` is for progress bars in a terminal: how many tasks of the stages that run now are done. A
job is many stages, one after the other, so the numbers are those of the present stage. Spark
Connect sessions offer neither Spark's metrics nor the tasks.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
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

from fencepost.client.errors import FencepostError
from fencepost.client.settings import NO_RETRIES
from fencepost.pipeline.backlog import Backlog
from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.errors import PipelineError
from fencepost.pipeline.options import Options, Selection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
LAG_SECONDS = 10.0
"""How often the server is asked how far queries are behind."""

log = logging.getLogger(__name__)


class PortError(PipelineError):
    """Metrics cannot be served on this port. Choose another one."""


class QueryMetrics(StreamingQueryListener):
    """A listener that turns the progress of queries into metrics of a registry."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        gauges: SparkGauges | None = None,
        token: str | None = None,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._gauges = gauges
        self._token = token
        self._names: dict[str, str] = {}
        self._running: dict[tuple[str, str], Followed] = {}
        self._lock = threading.Lock()
        """Spark's listener and the thread that asks the server both know what is running."""
        home, query, source = self.registry, ("query",), ("query", "source")

        def gauge(name: str, told: str) -> Gauge:
            return Gauge(f"fencepost_query_{name}", told, source, registry=home)

        def counter(name: str, told: str) -> Counter:
            return Counter(f"fencepost_query_{name}", told, query, registry=home)

        self._active = Gauge("fencepost_query_active", "1 while it runs.", query, registry=home)
        self._position = gauge("position", "Read to here.")
        self._head = gauge("head", "The end of the log.")
        self._lags = {
            "lag_positions": gauge("lag_positions", "Positions not read yet."),
            "lag_rows": gauge("lag_rows", "Messages of its streams not read yet."),
            "lag_bytes": gauge("lag_bytes", "Their payload."),
            "lag_seconds": gauge("lag_seconds", "The age of the oldest of them."),
        }
        self._rows = counter("rows", "Rows that were read.")
        self._bytes = counter("bytes", "Payload bytes that were read.")
        self._losses = counter("losses", "Rows that had left the log unread.")
        self._retries = counter("retries", "Attempts of the driver's requests that failed.")
        self._batches = counter("batches", "Batches done.")
        self._failures = counter("failures", "Runs that ended with an error.")
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
        self._forget(name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """A batch is done."""
        progress = event.progress
        name = self._name(str(progress.id), progress.name)
        self._rows.labels(name).inc(max(0, progress.numInputRows))
        self._batches.labels(name).inc()
        self._seconds.labels(name).observe(progress.batchDuration / 1000)
        for index, place in enumerate(places(progress.sources)):
            if place is not None:
                self._progressed((name, str(index)), place)

    def _progressed(self, labels: tuple[str, str], place: Place) -> None:
        told = place.told
        self._position.labels(*labels).set(place.position)
        with self._lock:
            before = self._running.pop(labels, None)
            if place.head is None:
                return
            followed = self._running[labels] = Followed(place, self._token)
        known = before.told if before is not None else {}
        for name, metric in (("losses", self._losses), ("retries", self._retries)):
            metric.labels(labels[0]).inc(max(0, told.get(name, 0) - known.get(name, 0)))
        self._bytes.labels(labels[0]).inc(told.get("batch_bytes", 0))
        self._show(labels, followed, told.get("behind_seconds", 0.0))

    def ask(self) -> None:
        """Ask the server how far each query that runs is behind now."""
        with self._lock:
            running = [*self._running.items()]
        for labels, followed in running:
            try:
                seconds = followed.ask()
            except FencepostError as error:
                log.warning("how far the query %s is behind is not known: %s", labels[0], error)
                continue
            with self._lock:
                # A batch that was done meanwhile has said where the query is now.
                if self._running.get(labels) is followed:
                    self._show(labels, followed, seconds)

    def _show(self, labels: tuple[str, str], followed: Followed, seconds: float) -> None:
        backlog = followed.backlog
        self._head.labels(*labels).set(backlog.until)
        lags = {
            "lag_positions": max(0, backlog.until - followed.position),
            "lag_rows": backlog.rows,
            "lag_bytes": backlog.bytes,
            "lag_seconds": seconds,
        }
        for name, value in lags.items():
            self._lags[name].labels(*labels).set(value)
            if self._gauges is not None:
                self._gauges.set(".".join((*labels, name)), int(value))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """No batch ran; `ask` finds out what has come."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """A query ended, by itself or with an error."""
        name = self._name(str(event.id), None)
        self._active.labels(name).set(0)
        self._forget(name)
        if event.exception is not None:
            self._failures.labels(name).inc()

    def _forget(self, name: str) -> None:
        with self._lock:
            for labels in [labels for labels in self._running if labels[0] == name]:
                del self._running[labels]

    def _name(self, query: str, given: str | None) -> str:
        return self._names.setdefault(query, given or query)


class Place(NamedTuple):
    """How far a source was read, and what it said with its latest offset (`source.stream`)."""

    position: int
    told: Mapping[str, Any]

    @property
    def head(self) -> int | None:
        """Where the log ended, if the source said so."""
        return _position(self.told)


def places(sources: list[Any]) -> Iterator[Place | None]:
    """Where each source of a query is; None for those that are not Fencepost's."""
    for source in sources:
        end = _position(_offset(source.endOffset))
        yield None if end is None else Place(end, _offset(source.latestOffset))


def _offset(offset: str | None) -> Mapping[str, Any]:
    """An offset as Spark reports it: JSON in a text, perhaps quoted once more."""
    found: Any = offset
    for _layer in range(2):
        if not isinstance(found, str):
            break
        try:
            found = json.loads(found)
        except ValueError:
            return {}
    return found if isinstance(found, dict) else {}


def _position(offset: Mapping[str, Any]) -> int | None:
    position = offset.get("position")
    return position if isinstance(position, int) else None


class Followed:
    """A source of a query that runs: where it is, and what came since it said so."""

    def __init__(self, place: Place, token: str | None) -> None:
        assert place.head is not None
        self.position, self.told = place
        self._token = token
        selection = Selection(tuple(self.told.get("streams", ())), self.told.get("match"))
        # A head that the source could not weigh is weighed by `ask`.
        is_weighed = "behind_rows" in self.told
        self.backlog = Backlog(
            selection,
            place.position,
            place.head if is_weighed else place.position,
            self.told.get("behind_rows", 0),
            self.told.get("behind_bytes", 0),
        )

    def ask(self) -> float:
        """Count what has come, and give the age of the oldest message that is not read."""
        with self._connection().client(retries=NO_RETRIES) as client:
            self.backlog.count(client)
            return self.backlog.seconds(client)

    def _connection(self) -> Connection:
        given = {"url": self.told["url"]}
        return connection_of(
            Options(given if self._token is None else given | {"token": self._token})
        )


class Watching:
    """Metrics of a session, for as long as it is not closed; a context manager."""

    def __init__(
        self,
        spark: SparkSession,
        port: int | None,
        address: str,
        token: str | None,
        lag_seconds: float,
    ) -> None:
        self._spark = spark
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.metrics = QueryMetrics(gauges=SparkGauges(spark), token=token)
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
        self._closing = threading.Event()
        self._asking = threading.Thread(
            target=self._ask, args=(lag_seconds,), name="fencepost-lag", daemon=True
        )
        self._asking.start()

    def _ask(self, lag_seconds: float) -> None:
        while not self._closing.wait(lag_seconds):
            self.metrics.ask()

    @property
    def port(self) -> int | None:
        """Where the metrics can be fetched."""
        return None if self._server is None else self._server.server_port

    def close(self) -> None:
        """Stop listening and serving."""
        self._closing.set()
        self._asking.join()
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


def watch(
    spark: SparkSession,
    *,
    port: int | None = None,
    address: str = "127.0.0.1",
    token: str | None = None,
    lag_seconds: float = LAG_SECONDS,
) -> Watching:
    """Measure every query of a session from now on; with a port, serve the numbers there.

    Port 0 takes any that is free; `Watching.port` says which.

    Args:
        token: Who asks the server how far queries are behind; by default `FENCEPOST_TOKEN`.
        lag_seconds: How often it is asked.
    """
    return Watching(spark, port, address, token, lag_seconds)


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
