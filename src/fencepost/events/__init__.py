"""Events: typed entities and actions, and reactions whose effects happen exactly once.

`types` is what an application declares, `App` puts it together, and `app.open(client)` acts on a
server, sync or async. Everything speaks HTTP through the client. docs/start-events.md begins.
"""

from fencepost.events.aio.apps import AsyncActing, AsyncOpenApp
from fencepost.events.aio.contexts import AsyncContext
from fencepost.events.app import App
from fencepost.events.closing import ClosedBooks, Period
from fencepost.events.commits import ANY, NO_STREAM, STREAM_EXISTS, Expected
from fencepost.events.deciding import Done
from fencepost.events.declarations import AppSettings
from fencepost.events.errors import (
    ActionInvalidError,
    ArchiveError,
    ConcurrencyError,
    DefinitionError,
    EventInvalidError,
    EventsError,
    EventTooNewError,
    InvariantError,
    NonRetryableError,
    SettleTimeoutError,
    UnknownEventError,
)
from fencepost.events.loading import Loaded
from fencepost.events.projections.declared import ProjectionLostError
from fencepost.events.projections.stores import Transaction
from fencepost.events.registry import Breadcrumb
from fencepost.events.retry import Retry
from fencepost.events.sync.apps import Acting, OpenApp
from fencepost.events.sync.contexts import Context
from fencepost.events.types import (
    Action,
    Entity,
    Event,
    Recorded,
    action,
    applies,
    invariant,
    upcasts,
)
from fencepost.events.working import Settled

__all__ = [
    "ANY",
    "Acting",
    "Action",
    "ActionInvalidError",
    "App",
    "AppSettings",
    "ArchiveError",
    "AsyncActing",
    "AsyncContext",
    "AsyncOpenApp",
    "Breadcrumb",
    "ClosedBooks",
    "ConcurrencyError",
    "Context",
    "DefinitionError",
    "Done",
    "Entity",
    "Event",
    "EventInvalidError",
    "EventTooNewError",
    "EventsError",
    "Expected",
    "InvariantError",
    "Loaded",
    "NO_STREAM",
    "NonRetryableError",
    "OpenApp",
    "Period",
    "ProjectionLostError",
    "Recorded",
    "Retry",
    "STREAM_EXISTS",
    "SettleTimeoutError",
    "Settled",
    "Transaction",
    "UnknownEventError",
    "action",
    "applies",
    "invariant",
    "upcasts",
]
