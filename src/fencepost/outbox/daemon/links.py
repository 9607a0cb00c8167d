"""The daemon's link to one mesh: negotiation, its session, and what the mesh said last.

A link negotiates before anything is sent, and opens a session for sends and deliveries. When that
is lost it negotiates again: a server that came back with its dedupe switched off must not get one
send. Where sessions do not pass, everything goes over plain HTTP, and a session is tried again
later. What a mesh said last is noted on disk, so that a start without the server knows how old rows
may become. A mesh that lacks what the outbox needs ends the daemon, with an exit code of its own,
and so does one whose inbox another daemon has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.aio.sessions import AsyncMeshSession
from fencepost.client.errors import (
    FeatureRefusedError,
    FencepostError,
    ResponseError,
    SessionClosedError,
)
from fencepost.client.sessions import is_passing
from fencepost.clock import Clock
from fencepost.outbox.ages import HOUR_MS, AgeRefused, max_age_hours
from fencepost.outbox.daemon import sessions
from fencepost.outbox.daemon.pulling import SHARED, InboxLostError, Puller
from fencepost.outbox.daemon.rows import NEVER_MS
from fencepost.outbox.daemon.sessions import SessionSends
from fencepost.outbox.daemon.settings import OutboxSettings
from fencepost.outbox.delivery import Sends
from fencepost.outbox.states import BACKOFF
from fencepost.protocol.features import (
    DEDUPE,
    MAX_PAYLOAD,
    POLICY,
    BadWishes,
    FeatureRefused,
    Wishes,
    negotiate,
    read_supported,
)
from fencepost.protocol.meshes import RETENTION_DAYS_MIN, DedupeMode
from fencepost.protocol.sessions import EXIT_CODES
from fencepost.protocol.timing import delay_ms

log = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 60.0
"""How often a mesh that works without a session is asked what it offers."""
SESSION_SOON_SECONDS = 2.0
SESSION_AGAIN_SECONDS = 300.0
"""How soon, and how late, a session is tried again where none could be opened."""
LASTING_SECONDS = 10.0
"""A session that lived as long was no failure when it ends."""
ASK_PAUSE_SECONDS = 0.2
AGE_EXIT_CODE = 15
"""The exit code when the settings let rows become older than a mesh remembers them."""


class RefusedError(Exception):
    """The daemon cannot work with a mesh, or may not: it ends with this exit code."""

    def __init__(self, mesh: str, close_code: int, kind: str, detail: str) -> None:
        super().__init__(f"mesh {mesh}: {kind}: {detail}")
        self.mesh = mesh
        self.close_code = close_code
        self.kind = kind
        self.exit_code = EXIT_CODES.get(close_code, AGE_EXIT_CODE)


class MeshNote(msgspec.Struct, frozen=True):
    """What is remembered of a mesh between two runs."""

    mode: DedupeMode
    retention_days: int
    policy: str


Happened = Callable[[str, str, Mapping[str, object]], None]
"""Told of an event: its kind, the mesh, the facts."""


class Link:
    """The way to one mesh."""

    def __init__(
        self,
        mesh: str,
        client: AsyncClient,
        settings: OutboxSettings,
        clock: Clock,
        *,
        sender: str | None,
        known: MeshNote | None,
    ) -> None:
        self.mesh = mesh
        self.sender = sender
        self.names: AsyncMesh = client.mesh(mesh)
        self.puller: Puller | None = None
        """Where the inbox of a member is filled from, if one is kept."""
        self._settings = settings
        self._clock = clock
        self._ask = asyncio.Event()
        self._connected = False
        self._told_connected = self._was_connected = False
        """Whether readers of events know it as connected; whether it ever was."""
        self._sends: SessionSends | None = None
        self._session_failures = self._session_after_ms = 0
        """Until when no session is tried, by the monotonic clock."""
        self.state = "connecting"
        self.error: str | None = None
        self.since_ms = clock.wall_ms()
        self.reconnects = 0
        self.mode: DedupeMode | None = None
        self.retention_days = 0
        self.policy = ""
        self._max_age_ms = NEVER_MS
        if known is not None:
            self._remember(known)

    @property
    def max_age_ms(self) -> int:
        return self._max_age_ms

    @property
    def sends(self) -> Sends | None:
        if not self._connected:
            return None
        return self._sends or self.names

    @property
    def has_session(self) -> bool:
        """Whether sends and deliveries go through a session now."""
        return self._sends is not None

    def failed(self) -> None:
        self._ask.set()

    def shut(self) -> None:
        self._connected = False
        self._ask.set()

    async def run(
        self,
        happened: Happened,
        looked: Callable[[], None],
        save: Callable[[MeshNote], Awaitable[None]],
    ) -> None:
        """Negotiate, and stay connected; raises `RefusedError` when the mesh will not do."""
        failures = 0
        while True:
            began_ms = self._clock.monotonic_ms()
            try:
                self._ask.clear()
                await self._ask_terms(save)
                self._reached(happened, looked)
                await self._stay(save, looked)
            except FeatureRefusedError as error:
                raise self._refused(error) from None
            except InboxLostError as error:
                raise self._replaced(error.close.code, error.close.kind, str(error)) from None
            except FencepostError as error:
                if isinstance(error, SessionClosedError) and sessions.is_fatal(error):
                    raise self._replaced(error.close_code, error.kind, error.detail) from None
                self._lost(error, happened, looked)
            if self._clock.monotonic_ms() - began_ms >= LASTING_SECONDS * 1000:
                failures = 0
            failures += 1
            # A session that was lost is made again at once; what fails again waits.
            if failures > 1 or not self._told_connected:
                await asyncio.sleep(delay_ms(BACKOFF, failures, self._clock.random()) / 1000)

    def _reached(self, happened: Happened, looked: Callable[[], None]) -> None:
        if self._connected:
            return
        self._connected = True
        self.reconnects += self._was_connected
        self._was_connected = True
        if not self._told_connected:
            self._told_connected = True
            log.info("mesh %s is in reach", self.mesh)
            happened("connected", self.mesh, {})
        self._stand("connected", None)
        looked()

    async def _ask_terms(self, save: Callable[[MeshNote], Awaitable[None]]) -> None:
        note = await self._negotiate()
        if note is not None:
            self._remember(note)
            await save(note)

    async def _stay(
        self, save: Callable[[MeshNote], Awaitable[None]], looked: Callable[[], None]
    ) -> None:
        """Use a session until it ends, or plain HTTP until a session is tried again."""
        session = await self._open_session()
        if session is not None:
            await self._use(session, looked)
            return
        asking = self._keep_asking(save, looked)
        if self.puller is None:
            await asking
        else:
            await _first(asking, self.puller.over_http(self.policy))

    async def _open_session(self) -> AsyncMeshSession | None:
        """A session, or None where there is none to be had for now."""
        if self._clock.monotonic_ms() < self._session_after_ms:
            return None
        puller, after = self.puller, None
        if puller is not None and self.policy == SHARED:
            after = (await puller.place()).position
        member, worker = (puller.member, puller.worker) if puller else (None, None)
        require, optional = self._wishes()
        session = self.names.session(
            member,
            require=require,
            optional=optional,
            worker=worker,
            after=after,
            reconnect=False,
        )
        try:
            await session.open()
        except FencepostError as error:
            if sessions.is_fatal(error):
                raise
            self._do_without_session(error)
            return None
        self._session_failures = 0
        return session

    def _do_without_session(self, error: FencepostError) -> None:
        """Use plain HTTP for a while: longer each time, and long at once where that is final."""
        seconds = SESSION_AGAIN_SECONDS
        if is_passing(error):
            seconds = min(seconds, SESSION_SOON_SECONDS * 2**self._session_failures)
        self._session_failures = min(self._session_failures + 1, 10)
        self._session_after_ms = self._clock.monotonic_ms() + int(seconds * 1000)
        log.warning(
            "mesh %s has no session for us, plain HTTP for %g s: %s", self.mesh, seconds, error
        )

    async def _use(self, session: AsyncMeshSession, looked: Callable[[], None]) -> None:
        """Send and receive through a session until it ends; raises what ended it for good."""
        self._sends = sends = SessionSends(session, self.names)
        looked()
        try:
            await _first(sends.stalled(), self._receive(session))
        except FencepostError as error:
            if sessions.is_fatal(error):
                raise
            log.info("the session with mesh %s is over: %s", self.mesh, error)
            if not is_passing(error):
                self._do_without_session(error)
        finally:
            self._sends = None
            # Nothing is sent until the mesh was asked again: another server may answer now.
            self._connected = False
            await session.close()

    async def _receive(self, session: AsyncMeshSession) -> None:
        if self.puller is not None:
            await self.puller.from_session(session, self.policy)
            return
        async for _ in session:
            pass  # without a member nothing is delivered: this waits for the end

    async def _keep_asking(
        self, save: Callable[[MeshNote], Awaitable[None]], looked: Callable[[], None]
    ) -> None:
        """Ask now and then, and after every failure, until a session is to be tried."""
        while (wait_ms := self._session_after_ms - self._clock.monotonic_ms()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(ASK_AGAIN_SECONDS, wait_ms / 1000)):
                    await self._ask.wait()
                    # Attempts that fail together ask once.
                    await asyncio.sleep(ASK_PAUSE_SECONDS)
            self._ask.clear()
            await self._ask_terms(save)
            if not self._connected:
                self._connected = True
                looked()

    def _wishes(self) -> tuple[dict[str, Any], dict[str, Any]]:
        require = {DEDUPE: {"version": 2, "request_fingerprint": True}, **self._settings.require}
        optional = {
            MAX_PAYLOAD: {"version": 1},
            POLICY: {"version": 1},
            **self._settings.optional,
        }
        return require, optional

    async def _negotiate(self) -> MeshNote | None:
        """What the mesh offers, checked here again; None if that is known already."""
        require, optional = self._wishes()
        answer = await self.names.negotiate(require, optional)
        found = read_supported(msgspec.json.encode(answer))
        if isinstance(found, BadWishes):
            raise self._not_met(4011, "feature_param_invalid", found.detail, require, answer)
        checked = negotiate(Wishes(require, optional), found)
        if isinstance(checked, FeatureRefused):
            detail = f"{checked.feature}: {checked.detail}"
            raise self._not_met(checked.close_code, checked.kind, detail, require, answer)
        dedupe = found[DEDUPE]
        note = MeshNote(
            dedupe["mode"],
            dedupe.get("dedupe_retention_days", RETENTION_DAYS_MIN),
            str(found.get(POLICY, {}).get("default_policy", "")),
        )
        known = MeshNote(self.mode, self.retention_days, self.policy) if self.mode else None
        return None if note == known else note

    def _refused(self, error: FeatureRefusedError) -> RefusedError:
        kind = str(error.problem.get("kind", error.code))
        feature = error.problem.get("feature", "")
        require, _ = self._wishes()
        code = error.close_code or 4010
        detail = f"{feature}: {error.detail}"
        return self._not_met(code, kind, detail, require, dict(error.problem))

    def _replaced(self, code: int, kind: str, detail: str) -> RefusedError:
        log.warning("mesh %s: the session was ended with %d %s: %s", self.mesh, code, kind, detail)
        self._connected = False
        self._stand("refused", f"{code} {kind}: {detail}")
        return RefusedError(self.mesh, code, kind, detail)

    def _not_met(
        self, code: int, kind: str, detail: str, asked: Mapping[str, Any], answered: object
    ) -> RefusedError:
        log.warning(
            "mesh %s: the negotiation failed with %d %s: asked %s, answered %s",
            self.mesh,
            code,
            kind,
            msgspec.json.encode(asked).decode(),
            msgspec.json.encode(answered).decode(),
        )
        self._connected = False
        self._stand("refused", f"{code} {kind}: {detail}")
        return RefusedError(self.mesh, code, kind, detail)

    def _remember(self, note: MeshNote) -> None:
        override = self._settings.max_age_hours_override or None
        hours = max_age_hours(note.mode, note.retention_days, override_hours=override)
        if isinstance(hours, AgeRefused):
            raise RefusedError(self.mesh, 0, hours.code, hours.detail)
        self.mode = note.mode
        self.retention_days = note.retention_days
        self.policy = note.policy
        self._max_age_ms = hours * HOUR_MS

    def _lost(self, error: FencepostError, happened: Happened, looked: Callable[[], None]) -> None:
        text = str(error)
        if isinstance(error, ResponseError) and error.status in (401, 403, 404):
            # It will not get better without a person, who may not look at the log soon.
            log.error("mesh %s cannot be used: %s", self.mesh, text)
        elif text != self.error:
            log.warning("mesh %s cannot be reached: %s", self.mesh, text)
        self._connected = False
        if self._told_connected:
            self._told_connected = False
            happened("disconnected", self.mesh, {"error": text})
            looked()
        self._stand("disconnected", text)

    def _stand(self, state: str, error: str | None) -> None:
        if state != self.state:
            self.since_ms = self._clock.wall_ms()
        self.state, self.error = state, error

    def shown(self) -> dict[str, object]:
        """The link as `status` shows it."""
        facts: dict[str, object] = {
            "mesh": self.mesh,
            "state": self.state,
            "since_ms": self.since_ms,
            "reconnects": self.reconnects,
            "via": "session" if self.has_session else "http",
        }
        if self.error is not None:
            facts["error"] = self.error
        if self.mode is not None:
            facts["dedupe_mode"] = self.mode
            if self.mode == "retention_scoped":
                facts["dedupe_retention_days"] = self.retention_days
            facts["max_age_hours"] = self._max_age_ms // HOUR_MS
        return facts


async def _first(*works: Coroutine[Any, Any, None]) -> None:
    """Run until one of them ends, and end the others; raises what ended it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            _ = task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(ended) == len(tasks)
    for task in done:
        task.result()
