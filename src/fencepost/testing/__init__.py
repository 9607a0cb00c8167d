"""For your tests: a clock to move, disks that fail, a server to talk to.

Fencepost's own fault tests are made of these tools (docs/internals/testing.md).
"""

from fencepost.testing.clock import SimClock
from fencepost.testing.disk import Disk, DiskLog
from fencepost.testing.server import TestServer
from fencepost.testing.vfs import FailingDisk, FaultVfs, FullDisk, SyncGate, fault_vfs

__all__ = [
    "Disk",
    "DiskLog",
    "FailingDisk",
    "FaultVfs",
    "FullDisk",
    "SimClock",
    "SyncGate",
    "TestServer",
    "fault_vfs",
]
