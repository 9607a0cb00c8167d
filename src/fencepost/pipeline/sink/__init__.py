"""The exactly-once sink, as Spark calls it: `batch_writer` and `stream_writer`.

Tasks upload their rows to staging, where no reader sees them. The driver then makes one commit of
what the winning attempts uploaded, in the name of the query and its batch. Spark pickles these
writers to the executors, and makes new ones in other processes for each batch and each commit.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from fencepost.client.errors import (
    ConnectionFailedError,
    ForbiddenError,
    ResponseError,
    StreamNotFoundError,
    UnauthorizedError,
    WriterNotFoundError,
)
from fencepost.client.results import WriterInfo
from fencepost.client.settings import NO_RETRIES
from fencepost.pipeline.connection import warn_of_waiting
from fencepost.pipeline.errors import MissingStreamError, without_traceback
from fencepost.pipeline.sink.chunks import Chunk, Chunks
from fencepost.pipeline.sink.commit import TaskWritten, abort_written, commit_written, start_run
from fencepost.pipeline.sink.identity import (
    BATCH_PROPERTY,
    JOB_PREFIX,
    QUERY_PROPERTY,
    RUN_PROPERTY,
    Identity,
    Place,
    Start,
    check_known,
    fenced_run,
    identity_of,
)
from fencepost.pipeline.sink.options import SinkOptions, sink_options
from fencepost.pipeline.sink.rows import RowsEncoder
from fencepost.pipeline.sink.upload import Uploads, drop

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:
    # PySpark 4.0 gives rows to the writers of streams; `datasource` refuses it before it gets here.
    DataSourceStreamArrowWriter = DataSourceArrowWriter  # type: ignore[misc, assignment]

WRITE_BYTES = 8


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    """The writer of `df.write`, in a batch or inside foreachBatch."""
    options = sink_options(given, schema, overwrite, streaming=False)
    return BatchWriter(Sink(options, *look_up(options, streaming=False), streaming=False))


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamWriter:
    """The writer of `df.writeStream`."""
    options = sink_options(given, schema, overwrite, streaming=True)
    return StreamWriter(Sink(options, *look_up(options, streaming=True), streaming=True))


class Sink:
    """One write: the state that both kinds of writer share and that travels to the executors."""

    def __init__(
        self,
        options: SinkOptions,
        known: WriterInfo | None,
        epoch: int | None,
        *,
        streaming: bool,
    ) -> None:
        self.options = options
        self.known = known
        self.start = Start(epoch, None if known is None else known.batch)
        self._is_planned = not streaming
        self.streaming = streaming
        # A streaming query writes a batch once in a run; inside foreachBatch, every `save()` is
        # another write.
        self.write = "stream" if streaming else secrets.token_hex(WRITE_BYTES)

    def __getstate__(self) -> dict[str, Any]:
        # Spark pickles a writer when it has planned a batch and sends it to the tasks. It makes
        # another one for the commit, which is never pickled. So this is the only moment that
        # comes before the first upload: here the run takes its epoch.
        if not self._is_planned:
            self._is_planned = True
            self.start = start_run(self.options, self.known, self.start.epoch)
        return self.__dict__

    def stage(self, batches: Iterator[pa.RecordBatch], place: Place) -> TaskWritten:
        """On an executor: upload the rows of one partition."""
        options = self.options
        identity = identity_of(options, place, streaming=self.streaming, write=self.write)
        if identity is not None:
            self._refuse_if_fenced(identity)
        published = identity is not None and check_known(
            self.known, identity, allow_new=options.allow_new
        )
        encoder = RowsEncoder(options, place.partition)
        chunks = Chunks(options.stream, chunk_bytes=options.chunk_bytes, json=options.json)
        made = _chunks(batches, encoder, chunks)
        parts = []
        if published:
            for _ in made:
                pass  # only the sums of the rows are needed
        else:
            with options.connection.client() as client:
                uploads = Uploads(client, options.content_type)
                try:
                    parts = uploads.send(made)
                except BaseException:
                    drop(options.connection, uploads.parts())
                    raise
        return TaskWritten(
            place.partition,
            identity,
            parts,
            chunks.sums,
            chunks.payload_bytes,
            self.start,
            published,
        )

    def _refuse_if_fenced(self, identity: Identity) -> None:
        """Raise if the driver found at its planning that a newer run writes now."""
        if self.start.fenced_by is not None:
            raise fenced_run(identity, self.start.fenced_by)
        if self.start.ended_run == identity.run:
            raise fenced_run(identity, self.start.epoch)

    def commit(self, messages: Sequence[Any], batch: int | None = None) -> None:
        """On the driver, after every task has succeeded: publish."""
        commit_written(
            self.options,
            [message for message in messages if message],
            write=self.write,
            batch=batch,
        )

    def abort(self, messages: Sequence[Any]) -> None:
        """On the driver, after something failed, perhaps the commit itself: tidy up."""
        abort_written(self.options, messages)


class BatchWriter(DataSourceArrowWriter):
    """The writer whose methods Spark calls for `df.write`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator, current_place())

    @without_traceback
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._sink.commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._sink.abort(messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer whose methods Spark calls for `df.writeStream`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @without_traceback
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator, current_place())

    @without_traceback
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._sink.commit(messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803, ARG002
        self._sink.abort(messages)


def current_place() -> Place:
    """Where this task runs, as Spark's task context says it."""
    context = TaskContext.get()
    assert context is not None, "write() runs in a task"
    batch = context.getLocalProperty(BATCH_PROPERTY)
    return Place(
        partition=context.partitionId(),
        attempt=context.attemptNumber(),
        query=context.getLocalProperty(QUERY_PROPERTY),
        batch=None if batch is None else int(batch),
        run=context.getLocalProperty(RUN_PROPERTY),
    )


def look_up(options: SinkOptions, *, streaming: bool) -> tuple[WriterInfo | None, int | None]:
    """What the server knows of this writer before the tasks begin, and the writer's epoch.

    The epoch is 0 when there is no writer yet, and None when the server does not answer.

    With it tasks refuse a new checkpoint before they upload anything, and need not upload a batch
    that was published; a missing token or grant shows here as well. The commit decides anew in any
    case, so a server that is away is no reason to wait here.
    """
    name = options.sink_name or (options.stream if streaming else None)
    if options.job_id is not None:
        name = JOB_PREFIX + options.job_id
    with options.connection.client(retries=NO_RETRIES) as client:
        try:
            if options.stream is not None and not options.auto_create:
                # A principal that may append need not be allowed to read.
                with contextlib.suppress(ForbiddenError):
                    client.stream(options.stream).head()
            if name is None:
                return None, None
            known = client.writer(name)
            return known, known.epoch
        except WriterNotFoundError:
            return None, 0
        except StreamNotFoundError:
            raise MissingStreamError(
                f"there is no stream {options.stream!r}: make it, or set autoCreate to true"
            ) from None
        except (UnauthorizedError, ForbiddenError):
            raise
        except ConnectionFailedError as error:
            warn_of_waiting(options.connection, error)
            return None, None
        except ResponseError:
            return None, None


def _chunks(
    batches: Iterator[pa.RecordBatch], encoder: RowsEncoder, chunks: Chunks
) -> Iterator[Chunk]:
    for batch in batches:
        yield from chunks.add(encoder.encode(batch))
    yield from chunks.rest()
