"""`fencepost serve --workers N`: a parent that keeps N servers running on one port.

The parent binds the port first, so that port 0 becomes one and the same number for all, and holds
it without listening; each worker is a whole server that listens there as well, and the kernel deals
connections out among them. The parent serves nothing itself: it starts workers, starts one again
that has died, and passes on the request to stop. A worker that loses its parent stops by itself.

What happens when is decided by `Care`, which knows no processes.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop

from fencepost.cli.process import sentence_for, set_up_logs, stop_on_signals
from fencepost.http.listener import bind
from fencepost.server.running import Worker, run, url_of
from fencepost.server.settings import ServerSettings
from fencepost.store.opener import AnyStoreSettings

log = logging.getLogger(__name__)

FIRST_WAIT_S, WAIT_S_MAX = 0.1, 5.0
"""How long to wait before a dead worker is started again: doubled each time, up to so much."""
FAILED_STARTS_MAX = 8
"""After so many failed starts in a row, while no worker is ready, the parent gives up."""
KILL_AFTER_S = 5.0
"""How long a worker may take to leave beyond its drain before it is killed."""

_SPAWNING = multiprocessing.get_context("spawn")


class Plan(NamedTuple):
    """What the workers are to serve, and where."""

    settings: ServerSettings
    store: AnyStoreSettings
    host: str
    port: int
    workers: int
    migrate: bool
    log_level: str
    log_json: bool


class WorkersFailedError(Exception):
    """The workers cannot be started: the message is what the last of them said."""


class Care:
    """When a worker that has died is started again, and when that is no use any more."""

    def __init__(self) -> None:
        self._failures: dict[int, int] = {}
        self._ready: set[int] = set()
        self.all_were_ready = False

    def ready(self, number: int, count: int) -> bool:
        """A worker serves; whether all do now, for the first time."""
        self._ready.add(number)
        self._failures[number] = 0
        first = not self.all_were_ready and len(self._ready) == count
        self.all_were_ready |= first
        return first

    def died(self, number: int) -> float | None:
        """Seconds until the worker is started again; None when the parent should give up."""
        failures = self._failures[number] = self._failures.get(number, 0) + 1
        self._ready.discard(number)
        if not self.all_were_ready:
            return None  # what keeps it from starting now would keep it from starting again
        if not self._ready and failures > FAILED_STARTS_MAX:
            return None
        return min(FIRST_WAIT_S * 2.0 ** (failures - 1), WAIT_S_MAX)


def supports_sharing() -> bool:
    """Whether several processes can listen on one port here."""
    return hasattr(socket, "SO_REUSEPORT")


async def supervise(plan: Plan, *, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
    """Keep the workers running until `stop` is set and all have left."""
    found = await asyncio.get_running_loop().getaddrinfo(
        plan.host, plan.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with bind(found[0], shared=True) as holding:
        plan = plan._replace(port=holding.getsockname()[1])
        await _Supervisor(plan, stop, ready).run()


@dataclass(slots=True)
class _Process:
    """A worker that was started."""

    number: int
    process: multiprocessing.process.BaseProcess
    said: Connection


class _Supervisor:
    def __init__(self, plan: Plan, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        self._plan = plan
        self._stop = stop
        self._ready = ready
        self._care = Care()
        self._running: dict[int, _Process] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                stopping = group.create_task(self._pass_on_the_end())
                kept = [group.create_task(self._keep(n)) for n in range(1, self._plan.workers + 1)]
                await asyncio.gather(*kept)
                stopping.cancel()
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            await self._end_all()

    async def _pass_on_the_end(self) -> None:
        await self._stop.wait()
        for running in self._running.values():
            running.process.terminate()

    async def _keep(self, number: int) -> None:
        """Run a worker, again and again, until it is to stop."""
        while not self._stop.is_set():
            why = await self._run_once(number)
            if self._stop.is_set():
                return
            wait_s = self._care.died(number)
            if wait_s is None:
                raise WorkersFailedError(why)
            log.error("worker %d has ended (%s) and is started again", number, why)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()

    async def _run_once(self, number: int) -> str:
        """Start a worker and wait until it has ended; says why it has."""
        running = self._start(number)
        self._running[number] = running
        if self._stop.is_set():
            running.process.terminate()
        try:
            said = await self._listen(running)
            await _readable(running.process.sentinel)
            running.process.join()
        finally:
            running.said.close()
        del self._running[number]
        code = running.process.exitcode
        assert code is not None
        return said or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    def _start(self, number: int) -> _Process:
        heard, said = _SPAWNING.Pipe(duplex=False)
        process = _SPAWNING.Process(
            target=work, args=(self._plan, number, said), name=f"fencepost-worker-{number}"
        )
        process.start()
        said.close()  # so that its end shows here when the worker ends
        return _Process(number, process, heard)

    async def _listen(self, running: _Process) -> str:
        """Hear what a worker says until it is gone: that it is ready, or why it cannot be."""
        why = ""
        while True:
            await _readable(running.said.fileno())
            try:
                message: str = running.said.recv()
            except EOFError:
                return why
            if message:
                why = message
            elif self._care.ready(running.number, self._plan.workers):
                self._ready(url_of(self._plan.host, self._plan.port))

    async def _end_all(self) -> None:
        """End every worker, however this process ends."""
        left = [running.process for running in self._running.values()]
        for process in left:
            process.terminate()
        patience_s = self._plan.settings.drain_ms / 1000 + KILL_AFTER_S
        for process in left:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await _readable(process.sentinel)
            if process.is_alive():
                process.kill()
            process.join()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[None] = loop.create_future()

    def see() -> None:
        if not seen.done():
            seen.set_result(None)

    loop.add_reader(descriptor, see)
    try:
        await seen
    finally:
        loop.remove_reader(descriptor)


def work(plan: Plan, number: int, say: Connection) -> None:
    """A worker, in its own process: a server on the shared port."""
    set_up_logs(plan.log_level, as_json=plan.log_json)
    try:
        uvloop.run(_work(plan, number, say))
    except Exception as error:
        sentence = sentence_for(error, plan.store, plan.host, plan.port)
        if sentence is None:
            raise
        _tell(say, sentence)
        raise SystemExit(1) from None


def _tell(say: Connection, message: str) -> None:
    """Say something to the parent, which may have had enough of this worker, or be gone."""
    with suppress(OSError):
        say.send(message)


async def _work(plan: Plan, number: int, say: Connection) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    loop = asyncio.get_running_loop()
    parent = multiprocessing.parent_process()
    assert parent is not None
    loop.add_reader(parent.sentinel, _orphaned, loop, parent.sentinel, stop)
    base = plan.settings.worker_port
    await run(
        plan.settings,
        plan.store,
        host=plan.host,
        port=plan.port,
        stop=stop,
        ready=lambda _: _tell(say, ""),
        migrate=plan.migrate,
        worker=Worker(number, base + number - 1 if base else 0),
    )


def _orphaned(loop: asyncio.AbstractEventLoop, sentinel: int, stop: asyncio.Event) -> None:
    loop.remove_reader(sentinel)
    log.error("the parent is gone: stopping")
    stop.set()
