"""Coordination among actors that share nothing but a stream, each pattern a small class.

Sync and async twins run the same operations; docs/adr/0011-coordination.md says why they hold.
"""

from fencepost.coordination.claiming import Claim, ClaimLostError, TaskState
from fencepost.coordination.claims import AsyncTaskClaims, TaskClaims
from fencepost.coordination.executing import ToolCall
from fencepost.coordination.executors import AsyncToolExecutor, ToolExecutor
from fencepost.coordination.overrides import AsyncOverrides, Overrides
from fencepost.coordination.resources import AsyncResources, Resources
from fencepost.coordination.resourcing import (
    Conflict,
    Merge,
    Resolution,
    Row,
    UpdateAbortedError,
    UpdateContendedError,
)

__all__ = [
    "AsyncOverrides",
    "AsyncResources",
    "AsyncTaskClaims",
    "AsyncToolExecutor",
    "Claim",
    "ClaimLostError",
    "Conflict",
    "Merge",
    "Overrides",
    "Resolution",
    "Resources",
    "Row",
    "TaskClaims",
    "TaskState",
    "ToolCall",
    "ToolExecutor",
    "UpdateAbortedError",
    "UpdateContendedError",
]
