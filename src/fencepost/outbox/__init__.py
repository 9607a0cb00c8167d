"""The outbox: sends that are accepted on this machine and delivered when the server can be reached.

`Outbox.table()` writes sends in the caller's own transaction, `Outbox.daemon()` hands them to the
daemon of this machine. `states` holds the rules, pure, for both.
"""

from fencepost.outbox.aio.daemons import AsyncDaemonOutbox
from fencepost.outbox.errors import (
    IdUsedError,
    NoTransactionError,
    OutboxDatabaseError,
    OutboxError,
    UnknownConnectionError,
)
from fencepost.outbox.local import InboxMessage, RequeuedRow, RowDetails, RowInfo, Taken
from fencepost.outbox.sync.daemons import DaemonOutbox
from fencepost.outbox.table import (
    Accepted,
    Destination,
    Outbox,
    TableOutbox,
    dm,
    queue,
    topic,
)

__all__ = [
    "Accepted",
    "AsyncDaemonOutbox",
    "DaemonOutbox",
    "Destination",
    "IdUsedError",
    "InboxMessage",
    "NoTransactionError",
    "Outbox",
    "OutboxDatabaseError",
    "OutboxError",
    "RequeuedRow",
    "RowDetails",
    "RowInfo",
    "TableOutbox",
    "Taken",
    "UnknownConnectionError",
    "dm",
    "queue",
    "topic",
]
