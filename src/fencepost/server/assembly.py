"""Put a server together: the store, the handlers and the background work behind a front end.

`fencepost serve` puts its own front end before it (`running.py`), another program mounts it as an
ASGI application (`embedding.py`). It opens from the bottom up and closes from the top down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

from fencepost.clock import Clock, SystemClock
from fencepost.http.bodies import KnowsSender
from fencepost.protocol.shares import CONNECTIONS, LINKS, WAITERS, Amounts
from fencepost.server.access import SEAL_SECRET, Gate, Seal
from fencepost.server.application import Application
from fencepost.server.audit import Audit
from fencepost.server.auth import Auth
from fencepost.server.groups.http import Groups
from fencepost.server.handlers.commits import Commits
from fencepost.server.handlers.lists import Lists
from fencepost.server.handlers.logs import Logs
from fencepost.server.handlers.operations import Operations
from fencepost.server.handlers.reads import Reads
from fencepost.server.handlers.staging import Staging
from fencepost.server.handlers.streams import Streams
from fencepost.server.handlers.tokens import KEY_BYTES, TOKEN_SECRET, ReadTokens, Tokens
from fencepost.server.handlers.waiting import WaiterLimit
from fencepost.server.handlers.writers import Writers
from fencepost.server.lease_tokens import SECRET as LEASE_SECRET
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.server.mesh.checking import OrphanChecks
from fencepost.server.mesh.http import Meshes
from fencepost.server.mesh.sending import Sending
from fencepost.server.mesh.sessions import Sessions
from fencepost.server.metrics import Metrics
from fencepost.server.origins import Origins
from fencepost.server.routes import Handlers
from fencepost.server.settings import ServerSettings
from fencepost.server.subscriptions.cluster import LedSubscriptions, OwnSubscriptions, open_parts
from fencepost.server.subscriptions.links import Readers
from fencepost.server.tails import Tails
from fencepost.store.opener import AnyStoreSettings, Opened, open_store

log = logging.getLogger(__name__)

LEADER_S_MAX = 5.0
"""How long a start waits for a node to lead; requests can wait for that as well."""


class Assembly:
    """A server without a front end. Make it with `open`, on the loop that it will run on."""

    def __init__(
        self, settings: ServerSettings, opened: Opened, clock: Clock, audit: Audit | None
    ) -> None:
        self.settings = settings
        self.opened = opened
        self.store = opened.store
        self.clock = clock
        self._audit = audit
        self.metrics = Metrics(opened)
        self.app: Application
        self.knows_sender: KnowsSender | None = None
        """Which principal sends a large body, asked before the body is read."""
        self._subscriptions: OwnSubscriptions | LedSubscriptions
        self._background: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        settings: ServerSettings,
        store_settings: AnyStoreSettings,
        *,
        on_loopback: bool,
        clock: Clock | None = None,
        migrate: bool = True,
    ) -> Assembly:
        """Open the store and start the background work."""
        clock = clock or SystemClock()
        # Claims must not be forgotten, whether or not the store's settings name them.
        kept = dict.fromkeys((*store_settings.kept_producer_globs, *settings.auth.claim_globs))
        store_settings = replace(store_settings, kept_producer_globs=tuple(kept))
        audit = None
        if settings.auth.principals:
            audit = Audit(refusals_per_s=settings.auth.audit_refusals_per_s)
        opened = await open_store(
            store_settings,
            settings.limits,
            clock,
            migrate=migrate,
            auditor=None if audit is None else audit.note,
        )
        assembly = cls(settings, opened, clock, audit)
        try:
            await assembly._assemble(on_loopback=on_loopback)
        except BaseException:
            await assembly._end_background()
            await assembly.store.close()
            raise
        return assembly

    async def _assemble(self, *, on_loopback: bool) -> None:
        settings, opened, clock = self.settings, self.opened, self.clock
        store = opened.store
        key = await opened.secret(TOKEN_SECRET, clock.token(KEY_BYTES))
        read_tokens = ReadTokens(key, clock)
        seal = None
        gate: Gate | None = None
        if self._audit is not None:
            gate = Gate(
                Auth(settings.auth, clock),
                read_tokens.read,
                settings.shares.connections_per_principal_max,
            )
            await self._audit.open(store, opened.join)
            secret = await opened.secret(SEAL_SECRET, clock.token(32))
            seal = Seal(secret, clock)
            self.metrics.watch_auth(gate.auth, self._audit)
        self._subscriptions = await self._open_subscriptions(
            None if gate is None else gate.readers, on_loopback=on_loopback
        )
        self.metrics.watch_subscriptions(self._subscriptions)
        tails = Tails(store)
        waiters = WaiterLimit(
            settings.limits.waiters_max, settings.shares.waiters_per_principal_max
        )
        reads = Reads(store, tails, clock, settings, waiters, shared=gate is None)
        tokens = LeaseTokens(await opened.secret(LEASE_SECRET, clock.token(32)))
        groups = Groups(
            store,
            opened.groups,
            clock,
            settings,
            tokens,
            waiters,
            is_shared=opened.leading is not None,
        )
        self.metrics.watch_groups(groups.working, groups.gauges)
        sending = Sending(
            *(store, opened.meshes, clock, settings.mesh),
            takes_senders=gate is None and on_loopback,
        )
        checks = OrphanChecks(opened.meshes, clock, sending, leads=self._leads)
        origins = Origins(settings.allowed_origins, settings.allowed_hosts, on_loopback=on_loopback)
        sessions = Sessions(
            store,
            opened.meshes,
            opened.groups,
            groups.working,
            tokens,
            sending,
            clock,
            settings.sessions,
            origins=origins,
            expires_ms=None if gate is None else gate.auth.expires_ms,
        )
        meshes = Meshes(
            store, opened.meshes, clock, settings, sending, sessions, checks, opened.sweep_sends
        )
        self.metrics.watch_meshes(sending, sessions)
        handlers = Handlers(
            streams=Streams(store, reads, settings, tokens, is_authorized=gate is not None),
            commits=Commits(store, settings.limits, clock, tokens, settings.groups, groups.working),
            staging=Staging(store, settings.limits),
            groups=groups,
            meshes=meshes,
            logs=Logs(opened.logs, store.listen, clock, settings, waiters),
            lists=Lists(opened.lists, settings, seal),
            writers=Writers(store, opened.lists, settings),
            tokens=Tokens(read_tokens, settings),
            operations=Operations(store, self.metrics),
            subscriptions=self._subscriptions,
        )
        self.knows_sender = None if gate is None else gate.knows_sender
        self.app = Application(
            handlers, settings, gate=gate, origins=origins if gate is None else None
        )
        self.metrics.watch(tails, handlers.logs.waiters)
        app = self.app
        self.metrics.watch_damage(lambda: app.damaged)
        if gate is not None:
            connections = gate.connections.counts

            def at_once() -> dict[str, Amounts]:
                followed = self._subscriptions.registry.followed
                return {WAITERS: waiters.tally.counts, CONNECTIONS: connections, LINKS: followed}

            self.metrics.watch_usage(opened.lists.usage, at_once, settings.shares)
        self._background += [asyncio.create_task(work()) for work in opened.background]
        self._background += [asyncio.create_task(run()) for run in (checks.run, sessions.run)]

    def _leads(self) -> bool:
        """Whether this server does the work that one of several does."""
        leading = self.opened.leading
        if leading is None:
            return True
        return leading.leader is not None and leading.leader.node == leading.node

    async def _open_subscriptions(
        self, readers: Readers | None, *, on_loopback: bool
    ) -> OwnSubscriptions | LedSubscriptions:
        settings, opened = self.settings, self.opened
        leading = opened.leading
        parts = await open_parts(
            opened.secret,
            self.clock if leading is None else leading.clock,
            settings.subscriptions,
            settings.limits,
            on_loopback=on_loopback,
            readers=readers,
            shares=settings.shares,
        )
        if leading is not None:
            return LedSubscriptions(leading, parts)
        assert opened.subscriptions is not None
        own = OwnSubscriptions(parts.make(opened.subscriptions))
        self._background.append(asyncio.create_task(own.run()))
        return own

    async def reached_at(self, url: str) -> None:
        """Tell the other servers of the store where this one is, and see who of them leads."""
        leading = self.opened.leading
        if leading is None:
            return
        leading.url = url
        leading.poke()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEADER_S_MAX):
                await leading.first_look.wait()

    async def drain(self) -> None:
        """Answer the clients that wait, and finish the deliveries under way."""
        self.app.stop_waiting()
        await self._subscriptions.drain(self.settings.drain_ms / 1000)

    async def close(self) -> None:
        """Commit what was decided and let go of the store. Raises when it had failed."""
        await self._end_background()
        await self._subscriptions.close()
        await self.app.close()
        failure = self.store.failure
        await self.store.close()
        if failure.done() and not failure.cancelled():
            failure.result()

    async def _end_background(self) -> None:
        for task in self._background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
