"""Who writes a batch, and what the driver remembers about a run between its batches.

A batch belongs to a query, or to a job, or to a plain write without a name. Spark tells the
driver's side of a data source nothing about the query, but it tells the tasks: local properties
name the query (its id is in the checkpoint), the batch and the run. So tasks put what they see into
their messages, and the driver reads it there.

Spark calls the driver's side of a sink in processes that come and go, so nothing in memory lasts
from one batch to the next. All of them see the scratch folder that Spark keeps for this driver and
removes with it. There each run, known by Spark's run id, notes the epoch that it was given. A
driver that was replaced keeps its old epoch in its note, and the server refuses it by that.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fencepost.client.results import WriterInfo
from fencepost.pipeline.checkpoints import local_folder
from fencepost.pipeline.errors import FencedRunError, NewCheckpointError, OptionError, SinkError
from fencepost.pipeline.sink.options import SinkOptions

QUERY_PROPERTY = "sql.streaming.queryId"
BATCH_PROPERTY = "streaming.sql.batchId"
RUN_PROPERTY = "spark.jobGroup.id"
JOB_PREFIX = "job:"

_RUN = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task runs, as Spark tells it."""

    partition: int
    attempt: int
    query: str | None = None
    batch: int | None = None
    run: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """The writer of a batch, as the server knows it."""

    name: str
    query: str
    batch: int
    run: str
    """Which start of the query this is: it shares one epoch among its batches."""


def identity_of(
    options: SinkOptions, place: Place, *, streaming: bool, write: str
) -> Identity | None:
    """Who writes; None for a batch write without a name, which cannot be recognised when repeated.

    `write` is a name for this one call of `save()`.
    """
    if place.query is not None and place.batch is not None:
        return _of_query(options, place, place.query, place.batch, streaming=streaming)
    if streaming:
        raise OptionError("Spark did not say which query this is: it is made for PySpark 4.3")
    if options.sink_name is not None:
        raise OptionError(
            "option sinkName in a write that belongs to no query: give a plain batch write a jobId"
            " instead. Inside foreachBatch, a thread of your own does not see the query: use"
            " pyspark.InheritableThread. Under Spark Connect no write in it does: write with"
            " writeStream.format('fencepost')"
        )
    if options.job_id is None:
        return None
    # A job is a query of one batch. Its name is apart from those of sinks.
    return Identity(JOB_PREFIX + options.job_id, options.job_id, 0, write)


def _of_query(
    options: SinkOptions, place: Place, query: str, batch: int, *, streaming: bool
) -> Identity:
    if not streaming:
        if options.job_id is not None:
            raise OptionError(
                "option jobId inside foreachBatch: the query and the batch name the write;"
                " drop jobId and give it a sinkName"
            )
        if options.sink_name is None:
            raise OptionError(
                "option sinkName is missing: inside foreachBatch each write needs a name of its"
                " own, by which its batches are known again after a restart"
            )
    name = options.sink_name or options.stream
    assert name is not None, "the options were checked"
    # Code inside foreachBatch may set a job group of its own, which hides the run. Then each batch
    # is a run: it takes an epoch of its own, and cannot be mistaken for one of an earlier start.
    run = place.run if place.run and _RUN.fullmatch(place.run) else f"{query}/{batch}"
    return Identity(name, query, batch, run)


def check_known(known: WriterInfo | None, identity: Identity, *, allow_new: bool) -> bool:
    """Whether the batch was published before; an error if the name is another query's."""
    if known is None:
        return False
    if known.query != identity.query:
        if allow_new:
            return False
        raise new_checkpoint(identity, known.query, known.batch)
    return known.batch is not None and identity.batch <= known.batch


def fenced_run(identity: Identity, epoch: int | None) -> FencedRunError:
    """The error that a newer run writes now."""
    return FencedRunError(
        f"another run of sink {identity.name!r} has begun since (epoch {epoch}): batch"
        f" {identity.batch} of this one was not written. If that was not on purpose, see that only"
        " one driver runs this query"
    )


def new_checkpoint(identity: Identity, query: str | None, batch: int | None) -> NewCheckpointError:
    """The error that the name belongs to another query."""
    reached = "no batch yet" if batch is None else f"batch {batch}"
    return NewCheckpointError(
        f"the sink {identity.name!r} belongs to query {query}, which came to {reached}; this is"
        f" query {identity.query} at batch {identity.batch}. Was the checkpoint deleted or moved?"
        " Start the query with its old checkpoint; or, if another query writes under this name,"
        " set sinkName to another one; or set allowNewCheckpoint to true if everything this query"
        " reads is to be written, although the old one wrote before"
    )


SCRATCH_VARIABLE = "SPARK_LOCAL_DIRS"


@dataclass(frozen=True, slots=True)
class Start:
    """What the driver knew of its writer when it planned a batch; tasks carry it to the commit."""

    epoch: int | None = None
    """The writer's epoch then; 0 without a writer, None when the server did not answer."""
    batch: int | None = None
    """The last batch that was published then."""
    ended_run: str | None = None
    """A run of this driver that a run of another driver has replaced since."""
    fenced_by: int | None = None
    """The epoch of a run that began just before this one was to begin."""


class Note(msgspec.Struct):
    """A run of one writer."""

    epoch: int | None = None
    query: str | None = None
    run: str | None = None
    """In the note of a start: the run that took the epoch over; None before its first commit."""
    batch: int | None = None
    """The last batch that this run committed or found committed."""
    write: str | None = None
    """Which write that was."""
    mismatches: int = 0
    """Batches that came again with other rows."""


class RunFile:
    """The note of one run; its file is locked while it is open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        data = os.pread(descriptor, 1 << 16, 0)
        # An empty file is new. A torn one cannot be: it is written in one call, below a page.
        self.note = msgspec.json.decode(data, type=Note) if data else Note()

    def save(self) -> None:
        """Keep the note for the batches to come."""
        data = msgspec.json.encode(self.note)
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))


def run_file(folder: Path, url: str, identity: Identity) -> AbstractContextManager[RunFile]:
    """The note about `identity`'s run at the server `url`, and the right to change it."""
    return _note_file(folder, (url, identity.name, identity.run))


def start_file(folder: Path, url: str, name: str) -> AbstractContextManager[RunFile]:
    """The note about the newest start of a sink by this driver: its epoch, and its run."""
    return _note_file(folder, (url, name))


@contextmanager
def _note_file(folder: Path, about: tuple[str, ...]) -> Iterator[RunFile]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise SinkError(
            f"{folder} belongs to another user: set spark.local.dir to a folder of your own"
        )
    named = hashlib.sha256("\0".join(about).encode()).hexdigest()
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / f"{named}.json", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Scratch folders are swept by age on some systems: a run that lives is never old.
        os.utime(descriptor)
        yield RunFile(descriptor)
    finally:
        os.close(descriptor)


def notes_folder(environment: dict[str, str] | None = None) -> Path:
    """Where this driver keeps its notes."""
    own = own_folder(environment)
    return own or Path(tempfile.gettempdir()) / f"fencepost-runs-{os.getuid()}"


def own_folder(environment: dict[str, str] | None = None) -> Path | None:
    """The folder for notes that no other driver has, if Spark says where its scratch folder is."""
    found = os.environ if environment is None else environment
    for scratch in found.get(SCRATCH_VARIABLE, "").split(","):
        if scratch and Path(scratch).is_dir():
            return Path(scratch) / "fencepost-runs"
    return None


def checkpoint_query(checkpoint: str | None) -> str | None:
    """The query id in a checkpoint that is a folder of this machine; None where it is elsewhere.

    Spark writes it before the first batch of a query is planned.
    """
    folder = local_folder(checkpoint)
    if folder is None:
        return None
    try:
        return str(json.loads((folder / "metadata").read_text())["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
