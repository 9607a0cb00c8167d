"""Groups and rows that the tests of groups share."""

from typing import Any

import msgspec

from fencepost.protocol.groups import Group, GroupSettings
from fencepost.protocol.leases import Target
from fencepost.protocol.timing import Backoff

NOW_MS = 1_000_000
LEASE_MS = 10_000
PLAIN = GroupSettings(sources=("orders/**",), backoff=Backoff("fixed", 1_000, 60_000, 0.0))


def group(**changes: Any) -> Group:
    """A group at the beginning of the log, with some settings changed."""
    settings = msgspec.structs.replace(PLAIN, **changes)
    return Group(7, "billing", settings, start=-1, watermark=-1, created_ms=NOW_MS)


def waiting(target: str = "orders/7", *, first: int = 3, last: int = 9, **changes: Any) -> Target:
    """A target with work that no worker has."""
    row = Target(target, target, work_to=last, waits_from=first)
    return row._replace(**changes)


def leased(target: str = "orders/7", **changes: Any) -> Target:
    """A target that Ann has, with lease number 4."""
    held = {"token": 4, "worker": "ann", "lease_until_ms": NOW_MS + LEASE_MS}
    return waiting(target, **{**held, **changes})
