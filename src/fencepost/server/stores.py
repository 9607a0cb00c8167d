"""The one place that chooses a store: it opens what the settings ask for, of either kind.

What a server needs besides the contract (the log, the lists, subscriptions, background work,
numbers to show) comes together as one `Opened`, so that nothing above knows which engine it has.
PostgreSQL's library is an extra: it is imported only when it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from fencepost.clock import Clock
from fencepost.protocol.appends import Append
from fencepost.protocol.limits import Limits
from fencepost.store.contract import Store, SubscriptionStore
from fencepost.store.engine.deciding import Decider
from fencepost.store.engine.lists import SqlLists
from fencepost.store.engine.logs import SqlLogs
from fencepost.store.engine.reading import Readers
from fencepost.store.log_contract import ListStore, LogStore
from fencepost.store.sqlite.database import PAGE_BYTES
from fencepost.store.sqlite.settings import SqliteSettings
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.subscriptions import SqliteSubscriptions
from fencepost.store.sqlite.upkeep import SqliteUpkeep

Measure = Callable[[int, int, int], None]
"""Told of each commit: how many it answered, its nanoseconds, those of its COMMIT alone."""


class ServedStore(Store, Protocol):
    """A store as the server that runs it sees it."""

    @property
    def decider(self) -> Decider:
        """What decides; its counts and standings are for the metrics."""
        ...

    @property
    def readers(self) -> Readers[Any]: ...

    @property
    def failure(self) -> asyncio.Future[None]:
        """Resolved with the error when the store can no longer be trusted: the server stops."""
        ...

    async def close(self) -> None:
        """Commit what was decided, and let go of the data."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A store that is open, and what a server needs around it."""

    store: ServedStore
    logs: LogStore
    lists: ListStore
    subscriptions: SubscriptionStore
    background: tuple[Callable[[], Coroutine[Any, Any, None]], ...]
    """What runs beside the requests until it is cancelled."""
    join: Callable[[Append], object]
    """Decides an append in the group that is open while something else is being decided."""
    measure: Callable[[Measure], None]
    """Takes the function that is told of each commit."""
    stats: Callable[[], dict[str, float]]
    """Numbers of this engine alone, by name, for the metrics."""


async def open_store(settings: SqliteSettings, limits: Limits, clock: Clock) -> Opened:
    """Open the store that the settings describe, on the event loop that will use it."""
    return _open_sqlite(settings, limits, clock)


def _open_sqlite(settings: SqliteSettings, limits: Limits, clock: Clock) -> Opened:
    store = SqliteStore(settings, clock)
    upkeep = SqliteUpkeep(store, clock)

    def measure(told: Measure) -> None:
        store.commits.on_commit = told

    return Opened(
        store=store,
        logs=SqlLogs(store.readers, limits),
        lists=SqlLists(store.readers),
        subscriptions=SqliteSubscriptions(store),
        background=(upkeep.run, upkeep.fold),
        join=store.decider.append,
        measure=measure,
        stats=lambda: {"wal_bytes": store.wal_pages * PAGE_BYTES},
    )
