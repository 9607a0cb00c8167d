"""Sweeps: work over very many streams that executors do, safe to stop and to run again.

`reclaim` gives the tasks of silent holders back. A claim is stale when its holder has been silent
for longer than a time, by the server's clock. The sweep raises it to the next epoch over the very
move that it saw (Producer-If): a holder that speaks up in between keeps its task, and any number of
sweeps may run at once.

`retention` drops what policies no longer keep. The server applies its own policies by itself; this
is for policies that are decided now. A policy is as in the server's config file: a pattern and
bounds on age, bytes and messages; the first one that fits a stream counts. Messages that were
stored at one time go or stay together, so no append is ever cut; the newest ones stay unless they
are too old.

The driver finds out what there is to do, and `on_executors` does it, stream by stream. A stream
that refuses does not stop the others: its error is part of the result. Both sweeps do only what has
not been done yet, so a sweep that was stopped is resumed by running it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fencepost.client.errors import FencepostError
from fencepost.client.sync import Client
from fencepost.coordination import TaskClaims
from fencepost.coordination.rules.claims import Kind
from fencepost.coordination.rules.entries import server_now_ms
from fencepost.pipeline.audit.log import facts
from fencepost.pipeline.audit.rules import messages_of, numbered
from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options, Selection
from fencepost.pipeline.source.columns import arrow_schema, struct_of
from fencepost.protocol.globs import BadGlob, parse_glob
from fencepost.protocol.offsets import Offset, parse_offset
from fencepost.protocol.retention import (
    KEEP_ALL,
    Kept,
    Policy,
    Retention,
    first_to_keep,
    retention_of,
)

STALE_SECONDS = 60.0
OWNER = "fencepost-reclaim"
CLAIM_KINDS: tuple[Kind, ...] = get_args(Kind)

_CLAIM_GIVEN = "stream string, kind string"
_CLAIM_MADE = (
    "stream string, kind string, task string, owner string, epoch long, silent_seconds double,"
    " outcome string, error string"
)
ClaimOutcome = Literal["stale", "reclaimed", "kept", "failed"]


class StaleClaim(msgspec.Struct, frozen=True, kw_only=True):
    """A claim whose holder was silent, and what became of it.

    `stale` is what a dry run says; `kept` that its holder or another actor was faster, or that the
    server's rules do not take the holder for gone yet; `failed` that the stream refused, in which
    case there may be no task.
    """

    stream: str
    kind: Kind
    outcome: ClaimOutcome
    task: str | None = None
    owner: str | None = None
    epoch: int | None = None
    silent_seconds: float | None = None
    error: str | None = None


def reclaim(
    spark: SparkSession,
    *,
    match: str = "**",
    kinds: Sequence[Kind] = CLAIM_KINDS,
    timeout: float = STALE_SECONDS,
    owner: str = OWNER,
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[StaleClaim]:
    """Make tasks available again whose holders have been silent; what was found, by stream.

    Args:
        match: Which streams, by pattern.
        kinds: `task`, `tool`, or both.
        timeout: How many seconds of silence make a claim stale.
        owner: Who we are, for those who read the stream.
        dry_run: Only find out.
        options: How to reach the server: url, token and the like.
    """
    connection = connection_of(Options({key: str(one) for key, one in (options or {}).items()}))
    with connection.client() as client:
        candidates = _candidates(client, match, kinds, timeout)
    work = _working(timeout, owner, dry_run)
    made = on_executors(spark, connection, candidates, _CLAIM_GIVEN, _CLAIM_MADE, work)
    found = [
        StaleClaim(**{**row, "outcome": row["outcome"] or "failed"})
        for row in made
        if row["task"] is not None or row["error"] is not None
    ]
    return sorted(found, key=lambda one: (one.stream, one.kind, one.task or ""))


def _candidates(
    client: Client, match: str, kinds: Sequence[Kind], timeout: float
) -> list[tuple[str, Kind]]:
    """Streams with a claim that has not moved for so long; whether it is held is not known yet."""
    latest = now_ms(client) - timeout * 1000
    found = {
        (one.stream, kind)
        for kind in kinds
        for one in client.producers(stream=match, match=f"{kind}:*")
        if timeout <= 0 or one.updated is None or one.updated.timestamp() * 1000 <= latest
    }
    return sorted(found)


def _working(timeout: float, owner: str, dry_run: bool) -> Work:
    def work(client: Client, row: dict[str, Any]) -> list[dict[str, Any]]:
        claims = TaskClaims(client.stream(row["stream"]), owner, kind=row["kind"])
        stale = claims.stale(timeout)
        if not stale:
            return []
        now = now_ms(client) / 1000
        taken = set() if dry_run else set(claims.reclaim_stale(timeout))
        missed: ClaimOutcome = "stale" if dry_run else "kept"
        return [
            {
                **row,
                "task": one.task,
                "owner": one.owner,
                "epoch": one.epoch,
                "silent_seconds": max(0.0, now - one.updated.timestamp()),
                "outcome": "reclaimed" if one.task in taken else missed,
            }
            for one in stale
        ]

    return work


_BOUNDS = (
    "stream string, tail_messages long, tail_bytes long, oldest_ms long, bytes_max long,"
    " messages_max long"
)
_DROP_GIVEN = "stream string, before string, messages long, bytes long"
_DROP_MADE = f"{_DROP_GIVEN}, outcome string, error string"
DropOutcome = Literal["would drop", "dropped", "failed"]


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a stream loses: all before an offset."""

    stream: str
    before: str
    messages: int
    bytes: int
    outcome: DropOutcome
    error: str | None = None


def policy(
    match: str,
    *,
    max_age_s: int | None = None,
    max_bytes: int | None = None,
    max_messages: int | None = None,
) -> Policy:
    """A policy from what a person wrote; at least one bound."""
    glob = parse_glob(match)
    if isinstance(glob, BadGlob):
        raise OptionError(f"{match!r} is no pattern: {glob.detail}")
    bounds = Retention(max_age_s, max_bytes, max_messages)
    if bounds == KEEP_ALL:
        raise OptionError(
            f"the policy for {match} bounds nothing: give an age, bytes or messages to keep"
        )
    if any(bound is not None and bound < 0 for bound in bounds):
        raise OptionError(f"the policy for {match} has a bound below 0")
    return Policy(glob, bounds)


def retention(
    spark: SparkSession,
    policies: Sequence[Policy],
    *,
    dry_run: bool = False,
    options: Mapping[str, Any] | None = None,
) -> list[Dropped]:
    """Drop what the policies do not keep, and say what that was; with `dry_run`, only say it.

    Running it again drops only what has come of age since, or what an interrupted run left.
    """
    if not policies:
        raise OptionError("give at least one policy: a pattern and what to keep")
    connection = connection_of(Options({key: str(one) for key, one in (options or {}).items()}))
    # One pattern narrows what is read of the log; several are told apart stream by stream.
    selection = Selection(match=policies[0].glob.text if len(policies) == 1 else "**")
    with connection.client() as client:
        bounds = _bounded_streams(client, selection, policies)
        now = now_ms(client)
        head = client.log_head()
    if not bounds:
        return []
    found, _span = facts(spark, connection, selection, -1, head)
    limits = spark.createDataFrame(
        [
            (path, *tail, None if held.age_s is None else now - held.age_s * 1000, *held[1:])
            for path, tail, held in bounds
        ],
        _BOUNDS,
    )
    wanted = [
        drop
        for row in planned(numbered(found), limits).collect()
        if (drop := _drop(row.asDict(recursive=True), now)) is not None
    ]
    if dry_run:
        return [_dropped(row, "would drop") for row in sorted(wanted)]
    made = on_executors(spark, connection, sorted(wanted), _DROP_GIVEN, _DROP_MADE, _truncate)
    done = [Dropped(**{**row, "outcome": row["outcome"] or "failed"}) for row in made]
    return sorted(done, key=lambda one: one.stream)


def planned(known: DataFrame, limits: DataFrame) -> DataFrame:
    """For each stream: where it begins, its first moment within bounds, and its newest one."""
    live = known.where("live")
    begun = (
        live.where("marker = 'truncated'").groupBy("stream").agg(F.max("offset").alias("begins"))
    )
    kept = (
        messages_of(live)
        .join(begun, "stream", "left")
        .where("begins is null or offset >= begins")
        .groupBy("stream", F.unix_millis("timestamp").alias("at_ms"))
        .agg(F.min("offset").alias("offset"))
        .join(limits, "stream")
    )
    parts = F.split("offset", "_")
    messages = F.col("tail_messages") - parts.getItem(0).cast("long")
    size = F.col("tail_bytes") - parts.getItem(1).cast("long")
    within = (
        F.coalesce(F.col("at_ms") > F.col("oldest_ms"), F.lit(True))
        & F.coalesce(size <= F.col("bytes_max"), F.lit(True))
        & F.coalesce(messages <= F.col("messages_max"), F.lit(True))
    )
    moment = F.struct("offset", "at_ms")
    names = ("tail_messages", "tail_bytes", "oldest_ms", "bytes_max", "messages_max")
    return kept.groupBy("stream", *names).agg(
        F.min("offset").alias("begins"),
        F.min(F.when(within, moment)).alias("within"),
        F.max(moment).alias("newest"),
    )


def _drop(row: dict[str, Any], now: int) -> tuple[str, str, int, int] | None:
    """The drop that the policies ask of a stream; None when it may keep everything."""
    tail = Offset(row["tail_messages"], row["tail_bytes"])
    oldest = row["oldest_ms"]
    held = Retention(
        None if oldest is None else (now - oldest) // 1000, row["bytes_max"], row["messages_max"]
    )
    within = None if row["within"] is None else _kept(row["within"])
    first = first_to_keep(held, within, _kept(row["newest"]), tail, now)
    begins = _offset(row["begins"])
    if first.bytes <= begins.bytes:
        return None
    return (
        row["stream"],
        str(first),
        first.messages - begins.messages,
        first.bytes - begins.bytes,
    )


def _kept(moment: dict[str, Any]) -> Kept:
    return Kept(_offset(moment["offset"]), moment["at_ms"])


def _offset(text: str) -> Offset:
    found = parse_offset(text)
    assert isinstance(found, Offset), text
    return found


def _bounded_streams(
    client: Client, selection: Selection, policies: Sequence[Policy]
) -> list[tuple[str, Offset, Retention]]:
    """The streams that a policy fits, with their tails and what they may hold."""
    found = []
    for one in client.streams(match=selection.match):
        held = retention_of(one.path, KEEP_ALL, policies)
        if held != KEEP_ALL and one.version >= 0:
            found.append((one.path, _offset(one.tail), held))
    return found


def _truncate(client: Client, row: dict[str, Any]) -> list[dict[str, Any]]:
    client.stream(row["stream"]).truncate(before=row["before"])
    return [{**row, "outcome": "dropped"}]


def _dropped(row: tuple[str, str, int, int], outcome: DropOutcome) -> Dropped:
    stream, before, messages, size = row
    return Dropped(stream=stream, before=before, messages=messages, bytes=size, outcome=outcome)


STREAMS_PER_TASK = 50
TASKS_MAX = 64

Work = Callable[[Client, dict[str, Any]], list[dict[str, Any]]]
"""What is done with one row: the rows of its result."""


def on_executors(
    spark: SparkSession,
    connection: Connection,
    rows: Sequence[tuple[Any, ...]],
    given: str,
    made: str,
    work: Work,
) -> list[dict[str, Any]]:
    """Do `work` with every row, on executors, and give back what was made.

    `given` and `made` are the columns of rows and results as DDL. Results have a column `error`;
    a row whose work failed gives its own columns, as far as `made` has them, and why.
    """
    if not rows:
        return []
    declared = arrow_schema(struct_of(made))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with connection.client() as client:
            for batch in batches:
                for row in batch.to_pylist():
                    done = attempted(client, row, work)
                    kept = [{name: one.get(name) for name in declared.names} for one in done]
                    yield pa.RecordBatch.from_pylist(kept, schema=declared)

    tasks = min(TASKS_MAX, -(-len(rows) // STREAMS_PER_TASK))
    asked = spark.createDataFrame(list(rows), given).repartition(tasks)
    return [row.asDict() for row in asked.mapInArrow(run, made).collect()]


def attempted(client: Client, row: dict[str, Any], work: Work) -> list[dict[str, Any]]:
    """The rows that the work gives for a row, or the row with its error."""
    try:
        return work(client, row)
    except FencepostError as error:
        return [{**row, "error": str(error)}]


def now_ms(client: Client) -> int:
    """The time at the server, whose clock decides what is stale or old."""
    driver = client._driver
    return driver.run(server_now_ms(driver.settings))
