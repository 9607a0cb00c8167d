"""A projection built by Spark: in parallel, in order per stream, beside the live one.

The log is read in parts, each with all events of some streams, and every part has a checkpoint of
its own in the database of the projection. A task applies its part, page by page: rows and
checkpoint in one transaction, fenced as in a plain worker. When every part has come to the head of
the log they are made one, and readers are switched in one transaction. Until then they see the
version that was live before.

Events of different streams are applied in any order. A projection whose rows come from several
streams must not depend on it; one that does is built by `fencepost events rebuild`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from fencepost.events.projections.declared import ProjectionLostError
from fencepost.events.projections.projecting import Projecting, advance, projecting
from fencepost.events.projections.stores import Taken, store_at
from fencepost.events.projections.working import in_thread
from fencepost.pipeline.connection import Connection, connection_of
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.options import Options
from fencepost.pipeline.reactions import app_of

if TYPE_CHECKING:
    from fencepost.client.sync import Client
    from fencepost.events import App

APPLIED = "part int, position long"
_APPLIED_ARROW = pa.schema([("part", pa.int32()), ("position", pa.int64())])


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """A projection that was built, and is live."""

    name: str
    version: int
    parts: int
    position: int


class _Building(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the driver hands to every task of a rebuild."""

    app: App | str
    name: str
    database: str
    connection: Connection
    until: int
    parts: list[Taken]


def rebuild(
    spark: SparkSession,
    app: App | str,
    name: str,
    database: str,
    *,
    options: Mapping[str, Any] | None = None,
    parts: int | None = None,
    anew: bool = False,
) -> Rebuilt:
    """Apply the log up to its head in parallel, then make this version of a projection live.

    A run that was killed is gone on with when it is started again with as many parts. Stop workers
    of this version first: one that takes the projection begins it anew.

    Args:
        app: The app, or `module:app`, which executors import.
        name: The projection.
        database: Where it is, as executors reach it: `postgresql://...`, or a file of this machine.
        options: How to reach the server, as for `.format("fencepost")`: url, token and the like.
        parts: How many; as many as tasks run side by side by default.
        anew: Make the tables of this version anew first.
    """
    found = app_of(app)
    if name not in found.projections:
        known = ", ".join(found.projections) or "none"
        raise OptionError(f"app {found.name!r} has no projection {name!r}; it has {known}")
    if database == ":memory:":
        raise OptionError("a projection in memory is of one process: give a file or postgresql://")
    connection = connection_of(Options({key: str(one) for key, one in (options or {}).items()}))
    count = parts or max(1, spark.sparkContext.defaultParallelism)
    with connection.client() as client:
        run = _running(found, name, database, client)
        try:
            run.store.prepare(run.projection, anew=anew)
            if anew:
                run.store.reset(run.projection, -1)
            taken = run.store.take_parts(run.projection, count)
            until = client.log_head()
            building = _Building(
                app=app,
                name=name,
                database=database,
                connection=connection,
                until=until,
                parts=taken,
            )
            spark.range(0, count, 1, count).mapInArrow(_applying(building), APPLIED).collect()
            fence, live = taken[0].fence, taken[0].live
            joined = run.store.join_parts(run.projection, fence, until)
            if joined and not live:
                joined = run.store.switch(run.projection, Taken(fence, until, live), back=True)
            if not joined:
                raise ProjectionLostError(f"{run.projection.group} was taken by another worker")
        finally:
            run.store.close()
    return Rebuilt(name=name, version=run.projection.version, parts=count, position=until)


def _running(app: App, name: str, database: str, client: Client) -> Projecting:
    settings = client._driver.settings
    return projecting(app, settings, app.projections[name], store_at(database), in_thread)


def _applying(
    building: _Building,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                row = {"part": part, "position": _apply(building, part)}
                yield pa.RecordBatch.from_pylist([row], schema=_APPLIED_ARROW)

    return work


def _apply(building: _Building, part: int) -> int:
    """A task: its part of the log, up to where the log ended when the driver looked."""
    with building.connection.client() as client:
        run = _running(app_of(building.app), building.name, building.database, client)
        try:
            while True:
                # The checkpoint says how far other attempts of this task have come.
                taken = run.store.part(run.projection, building.parts[part])
                if taken is None:
                    raise ProjectionLostError(f"{run.projection.group} was taken by another worker")
                if taken.position >= building.until:
                    return taken.position
                with suppress(ProjectionLostError):
                    applied = client._driver.run(advance(run, taken, building.until))
                    if applied.error is not None:
                        raise applied.error
        finally:
            run.store.close()
