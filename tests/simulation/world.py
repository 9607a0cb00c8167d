"""A store in a world that one seed decides: its event loop, its threads, its clock and its disk.

The store is the real one, on real SQLite. What is simulated is what chance decides elsewhere: when
a thread has done its work, how long things take, when the power goes, and what of the unsynced
bytes the disk has then. Nothing waits for real time, and no thread runs, so the same seed makes
the same decisions in the same order and leaves the same bytes.

A life of the store ends when the power goes: at any operation of its disk. What the store does
after that moment reaches neither the disk nor a client. The next life begins on what the disk kept.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import apsw

from fencepost.store.contract import Failed, Published, Unknown
from fencepost.store.settings import SqliteSettings
from fencepost.store.sqlite.connection import FILE, fold
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write import group_commit
from fencepost.testing.clock import START_MS
from fencepost.testing.disk import (
    Disk,
    DiskLog,
    Image,
    Operation,
    Sync,
    everything,
    nothing,
    some_prefix,
    some_sectors,
    write_image,
)
from fencepost.testing.vfs import WAL, FaultVfs, Kind, fault_vfs

OPERATIONS_PER_LIFE = 1_200
"""The power goes at some operation of the disk up to this one."""
SYNCS_PER_LIFE = 60
"""The same for syncs of the write-ahead log."""
IDLE_ROUNDS_MAX = 50_000
"""Rounds of the loop in which no time may pass before it counts as endless."""
LIFE_S_MAX = 60.0
"""A life without enough operations ends after so much simulated time."""
THREAD_S_MAX = 0.02
"""How long a simulated thread takes for a piece of work, at most."""
FULL_SHARE = 0.15
"""The share of lives in which the disk is full for a while."""


class StuckError(Exception):
    """Nothing is left to do and a client waits, or there is always something and no time passes, or
    a life goes on and on, because what fails is tried again for ever."""


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time passes when there is nothing else to do."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice
        self._now = self._began = 0.0
        self._idle_rounds = 0
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> Sequence[object]:
        """What a selector does: here, let time pass until something is due."""
        self._idle_rounds = 0 if timeout else self._idle_rounds + 1
        if timeout is None or self._idle_rounds > IDLE_ROUNDS_MAX:
            raise StuckError
        if self._now - self._began > 2 * LIFE_S_MAX:
            raise StuckError
        self._now += timeout
        return ()

    def forget(self) -> None:
        """Drop what is left to do: it belongs to a machine without power."""
        self._began = self._now
        self._scheduled.clear()  # type: ignore[attr-defined]
        self._ready.clear()  # type: ignore[attr-defined]

    def _process_events(self, _events: object) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """No other thread needs to be woken."""

    def run_in_executor(  # type: ignore[override]
        self, _executor: object, work: Callable[..., Any], *values: Any
    ) -> asyncio.Future[Any]:
        """Do the work at some moment soon, as a thread would."""
        done = self.create_future()

        def run() -> None:
            try:
                result = work(*values)
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self._dice.random() * THREAD_S_MAX, run)
        return done


class SimThread(Executor):
    """The writer thread of the group commit, without a thread."""

    loop: SimLoop
    dice: random.Random

    def __init__(self, _threads: int, **_names: str) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *values: Any, **_more: Any) -> Any:
        self.loop.call_later(self.dice.random() * THREAD_S_MAX, work, *values)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures


class LoopClock:
    """The time of the loop, and seeded dice."""

    def __init__(self, loop: SimLoop, dice: random.Random) -> None:
        self._loop = loop
        self._dice = dice

    def now_ms(self) -> int:
        return START_MS + int(self._loop.time() * 1000)

    wall_ms = now_ms

    def monotonic_ms(self) -> int:
        return int(self._loop.time() * 1000)

    def monotonic_ns(self) -> int:
        return int(self._loop.time() * 1e9)

    def random(self) -> float:
        return self._dice.random()

    def token(self, bytes_count: int) -> bytes:
        return self._dice.randbytes(bytes_count)


class Power:
    """Takes the power away at an operation of the disk, before a sync of the log, or behind one.

    A moment behind a sync is short, and the most telling: all is on the disk and nothing is said.
    """

    def __init__(self, log: SimLog, dice: random.Random, *, goes: bool) -> None:
        self.is_on = True
        self.went: asyncio.Event | None = None
        self._log = log
        self._left: dict[str, int] = {}
        if goes:
            kind = dice.choice(("any", "before sync", "behind sync"))
            most = OPERATIONS_PER_LIFE if kind == "any" else SYNCS_PER_LIFE
            self._left[kind] = dice.randrange(1, most)
        log.synced = self._synced

    def __call__(self, kind: Kind, file: str, size: int, end: int) -> None:
        del size, end
        if kind != "read":
            self._count("any")
        if kind == "sync" and file.endswith(WAL):
            self._count("before sync")

    def _synced(self) -> None:
        self._count("behind sync")

    def _count(self, kind: str) -> None:
        if self.is_on and kind in self._left:
            self._left[kind] -= 1
            if self._left[kind] == 0:
                self.cut()

    def cut(self) -> None:
        self.is_on = self._log.is_on = False
        if self.went is not None:
            self.went.set()


class SimLog(DiskLog):
    """The operations of a disk as long as it has power."""

    is_on = True
    synced: Callable[[], None]
    """Told when a sync of the write-ahead log has returned."""

    def record(self, operation: Operation) -> None:
        if self.is_on:
            self.operations.append(operation)
            if isinstance(operation, Sync) and operation.file.endswith(WAL):
                self.synced()


class FullForAWhile:
    """A disk on which nothing fits between two of its writes."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last, self._count = first, last, 0

    def __call__(self, kind: Kind, file: str, size: int, end: int) -> None:
        del file, size, end
        if kind == "write":
            self._count += 1
            if self._first <= self._count < self._last:
                raise apsw.FullError("no space left, as the seed asked")


class World:
    """Everything that outlives the store: the disk, the clients' side, what was seen."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self.loop = SimLoop(self.dice)
        self.clock = LoopClock(self.loop, self.dice)
        self.trace: list[str] = []
        """What happened, in order: the same for the same seed."""
        self.decisions = 0
        self.lives = 0
        self.store: SqliteStore
        self._image: Image = {}
        self._power: Power | None = None
        self.synchronous = "FULL"
        self.published: dict[int, int] = {}
        """The furthest byte of each stream that readers were told of."""

    # What clients do

    async def ask(self, ask: Callable[[Any, Callable[[Any], None]], None], request: Any) -> Any:
        """The answer of the store. Without power there is none, and the client waits for ever."""
        answer: asyncio.Future[Any] = self.loop.create_future()

        def answered(outcome: Any) -> None:
            if self.is_on and not answer.done():
                answer.set_result(outcome)

        self.decisions += 1
        ask(request, answered)
        return await answer

    async def seen(self, work: Awaitable[Any]) -> Any:
        """What a read of the store gives, if there still is power."""
        found = await work
        if not self.is_on:
            await self.loop.create_future()
        return found

    async def rest(self, seconds_max: float = 0.05) -> None:
        await asyncio.sleep(self.dice.random() * seconds_max)

    @property
    def is_on(self) -> bool:
        return self._power is not None and self._power.is_on

    def note(self, text: str) -> None:
        self.trace.append(f"{self.loop.time():.6f} {text}")

    # Lives

    def live(self, clients: Sequence[Callable[[], Awaitable[None]]], *, last: bool = False) -> None:
        """One life of the store: until the power goes, or, the `last` one, until clients end."""
        self.lives += 1
        place = self.folder / f"life-{self.lives}"
        write_image(self._image, place)
        log = SimLog()
        with fault_vfs(log=log) as vfs, _no_threads(self):
            self._power = power = Power(log, self.dice, goes=not last)
            vfs.rules.append(power)
            if not last and self.dice.random() < FULL_SHARE:
                first = self.dice.randrange(5, OPERATIONS_PER_LIFE)
                vfs.rules.append(FullForAWhile(first, first + self.dice.randrange(1, 40)))
            self.loop.run_until_complete(self._live(vfs, place, power, clients, last=last))
        self.loop.forget()
        disk = Disk(self._image)
        disk.advance(log.operations, len(log.operations))
        kept = self.dice.choice(
            (nothing, everything, some_prefix(self.dice), some_sectors(self.dice))
        )
        self._image = disk.cut(everything if last else kept)
        self.note(f"life {self.lives} ended, {len(log.operations)} operations")
        shutil.rmtree(place)

    async def _live(
        self,
        vfs: FaultVfs,
        place: Path,
        power: Power,
        clients: Sequence[Callable[[], Awaitable[None]]],
        *,
        last: bool,
    ) -> None:
        power.went = asyncio.Event()
        settings = SqliteSettings(
            folder=place,
            vfs=vfs.name,
            synchronous=self.synchronous,
            streams_cached_max=6,
            producers_cached_max=4,
            checkpoint_wal_bytes=64 << 10,
            key_index_keys=16,
            rows_behind_max=(4_096, 1, 30)[self.lives % 3],
            loop_commit_us_max=self.dice.choice((0, 1_000)),
        )
        try:
            store = SqliteStore(settings, self.clock)
        except apsw.FullError:
            self.note("the disk is full at the start")
            power.cut()
            return
        self.store = store
        store.listen(self._published)
        running = [asyncio.ensure_future(client()) for client in clients]
        running.append(asyncio.ensure_future(self._checkpoints(store)))
        try:
            if last:
                await asyncio.gather(*running[:-1])
                # What is left in the log has a salt that SQLite makes up.
                await store.between_commits(lambda connection: fold(connection.raw))
            else:
                gone = asyncio.ensure_future(power.went.wait())
                await asyncio.wait(
                    {gone, *running}, timeout=LIFE_S_MAX, return_when=asyncio.FIRST_COMPLETED
                )
                gone.cancel()
                for task in running:
                    if task.done():
                        task.result()
        finally:
            power.cut()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            _drop(store)

    def _published(self, changes: Sequence[Published]) -> None:
        if self.is_on:
            for change in changes:
                before = self.published.get(change.info.id, 0)
                self.published[change.info.id] = max(before, change.info.tail.bytes)

    async def _checkpoints(self, store: SqliteStore) -> None:
        """What the upkeep does with the write-ahead log."""
        while True:
            await store.wal_grown.wait()
            store.wal_grown.clear()
            try:
                await store.between_commits(lambda connection: fold(connection.raw))
            except apsw.FullError:
                self.note("no room to fold the log")

    def files(self) -> Image:
        """What the disk has at the end: all that was written is in the database."""
        return {FILE: self._image[FILE]}

    def begin(self) -> None:
        """A first life without faults, which makes the file."""
        self.live((), last=True)


def _drop(store: SqliteStore) -> None:
    """Let go of a store whose machine has no power: nothing is folded, nothing is said."""
    connection = store._writer.connection
    connection.raw.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    for readers in (store.readers, store.scanners):
        readers.close()
    store._lookups.close()
    connection.close()
    store._lock.release()
    store.failure.cancel()


@contextmanager
def _no_threads(world: World) -> Iterator[None]:
    """Let the group commit take a simulated thread."""
    SimThread.loop, SimThread.dice = world.loop, world.dice
    with mock.patch.object(group_commit, "ThreadPoolExecutor", SimThread):
        yield


def is_failure(outcome: object) -> bool:
    """Whether the store could not say what became of a request: it is to be sent again."""
    return isinstance(outcome, Failed | Unknown)
