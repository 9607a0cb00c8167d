"""Why a write to Fencepost fails on purpose, and what to do then.

None of these loses or doubles anything: what is not committed was not written, and a query that is
started again from its checkpoint goes on where it was.
"""

from __future__ import annotations

from fencepost.pipeline.errors import PipelineError


class SinkError(PipelineError):
    """The root of what the sink refuses."""


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
    """Somebody removed the writer's record while the run was on. Start the query again."""


class ReplayMismatchError(SinkError):
    """A batch came again with other rows, and `onReplayMismatch` is fail. Nothing was changed."""


class SinkNameUsedError(SinkError):
    """Two writes of one batch go by the same `sinkName`. Give each a name of its own."""


class StagingExpiredError(SinkError):
    """What the tasks uploaded was dropped before the driver could commit it. Start again."""


class CommitTooLargeError(SinkError):
    """One batch holds more than one commit may. Set `maxRowsPerTrigger` lower."""


class MissingStreamError(SinkError):
    """The stream does not exist. Make it, or set `autoCreate`."""
