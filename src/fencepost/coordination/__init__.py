"""Coordination among actors that share nothing but a stream, each pattern a small class.

Sync and async twins run the same operations; docs/adr/0011-coordination.md says why they hold.
"""

from fencepost.coordination.claiming import Claim, ClaimLostError, TaskState
from fencepost.coordination.claims import AsyncTaskClaims, TaskClaims

__all__ = [
    "AsyncTaskClaims",
    "Claim",
    "ClaimLostError",
    "TaskClaims",
    "TaskState",
]
