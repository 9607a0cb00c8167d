"""The way to each mesh: negotiation, whether it can be reached, and what it remembers.

A link negotiates before anything is sent, and again whenever an attempt failed: a server that came
back with its dedupe switched off must not get one send. What a mesh said last is noted on disk, so
that a start without the server knows how old rows may become. A mesh that lacks what the outbox
needs ends the daemon, with an exit code of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.meshes import AsyncMesh
from fencepost.client.errors import FeatureRefusedError, FencepostError, ResponseError
from fencepost.clock import Clock
from fencepost.outbox.ages import HOUR_MS, AgeRefused, max_age_hours
from fencepost.outbox.daemon.rows import NEVER_MS
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
"""How often a mesh that works is asked what it offers."""
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
        self._settings = settings
        self._clock = clock
        self._ask = asyncio.Event()
        self._connected = False
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
        return self.names if self._connected else None

    def failed(self) -> None:
        self._ask.set()

    async def run(
        self,
        happened: Happened,
        looked: Callable[[], None],
        save: Callable[[MeshNote], Awaitable[None]],
    ) -> None:
        """Negotiate, and keep asking; raises `RefusedError` when the mesh will not do."""
        failures = 0
        was_connected = False
        while True:
            self._ask.clear()
            try:
                note = await self._negotiate()
            except FeatureRefusedError as error:
                raise self._refused(error) from None
            except FencepostError as error:
                failures += 1
                self._lost(error, happened, looked)
                await asyncio.sleep(delay_ms(BACKOFF, failures, self._clock.random()) / 1000)
                continue
            failures = 0
            if note is not None:
                self._remember(note)
                await save(note)
            if not self._connected:
                self._connected = True
                self.reconnects += was_connected
                was_connected = True
                self._stand("connected", None)
                log.info("mesh %s is in reach", self.mesh)
                happened("connected", self.mesh, {})
                looked()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_SECONDS):
                    await self._ask.wait()
                    # Attempts that fail together ask once.
                    await asyncio.sleep(ASK_PAUSE_SECONDS)

    async def _negotiate(self) -> MeshNote | None:
        """What the mesh offers, checked here again; None if that is known already."""
        require = {DEDUPE: {"version": 2, "request_fingerprint": True}, **self._settings.require}
        optional = {
            MAX_PAYLOAD: {"version": 1},
            POLICY: {"version": 1},
            **self._settings.optional,
        }
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
        require = {DEDUPE: {"version": 2, "request_fingerprint": True}, **self._settings.require}
        code = error.close_code or 4010
        detail = f"{feature}: {error.detail}"
        return self._not_met(code, kind, detail, require, dict(error.problem))

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
        if self._connected:
            self._connected = False
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
        }
        if self.error is not None:
            facts["error"] = self.error
        if self.mode is not None:
            facts["dedupe_mode"] = self.mode
            if self.mode == "retention_scoped":
                facts["dedupe_retention_days"] = self.retention_days
            facts["max_age_hours"] = self._max_age_ms // HOUR_MS
        return facts
