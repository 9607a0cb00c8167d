"""Errors that the pipeline raises on purpose, and how they pass through Spark.

Each error says what is wrong and what to do. None of the errors of the sink loses or doubles
anything: a batch that is not committed was not written, and a query that is started again from its
checkpoint continues where it was.

An error that is raised in one of Spark's Python processes reaches the user as the text of a
traceback inside a message of Spark's own. The frames would hide the sentence, so
`without_traceback` removes them where Spark calls our code, and logs them at level DEBUG. Errors of
other packages keep their frames.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from fencepost.client.errors import FencepostError


class PipelineError(FencepostError):
    """The base class of every error that the pipeline raises on purpose."""


class OptionError(PipelineError):
    """An option of `.format("fencepost")` is missing, unknown or not a legal value. Change it."""


class SparkMissingError(PipelineError):
    """PySpark is not installed, or not the version this is made for. Install fencepost[spark]."""


class JavaError(PipelineError):
    """There is no Java that Spark can run on; the message says where it was looked for."""


class SessionError(PipelineError):
    """A Spark session is running with other settings. Stop it first, or use it with `register`."""


class AccessError(PipelineError):
    """The server cannot be read from: a wrong url or token, missing grants, no Arrow there."""


class DataLossError(PipelineError):
    """Rows that the query has not read are gone, or the server is not the one it read from."""


class MalformedError(PipelineError):
    """A message is not what its format and schema say, and the mode is failfast."""


class SinkError(PipelineError):
    """The base class of every error of the sink."""


class RowError(SinkError):
    """A row cannot be written; the message names the partition and the row. Filter or mend it."""


class NewCheckpointError(SinkError):
    """The sink's name belongs to another query: its checkpoint was deleted, or the name is taken.

    Restore the checkpoint; or choose another `sinkName`; or set `allowNewCheckpoint` if everything
    of this query is to be written, whatever the other one wrote.
    """


class FencedRunError(SinkError):
    """A newer run of the query writes now. Stop this one; nothing of its batch was written."""


class ForgottenWriterError(SinkError):
    """The writer's record was deleted while the run was on. Start the query again."""


class ReplayMismatchError(SinkError):
    """A batch came again with other rows, and `onReplayMismatch` is fail. Nothing was changed.

    `fail` is the default where the positions that the batch was read from are not known.
    """


class OldCheckpointError(SinkError):
    """The checkpoint is older than what was published under its batch numbers.

    Nothing was written: to take the batch as written would lose rows. Start the query with its
    newest checkpoint, or with a new one behind the last published batch.
    """


class SinkNameUsedError(SinkError):
    """Two writes of one batch go by the same `sinkName`. Give each a name of its own."""


class StagingExpiredError(SinkError):
    """What the tasks uploaded was dropped before the driver could commit it. Start again."""


class CommitTooLargeError(SinkError):
    """One batch holds more than one commit may. Set `maxRowsPerTrigger` lower."""


class MissingStreamError(SinkError):
    """The stream does not exist. Make it, or set `autoCreate`."""


log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def without_traceback(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a method that Spark calls: errors of the pipeline leave it without frames and causes."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except FencepostError as error:
            raise _bare(error) from None

    return called


def rows_without_traceback(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Wrap a generator that Spark reads rows from: its errors come while rows are taken."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        try:
            yield from function(*args, **kwargs)
        except FencepostError as error:
            raise _bare(error) from None

    return called


def _bare(error: FencepostError) -> FencepostError:
    log.debug("an error is passed to Spark: %s", error, exc_info=error)
    return error.with_traceback(None)
