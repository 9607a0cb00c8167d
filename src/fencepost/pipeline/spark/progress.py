"""How far Spark is with what it is doing, for bars in a terminal.

Spark knows how many tasks the stages have that are running now; a job is many stages, one after the
other, so the number is that of the present step. Sessions of Spark Connect do not tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Tasks(NamedTuple):
    """Tasks of the stages that are running now."""

    done: int
    all: int


def tasks(spark: SparkSession) -> Tasks | None:
    """How far the running stages are; None when nothing runs or nobody can tell."""
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
