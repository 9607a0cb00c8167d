"""Tool executors on a real server: one result for every call, also when executors die."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import fencepost
from fencepost import Client, FencepostError, Stream
from fencepost.coordination import AsyncToolExecutor, TaskClaims, ToolCall, ToolExecutor
from tests.integration.coordination_support import Cutting
from tests.serving import ServerProcess


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="session")
def _session(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"sessions/{request.node.name}")


@pytest.fixture(name="claims")
def _claims(client: Client, session: Stream) -> Stream:
    return client.create(f"{session.path}/claims")


def call(number: int | str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_call", "id": f"call_{number}", "n": number, **more}


def double(one: ToolCall) -> Any:
    return one.message["n"] * 2


def results(session: Stream) -> list[dict[str, Any]]:
    return [message for message in session.read() if message["type"] != "tool_call"]


def test_a_call_is_carried_out_and_answered_in_the_session(session: Stream, claims: Stream) -> None:
    session.append({"type": "text", "text": "What is 2 x 21?"})
    session.append(call(21))
    ada, bob = (ToolExecutor(session, claims, name, double) for name in ("ada", "bob"))

    assert ada.step() == 1
    assert bob.step() == 0

    assert list(session.read())[-1] == {
        "type": "tool_result",
        "toolCallId": "call_21",
        "executorId": "ada",
        "result": 42,
    }
    seen = TaskClaims(claims, "reader", kind="tool").get("call_21")
    assert seen is not None
    assert (seen.owner, seen.status) == ("ada", "completed")


def test_an_error_is_a_result_as_well(session: Stream, claims: Stream) -> None:
    session.append_many([call(1, fails=True), call(2)])

    def handler(one: ToolCall) -> Any:
        if "fails" in one.message:
            raise ValueError("no such city")
        return object()  # which no JSON can hold

    assert ToolExecutor(session, claims, "ada", handler).step() == 2

    first, second = results(session)
    assert (first["type"], first["error"]) == ("tool_error", "no such city")
    assert (second["type"], second["toolCallId"]) == ("tool_error", "call_2")


def test_a_call_is_taken_over_from_an_executor_that_died(session: Stream, claims: Stream) -> None:
    session.append(call(1))

    def dies(_call: ToolCall) -> Any:
        raise SystemExit

    with pytest.raises(SystemExit):
        ToolExecutor(session, claims, "ada", dies).step()
    patient = ToolExecutor(session, claims, "cid", double)
    assert patient.step() == 0, "ada may be alive"

    assert ToolExecutor(session, claims, "bob", double, timeout=0).step() == 1

    assert [one["executorId"] for one in results(session)] == ["bob"]
    assert patient.step() == 0


def test_an_executor_that_was_taken_over_while_it_worked_stores_nothing(
    session: Stream, claims: Stream
) -> None:
    session.append(call(1))
    bob = ToolExecutor(session, claims, "bob", double, timeout=0)

    def slow(one: ToolCall) -> Any:
        assert bob.step() == 1
        return double(one)

    ada = ToolExecutor(session, claims, "ada", slow)

    assert ada.step() == 0
    assert [one["executorId"] for one in results(session)] == ["bob"]


def test_a_handler_keeps_its_claim_by_heartbeats_or_learns_that_it_is_gone(
    session: Stream, claims: Stream
) -> None:
    session.append(call(1))
    bob = ToolExecutor(session, claims, "bob", double, timeout=0)
    beats: list[str] = []

    def careful(one: ToolCall) -> Any:
        ada.heartbeat(one)
        beats.append("alive")
        bob.step()
        ada.heartbeat(one)
        beats.append("never")
        return double(one)

    ada = ToolExecutor(session, claims, "ada", careful)

    assert ada.step() == 0
    assert beats == ["alive"]
    assert [one["executorId"] for one in results(session)] == ["bob"]


def test_a_commit_whose_answer_was_lost_is_settled_and_stored_once(
    server_process: ServerProcess, session: Stream, claims: Stream
) -> None:
    session.append(call(1))
    with (
        Cutting(server_process) as cutting,
        fencepost.connect(cutting.url, retries=fencepost.NO_RETRIES) as near,
    ):
        runs: list[str] = []

        def once(one: ToolCall) -> Any:
            runs.append(one.id)
            cutting.answers_lost = 1
            return double(one)

        ada = ToolExecutor(near.stream(session.path), near.stream(claims.path), "ada", once)
        with pytest.raises(fencepost.OutcomeUnknownError):
            ada.step()
        ada.step()

    assert runs == ["call_1"]
    assert [one["result"] for one in results(session)] == [2]


def test_many_executors_give_each_call_one_result_until_the_session_is_closed(
    session: Stream, claims: Stream
) -> None:
    executors = [ToolExecutor(session, claims, f"e{n}", double) for n in range(4)]
    threads = [
        threading.Thread(target=executor.run, kwargs={"poll": 0.01}) for executor in executors
    ]
    for thread in threads:
        thread.start()
    for number in range(30):
        session.append(call(number))
    seen: Counter[str] = Counter()
    for message in session.follow():
        if message["type"] == "tool_result":
            seen[message["toolCallId"]] += 1
        if len(seen) == 30:
            break
    session.close()
    for thread in threads:
        thread.join()

    answered = Counter(one["toolCallId"] for one in results(session))
    assert answered == {f"call_{number}": 1 for number in range(30)}


def test_a_session_that_is_closed_gets_no_more_results(session: Stream, claims: Stream) -> None:
    session.append_many([call(1), call(2)])
    runs: list[str] = []

    def closes(one: ToolCall) -> Any:
        runs.append(one.id)
        session.close()
        return double(one)

    ToolExecutor(session, claims, "ada", closes).run()
    ToolExecutor(session, claims, "bob", closes, timeout=0).run()

    assert runs == ["call_1"]
    assert results(session) == []


def test_both_streams_are_of_one_client(
    server_process: ServerProcess, session: Stream, claims: Stream
) -> None:
    with (
        fencepost.connect(server_process.url) as other,
        pytest.raises(FencepostError, match="one client"),
    ):
        ToolExecutor(session, other.stream(claims.path), "ada", double)


async def test_the_async_twin_takes_async_handlers(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        session = await client.create(path)
        claims = await client.create(f"{path}/claims")

        async def handler(one: ToolCall) -> Any:
            await ada.heartbeat(one)
            if one.message["n"] == 3:
                raise ValueError("three")
            return one.message["n"]

        ada = AsyncToolExecutor(session, claims, "ada", handler)
        await session.append(call(1))
        assert await ada.step() == 1
        running = asyncio.create_task(ada.run())
        await session.append(call(2))
        seen = session.follow()
        async for message in seen:
            if message.get("toolCallId") == "call_2":
                break
        await session.append(call(3))
        async for message in seen:
            if message.get("toolCallId") == "call_3":
                assert message["error"] == "three"
                break
        await session.close()
        await running
