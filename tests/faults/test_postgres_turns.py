"""Sessions ended in the middle of turns: all of a commit or nothing, and answers that are true.

Two stores share a database, and an administrator ends one of their sessions after the other,
at moments thrown by dice. An answer that says nothing was stored must be right, because the retry
is taken as the first; one that says the outcome is unknown may be either; there are no others.
FENCEPOST_FAULT_KILLS (`just faults`) makes it the long run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Appended, Duplicate
from fencepost.protocol.commits import Commit, CommitDuplicate, CommitItem, Committed
from fencepost.protocol.creates import Create
from fencepost.store.contract import Chunk, Failed, StoreAwayError, StreamInfo, Unknown
from fencepost.store.postgres.store import PostgresStore
from fencepost.store.settings import PostgresSettings
from tests.contract.subject import append

KILLS = int(os.environ.get("FENCEPOST_FAULT_KILLS", "60"))
SEED = int(os.environ.get("FENCEPOST_FAULT_SEED", "0"))
JSON = "application/json"
STREAMS = ("turns/left", "turns/right")
WRITERS = 8
ASKED_S_MAX = 60.0

pytestmark = pytest.mark.timeout(180 + KILLS)

Ask = Callable[[Any, Callable[[Any], None]], None]


class Ender:
    """Ends sessions of the stores, mostly those that are in a turn."""

    def __init__(self, url: str, *, pause_s_max: float) -> None:
        self._url = url
        self._pause_s_max = pause_s_max
        self._dice = random.Random(SEED)
        self.in_turn_count = 0

    async def run(self, kills: int) -> None:
        connection = await psycopg.AsyncConnection.connect(self._url, autocommit=True)
        async with connection:
            left = kills
            while left:
                await asyncio.sleep(self._dice.random() * self._pause_s_max)
                found = await connection.execute(
                    "SELECT pid, xact_start IS NOT NULL FROM pg_stat_activity"
                    " WHERE application_name = 'fencepost' AND datname = current_database()"
                )
                sessions = await found.fetchall()
                in_turn = [pid for pid, is_in_turn in sessions if is_in_turn]
                anybody = [pid for pid, _ in sessions]
                chosen = in_turn if in_turn and self._dice.random() < 0.8 else anybody
                if chosen:
                    pid = self._dice.choice(chosen)
                    await connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
                    self.in_turn_count += pid in in_turn
                    left -= 1


class Writer:
    """A producer that commits to both streams, or appends to one, at either store."""

    def __init__(self, number: int, stores: list[PostgresStore], done: asyncio.Event) -> None:
        self.name = f"writer-{number}"
        self._dice = random.Random(f"{SEED}/{number}")
        self._stores = stores
        self._done = done
        self._next = dict.fromkeys(STREAMS, 0)
        self.sent: dict[str, list[str]] = {path: [] for path in STREAMS}
        self.told: Counter[str] = Counter()
        self.plain: list[tuple[str, str]] = []
        self.plain_unknown: list[tuple[str, str]] = []

    async def run(self) -> None:
        number = 0
        while not self._done.is_set():
            number += 1
            label = f"{self.name}/{number}"
            if self._dice.random() < 0.3:
                await self._append_once(f"plain/{label}")
                continue
            both = self._dice.random() < 0.6
            paths = STREAMS if both else (self._dice.choice(STREAMS),)
            items = [self._append(path, label) for path in paths]
            if both:
                commit = Commit(tuple(CommitItem(item) for item in items))
                await self._until_done(lambda store: store.commit, commit)
            else:
                await self._until_done(lambda store: store.append, items[0])
            for path in paths:
                self._next[path] += 1
                self.sent[path].append(label)

    async def _append_once(self, label: str) -> None:
        """An append that nothing is known by: it may be sent again only if it was not stored."""
        path = self._dice.choice(STREAMS)
        request = append(path, json.dumps([label]).encode(), JSON)
        while True:
            outcome = await asked(self._dice.choice(self._stores).append, request)
            self.told[type(outcome).__name__] += 1
            if isinstance(outcome, Failed):
                await asyncio.sleep(0.01)
                continue
            assert isinstance(outcome, Appended | Unknown), outcome
            stored = isinstance(outcome, Appended)
            (self.plain if stored else self.plain_unknown).append((path, label))
            return

    def _append(self, path: str, label: str) -> Any:
        body = json.dumps([label]).encode()
        return append(path, body, JSON, producer=(self.name, 0, self._next[path]))

    async def _until_done(self, of: Callable[[PostgresStore], Ask], request: Any) -> None:
        """Ask again, at another store, until it is stored; and hold each answer to the others."""
        unknown = False
        while True:
            outcome = await asked(of(self._dice.choice(self._stores)), request)
            self.told[type(outcome).__name__] += 1
            match outcome:
                case Failed():
                    await asyncio.sleep(0.01)
                case Unknown():
                    unknown = True
                case Appended() | Committed():
                    return
                case Duplicate() | CommitDuplicate():
                    assert unknown, f"{request} was stored although it was said not to be"
                    return
                case _:
                    raise AssertionError(f"{outcome} to {request}")


async def asked(ask: Ask, request: Any) -> Any:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ask(request, answer.set_result)  # a second answer would raise
    async with asyncio.timeout(ASKED_S_MAX):
        return await answer


async def content(store: PostgresStore, path: str) -> list[str]:
    """All messages, read by a store whose connections may have been ended as well."""
    while True:
        try:
            info = await store.look(path, touch=False)
            assert isinstance(info, StreamInfo), info
            at, parts = info.first, []
            while at != info.tail:
                chunk = await store.read(info, at, bytes_max=1 << 20)
                assert isinstance(chunk, Chunk), chunk
                parts.append(chunk.data)
                at = chunk.next
        except StoreAwayError:
            await asyncio.sleep(0.01)
        else:
            found: list[str] = json.loads(b"[%b]" % b",".join(parts))
            return found


@pytest.mark.parametrize(("nodes", "clients"), [(2, WRITERS), (1, 1), (2, 2)])
async def test_a_session_that_ends_in_its_turn_leaves_all_or_nothing_and_answers_are_true(
    postgres_dsn: str, nodes: int, clients: int
) -> None:
    """A client by itself has its turns in one round trip each: nothing is locked beforehand."""
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(nodes):
            store = await PostgresStore.open(PostgresSettings(url=postgres_dsn), SystemClock())
            stack.push_async_callback(store.close)
            stores.append(store)
        for path in STREAMS:
            await asked(stores[0].create, Create(path, JSON))
        done = asyncio.Event()
        writers = [Writer(number, stores, done) for number in range(clients)]
        # A client by itself has some ordinary turns after each end.
        ender = Ender(postgres_dsn, pause_s_max=0.05 if clients > 1 else 0.15)
        try:
            async with asyncio.TaskGroup() as running:
                for writer in writers:
                    running.create_task(writer.run())
                await ender.run(KILLS)
                # Until a COMMIT was cut off as well: else nothing was ever in doubt.
                while not any(writer.told["Unknown"] for writer in writers) or (
                    clients == 1 and not stores[0].turns.counted.quick
                ):
                    await ender.run(1)
                done.set()
            for store in stores:
                for path in STREAMS:
                    await check(store, path, writers)
            lefts, rights = [set(await content(stores[0], path)) for path in STREAMS]
        except BaseException as error:
            error.add_note(
                f"again: FENCEPOST_FAULT_KILLS={KILLS} FENCEPOST_FAULT_SEED={SEED}"
                " ./test tests/faults/test_postgres_turns.py"
            )
            raise
    for writer in writers:
        for label in set(writer.sent[STREAMS[0]]) & set(writer.sent[STREAMS[1]]):
            assert label in lefts & rights, "a commit is there in part"
    assert ender.in_turn_count, "no session was ended in its turn"


async def check(store: PostgresStore, path: str, writers: list[Writer]) -> None:
    """Everybody's messages are there once, those of a producer in their order."""
    found = await content(store, path)
    for writer in writers:
        mine = [label for label in found if label.startswith(f"{writer.name}/")]
        assert mine == writer.sent[path], f"{writer.name} on {path}"
    counts = Counter(found)
    for writer in writers:
        assert {counts[label] for at, label in writer.plain if at == path} <= {1}, "lost or doubled"
        assert {counts[label] for at, label in writer.plain_unknown if at == path} <= {0, 1}
    assert len(counts) == len(found)
