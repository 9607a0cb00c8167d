"""The daemon from start to stop, with its endpoints on the socket and the port.

Stopping ends what was begun last first: no new requests, then no new attempts, then the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from fencepost.client.aio.client import AsyncClient
from fencepost.clock import Clock
from fencepost.http.listener import Listening, serve, serve_socket
from fencepost.http.settings import HttpSettings
from fencepost.outbox.daemon.daemon import Daemon
from fencepost.outbox.daemon.delivering import Failpoint, no_failpoint
from fencepost.outbox.daemon.endpoints import Endpoints
from fencepost.outbox.daemon.gate import Gate, TokenFile
from fencepost.outbox.daemon.settings import TOKEN, OutboxSettings

LAST_EXIT = "last_exit.json"
SOCKET_BYTES_MAX = 104
"""What the address of a unix socket has room for, on every system."""


class CannotStartError(Exception):
    """The daemon does not start: the message says why, and what to do."""


async def run(
    settings: OutboxSettings,
    client: AsyncClient,
    clock: Clock,
    *,
    sender: str | None,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    failpoint: Failpoint = no_failpoint,
) -> None:
    """Serve until `stop` is set. Raises why it ended otherwise."""
    daemon = await Daemon.open(settings, client, clock, sender=sender, failpoint=failpoint)
    listening: list[Listening] = []
    endpoints: list[Endpoints] = []
    http = HttpSettings(
        body_bytes_max=settings.body_bytes_max,
        open_body_bytes_max=settings.body_bytes_max,
        connections_max=256,
        bodies_bytes_max=(settings.in_flight_max + 1) * settings.body_bytes_max,
        bodies_bytes_per_principal_max=(settings.in_flight_max + 1) * settings.body_bytes_max,
    )
    try:
        working = asyncio.create_task(daemon.run())
        try:
            endpoints.append(Endpoints(daemon, Gate(settings, clock, None)))
            bound = _bind_socket(settings.socket_path)
            listening.append(await serve_socket(endpoints[0], http, bound, clock=clock))
            if settings.port:
                token = TokenFile(settings.folder / TOKEN, clock, settings.token_grace_ms)
                endpoints.append(Endpoints(daemon, Gate(settings, clock, token)))
                port = max(0, settings.port)
                listening.append(await serve(endpoints[1], http, port=port, clock=clock))
            ready(_where(settings, listening))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait((stopped, working), return_when=asyncio.FIRST_COMPLETED)
            _ = stopped.cancel()
            drain_s = settings.drain_ms / 1000
            await asyncio.gather(*(one.drain(drain_s) for one in listening))
            if working.done():
                await working
        finally:
            _ = working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(working, return_exceptions=True)
            for one in endpoints:
                await one.close()
    finally:
        settings.socket_path.unlink(missing_ok=True)
        await daemon.close()


def _where(settings: OutboxSettings, listening: list[Listening]) -> str:
    where = f"the socket {settings.socket_path}"
    if len(listening) > 1:
        where += f" and on http://127.0.0.1:{listening[1].port}"
    return where


def _bind_socket(path: Path) -> socket.socket:
    """The socket in its file, which only its user may open. No other daemon has the lock."""
    if len(os.fsencode(path)) > SOCKET_BYTES_MAX:
        raise CannotStartError(
            f"the path of the socket {path} is too long ({SOCKET_BYTES_MAX} bytes at most): name a"
            " shorter one with --socket"
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise CannotStartError(f"{path} is there and no socket: name another with --socket")
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        made.setblocking(False)
        made.bind(str(path))
    except OSError as error:
        made.close()
        raise CannotStartError(f"the socket {path} cannot be made: {error.strerror}") from None
    finally:
        os.umask(before)
    return made
