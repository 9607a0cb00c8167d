"""Coordination beside actors of another making: messages of the published patterns count, and what
cannot be read is told and can be overridden.

The messages of the patterns are used as data, word for word: they carry no epoch, their version may
be old, and a claim may be a plain object.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import Client, Producing, Stream
from fencepost.coordination import (
    AsyncOverrides,
    AsyncResources,
    AsyncTaskClaims,
    Overrides,
    Resources,
    RowUnreadableError,
    TaskClaims,
    ToolCall,
    ToolExecutor,
)
from tests.engines import emptied, server_at
from tests.engines import engine as engine
from tests.serving import ServerProcess

Plain = dict[str, Any]

PLAIN_CLAIM = {
    "taskId": "tool-call-abc123",
    "owner": "actor-a",
    "status": "claimed",
    "claimedAt": "2025-02-01T10:00:00Z",
}
RAISED_CLAIM = {
    "taskId": "tool-call-abc123",
    "owner": "actor-b",
    "epoch": 1,
    "status": "claimed",
    "claimedAt": "2025-02-01T10:00:30Z",
}
RECLAIMED = {
    "taskId": "tool-call-abc123",
    "owner": "reclaim-service",
    "epoch": 2,
    "status": "available",
    "previousOwner": "actor-b",
    "reclaimedAt": "2025-02-01T10:01:30Z",
}
TOOL_CLAIM = {
    "toolCallId": "call_abc123",
    "executorId": "agent-a",
    "status": "claimed",
    "claimedAt": "2025-02-01T10:00:00Z",
}
STATE_CLAIM = {
    "type": "task_claim",
    "key": "tool-call-abc123",
    "value": {
        "owner": "executor-a",
        "status": "claimed",
        "claimedAt": "2025-02-01T10:00:00Z",
    },
    "headers": {"operation": "insert"},
}
ROW_AT_3 = {
    "type": "user",
    "key": "123",
    "value": {"name": "Alice", "version": 3},
    "headers": {"operation": "update"},
}
ROW_AT_5 = {
    "type": "user",
    "key": "123",
    "value": {"name": "Alice Smith", "email": "alice@example.com", "version": 5},
    "headers": {"operation": "update", "timestamp": "2025-02-01T10:00:00Z"},
}
STATE_ROW = {
    "type": "user",
    "key": "123",
    "value": {"name": "Alice Smith", "email": "alice@example.com", "version": 0},
    "headers": {"operation": "update", "timestamp": "2025-02-01T10:00:00Z"},
}
ROW_BY_RESOURCE_ID = {
    "type": "resource",
    "key": "user:123",
    "value": {"name": "Alice", "version": 0},
    "headers": {"operation": "insert"},
}
ROW_WITHOUT_VERSION = {
    "type": "user",
    "key": "123",
    "value": {"name": "Alice"},
    "headers": {"operation": "update"},
}
OVERRIDDEN_ROW = {
    "type": "resource",
    "key": "user:123",
    "value": {
        "name": "Alice",
        "version": 0,
        "epoch": 1,
        "adminOverride": {"reason": "typo", "timestamp": "2025-02-01T10:00:00Z"},
    },
    "headers": {"operation": "update"},
}
FOREIGN: list[Any] = [
    {"hello": "world"},
    ["price", "tea"],
    7,
    {"type": "price", "key": "milk", "value": {}, "headers": {"operation": "insert"}},
    {"type": "price", "key": "tea", "value": 30, "headers": {"operation": "insert"}},
]


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="stream")
def _stream(client: Client, path: str) -> Stream:
    return client.create(f"foreign/{path}")


def put(stream: Stream, message: Any, id: str, epoch: int = 0, seq: int = 0) -> None:
    done = stream.append(message, producer=Producing(id, epoch, seq))
    assert not done.duplicate


@pytest.mark.parametrize("message", [PLAIN_CLAIM, STATE_CLAIM])
def test_a_claim_as_the_patterns_write_it_holds_its_task(
    stream: Stream, message: dict[str, Any]
) -> None:
    put(stream, message, "task:tool-call-abc123")
    ours = TaskClaims(stream, "ours")

    assert not ours.claim("tool-call-abc123")

    seen = ours.get("tool-call-abc123")
    assert seen is not None
    assert (seen.status, seen.epoch, seen.version) == ("claimed", 0, 0)
    assert seen.owner in ("actor-a", "executor-a")
    assert [one.task for one in ours.open()] == ["tool-call-abc123"]


def test_a_task_goes_back_and_forth_between_actors_of_both_makings(stream: Stream) -> None:
    ours, id = TaskClaims(stream, "ours"), "task:tool-call-abc123"
    put(stream, PLAIN_CLAIM, id)
    put(stream, RAISED_CLAIM, id, 1)
    put(stream, RECLAIMED, id, 2)
    seen = ours.get("tool-call-abc123")
    assert seen is not None
    assert (seen.status, seen.previous_owner) == ("available", "actor-b")

    claim = ours.claim("tool-call-abc123")

    assert claim
    assert (claim.epoch, claim.version) == (2, 1)
    with pytest.raises(fencepost.StaleEpochError):
        put(stream, PLAIN_CLAIM, id)
    put(stream, {**RAISED_CLAIM, "epoch": 3}, id, 3)
    assert not ours.own(claim)
    taken = ours.claim_with_timeout("tool-call-abc123", 0)
    assert taken
    assert (taken.epoch, taken.version) == (4, 0)


def test_a_claim_of_ours_says_when_for_actors_that_go_by_it(stream: Stream) -> None:
    ours = TaskClaims(stream, "ours")
    claim = ours.claim("build")
    ours.heartbeat(claim)

    values = [message["value"] for message in stream.read()]

    assert all(value["claimedAt"].endswith("Z") for value in values)
    assert values[0]["claimedAt"] <= values[1]["claimedAt"]


def test_a_tool_call_that_an_agent_of_the_patterns_claimed_is_left_to_it(
    client: Client, stream: Stream
) -> None:
    claims = client.create(f"{stream.path}/claims")
    stream.append({"type": "tool_call", "id": "call_abc123"})
    put(claims, TOOL_CLAIM, "tool:call_abc123")

    def handler(call: ToolCall) -> str:
        return call.id

    assert ToolExecutor(stream, claims, "ours", handler).step() == 0
    seen = TaskClaims(claims, "ours", kind="tool").get("call_abc123")
    assert seen is not None
    assert seen.owner == "agent-a"
    assert ToolExecutor(stream, claims, "ours", handler, timeout=0).step() == 1


@pytest.mark.parametrize("message", [STATE_ROW, ROW_BY_RESOURCE_ID, ROW_WITHOUT_VERSION])
def test_a_row_as_the_patterns_write_it_is_read_and_updated(
    stream: Stream, message: dict[str, Any]
) -> None:
    put(stream, message, "row:user:123")
    users: Resources[Plain] = Resources(stream, "user")

    row = users.get("123")
    assert row is not None
    assert (row.epoch, row.version) == (0, 0)
    assert "version" not in row.value
    assert row.value["name"].startswith("Alice")
    # Their value may carry the version that it was made of: what counts is the Producer-Seq.
    put(stream, {**STATE_ROW, "value": {"name": "Bob", "version": 0}}, "row:user:123", 0, 1)
    row = users.update("123", lambda user: {**(user or {}), "seen": True})

    assert row.value == {"name": "Bob", "seen": True}
    assert (row.epoch, row.version) == (0, 2)
    stored = list(stream.read())[-1]["value"]
    assert stored["version"] == 2


def test_versions_that_both_makings_write_in_turn_are_one_line(stream: Stream) -> None:
    users: Resources[Plain] = Resources(stream, "user")
    for number in range(3):
        assert users.update("123", lambda _user: {"name": "?"}).version == number
    put(stream, ROW_AT_3, "row:user:123", 0, 3)

    row = users.update("123", lambda user: {**(user or {}), "ours": True})

    assert (row.value, row.version) == ({"name": "Alice", "ours": True}, 4)
    put(stream, ROW_AT_5, "row:user:123", 0, 5)
    last = users.get("123")
    assert last is not None
    assert (last.value["name"], last.version) == ("Alice Smith", 5)


def test_an_override_as_the_patterns_write_it_is_gone_on_from(stream: Stream) -> None:
    users: Resources[Plain] = Resources(stream, "user")
    users.update("123", lambda _none: {"name": "Alise"})
    put(stream, OVERRIDDEN_ROW, "row:user:123", 1)

    row = users.update("123", lambda user: {**(user or {}), "seen": True})

    assert (row.value, row.epoch, row.version) == ({"name": "Alice", "seen": True}, 1, 1)


@pytest.mark.parametrize("message", FOREIGN)
def test_a_row_that_cannot_be_read_is_told_at_once_and_corrected(
    stream: Stream, message: Any
) -> None:
    put(stream, message, "row:price:tea")
    prices: Resources[Plain] = Resources(stream, "price")
    root = Overrides(stream, "root")

    with pytest.raises(RowUnreadableError, match=r"price/tea.*epoch 0, version 0.*correct") as told:
        prices.update("tea", lambda _none: {"cents": 30})
    assert told.value.skipped.place == (0, 0)
    with pytest.raises(RowUnreadableError):
        prices.get("tea")
    with pytest.raises(RowUnreadableError):
        root.restart_versions("price", "tea", reason="its value is not known")
    assert list(prices.rows()) == []

    row = root.correct("price", "tea", {"cents": 300}, reason="not readable")

    assert (row.value, row.epoch, row.version) == ({"cents": 300}, 1, 0)
    assert list(stream.read())[-1]["value"]["override"]["skipped"] == {
        "epoch": 0,
        "version": 0,
        "why": told.value.skipped.why,
    }
    assert prices.update("tea", lambda price: {"cents": (price or {})["cents"] + 1}).version == 1


def test_a_foreign_message_behind_a_good_one_is_told_and_the_good_value_is_not_used(
    stream: Stream,
) -> None:
    prices: Resources[Plain] = Resources(stream, "price")
    prices.update("tea", lambda _none: {"cents": 30})
    put(stream, {"hello": "world"}, "row:price:tea", 0, 1)

    with pytest.raises(RowUnreadableError, match="version 1"):
        prices.update("tea", lambda price: {"cents": (price or {})["cents"] + 1})

    assert Overrides(stream, "root").correct("price", "tea", {"cents": 1}, reason="x").epoch == 1


def test_a_baseline_clears_what_cannot_be_read(stream: Stream) -> None:
    prices: Resources[Plain] = Resources(stream, "price")
    prices.update("milk", lambda _none: {"cents": 90})
    put(stream, {"hello": "world"}, "row:price:tea", 3)
    put(stream, {"hello": "world"}, "row:price:milk", 0, 1)
    put(stream, {"hello": "world"}, "row:price:gone")
    root = Overrides(stream, "root")

    assert root.baseline("price", {"tea": {"cents": 1}, "milk": {"cents": 2}}, reason="clean") == 3

    assert {row.key: (row.value, row.epoch) for row in prices.rows()} == {
        "tea": ({"cents": 1}, 4),
        "milk": ({"cents": 2}, 1),
    }
    assert prices.get("gone") is None


def test_a_claim_that_cannot_be_read_is_freed_by_an_override(stream: Stream) -> None:
    put(stream, {"hello": "world"}, "task:build")
    ours = TaskClaims(stream, "ours")
    found = ours.claim("build")
    assert not found
    assert found.outcome == "unreadable"

    assert Overrides(stream, "root").free("build", reason="not readable")

    assert ours.claim("build")


def test_what_was_truncated_beyond_the_retention_of_the_log_is_overridden(
    engine: str, tmp_path: Path
) -> None:
    forgets = {"FENCEPOST_STORE_LOG_RETENTION_MS": "1", "FENCEPOST_STORE_SWEEP_INTERVAL_MS": "20"}
    with (
        emptied(engine, tmp_path) as store,
        server_at(store, environment=forgets) as server,
        fencepost.connect(server.url) as client,
    ):
        stream = client.create("truncated")
        Resources[Plain](stream, "price").update("tea", lambda _none: {"cents": 30})
        assert TaskClaims(stream, "dead").claim("build")
        stream.truncate(before="now")
        while any(entry.producer for entry in client.log(streams=["truncated"], skip_pruned=True)):
            continue  # the log forgets within its next round of upkeep
        root, prices = Overrides(stream, "root"), Resources[Plain](stream, "price")

        with pytest.raises(RowUnreadableError, match="truncated"):
            prices.update("tea", lambda _none: {"cents": 31})
        assert root.baseline("price", {"milk": {"cents": 1}}, reason="clean") == 2
        assert root.correct("price", "tea", {"cents": 300}, reason="gone").epoch == 2
        found = TaskClaims(stream, "ours").claim("build")
        assert found.outcome == "unreadable"
        assert root.free("build", reason="gone")
        assert TaskClaims(stream, "ours").claim("build")


async def test_the_async_twins_recover_as_well(server_process: ServerProcess, path: str) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        stream = await client.create(f"foreign/{path}")
        for id in ("row:price:tea", "task:build"):
            await stream.append({"hello": "world"}, producer=Producing(id, 0, 0))
        await stream.append(PLAIN_CLAIM, producer=Producing("task:tool-call-abc123", 0, 0))
        prices: AsyncResources[Plain] = AsyncResources(stream, "price")
        root, claims = AsyncOverrides(stream, "root"), AsyncTaskClaims(stream, "ours")

        with pytest.raises(RowUnreadableError):
            await prices.update("tea", lambda _none: {"cents": 30})
        assert (await root.correct("price", "tea", {"cents": 3}, reason="x")).epoch == 1
        assert await root.free("build", reason="x")
        assert await claims.claim("build")
        held = await claims.claim("tool-call-abc123")
        assert (held.outcome, held.owner) == ("held", "actor-a")
