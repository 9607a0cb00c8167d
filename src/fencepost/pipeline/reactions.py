"""Reactions on Spark: the handlers of an app, drained on executors.

The driver notes which targets events concern and claims leases, one request for all tasks of a
round. The tokens travel to the tasks. A task reads the events of its targets, runs their handlers
in order per target and the targets side by side, renews its leases meanwhile, and commits effects
and ack as one. The same app runs in plain workers at the same time: leases keep them apart.

Two attempts of one task hold the same tokens. The first commit ends the lease, and the other one is
told `lease_lost` and changes nothing. When executors or the driver die their leases expire, and the
next round, or any other worker, takes them.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from fencepost.client.groups import Lease
from fencepost.client.sync import Client
from fencepost.events.correlating import Correlating, make_group
from fencepost.events.working import Given
from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.errors import OptionError, PipelineError
from fencepost.pipeline.options import Options

if TYPE_CHECKING:
    from fencepost.events import App

STREAMS_PER_TASK = 16
"""Targets that a task handles side by side."""
WAIT_MS = 500
"""How long a claim waits for work that is not there yet."""
HANDLED = "task int, worker string, leases long"
_HANDLED_ARROW = pa.schema([("task", pa.int32()), ("worker", pa.string()), ("leases", pa.int64())])


class AppMissingError(PipelineError):
    """`MODULE:APP` names no app on this machine; the message says what is there instead."""


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """What a drain did."""

    rounds: int
    claimed: int
    """Leases that the driver claimed."""
    acked: int
    """Leases that tasks handled to their end. What was lost or failed is claimed again."""


class _Round(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the driver hands to every task of a round."""

    app: App | str
    connection: Connection
    worker: str
    pieces: list[bytes]
    """The leases of each task, by its number."""


def drain(
    spark: SparkSession,
    app: App | str,
    *,
    options: Mapping[str, Any] | None = None,
    tasks: int | None = None,
    streams: int = STREAMS_PER_TASK,
    events: int = 10,
    lane: str | None = None,
    worker: str | None = None,
    follow: bool = False,
    stopping: threading.Event | None = None,
) -> Drained:
    """Handle what is left to do for an app, waiting retries included; or follow what comes.

    Args:
        app: The app, or `module:app`, which executors import. An app of a script travels to them.
        options: How to reach the server, as for `.format("fencepost")`: url, token and the like.
        tasks: Tasks of a round; as many as run side by side by default.
        streams: Targets that a task handles side by side.
        events: Events of a target that are handled for one lease.
        lane: Serve this lane alone.
        worker: The name that leases are held by; one of its own by default.
        follow: Go on until `stopping` is set, instead of ending when nothing is left to do.
        stopping: Set it, and the round that runs is the last one.
    """
    found = app_of(app)
    connection = connection_of(Options({key: str(one) for key, one in (options or {}).items()}))
    parallel = tasks or max(1, spark.sparkContext.defaultParallelism)
    stop = stopping or threading.Event()
    with connection.client() as client:
        claims = _Claims(client, found, worker, lane, streams * parallel, events)
        rounds = claimed = acked = 0
        while not stop.is_set():
            leases, is_due = claims.next()
            if not leases:
                if not claims.note(is_moving=is_due or follow) and not is_due and not follow:
                    break
                continue
            rounds += 1
            claimed += len(leases)
            round_ = claims.round_of(app, connection, leases, parallel)
            acked += _handle(spark, round_)
    return Drained(rounds=rounds, claimed=claimed, acked=acked)


class _Claims:
    """The driver's side: what there is to do, and the leases for it."""

    def __init__(
        self,
        client: Client,
        app: App,
        worker: str | None,
        lane: str | None,
        streams_max: int,
        events_max: int,
    ) -> None:
        self._driver = client._driver
        settings = self._driver.settings
        self._group = client.group(app.name)
        self._correlating = Correlating(settings, app.name, app.registry)
        self._worker = worker or f"{app.name}-spark-{settings.clock.token(6).hex()}"
        self._lane = lane
        self._streams_max = streams_max
        self._events_max = events_max
        self._lease_ms = app.settings.lease_ms
        self._wait_ms = 0
        self._driver.run(make_group(settings, app.name, app.settings.start))

    def next(self) -> tuple[list[Lease], bool]:
        """Leases, and whether work comes due without anyone writing more."""
        taken = self._group.claim(
            self._worker,
            streams_max=self._streams_max,
            events_max=self._events_max,
            lease_ms=self._lease_ms,
            lane=self._lane,
            wait_ms=self._wait_ms,
        )
        self._wait_ms = 0 if taken.leases else WAIT_MS
        return taken.leases, taken.due_ms is not None

    def note(self, *, is_moving: bool = True) -> bool:
        """Note which targets new events concern; whether there were any."""
        return bool(self._driver.run(self._correlating.to_head(is_moving=is_moving)))

    def round_of(
        self, app: App | str, connection: Connection, leases: list[Lease], tasks: int
    ) -> _Round:
        """The leases split evenly over as many tasks as they need."""
        size = math.ceil(len(leases) / tasks)
        pieces = [leases[start : start + size] for start in range(0, len(leases), size)]
        return _Round(
            app=app,
            connection=connection,
            worker=self._worker,
            pieces=[msgspec.msgpack.encode(piece) for piece in pieces],
        )


def _handle(spark: SparkSession, round_: _Round) -> int:
    """Run a round; how many leases were handled to their end."""
    count = len(round_.pieces)
    numbers = spark.range(0, count, 1, count)
    found = numbers.mapInArrow(_working(round_), HANDLED).collect()
    return sum(row["leases"] for row in found)


def _working(
    round_: _Round,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                acked = asyncio.run(_work(round_, number))
                row = {"task": number, "worker": round_.worker, "leases": acked}
                yield pa.RecordBatch.from_pylist([row], schema=_HANDLED_ARROW)

    return work


async def _work(round_: _Round, number: int) -> int:
    """A task: both plain and async handlers run in it."""
    leases = msgspec.msgpack.decode(round_.pieces[number], type=list[Lease])
    found = app_of(round_.app)
    async with (
        round_.connection.async_client() as client,
        found.open(client) as opened,
    ):
        given = Given(leases=leases)
        return (await opened.work_given(given, worker=round_.worker)).leases


def app_of(app: App | str) -> App:
    """The app that `module:app` names."""
    from fencepost.events import App

    if isinstance(app, App):
        return app
    module_name, _, name = app.partition(":")
    if not module_name or not name:
        raise OptionError(f"{app!r} is not of the form MODULE:APP, as in shop:app")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise AppMissingError(
            f"there is no module {error.name!r} here: install it on every executor, or give it to"
            " them with --py-files"
        ) from None
    found = getattr(module, name, None)
    if not isinstance(found, App):
        raise AppMissingError(f"{app!r} is no App of fencepost.events")
    return found
