"""State over a stream: messages that say what changed, and the rows that they add up to.

The format is the public State Protocol: a change names a type and a key and their new value, a
control message says something about the stream itself. `insert`, `update`, `upsert`, `delete` and
the three controls build messages that are valid; `parse` checks one that came from elsewhere.
`Materialized` and `AsyncMaterialized` keep the rows in memory; both run the same `Rows` and
`Materializing`, which do no I/O.
"""

from fencepost.client.state.aio import AsyncMaterialized
from fencepost.client.state.messages import (
    Change,
    ChangeHeaders,
    Control,
    ControlHeaders,
    Instant,
    Name,
    StateMessageError,
    delete,
    insert,
    parse,
    reset,
    snapshot_end,
    snapshot_start,
    update,
    upsert,
)
from fencepost.client.state.rows import Materializing, Rows
from fencepost.client.state.sync import Materialized

__all__ = [
    "AsyncMaterialized",
    "Change",
    "ChangeHeaders",
    "Control",
    "ControlHeaders",
    "Instant",
    "Materialized",
    "Materializing",
    "Name",
    "Rows",
    "StateMessageError",
    "delete",
    "insert",
    "parse",
    "reset",
    "snapshot_end",
    "snapshot_start",
    "update",
    "upsert",
]
