"""The outbox: sends that are accepted on this machine and delivered when the server can be reached.

`Outbox.table()` writes sends in the caller's own transaction. `states` holds the rules, pure, for
the daemon and for rows in a caller's own database.
"""

from fencepost.outbox.errors import (
    IdUsedError,
    NoTransactionError,
    OutboxDatabaseError,
    OutboxError,
    UnknownConnectionError,
)
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
    "Destination",
    "IdUsedError",
    "NoTransactionError",
    "Outbox",
    "OutboxDatabaseError",
    "OutboxError",
    "TableOutbox",
    "UnknownConnectionError",
    "dm",
    "queue",
    "topic",
]
