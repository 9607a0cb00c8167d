"""An app: declared once, and opened with a client.

`App` holds declarations only and does no I/O, so one app serves the sync and the async client, any
number of workers, and tests. `open` gives what acts on a server.
"""

from __future__ import annotations

import inspect
from typing import overload

from fencepost.client.aio.client import AsyncClient
from fencepost.client.errors import require
from fencepost.client.sync.client import Client
from fencepost.events.aio.apps import AsyncOpenApp
from fencepost.events.declarations import Declarations
from fencepost.events.errors import DefinitionError
from fencepost.events.sync.apps import OpenApp


class App(Declarations):
    """An application: entities, reactions and hooks. Its group on the server has its name."""

    @overload
    def open(self, client: Client, *, projections: str | None = None) -> OpenApp: ...

    @overload
    def open(self, client: AsyncClient, *, projections: str | None = None) -> AsyncOpenApp: ...

    def open(
        self, client: Client | AsyncClient, *, projections: str | None = None
    ) -> OpenApp | AsyncOpenApp:
        """The app on a server: use it as a context manager.

        `projections` is the database of the projections: a SQLite file, `:memory:`, or
        `postgresql://...`. Without it they do not run.
        """
        if isinstance(client, AsyncClient):
            return AsyncOpenApp(self, client, projections)
        require(
            isinstance(client, Client),
            f"open takes a client, as in app.open(fencepost.connect(url)), not {client!r}",
        )
        for policy in self.policies:
            if inspect.iscoroutinefunction(policy.archive):
                raise DefinitionError(
                    f"the archive of {policy.entity.__name__} is async: open the app with an async "
                    "client"
                )
        return OpenApp(self, client, projections)
