"""Opening a store: the one place that chooses between SQLite and PostgreSQL.

`open_store` reads from the settings which of the two it is, and returns an `Opened`: the store with
the log, the lists, the subscriptions, the background work and the counters around it. A server uses
that and the contracts only, so nothing in a server knows which database it has. PostgreSQL's
library is an extra, so it is imported only when the settings ask for PostgreSQL.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fencepost.clock import Clock, SystemClock
from fencepost.protocol.appends import Append
from fencepost.protocol.claims import AuditEvent
from fencepost.protocol.limits import Limits
from fencepost.store.contract import (
    Counters,
    Leadership,
    ServedStore,
    StoreAwayError,
    SubscriptionStore,
)
from fencepost.store.group_contract import GroupReads
from fencepost.store.log_contract import ListStore, LogStore
from fencepost.store.maintain.jobs import sweep_sends
from fencepost.store.mesh_contract import MeshReads
from fencepost.store.read.groups import SqlGroupReads
from fencepost.store.read.lists import SqlLists
from fencepost.store.read.log import SqlLogs
from fencepost.store.read.meshes import SqlMeshReads
from fencepost.store.read.scans import Scans
from fencepost.store.settings import PostgresSettings, SqliteSettings
from fencepost.store.sql import Schema
from fencepost.store.sqlite import migrate as sqlite_schema
from fencepost.store.sqlite.connection import PAGE_BYTES
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.sqlite.subscriptions import SqliteSubscriptions

AnyStoreSettings = SqliteSettings | PostgresSettings
"""The type of the settings says which store to open."""

INDEXED_BYTES_MAX = 2_000
"""The longest path, producer id or key on PostgreSQL. Each is in an index there, and an entry of an
index has room for so much, and for what stands beside it."""

Measure = Callable[[int, int, int], None]
"""Called after each commit with the number of requests that it answered, its duration in
nanoseconds, and that of its COMMIT alone."""

Auditor = Callable[[AuditEvent], None]
"""Called with each event for the audit stream while the commit is open that the event is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A store that is open, and what a server needs around it."""

    store: ServedStore
    logs: LogStore
    lists: ListStore
    groups: GroupReads
    meshes: MeshReads
    sweep_sends: Callable[[], Awaitable[int]]
    """Forget some sends whose time is over; how many."""
    subscriptions: SubscriptionStore | None
    """Where subscriptions are kept; None where several servers share the store."""
    leading: Leadership | None = None
    """Where they do: this server's part in choosing a leader, who is given the subscriptions."""
    secret: Callable[[str, bytes], Awaitable[bytes]]
    """The secret called by a name, the same for all servers of the store. The second argument
    becomes the secret if the store has none yet."""
    background: tuple[Callable[[], Coroutine[Any, Any, None]], ...]
    """Work that runs beside the requests until it is cancelled."""
    join: Callable[[Append], object]
    """Add an append to the commit of the request that is being decided."""
    measure: Callable[[Measure], None]
    """Set the function that is told of each commit."""
    counters: Callable[[], Counters]
    """Numbers that every store has, for the metrics."""
    stats: Callable[[], dict[str, float]]
    """Numbers that only this kind of store has, by name, for the metrics."""


class CannotOpenError(Exception):
    """The store cannot be opened as it was asked for: the message says why and what to do."""


def describe(settings: AnyStoreSettings) -> str:
    """Where the store is, in words that hold no password."""
    if isinstance(settings, SqliteSettings):
        return str(settings.folder)
    scheme, _, rest = settings.url.partition("://")
    # The last @ of all: a password that was not escaped may hold anything, also an @ or a /.
    login, at, place = rest.rpartition("@")
    user = login.partition(":")[0]
    return f"{scheme}://{user}{at}{re.split('[?#]', place)[0]}"


def require_postgres(settings: PostgresSettings) -> None:
    """See that PostgreSQL's library is there and can read the URL, whose password is not shown."""
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise CannotOpenError(
            "a store on PostgreSQL needs a library that is not installed here:"
            f" pip install 'fencepost[postgres]' ({error})"
        ) from None
    try:
        ports = str(conninfo_to_dict(settings.url).get("port", ""))
        readable = all(port.isdigit() for port in ports.split(",") if port)
    except psycopg.Error:
        readable = False
    if not readable:
        # What libpq says of it may quote a piece of the password.
        raise CannotOpenError(
            "the url of the store cannot be read: it is postgresql://user:password@host:port/name,"
            " with special characters of the password as percent escapes"
        )


@contextmanager
def saying_why(settings: PostgresSettings) -> Iterator[None]:
    """Turn what PostgreSQL has to say against being used into an error with one sentence."""
    import psycopg

    from fencepost.store.postgres.driver.connection import StandbyError, UnusableDatabaseError

    try:
        yield
    except (UnusableDatabaseError, StandbyError) as error:
        raise CannotOpenError(f"{describe(settings)} cannot be used: {error}") from error
    except psycopg.OperationalError as error:
        raise StoreAwayError(" ".join(str(error).split())) from error
    except psycopg.Error as error:
        said = " ".join(str(error).split())
        raise CannotOpenError(f"{describe(settings)} cannot be used: {said}") from error


def schema_of(settings: AnyStoreSettings) -> Schema:
    """Where the schema of the store stands; nothing is changed."""
    if isinstance(settings, SqliteSettings):
        return sqlite_schema.schema_of(settings.folder)
    require_postgres(settings)
    from fencepost.store.postgres.migrate import schema_of as schema_of_database

    with saying_why(settings):
        return schema_of_database(settings)


def migrate(settings: AnyStoreSettings) -> Schema:
    """Bring the schema of the store up to date; what there was to do."""
    if isinstance(settings, SqliteSettings):
        return sqlite_schema.migrate_folder(settings.folder)
    require_postgres(settings)
    from fencepost.store.postgres.migrate import migrate_database

    with saying_why(settings):
        return migrate_database(settings)


def _refuse_older(settings: AnyStoreSettings) -> None:
    schema = schema_of(settings)
    if schema.is_older:
        option = "--data" if isinstance(settings, SqliteSettings) else "--store"
        raise CannotOpenError(
            f"the schema of {describe(settings)} is at version {schema.current}, and this server"
            f" needs {schema.newest}: run `fencepost migrate {option} ...`, or start without"
            " --no-migrate"
        )


async def open_store(
    settings: AnyStoreSettings,
    limits: Limits,
    clock: Clock,
    *,
    migrate: bool = True,
    auditor: Auditor | None = None,
) -> Opened:
    """Open the store that the settings describe, on the event loop that will use it.

    Without `migrate` a schema that is older than this version's is refused, not brought up to date.
    """
    if not migrate:
        _refuse_older(settings)
    if isinstance(settings, SqliteSettings):
        return _open_sqlite(settings, limits, clock, auditor)
    return await _open_postgres(settings, limits, clock, auditor, migrate=migrate)


def _open_sqlite(
    settings: SqliteSettings, limits: Limits, clock: Clock, auditor: Auditor | None
) -> Opened:
    store = SqliteStore(settings, clock)
    store.decider.claims.auditor = auditor
    upkeep = SqliteUpkeep(store, clock)
    subscriptions = SqliteSubscriptions(store)
    scans = Scans(store.scanners, threads=settings.scan_threads + 1)

    def measure(told: Measure) -> None:
        store.commits.on_commit = told

    return Opened(
        store=store,
        logs=SqlLogs(scans, limits),
        lists=SqlLists(store.readers, store.decider.holds),
        groups=SqlGroupReads(store.readers),
        meshes=SqlMeshReads(store.readers),
        sweep_sends=lambda: store.between_commits(partial(sweep_sends, clock.now_ms())),
        subscriptions=subscriptions,
        secret=subscriptions.secret,
        background=(upkeep.run, upkeep.fold),
        join=store.decider.append,
        measure=measure,
        counters=store.decider.counters,
        stats=lambda: {
            "wal_bytes": store.wal_pages * PAGE_BYTES,
            **store.chunks.stats(),
            **scans.stats(),
        },
    )


def _refuse_long_names(limits: Limits) -> None:
    for name in ("path_bytes_max", "producer_id_bytes_max", "key_bytes_max"):
        if getattr(limits, name) > INDEXED_BYTES_MAX:
            raise CannotOpenError(
                f"[limits] {name} may be {INDEXED_BYTES_MAX} on PostgreSQL, whose indexes take no"
                f" longer texts, and is {getattr(limits, name)}"
            )


async def _open_postgres(
    settings: PostgresSettings,
    limits: Limits,
    clock: Clock,
    auditor: Auditor | None,
    *,
    migrate: bool,
) -> Opened:
    require_postgres(settings)
    _refuse_long_names(limits)
    from fencepost.store.postgres.cluster.leader import Leading
    from fencepost.store.postgres.store import PostgresStore
    from fencepost.store.postgres.subscriptions import secret

    # The database's clock takes the place of this machine's, but not that of a test's.
    simulated = not isinstance(clock, SystemClock)
    with saying_why(settings):
        store = await PostgresStore.open(settings, clock, simulated=simulated, migrating=migrate)
    store.decider.claims.auditor = auditor
    leading = Leading(store, clock, simulated=simulated)
    scans = Scans(store.scanners, threads=settings.scan_threads + 1)

    def measure(told: Measure) -> None:
        store.turns.on_commit = told

    return Opened(
        store=store,
        logs=SqlLogs(scans, limits),
        lists=SqlLists(store.readers),
        groups=SqlGroupReads(store.readers),
        meshes=SqlMeshReads(store.readers),
        sweep_sends=lambda: store.between_commits(partial(sweep_sends, clock.now_ms())),
        subscriptions=None,
        leading=leading,
        secret=partial(secret, store),
        background=(leading.run,),
        join=store.decider.append,
        measure=measure,
        counters=store.decider.counters,
        stats=lambda: {**store.stats(), **store.chunks.stats(), **scans.stats()},
    )
