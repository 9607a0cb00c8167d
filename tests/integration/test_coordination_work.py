"""Working on claimed tasks: blocks with heartbeats, worker loops, and true reasons of refusals."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import Client, EpochGuardedError, FencepostError, Producing, Stream
from fencepost.coordination import (
    AsyncClaim,
    AsyncTaskClaims,
    Claim,
    ClaimLostError,
    ClaimNotWonError,
    Overrides,
    Resources,
    TaskClaims,
    ToolCall,
    ToolExecutor,
)
from tests.integration.auth_support import ALL, ROOT, place, principal, token
from tests.serving import ServerProcess

BRISK = 0.3
"""A timeout of claims whose heartbeats go out ten times a second."""


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="jobs")
def _jobs(client: Client, path: str) -> Stream:
    return client.create(f"work/{path}")


def beats(jobs: Stream) -> int:
    return sum(message["value"]["status"] == "heartbeat" for message in jobs.read())


def test_a_claim_says_what_it_found(jobs: Stream) -> None:
    ada, bob = TaskClaims(jobs, "ada"), TaskClaims(jobs, "bob")

    claim = ada.claim("build")
    ada.heartbeat(claim)
    while (seen := bob.get("build")) is None or seen.updated == seen.since:
        ada.heartbeat(claim)  # until the server's clock shows another millisecond
    held = bob.claim("build")
    again = ada.claim("build")

    assert claim
    assert (claim.outcome, claim.owner) == ("won", "ada")
    assert not held
    assert (held.outcome, held.owner) == ("held", "ada")
    assert held.since == seen.since < seen.updated
    assert not again
    assert again.outcome == "mine"
    claim.complete({"built": 7})
    done = bob.claim("build")
    assert not done
    assert (done.outcome, done.owner) == ("completed", "ada")
    seen = bob.get("build")
    assert seen is not None
    assert seen.result == {"built": 7}


def test_a_claim_that_was_not_won_is_no_block_and_has_no_moves(jobs: Stream) -> None:
    TaskClaims(jobs, "ada").claim("build")
    found = TaskClaims(jobs, "bob").claim("build")

    with pytest.raises(ClaimNotWonError, match="held by ada since"), found:
        pytest.fail("the block began")
    for move in (found.heartbeat, found.release, found.complete, found.save):
        with pytest.raises(ClaimNotWonError):
            move()
    assert not found.own()


def test_a_block_sends_heartbeats_and_completes_its_task(jobs: Stream) -> None:
    claims = TaskClaims(jobs, "ada", timeout=BRISK)
    with claims.claim("build") as claim:
        while beats(jobs) < 3:
            assert not claim.lost

    seen = claims.get("build")
    assert seen is not None
    assert seen.status == "completed"


def test_a_task_is_completed_with_one_result(jobs: Stream) -> None:
    """A second one was dropped without a word."""
    claim = TaskClaims(jobs, "ada").claim("build")

    claim.complete({"artifact": "a"})
    claim.complete({"artifact": "a"})  # the same again, as after a lost answer
    claim.complete()
    with pytest.raises(ClaimLostError, match="completed with another result"):
        claim.complete({"artifact": "b"})

    state = TaskClaims(jobs, "bob").get("build")
    assert state is not None
    assert state.result == {"artifact": "a"}


def test_a_result_that_is_no_json_leaves_the_claim_as_it_is(jobs: Stream) -> None:
    claim = TaskClaims(jobs, "ada").claim("build")

    with pytest.raises(fencepost.UnencodableError):
        claim.complete(object())

    assert claim.is_open
    claim.complete("built")


def test_an_exception_in_a_block_releases_its_task(jobs: Stream) -> None:
    claims = TaskClaims(jobs, "ada")
    with pytest.raises(ZeroDivisionError), claims.claim("build"):
        raise ZeroDivisionError

    assert [one.task for one in claims.available()] == ["build"]


def test_a_block_may_end_its_claim_itself(jobs: Stream) -> None:
    claims = TaskClaims(jobs, "ada", timeout=BRISK)
    with claims.claim("one") as one:
        one.complete("done")
        assert not one.is_open
    with claims.claim("two") as two:
        two.release()

    states = [claims.get(task) for task in ("one", "two")]
    assert [state and (state.status, state.result) for state in states] == [
        ("completed", "done"),
        ("released", None),
    ]


def test_a_thread_whose_claim_is_taken_is_told(jobs: Stream) -> None:
    claims = TaskClaims(jobs, "ada", timeout=BRISK)

    def work() -> None:
        with claims.claim("build") as claim:
            assert Overrides(jobs, "root").free("build", reason="to see what happens")
            while not claim.lost:
                continue

    with pytest.raises(ClaimLostError):
        work()

    assert [one.task for one in claims.available()] == ["build"]


async def test_a_coroutine_whose_claim_is_taken_is_cancelled(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        jobs = await client.create(path)
        ada = AsyncTaskClaims(jobs, "ada", timeout=BRISK)
        bob = AsyncTaskClaims(jobs, "bob")
        cancelled = []

        async def work() -> None:
            async with await ada.claim("build"):
                assert await bob.claim_with_timeout("build", 0)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append("build")
                    raise

        with pytest.raises(ClaimLostError):
            await work()
        assert cancelled == ["build"]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)

        async with await ada.claim("other") as claim:
            assert claim.is_open
        seen = await ada.get("other")
        assert seen is not None
        assert seen.status == "completed"


async def test_a_cancellation_from_outside_releases_the_task_and_goes_through(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        ada = AsyncTaskClaims(await client.create(path), "ada")
        began = asyncio.Event()

        async def work() -> None:
            async with await ada.claim("build"):
                began.set()
                await asyncio.Event().wait()

        working = asyncio.create_task(work())
        await began.wait()
        working.cancel()

        with pytest.raises(asyncio.CancelledError):
            await working
        assert [one.task for one in await ada.available()] == ["build"]


def test_a_block_whose_server_is_away_ends_when_another_actor_may_have_its_task(
    tmp_path: Path,
) -> None:
    """By default requests are tried again for a minute: heartbeats give up sooner."""

    def work(server: ServerProcess, claims: TaskClaims) -> None:
        with claims.claim("build") as claim:
            server.kill()
            while not claim.lost:
                continue

    with ServerProcess(tmp_path) as server, fencepost.connect(server.url) as client:
        claims = TaskClaims(client.create("jobs"), "ada", timeout=BRISK)
        began = time.monotonic()
        with pytest.raises(ClaimLostError, match="no heartbeat of build was acknowledged"):
            work(server, claims)

    assert time.monotonic() - began < 30


def test_workers_carry_out_every_task_once(jobs: Stream) -> None:
    names = [f"task-{number}" for number in range(12)]
    offering = TaskClaims(jobs, "boss")
    for name in names[:6]:
        assert offering.offer(name)
    assert not offering.offer(names[0])
    stop, ran = threading.Event(), []

    def handler(claim: Claim) -> str:
        ran.append(claim.task)
        return claim.task.upper()

    workers = [TaskClaims(jobs, f"worker-{number}") for number in range(3)]
    threads = [
        threading.Thread(target=partial(worker.work, handler, stop=stop, poll=0.02))
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for name in names[6:]:
        offering.offer(name)
    while any(one is None or one.status != "completed" for one in map(offering.get, names)):
        continue
    stop.set()
    for thread in threads:
        thread.join()

    assert sorted(ran) == sorted(names)
    states = [offering.get(name) for name in names]
    assert [state and state.result for state in states] == [name.upper() for name in names]


def test_a_worker_releases_what_its_handler_fails_at(jobs: Stream) -> None:
    claims = TaskClaims(jobs, "ada")
    claims.offer("build")

    def fails(_claim: Claim) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        claims.work(fails)
    assert [one.task for one in claims.available()] == ["build"]

    stop, told = threading.Event(), []

    def on_error(claim: Claim, error: Exception) -> None:
        told.append((claim.task, type(error)))
        stop.set()

    claims.work(fails, stop=stop, poll=0.01, on_error=on_error)
    assert told == [("build", ZeroDivisionError)]


async def test_an_async_worker_takes_async_handlers_and_takes_over_what_is_stale(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        jobs = await client.create(path)
        assert await AsyncTaskClaims(jobs, "dead").claim("left behind")
        ada = AsyncTaskClaims(jobs, "ada", timeout=BRISK)
        stop = asyncio.Event()

        async def handler(claim: AsyncClaim) -> str:
            await claim.heartbeat()
            stop.set()
            return "done"

        await ada.work(handler, stop=stop, poll=0.05)

        seen = await ada.get("left behind")
        assert seen is not None
        assert (seen.owner, seen.status, seen.result) == ("ada", "completed", "done")


def test_tasks_are_followed_as_they_become_free(jobs: Stream) -> None:
    ada, bob = TaskClaims(jobs, "ada"), TaskClaims(jobs, "bob")
    ada.offer("first")
    free = bob.follow()
    assert next(free).task == "first"
    claim = ada.claim("second")
    ada.release(claim)
    assert bob.get("second") is not None

    assert next(free).task == "second"
    assert [one.task for one in bob.available()] == ["first", "second"]


async def test_tasks_are_followed_by_coroutines_as_well(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        ada = AsyncTaskClaims(await client.create(path), "ada")
        free = ada.follow()
        await ada.offer("first")
        assert (await anext(free)).task == "first"
        await ada.offer("second")
        assert (await anext(free)).task == "second"


# The true reason


def wrong(value: object) -> Any:
    return value


@pytest.mark.parametrize("task", [7, None, b"build", ""])
def test_a_task_without_a_name_is_told(jobs: Stream, task: object) -> None:
    with pytest.raises(FencepostError, match="name"):
        TaskClaims(jobs, "ada").claim(wrong(task))
    assert list(jobs.read()) == []


def test_what_is_handed_in_wrongly_is_told_before_anything_is_claimed(
    client: Client, jobs: Stream
) -> None:
    async def handler(_call: object) -> None: ...

    class Handler:
        async def __call__(self, _call: object) -> None: ...

    other = client.create(f"{jobs.path}/claims")
    jobs.append({"type": "tool_call", "id": "call_1"})
    claims = TaskClaims(other, "ada")
    claims.offer("build")
    before = len(list(other.read()))
    asynchronous = wrong(an_async_stream())
    for act in (
        lambda: TaskClaims(jobs, "ada", kind=wrong("job")),
        lambda: TaskClaims(jobs, wrong(7)),
        lambda: TaskClaims(jobs, "ada", timeout=0),
        lambda: TaskClaims(asynchronous, "ada"),
        lambda: Resources(asynchronous, "row"),
        lambda: Overrides(asynchronous, "root"),
        lambda: ToolExecutor(jobs, asynchronous, "ada", print),
        lambda: ToolExecutor(jobs, other, "ada", wrong(handler)),
        lambda: ToolExecutor(jobs, other, "ada", Handler()),
        lambda: ToolExecutor(jobs, other, "ada", partial(handler)),
        lambda: claims.work(wrong(handler)),
        lambda: claims.work(wrong(None)),
        lambda: claims.work(wrong(print), poll=0),
        lambda: claims.work(wrong(print), stop=wrong("never")),
        lambda: claims.claim_with_timeout("build", timeout=-1),
        lambda: claims.stale(timeout=-1),
        lambda: claims.reclaim_stale(wrong("60")),
        lambda: claims.keep_reclaiming(threading.Event(), every=0),
        lambda: claims.restore(b"no claim"),
        lambda: Resources(other, "row").update("tea", wrong({"price": 1})),
        lambda: Resources(other, "row").update("tea", wrong(handler)),
        lambda: Resources(other, "row").update("tea", wrong(lambda: {"price": 1})),
        lambda: Resources(other, "row").update("tea", lambda _: {}, retries=-1),
        lambda: Overrides(jobs, "root").free("build", reason="x", kind=wrong("job")),
    ):
        with pytest.raises(fencepost.InvalidArgumentError):
            act()
    assert len(list(other.read())) == before


def an_async_stream() -> object:
    return fencepost.connect_async("http://127.0.0.1:1").stream("jobs")


async def test_a_sync_stream_in_an_async_class_is_told(jobs: Stream) -> None:
    with pytest.raises(FencepostError, match="connect_async"):
        AsyncTaskClaims(wrong(jobs), "ada")


def test_tool_calls_without_an_id_are_reported(
    client: Client, jobs: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    claims = client.create(f"{jobs.path}/claims")
    jobs.append_many(
        [
            {"type": "tool_call", "id": 7},
            {"type": "tool_call"},
            {"type": "tool_call", "id": ""},
            {"type": "tool_call", "id": "call_1"},
        ]
    )

    def handler(call: ToolCall) -> str:
        return call.id

    executor = ToolExecutor(jobs, claims, "ada", handler)

    assert executor.step() == 1
    assert [one.get("id") for one in executor.refused] == [7, None, ""]
    assert caplog.text.count("tool_call without a text as id") == 3


def test_principals_are_told_the_true_reason_at_once(tmp_path: Path) -> None:
    names = ("one", "two")
    both = (principal(name, ("jobs", ALL), open_claims_max=2) for name in names)
    failed: list[FencepostError] = []
    with (
        place(tmp_path, ROOT, *both) as here,
        fencepost.connect(here.process.url, token=token("one"), on_error=failed.append) as first,
        fencepost.connect(here.process.url, token=token("two"), on_error=failed.append) as second,
    ):
        one, two = TaskClaims(first.create("jobs"), "one"), second.stream("jobs")
        claim = one.claim("build")
        assert claim

        with pytest.raises(EpochGuardedError):
            Overrides(two, "two").free("build", reason="I want it")
        stolen = TaskClaims(two, "two").restore(claim.save())
        with pytest.raises(fencepost.ProducerHeldError):
            stolen.heartbeat()
        assert one.claim("second")
        with pytest.raises(fencepost.OpenClaimsError, match="open_claims_max"):
            one.claim("third")

        refusals = [event["code"] for event in here.audit() if event["type"] == "refused"]
    assert refusals == ["epoch_guarded", "producer_held"]
    assert [error.code for error in failed] == [*refusals, "too_fast"], "asked again"


async def test_a_completed_claim_accepts_nothing_further(tmp_path: Path) -> None:
    one = principal("one", ("jobs", ALL))
    with place(tmp_path, one) as here:
        async with fencepost.connect_async(here.process.url, token=token("one")) as client:
            jobs = await client.create("jobs")
            claims = AsyncTaskClaims(jobs, "one")
            claim = await claims.claim("build")
            await claim.complete("done")

            with pytest.raises(fencepost.ClaimCompletedError):
                await jobs.append({"late": 1}, producer=Producing("task:build", 0, 2))
            claim.held.status = "claimed"  # as in a process that does not know it completed it
            with pytest.raises(ClaimLostError):
                await claim.heartbeat()
            assert (await claims.claim("build")).outcome == "completed"


def test_without_principals_completed_is_final_by_the_number_of_its_move(jobs: Stream) -> None:
    """A server without principals cannot tell holders apart, so it guards no claims."""
    ada, bob = TaskClaims(jobs, "ada"), TaskClaims(jobs, "bob")
    claim = ada.claim("build")
    sleeper = ada.restore(claim.save())
    claim.complete("done")

    for late in (sleeper.heartbeat, sleeper.release, lambda: sleeper.complete("other")):
        with pytest.raises(ClaimLostError):
            late()
    assert bob.claim_with_timeout("build", timeout=0).outcome == "completed"

    jobs.append(
        {"late": 1}, producer=Producing("task:build", 0, 2)
    )  # it is taken, and wins nothing
    assert bob.claim_with_timeout("build", timeout=0).outcome == "unreadable"


def test_a_heartbeat_that_saves_its_holder_is_no_refusal(tmp_path: Path) -> None:
    """The server guards an epoch whose holder came to life after it was seen to be stale."""
    both = (principal(name, ("jobs", ALL)) for name in ("one", "two"))
    with (
        place(tmp_path, *both, stale_after_s=1) as here,
        fencepost.connect(here.process.url, token=token("one")) as first,
        fencepost.connect(here.process.url, token=token("two")) as second,
    ):
        one = TaskClaims(first.create("jobs"), "one")
        two = TaskClaims(second.stream("jobs"), "two")
        claim = one.claim("build")
        stale: list[Any] = []
        while not stale:
            stale = two.stale(1)
        one.heartbeat(claim)

        assert two._driver.run(two._core.reclaim_all(stale)) == []
