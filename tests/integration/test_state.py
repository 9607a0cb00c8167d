"""State over a real server: rows that follow a stream, and the npm package on the other side."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import fencepost
from fencepost import Client, Stream
from fencepost.client import state
from fencepost.client.state import AsyncMaterialized, Materialized, StateMessageError
from tests import npm
from tests.serving import ServerProcess


class User(msgspec.Struct):
    id: str
    name: str


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="people")
def _people(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"state/{request.node.name}")


def test_rows_are_read_and_then_followed(people: Stream) -> None:
    people.append(state.insert("user", "1", {"id": "1", "name": "Ada"}))
    view = Materialized(people, {"user": User}).refresh()
    assert view.get("user", "1", User) == User("1", "Ada")
    people.append_many(
        [
            state.update("user", "1", User("1", "Ada L.")),
            state.insert("user", "2", User("2", "Bob")),
        ]
    )
    people.append(state.delete("user", "1"), close=True)

    operations = [
        message.operation for message in view.follow() if isinstance(message, state.Change)
    ]

    assert operations == ["update", "insert", "delete"]
    assert view.rows("user", User) == {"2": User("2", "Bob")}
    assert view.types == ["user"]
    assert view.offset == people.head().next_offset


def test_a_refresh_reads_only_what_is_new(people: Stream) -> None:
    people.append(state.insert("n", "1", 1))
    view = Materialized(people).refresh()
    people.append(state.insert("n", "2", 2))
    again = Materialized(people, offset=view.offset).refresh()

    assert view.refresh().rows("n") == {"1": 1, "2": 2}
    assert again.rows("n") == {"2": 2}


def test_a_reset_begins_again_where_it_says(people: Stream) -> None:
    people.append(state.insert("n", "wrong", 0))
    begin = people.append(state.insert("n", "wrong as well", 0)).next_offset
    people.append(state.insert("n", "kept", 1))
    view = Materialized(people).refresh()
    assert len(view.rows("n")) == 3

    people.append(state.reset(offset=begin))
    people.append(state.insert("n", "after", 2))

    assert view.refresh().rows("n") == {"kept": 1, "after": 2}
    assert Materialized(people).refresh().rows("n") == {"kept": 1, "after": 2}
    assert view.offset == people.head().next_offset


def test_two_resets_do_not_send_a_reader_in_circles(people: Stream) -> None:
    first = people.append(state.insert("n", "1", 1)).next_offset
    second = people.append(state.insert("n", "2", 2)).next_offset
    people.append(state.reset(offset=second))
    people.append(state.insert("n", "3", 3))
    people.append(state.reset(offset=first))
    people.append(state.insert("n", "4", 4), close=True)

    view = Materialized(people)
    for _message in view.follow():
        pass

    assert view.rows("n") == {"2": 2, "3": 3, "4": 4}


def test_a_reset_without_an_offset_begins_here(people: Stream) -> None:
    people.append_many([state.insert("n", "1", 1), state.reset(), state.insert("n", "2", 2)])

    assert Materialized(people).refresh().rows("n") == {"2": 2}


def test_a_snapshot_replaces_what_was_there(people: Stream) -> None:
    people.append(state.insert("n", "gone", 0))
    people.append_many([state.snapshot_start(), state.insert("n", "1", 1), state.snapshot_end()])

    assert Materialized(people).refresh().rows("n") == {"1": 1}


def test_what_is_no_message_is_counted_or_raised(people: Stream) -> None:
    people.append({"hello": "world"})
    people.append(state.insert("user", "1", {"name": 7}))
    people.append(state.insert("n", "1", 1))

    view = Materialized(people, {"user": User}).refresh()

    assert (view.invalid, view.types) == (2, ["n"])
    with pytest.raises(StateMessageError):
        Materialized(people, strict=True).refresh()


async def test_the_async_twin_follows_live(server_process: ServerProcess, path: str) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        numbers = await client.create(path)
        await numbers.append(state.insert("n", "1", 1))
        view = await AsyncMaterialized(numbers).refresh()
        assert view.get("n", "1") == 1
        seen: asyncio.Queue[str] = asyncio.Queue()

        async def follow() -> None:
            async for message in view.follow():
                assert isinstance(message, state.Change)
                seen.put_nowait(message.key)

        following = asyncio.create_task(follow())
        for key in ("2", "3"):
            await numbers.append(state.upsert("n", key, int(key)))
            assert await seen.get() == key
            assert view.get("n", key, int) == int(key)
        await numbers.close()
        await following
        assert view.rows("n") == {"1": 1, "2": 2, "3": 3}


def run_npm(server: ServerProcess, *scenario: str) -> Any:
    """What the npm package saw in one scenario of state.mjs."""
    outcome = subprocess.run(
        [npm.node(), "interop/state.mjs", *scenario],
        cwd=npm.FOLDER,
        env={**os.environ, "FENCEPOST_BASE_URL": server.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.mark.timeout(npm.INSTALL_SECONDS_MAX + 120)
def test_what_the_npm_package_writes_is_understood(
    server_process: ServerProcess, client: Client
) -> None:
    assert run_npm(server_process, "write", "state/from-npm") == 5

    view = Materialized(client.stream("state/from-npm"), {"user": User}, strict=True).refresh()

    assert view.rows("user", User) == {"1": User("1", "Ada L.")}
    assert view.rows("flag") == {"dark": {"id": "dark", "enabled": True}}


@pytest.mark.timeout(npm.INSTALL_SECONDS_MAX + 120)
def test_the_npm_package_understands_what_we_write(
    server_process: ServerProcess, people: Stream
) -> None:
    people.append_many(
        [
            state.snapshot_start(),
            state.insert("user", "1", User("1", "Ada"), txid="t"),
            state.upsert("user", "2", User("2", "Bob")),
            state.update("user", "1", User("1", "Ada L."), old_value=User("1", "Ada")),
            state.insert("flag", "dark", {"enabled": True}),
            state.delete("user", "2"),
            state.snapshot_end(),
        ]
    )

    saw = run_npm(server_process, "read", people.path)

    ours = Materialized(people).refresh()
    assert saw["rows"] == {type: dict(ours.rows(type)) for type in ("user", "flag")}
    assert saw["controls"] == 2
