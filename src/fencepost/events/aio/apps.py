"""An app on a server: act, load, query, and work on reactions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any, ParamSpec

import msgspec

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.closing import AsyncClosing
from fencepost.client.aio.groups import AsyncGroup
from fencepost.client.aio.readings import AsyncListing
from fencepost.client.errors import FencepostError
from fencepost.client.group_worker import Working
from fencepost.events import loading, tracing
from fencepost.events.aio.books import AsyncBooks
from fencepost.events.aio.projections import AsyncProjections
from fencepost.events.background import AsyncBackground
from fencepost.events.codec import CORRELATION
from fencepost.events.commits import (
    ANY,
    Expected,
    Query,
    commit,
    meta_of,
    require_events,
    require_version,
)
from fencepost.events.deciding import Deciding, Done, do
from fencepost.events.declarations import Declarations
from fencepost.events.loading import Cache, Loaded
from fencepost.events.projections.working import async_work_beside
from fencepost.events.registry import Breadcrumb
from fencepost.events.types import (
    Action,
    EntityT,
    Event,
    Recorded,
    require_action,
    require_entity,
)
from fencepost.events.working import (
    CAUSE,
    Given,
    OnWait,
    Settled,
    Staff,
    async_settle,
    async_work_app,
    async_work_given,
)

P = ParamSpec("P")


class AsyncOpenApp(AsyncClosing):
    """An app on a server. `app.open(client)` makes it; leave it before the client closes."""

    def __init__(
        self, app: Declarations, client: AsyncClient, projections: str | None = None
    ) -> None:
        self._driver = client._driver
        self._background = AsyncBackground()
        self.app = app
        self.client = client
        self.projections = AsyncProjections(app, client, projections)
        """The projections of the app, if it was opened with a database for them."""
        self.snapshot_failures = 0
        """Snapshots that could not be written. Nothing waits for them."""
        self.deciding = Deciding(
            settings=client._driver.settings,
            codec=app.registry.codec,
            cache=Cache(app.settings.cache_max),
            conflicts_max=app.settings.conflicts_max,
            snapshots=app.settings.snapshot_every is not None,
        )
        self.books = AsyncBooks(app, client, self.deciding)
        """The books of the app's entities, and how they are closed."""

    def __repr__(self) -> str:
        return f"<AsyncOpenApp {self.app.name!r}>"

    @property
    def group(self) -> AsyncGroup:
        """The group of the app, for operators: what is blocked or parked, unblock, replay."""
        return self.client.group(self.app.name)

    # Acting

    def using(
        self,
        *,
        expected: int | None = None,
        correlation: str | None = None,
        causation: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> AsyncActing:
        """Act with options: `app.using(expected=4).do(...)`.

        Args:
            expected: The version that the entity must have (-1: it must be new). A conflict is then
                `ConcurrencyError` at once.
            correlation: The id of the conversation; a new one by default.
            causation: What led to it.
            meta: Further values that go with the events.
        """
        if expected is not None:
            require_version(expected, "")
        return AsyncActing(self, expected, correlation, causation, meta)

    async def do(
        self,
        action: Action[EntityT, P, Any],
        entity_id: str,
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Done[EntityT]:
        """Let an entity act: check the arguments, load, decide, and commit at that version.

        A conflict with another writer is decided again on the newer state, a bounded number of
        times. Raises `InvariantError` when the state does not allow it.
        """
        return await self._do(action, entity_id, arguments, named, None, self._meta(None, None))

    async def _do(
        self,
        action: Action[EntityT, P, Any],
        entity_id: str,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        expected: int | None,
        meta: Mapping[str, Any],
    ) -> Done[EntityT]:
        require_action(action)
        path = action.entity.__entity__.path_of(entity_id)
        with self._commit_span(path, meta, action.name) as carried:
            given = {**meta, **carried}
            done, loaded = await self._driver.run(
                do(self.deciding, action, entity_id, arguments, named, meta=given, pinned=expected)
            )
        if done.events:
            self._committed(done.stream, done.events)
            self._consider_snapshot(loaded)
        return done

    async def commit(
        self,
        stream: str,
        events: Sequence[Event],
        expected: Expected | int = ANY,
        *,
        correlation: str | None = None,
        causation: str | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> list[Recorded[Any]]:
        """Store events in one step if the stream stands where it is expected.

        `expected` is `ANY`, `NO_STREAM`, `STREAM_EXISTS` or the version of its last event. If it
        does not, nothing is stored: `ConcurrencyError`. An empty list does nothing.
        """
        require_events(events)
        if not events:
            return []
        self.app.registry.require_readable(stream, events)
        given = self._meta(correlation, causation, meta)
        with self._commit_span(stream, given) as carried:
            stored = await self._driver.run(
                commit(self._driver.settings, stream, events, expected, {**given, **carried})
            )
        self._committed(stream, stored.events)
        return stored.events

    # Reading

    async def load(
        self, kind: type[EntityT], entity_id: str, *, as_of: datetime | int | None = None
    ) -> Loaded[EntityT]:
        """An entity as it stands now, or as it stood at a time or behind a position of the log."""
        require_entity(kind)
        if as_of is not None:
            return await self._driver.run(
                loading.load_as_of(
                    self._driver.settings, self.deciding.codec, kind, entity_id, as_of
                )
            )
        known = self.deciding.cache.get(kind, kind.__entity__.path_of(entity_id))
        loaded = await self._driver.run(
            loading.load(
                self._driver.settings,
                self.deciding.codec,
                kind,
                entity_id,
                known,
                snapshots=self.deciding.snapshots,
            )
        )
        self.deciding.cache.put(loaded)
        return loaded

    def query(
        self,
        *,
        after: int = -1,
        before: int | None = None,
        stream: str | None = None,
        names: Sequence[str | type[Event]] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        correlation: str | None = None,
        limit: int | None = None,
        backward: bool = False,
    ) -> AsyncListing[Recorded[Any]]:
        """Events in the order of their positions, or the newest first.

        Args:
            after: Only events behind this position.
            before: Only events before this position.
            stream: The path of a stream, or a glob (`orders/*`, `**`).
            names: Only events of these classes, or with these names.
            created_after: Only events of this time or later.
            created_before: Only events before this time.
            correlation: Only events of this conversation.
            limit: So many at most.
            backward: The newest first.
        """
        found = Query(
            self._driver.settings,
            self.deciding.codec,
            after=after,
            before=before,
            stream=stream,
            names=names,
            created_after=created_after,
            created_before=created_before,
            correlation=correlation,
            limit=limit,
            backward=backward,
        )
        return AsyncListing(self._driver, found)

    # Reactions

    async def work(
        self,
        *,
        worker: str | None = None,
        streams: int = 10,
        events: int = 10,
        lane: str | None = None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        """Run reactions until cancelled, or until `stopping` is set.

        Targets are handled side by side, the events of each in order. Handlers that run at the end
        finish first, and their leases are renewed until then.

        Args:
            worker: The name of this worker; one that no other has by default.
            streams: Targets that are handled at once.
            events: Events of a target that are handled for one lease.
            lane: Serve this lane alone.
        """
        options = self._options(worker, streams, events, lane)
        await async_work_beside(
            lambda: async_work_app(self._driver, self.group, self._staff(options), stopping),
            self.projections.works(options.worker),
        )

    async def work_given(self, given: Given, *, worker: str) -> Settled:
        """Handle leases that another process has claimed, side by side, and nothing else.

        They are renewed first and while handlers work; those that were lost meanwhile are left out.
        """
        options = self._options(worker, max(1, len(given.leases)), 10, None)
        return await async_work_given(self._driver, self.group, self._staff(options), given)

    async def settle(
        self,
        *,
        timeout: float = 60.0,
        streams: int = 10,
        events: int = 10,
        on_wait: OnWait | None = None,
    ) -> Settled:
        """Run reactions and projections until nothing is left to do, waiting retries included.

        Raises `SettleTimeoutError` when work is left after so many seconds. Blocked targets and
        parked events wait for an operator, and are no work. `on_wait` is for tests that move the
        server's clock: it is told when the next retry is due, and nothing waits for it.
        """
        options = self._options(None, streams, events, None)
        settled = await async_settle(
            self._driver, self.group, self._staff(options), timeout, on_wait
        )
        await self.projections.settle(timeout=timeout)
        return settled

    def _options(self, worker: str | None, streams: int, events: int, lane: str | None) -> Working:
        name = worker or f"{self.app.name}-{self._driver.settings.clock.token(6).hex()}"
        return Working(
            worker=name,
            streams=streams,
            events=events,
            lane=lane,
            lease_ms=self.app.settings.lease_ms,
        )

    def _staff(self, options: Working) -> Staff:
        return Staff(app=self.app, deciding=self.deciding, options=options)

    # The end

    async def close(self) -> None:
        """Wait for snapshots that are being written. The client stays open."""
        await self._background.close()
        await self.projections.close()

    # Inside

    def _meta(
        self,
        correlation: str | None,
        causation: str | None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """What goes with events; inside a reaction, what its event carries."""
        cause = CAUSE.get()
        if cause is not None:
            correlation, causation = correlation or cause[0], causation or cause[1]
        return meta_of(self._driver.settings, correlation, causation, extra)

    def _commit_span(
        self, stream: str, meta: Mapping[str, Any], action: str | None = None
    ) -> AbstractContextManager[tracing.Carrier]:
        found = {"app": self.app.name, "stream": stream, "action": action}
        return tracing.span("commit", {**found, "correlation": meta[CORRELATION]})

    def _committed(self, stream: str, events: list[Recorded[Any]]) -> None:
        self.app.tell(
            Breadcrumb(
                kind="committed",
                app=self.app.name,
                stream=stream,
                events=len(events),
                position=events[-1].position,
                correlation=events[-1].correlation,
            )
        )

    def _consider_snapshot(self, loaded: Loaded[Any]) -> None:
        if not loading.is_due(loaded, self.app.settings.snapshot_every):
            return
        self.deciding.cache.put(msgspec.structs.replace(loaded, snapshot=loaded.version))
        if not self._background.start(lambda: self._snapshot(loaded)):
            self.snapshot_failures += 1

    async def _snapshot(self, loaded: Loaded[Any]) -> None:
        try:
            await self._driver.run(loading.write_snapshot(self._driver.settings, loaded))
        except FencepostError:
            self.snapshot_failures += 1


class AsyncActing:
    """Acting with options; `AsyncOpenApp.using` makes it."""

    def __init__(
        self,
        opened: AsyncOpenApp,
        expected: int | None,
        correlation: str | None,
        causation: str | None,
        meta: Mapping[str, Any] | None,
    ) -> None:
        self._opened = opened
        self._expected = expected
        self._correlation = correlation
        self._causation = causation
        self._meta = meta

    async def do(
        self,
        action: Action[EntityT, P, Any],
        entity_id: str,
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Done[EntityT]:
        """Let an entity act, with these options."""
        meta = self._opened._meta(self._correlation, self._causation, self._meta)
        return await self._opened._do(action, entity_id, arguments, named, self._expected, meta)
