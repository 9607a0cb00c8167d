"""Subscriptions over very many streams come and go a part at a time, and are seen whole or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import fencepost.server.subscriptions.links as linking
from fencepost.protocol.creates import Create
from fencepost.protocol.shares import Shares
from fencepost.server.subscriptions.engine import Engine
from fencepost.server.subscriptions.registry import ConfigConflict, Made, TooMany
from fencepost.store.sqlite.connection import FILE
from tests.integration.subscriptions_support import Opened, SimClock, opened, pull_config

BASE_URL = "http://127.0.0.1:4437/v1/stream/__ds"
STREAMS = 40
PART = 8


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "LINKS_AT_ONCE", PART)


async def fill(on: Opened) -> None:
    for number in range(STREAMS):
        await on.create(f"events/{number}", 1)


async def until(happens: Callable[[], object]) -> None:
    """Let everything go on until something is so."""
    async with asyncio.timeout(20):
        while not happens():
            await asyncio.to_thread(lambda: None)


def fetch(folder: Path, text: str) -> list[Any]:
    """Rows as they are on disk."""
    connection = apsw.Connection(str(folder / FILE), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return connection.execute(text).fetchall()
    finally:
        connection.close()


def begun(engine: Engine) -> bool:
    """Whether the first part of a subscription is there."""
    return bool(engine.registry.watching("events/0"))


class Pause:
    """Holds a subscription that is being made behind its first part, until it may go on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.reached = asyncio.Event()
        self._on = asyncio.Event()
        store = engine._links._store
        self._durable = store.durable
        monkeypatch.setattr(store, "durable", self._pause)

    async def _pause(self) -> Any:
        failure = await self._durable()
        if begun(self.engine):
            self.reached.set()
            await self._on.wait()
        return failure

    async def first_part(self) -> None:
        async with asyncio.timeout(20):
            await self.reached.wait()

    def go_on(self) -> None:
        self._on.set()


async def test_a_subscription_is_seen_when_its_last_part_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, SimClock()) as on:
        engine, store = on.subscriptions.engine, on.store
        await fill(on)
        pause = Pause(engine, monkeypatch)
        creating = asyncio.create_task(engine.create("s", pull_config(), BASE_URL))
        await pause.first_part()

        assert engine.find("s") is None
        assert fetch(tmp_path, "SELECT count(*) FROM links") < [(STREAMS,)]
        store.create(Create("events/during", content_type="text/plain"), lambda _: None)
        store.delete("events/0", lambda _: None)
        store.delete("events/39", lambda _: None)
        await on.append("events/1", 2)
        pause.go_on()
        made = await creating
        await on.settle()

        assert isinstance(made, Made)
        assert made.created
        wanted = {f"events/{number}" for number in range(1, 39)} | {"events/during"}
        assert set(made.subscription.links) == wanted

    async with opened(tmp_path, SimClock()) as on:
        found = on.subscriptions.engine.find("s")
        assert found is not None
        assert set(found.links) == wanted
        assert fetch(tmp_path, "SELECT count(*) FROM partial_subscriptions") == [(0,)]


async def test_a_message_that_comes_between_the_parts_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        await fill(on)
        pause = Pause(engine, monkeypatch)
        creating = asyncio.create_task(engine.create("s", pull_config(), BASE_URL))
        await pause.first_part()

        await on.append("events/0", 2)
        pause.go_on()
        made = await creating

        assert isinstance(made, Made)
        assert list(made.subscription.pending) == ["events/0"]
        assert not made.subscription.wake.is_idle


async def test_one_that_its_client_leaves_comes_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        await fill(on)
        running = asyncio.create_task(engine.run())
        pause = Pause(engine, monkeypatch)
        creating = asyncio.create_task(engine.create("s", pull_config(), BASE_URL, "ann"))
        await pause.first_part()

        creating.cancel()
        pause.go_on()
        await on.settle()
        await until(lambda: fetch(tmp_path, "SELECT count(*) FROM partial_subscriptions") == [(0,)])

        assert fetch(tmp_path, "SELECT count(*) FROM links") == [(0,)]
        assert not begun(engine)
        assert engine.registry.followed["ann"] == 0
        assert isinstance(await engine.create("s", pull_config(), BASE_URL, "bob"), Made)
        running.cancel()


async def test_of_two_under_one_name_one_is_made(tmp_path: Path) -> None:
    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        await fill(on)
        running = asyncio.create_task(engine.run())

        outcomes = await asyncio.gather(
            engine.create("s", pull_config(), BASE_URL, "ann"),
            engine.create("s", pull_config(), BASE_URL, "bob"),
        )
        await on.settle()
        await until(lambda: fetch(tmp_path, "SELECT count(*) FROM partial_subscriptions") == [(0,)])

        assert sorted(type(one).__name__ for one in outcomes) == [
            ConfigConflict.__name__,
            Made.__name__,
        ]
        assert fetch(tmp_path, "SELECT count(*) FROM links") == [(STREAMS,)]
        assert [count for count in engine.registry.followed.values() if count] == [STREAMS]
        running.cancel()


async def test_a_share_that_is_used_up_to_the_last_link_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last part may be short: no more is asked for than there are streams."""
    monkeypatch.setattr(linking, "LINKS_AT_ONCE", PART + 1)
    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        await fill(on)
        monkeypatch.setattr(engine._links, "_shares", Shares(links_per_principal_max=STREAMS))

        made = await engine.create("s", pull_config(), BASE_URL, "ann")

        assert isinstance(made, Made), made
        assert engine.registry.followed["ann"] == STREAMS
        assert isinstance(await engine.create("t", pull_config(), BASE_URL, "ann"), TooMany)


async def test_a_stop_between_the_parts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, SimClock()) as on:
        await fill(on)
        pause = Pause(on.subscriptions.engine, monkeypatch)
        creating = asyncio.create_task(on.subscriptions.engine.create("s", pull_config(), BASE_URL))
        await pause.first_part()
        creating.cancel()
        await on.settle()

    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        assert engine.find("s") is None
        assert fetch(tmp_path, "SELECT count(*) FROM links") >= [(PART,)]
        made = await engine.create("s", pull_config(), BASE_URL)
        assert isinstance(made, Made)
        await on.settle()
        running = asyncio.create_task(engine.run())
        await until(lambda: fetch(tmp_path, "SELECT count(*) FROM partial_subscriptions") == [(0,)])

        assert fetch(tmp_path, "SELECT DISTINCT subscription FROM links") == [
            (made.subscription.id,)
        ]
        assert fetch(tmp_path, "SELECT count(*) FROM links") == [(STREAMS,)]
        running.cancel()


async def test_a_subscription_that_ends_is_gone_before_its_links(tmp_path: Path) -> None:
    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        await fill(on)
        made = await engine.create("s", pull_config(), BASE_URL, "ann")
        assert isinstance(made, Made)
        engine.delete(made.subscription)
        await on.settle()

        assert engine.find("s") is None
        assert fetch(tmp_path, "SELECT count(*) FROM links") == [(STREAMS,)]
        await on.append("events/3", 2)
        assert made.subscription.wake.is_idle

    async with opened(tmp_path, SimClock()) as on:
        engine = on.subscriptions.engine
        assert engine.find("s") is None
        assert not begun(engine)
        running = asyncio.create_task(engine.run())
        await until(lambda: fetch(tmp_path, "SELECT count(*) FROM partial_subscriptions") == [(0,)])
        assert fetch(tmp_path, "SELECT count(*) FROM links") == [(0,)]
        running.cancel()
