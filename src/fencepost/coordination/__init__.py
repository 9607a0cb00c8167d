"""Coordination among actors that share nothing but a stream, each pattern a small class.

`rules` holds the operations, without I/O; `aio` the async classes over them, and `sync` the classes
that are generated from those. docs/adr/0011-coordination.md says why the patterns hold.
"""

from fencepost.coordination.aio.claims import AsyncClaim, AsyncTaskClaims
from fencepost.coordination.aio.executors import AsyncToolExecutor
from fencepost.coordination.aio.overrides import AsyncOverrides
from fencepost.coordination.aio.resources import AsyncResources
from fencepost.coordination.rules.entries import Skipped
from fencepost.coordination.rules.executors import ToolCall
from fencepost.coordination.rules.resources import (
    Conflict,
    Merge,
    Override,
    Resolution,
    Row,
    RowUnreadableError,
    UpdateAbortedError,
    UpdateContendedError,
)
from fencepost.coordination.rules.tasks import ClaimLostError, ClaimNotWonError, Found, TaskState
from fencepost.coordination.sync.claims import Claim, TaskClaims
from fencepost.coordination.sync.executors import ToolExecutor
from fencepost.coordination.sync.overrides import Overrides
from fencepost.coordination.sync.resources import Resources

__all__ = [
    "AsyncClaim",
    "AsyncOverrides",
    "AsyncResources",
    "AsyncTaskClaims",
    "AsyncToolExecutor",
    "Claim",
    "ClaimLostError",
    "ClaimNotWonError",
    "Conflict",
    "Found",
    "Merge",
    "Override",
    "Overrides",
    "Resolution",
    "Resources",
    "Row",
    "RowUnreadableError",
    "Skipped",
    "TaskClaims",
    "TaskState",
    "ToolCall",
    "ToolExecutor",
    "UpdateAbortedError",
    "UpdateContendedError",
]
