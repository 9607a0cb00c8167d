"""A server from start to stop: what is behind the front end, then the front end itself.

Stopping goes the other way round: no new connections, those who wait are told to come back,
requests in flight are finished, then the store commits and closes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import NamedTuple

from fencepost.clock import Clock
from fencepost.http.listener import Listening, serve
from fencepost.server.assembly import Assembly
from fencepost.server.routes import takes_websocket
from fencepost.server.settings import ServerSettings
from fencepost.server.subscriptions.security import is_loopback
from fencepost.store.opener import AnyStoreSettings

log = logging.getLogger(__name__)


class Worker(NamedTuple):
    """One of several processes on one port: its number, and the port that it has to itself."""

    number: int
    port: int


async def run(
    settings: ServerSettings,
    store_settings: AnyStoreSettings,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    ready: Callable[[str], None],
    clock: Clock | None = None,
    migrate: bool = True,
    worker: Worker | None = None,
) -> None:
    """Serve until `stop` is set, then drain. Raises when the store fails for good."""
    assembly = await Assembly.open(
        settings, store_settings, on_loopback=is_loopback(host), clock=clock, migrate=migrate
    )
    app, http, clock = assembly.app, settings.http, assembly.clock
    try:
        shared = worker is not None
        listening = [
            await serve(
                app,
                http,
                host=host,
                port=port,
                clock=clock,
                shared=shared,
                takes_websocket=takes_websocket,
                knows_sender=assembly.knows_sender,
            )
        ]
        assembly.metrics.count(listening[0].counters)
        if worker is not None:
            assembly.metrics.worker = worker.number
            listening.append(await _serve_alone(assembly, host, worker))
            log.info("worker %d is at %s", worker.number, url_of(host, listening[1].port))
        await assembly.reached_at(url_of(node_host(settings, host), listening[-1].port))
        ready(url_of(host, listening[0].port))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, assembly.store.failure), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        log.info("stopping")
        drain_s = settings.drain_ms / 1000
        await asyncio.gather(assembly.drain(), *(one.drain(drain_s) for one in listening))
    finally:
        await assembly.close()


class WorkerPortError(Exception):
    """The port of one worker alone cannot be had."""


async def _serve_alone(assembly: Assembly, host: str, worker: Worker) -> Listening:
    """Listen where only this worker is asked."""
    http, clock = assembly.settings.http, assembly.clock
    try:
        return await serve(
            assembly.app,
            http,
            host=host,
            port=worker.port,
            clock=clock,
            takes_websocket=takes_websocket,
            knows_sender=assembly.knows_sender,
        )
    except OSError as error:
        what = f"worker {worker.number} needs the port {worker.port} of its own (worker_port)"
        raise WorkerPortError(f"{what}: {error.strerror}") from error


def node_host(settings: ServerSettings, host: str) -> str:
    """Under which name other servers reach this one."""
    if settings.node_host:
        return settings.node_host
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = host == ""
    return socket.gethostname() if everywhere else host


def url_of(host: str, port: int) -> str:
    """Where a server on this address is reached."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
