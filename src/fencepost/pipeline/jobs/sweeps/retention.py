"""The sweep that drops what policies no longer keep: planned over the log, done by truncating.

The server applies its own policies by itself. This is for policies that are decided now: what
would they drop, and then drop it. A policy is as in the server's config file: a pattern and bounds
on age, bytes and messages, and the first that fits a stream counts. Messages that were stored at
one time go or stay together, so that no append is ever cut; the newest ones stay unless they are
too old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from fencepost.client.sync import Client
from fencepost.pipeline.connection import connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.jobs.audit.log import facts
from fencepost.pipeline.jobs.audit.rules import messages_of, numbered
from fencepost.pipeline.jobs.sweeps.sweeps import now_ms, on_executors
from fencepost.pipeline.options import Options
from fencepost.pipeline.selection import Selection
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

_BOUNDS = (
    "stream string, tail_messages long, tail_bytes long, oldest_ms long, bytes_max long,"
    " messages_max long"
)
_GIVEN = "stream string, before string, messages long, bytes long"
_MADE = f"{_GIVEN}, outcome string, error string"
Outcome = Literal["would drop", "dropped", "failed"]


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream loses: everything before an offset."""

    stream: str
    before: str
    messages: int
    bytes: int
    outcome: Outcome
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
        bounds = _bounds(client, selection, policies)
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
    made = on_executors(spark, connection, sorted(wanted), _GIVEN, _MADE, _truncate)
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
    """What a stream should lose, by the rules of the protocol; None when it may keep everything."""
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


def _bounds(
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


def _dropped(row: tuple[str, str, int, int], outcome: Outcome) -> Dropped:
    stream, before, messages, size = row
    return Dropped(stream=stream, before=before, messages=messages, bytes=size, outcome=outcome)
