"""For the tests of whoever builds on Fencepost: a clock to move, disks that fail, a server to talk to.

These are the tools that Fencepost's own fault tests are made of (docs/internals/testing.md).
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
