"""Gauges among Spark's own metrics: on the port of its UI, and wherever else Spark sends them.

Spark's pages show how fast a query is, and not how far behind. What is set here is at
`/metrics/json` of the UI, and in every sink that `metrics.properties` names (JMX, Graphite,
Prometheus), beside Spark's own numbers.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

_PREFIX = "fencepost"
_registered: dict[tuple[str, str], Any] = {}
"""By application and name: Spark takes a name once, and keeps it while the application runs."""


class SparkGauges:
    """Numbers of one session. With Spark Connect there is no way to them, and they are left out."""

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
        # Accumulators are the one thing that Spark lets programs add to its metrics.
        accumulator = self._context.longAccumulator()
        java = self._jvm.org.apache.spark
        named = java.api.python.PythonUtils.toScalaMap({name: accumulator})
        # A Scala object: what Python sees under the plain name is the class beside it.
        source = getattr(getattr(java.metrics.source, "LongAccumulatorSource$"), "MODULE$")
        source.register(self._context, named)
        return accumulator
