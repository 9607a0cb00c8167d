# Generated from src/fencepost/events/aio/projections.py by `just twins`: change that file.
"""The projections of an open app: read them, look at them, build them anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fencepost.client.errors import require
from fencepost.client.sync.client import Client
from fencepost.events.declarations import Declarations
from fencepost.events.projections.projecting import Progress, Projecting, projecting, rebuild
from fencepost.events.projections.stores import ProjectionStore, Status, store_at
from fencepost.events.projections.working import (
    Work,
    in_thread,
    settle_projection,
    work_projection,
)


class Projections:
    """The projections of an app in one database. `shop.projections` of an open app is this."""

    def __init__(self, app: Declarations, client: Client, address: str | None) -> None:
        self._app = app
        self._client = client
        self._driver = client._driver
        self._store = None if address is None else store_at(address)

    @property
    def store(self) -> ProjectionStore:
        """The database; raises `InvalidArgumentError` if the app was opened without one."""
        require(self._store is not None, "open the app with projections=, the database for them")
        assert self._store is not None
        return self._store

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """The rows of a query in the database of the projections."""
        store = self.store
        return in_thread(lambda: store.read(sql, parameters))  # type: ignore[no-any-return]

    def statuses(self) -> list[Status]:
        """Every version of every projection in the database: how far it is, and which is live."""
        store = self.store
        return in_thread(lambda: store.statuses(self._app.name))  # type: ignore[no-any-return]

    def rebuild(
        self, name: str, *, after: int | None = None, on_progress: Progress | None = None
    ) -> int:
        """Apply the log up to its head, then make the version of this program the live one.

        A version that is new in the database is built beside the live one, which readers go on
        seeing until one transaction switches. With `after` this version goes back to a position
        first: -1 makes its tables anew. Gives the position that was reached.

        Raises `ProjectionLostError` when a worker took the projection meanwhile: stop it first.
        """
        known = ", ".join(self._app.projections) or "none"
        require(
            name in self._app.projections, f"the app has no projection {name!r}; it has {known}"
        )
        run = self._run(name)
        anew = after is not None and after < 0
        in_thread(lambda: run.store.prepare(run.projection, anew=anew))
        applied = self._driver.run(rebuild(run, after=after, progress=on_progress))
        return applied.position

    def settle(self, *, timeout: float = 60.0) -> None:
        """Apply everything that there is now."""
        for name in self._names():
            run = self._run(name)
            settle_projection(
                self._driver,
                self._client.group(run.projection.group),
                run,
                self._worker(),
                self._app.settings.lease_ms,
                timeout,
            )

    def works(self, worker: str) -> dict[str, Work]:
        """What a worker has to run for each projection, by name."""
        return {name: self._work(name, worker) for name in self._names()}

    def close(self) -> None:
        """Close the database."""
        store = self._store
        if store is not None:
            in_thread(store.close)

    def _work(self, name: str, worker: str) -> Work:
        run = self._run(name)
        group = self._client.group(run.projection.group)
        lease_ms = self._app.settings.lease_ms
        return lambda stopping: work_projection(
            self._driver, group, run, worker, lease_ms, stopping
        )

    def _names(self) -> list[str]:
        return [] if self._store is None else list(self._app.projections)

    def _run(self, name: str) -> Projecting:
        return projecting(
            self._app,
            self._driver.settings,
            self._app.projections[name],
            self.store,
            in_thread,
        )

    def _worker(self) -> str:
        return f"{self._app.name}-{self._driver.settings.clock.token(6).hex()}"
