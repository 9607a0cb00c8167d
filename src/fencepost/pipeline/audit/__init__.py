"""The audit: does the log hold what the server promises, and do the server's lists agree with it?

Every rule is a Spark job over the facts of the log; the driver reads what the server lists. The
server may write meanwhile: the lists are read between two looks at the head of the log, and only
what must hold at some moment between the two is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from fencepost.client.sync import Client
from fencepost.pipeline.audit import leases, lists, rules, sends
from fencepost.pipeline.audit import writers as of_writers
from fencepost.pipeline.audit.log import Span, facts
from fencepost.pipeline.audit.reports import (
    UNIT_SECONDS,
    Count,
    DayCount,
    Defect,
    Report,
    Unit,
    day_name,
    timeline,
    unit_for,
)
from fencepost.pipeline.audit.writers import NO_WRITERS, ListedWriters
from fencepost.pipeline.connection import connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options, Selection

KINDS = rules.KINDS | leases.KINDS | sends.KINDS
"""What each kind of defect means."""
SAMPLES_MAX = 20
LARGEST_MAX = 100
EVERYTHING = "**"

Tell = Callable[[str], None]
"""Called with what the audit is doing."""


class Listed(NamedTuple):
    """What the server lists, and the head of the log before and after the lists were read."""

    settled: int
    until: int
    streams: list[tuple[str, int, str, bool, bool]]
    producers: list[tuple[str, str, int, int]]
    keys: list[tuple[str, int, str, str, int]]
    writers: ListedWriters = NO_WRITERS


def audit(
    spark: SparkSession,
    *,
    stream: str | Sequence[str] | None = None,
    match: str | None = None,
    after: int = -1,
    until: int | None = None,
    options: Mapping[str, Any] | None = None,
    samples_max: int = SAMPLES_MAX,
    forgetting: bool = False,
    once: str | None = None,
    tell: Tell | None = None,
) -> Report:
    """Check the log, and the lists against it, and report every kind of defect that there is.

    Args:
        stream: The stream or streams to check, by path; or `match`, a pattern. Else everything.
        after: Check what lies above this position; beginnings and lists are then left out.
        until: Check up to this position instead of the head; lists are then left out.
        options: How to reach the server, as for `.format("fencepost")`: url, token and the like.
        samples_max: How many examples of each kind to report.
        forgetting: The server has a `producer_retention_s`: producers that are not listed are no
            defect.
        once: What makes a JSON message that very one, as a path in it (`id`, `order.id`, `$` for
            all of it): no two of a stream may have the same.
        tell: Called with each step.
    """
    selection = _selection(stream, match)
    connection = connection_of(Options({key: str(one) for key, one in (options or {}).items()}))
    say = tell or (lambda _step: None)
    whole = after < 0 and until is None
    with connection.client() as client:
        say("reading the lists")
        listed = _listed(client, selection) if whole else None
        # Groups read any streams, so only an audit of all of them looks at groups.
        seen = leases.look(client) if whole and selection.match == EVERYTHING else None
        end = listed.until if listed is not None else client.log_head()
        end = end if until is None else min(until, end)
    say("reading the log")
    found, span = facts(spark, connection, selection, after, end, _path(once))
    known = rules.numbered(found).persist()
    try:
        messages = rules.messages_of(known).count()
        say("checking")
        defects = all_defects(known, span, listed, forgetting=forgetting, once=once is not None)
        defects = defects.persist()
        try:
            counted, samples = _summary(defects, samples_max)
        finally:
            defects.unpersist()
        say("counting")
        days, largest, by_stream_and_day, streams = _counts(known)
        unit, times = _timeline(known)
    finally:
        known.unpersist()
    if seen is not None:
        say("looking at the groups again")
        with connection.client() as client:
            more = leases.compare(client, seen)
            say("checking the sends of meshes")
            more += sends.check(client)
        counted, samples = _with(counted, samples, more, samples_max)
    return Report(
        selection=str(selection),
        after=after,
        until=end,
        messages=messages,
        streams=streams if listed is None else max(streams, len(listed.streams)),
        producers=0 if listed is None else len(listed.producers),
        keys=0 if listed is None else len(listed.keys),
        pruned=None if span.pruned < 0 else span.pruned,
        lists_compared=whole,
        defects=counted,
        samples=samples,
        days=days,
        largest=largest,
        by_stream_and_day=by_stream_and_day,
        timeline_unit=unit,
        timeline=times,
    )


def all_defects(
    known: DataFrame,
    span: Span,
    listed: Listed | None,
    *,
    forgetting: bool = False,
    once: bool = False,
) -> DataFrame:
    """Every defect of numbered facts, those against the lists included if there are any."""
    spark = known.sparkSession
    cut = _cut(known, span)
    batches = rules.batches_of(known)
    found = [rules.damages(known), rules.sequences(known), rules.producers(batches, cut)]
    if once:
        found.append(rules.repetitions(known))
    if listed is not None:
        streams = spark.createDataFrame(listed.streams, lists.STREAM_LIST)
        producers = spark.createDataFrame(listed.producers, lists.PRODUCER_LIST)
        keys = spark.createDataFrame(listed.keys, lists.KEY_LIST)
        found += [
            lists.streams(known, streams, cut, listed.settled),
            lists.producers(known, batches, producers, cut, listed.settled, forgetting=forgetting),
            lists.keys(known, keys, span.pruned),
        ]
        if listed.writers.writers:
            found += _of_writers(known, listed.writers, pruned=span.pruned >= 0)
    return rules.union_of(found)


def _of_writers(known: DataFrame, listed: ListedWriters, *, pruned: bool) -> list[DataFrame]:
    spark = known.sparkSession
    writers = spark.createDataFrame(listed.writers, of_writers.WRITER_LIST)
    batches = spark.createDataFrame(listed.batches, of_writers.BATCH_LIST)
    return [of_writers.writers(writers), of_writers.batches(known, batches, pruned=pruned)]


def _cut(known: DataFrame, span: Span) -> DataFrame:
    """The streams of which some messages are not in the range, with right."""
    if span.after >= 0:
        return known.select("stream")
    if span.pruned < 0:
        return known.sparkSession.createDataFrame([], "stream string")
    return known.where(F.col("marker").isin("truncated", *rules.ENDS)).select("stream")


def _summary(defects: DataFrame, samples_max: int) -> tuple[dict[str, int], list[Defect]]:
    counted = {
        row.kind: row.found
        for row in defects.groupBy("kind").agg(F.count("*").alias("found")).collect()
    }
    rank = F.row_number().over(Window.partitionBy("kind").orderBy("position", "stream"))
    shown = defects.withColumn("rank", rank).where(F.col("rank") <= samples_max)
    samples = [
        Defect(row.kind, row.stream, row.position, row.detail)
        for row in shown.orderBy("kind", "rank").collect()
    ]
    return dict(sorted(counted.items())), samples


def _with(
    counted: dict[str, int], samples: list[Defect], more: list[Defect], samples_max: int
) -> tuple[dict[str, int], list[Defect]]:
    """The summary with defects that the driver found."""
    by_kind: dict[str, list[Defect]] = {}
    for defect in more:
        by_kind.setdefault(defect.kind, []).append(defect)
    counts = {**counted, **{kind: len(found) for kind, found in by_kind.items()}}
    shown = [defect for _, found in sorted(by_kind.items()) for defect in found[:samples_max]]
    return dict(sorted(counts.items())), samples + shown


def _counts(known: DataFrame) -> tuple[list[Count], list[Count], list[DayCount], int]:
    """Totals by day, the largest streams, their days, and how many streams there are."""
    counts = rules.counts(known).persist()
    total = F.sum("messages").alias("messages"), F.sum("bytes").alias("bytes")
    try:
        days = [
            Count(day_name(row.day), row.messages, row.bytes)
            for row in counts.groupBy("day").agg(*total).orderBy("day").collect()
        ]
        streams = counts.groupBy("stream").agg(*total)
        largest = [
            Count(row.stream, row.messages, row.bytes)
            for row in streams.orderBy(F.desc("messages"), "stream").limit(LARGEST_MAX).collect()
        ]
        of_largest = counts.where(F.col("stream").isin([one.name for one in largest]))
        by_stream_and_day = [
            DayCount(row.stream, day_name(row.day), row.messages, row.bytes)
            for row in of_largest.orderBy("stream", "day").collect()
        ]
        return days, largest, by_stream_and_day, counts.select("stream").distinct().count()
    finally:
        counts.unpersist()


def _timeline(known: DataFrame) -> tuple[Unit, list[Count]]:
    """Messages by the unit of time that shows how they came."""
    span = rules.span(known).first()
    if span is None or span["first"] is None:
        return "day", []
    unit = unit_for(span["last"] - span["first"])
    rows = rules.counts_by(known, UNIT_SECONDS[unit]).collect()
    return unit, timeline(unit, {row["at"]: (row["messages"], row["bytes"]) for row in rows})


def _listed(client: Client, selection: Selection) -> Listed:
    # Writers publish to any streams, so only an audit of all of them can hold them to the log.
    whole = selection.match == EVERYTHING
    writers = of_writers.listed(client) if whole else NO_WRITERS
    settled = client.log_head()
    streams = [
        (one.path, one.version, one.tail, one.closed, one.forked_from is not None)
        for pattern in _patterns(selection)
        for one in client.streams(match=pattern)
    ]
    producers = [
        (one.stream, one.id, one.epoch, one.seq)
        for pattern in _patterns(selection)
        for one in client.producers(stream=pattern)
    ]
    keys = [
        (one.stream, one.incarnation, one.key, one.offset, one.position)
        for one in client.keys()  # noqa: SIM118  (a list of the server, not a dict's)
        if one.stream is not None and selection.takes(one.stream)
    ]
    return Listed(settled, client.log_head(), streams, producers, keys, writers)


def _patterns(selection: Selection) -> list[str]:
    """A path is a pattern for itself."""
    return list(selection.streams) if selection.match is None else [selection.match]


def _path(once: str | None) -> str | None:
    """A path as Spark wants it."""
    return once if once is None or once.startswith("$") else f"$.{once}"


def _selection(stream: str | Sequence[str] | None, match: str | None) -> Selection:
    if stream is not None and match is not None:
        raise OptionError("say which streams to audit by stream or by match, not both")
    if stream is None:
        return Selection(match=match or EVERYTHING)
    return Selection((stream,) if isinstance(stream, str) else tuple(stream))
