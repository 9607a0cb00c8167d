"""Task claims on a real server: the state table, move by move, and races for a task."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import fencepost
from fencepost import Client, Producing, Stream
from fencepost.client import state
from fencepost.coordination import AsyncTaskClaims, Claim, ClaimLostError, TaskClaims
from tests.engines import engine as engine
from tests.integration.auth_support import ALL, place, principal, token
from tests.integration.coordination_support import Cutting
from tests.serving import ServerProcess


@pytest.fixture(name="client")
def _client(server_process: ServerProcess) -> Iterator[Client]:
    with fencepost.connect(server_process.url) as client:
        yield client


@pytest.fixture(name="jobs")
def _jobs(client: Client, request: pytest.FixtureRequest) -> Stream:
    return client.create(f"jobs/{request.node.name}")


@pytest.fixture(name="ada")
def _ada(jobs: Stream) -> TaskClaims:
    return TaskClaims(jobs, "ada")


@pytest.fixture(name="bob")
def _bob(jobs: Stream) -> TaskClaims:
    return TaskClaims(jobs, "bob")


def claimed(claims: TaskClaims, task: str = "build") -> Claim:
    claim = claims.claim(task)
    assert claim
    return claim


def moves(jobs: Stream) -> list[tuple[str, str, int, int]]:
    """Owner, status, epoch and version of every message."""
    values = [message["value"] for message in jobs.read()]
    return [(one["owner"], one["status"], one["epoch"], one["version"]) for one in values]


def test_the_first_one_to_claim_has_the_task(ada: TaskClaims, bob: TaskClaims) -> None:
    claim = claimed(ada)

    assert not bob.claim("build")
    assert bob.claim("another")
    assert (claim.epoch, claim.version) == (0, 0)
    seen = bob.get("build")
    assert seen is not None
    assert (seen.owner, seen.status, seen.is_held) == ("ada", "claimed", True)
    assert bob.get("never claimed") is None


def test_a_task_goes_through_the_state_table(
    jobs: Stream, ada: TaskClaims, bob: TaskClaims
) -> None:
    claim = claimed(ada)
    ada.heartbeat(claim)
    ada.release(claim)
    second = claimed(bob)
    assert not ada.claim("build")
    third = ada.claim_with_timeout("build", 0)
    assert third
    ada.heartbeat(third)
    assert bob.reclaim_stale(0) == ["build"]
    last = claimed(bob)
    bob.complete(last)

    assert (second.epoch, second.version) == (0, 3)
    assert moves(jobs) == [
        ("ada", "claimed", 0, 0),
        ("ada", "heartbeat", 0, 1),
        ("ada", "released", 0, 2),
        ("bob", "claimed", 0, 3),
        ("ada", "claimed", 1, 0),
        ("ada", "heartbeat", 1, 1),
        ("bob", "available", 2, 0),
        ("bob", "claimed", 2, 1),
        ("bob", "completed", 2, 2),
    ]


def test_bodies_are_state_messages_with_a_nonce(jobs: Stream, ada: TaskClaims) -> None:
    ada.heartbeat(claimed(ada))

    messages = [state.parse(raw) for raw in jobs.read()]

    changes = [message for message in messages if isinstance(message, state.Change)]
    assert [(one.type, one.key, one.operation) for one in changes] == [
        ("task_claim", "build", "insert"),
        ("task_claim", "build", "update"),
    ]
    assert len({one.headers.txid for one in changes}) == 2


def test_completed_is_final(ada: TaskClaims, bob: TaskClaims) -> None:
    claim = claimed(ada)
    ada.complete(claim)
    ada.complete(claim)

    assert not bob.claim("build")
    assert not bob.claim_with_timeout("build", 0)
    assert bob.stale(0) == []
    assert bob.reclaim_stale(0) == []
    assert not ada.own(claim)
    with pytest.raises(ClaimLostError):
        ada.heartbeat(claim)


def test_a_live_claim_is_not_taken_over(ada: TaskClaims, bob: TaskClaims) -> None:
    claimed(ada)

    assert not bob.claim_with_timeout("build")
    assert bob.stale() == []
    assert bob.reclaim_stale() == []
    assert [one.task for one in bob.open()] == ["build"]


def test_a_zombie_is_told_and_stores_nothing(
    jobs: Stream, ada: TaskClaims, bob: TaskClaims
) -> None:
    zombie = claimed(ada)
    taken = bob.claim_with_timeout("build", 0)
    assert taken
    before = moves(jobs)

    for move in (ada.heartbeat, ada.release, ada.complete):
        with pytest.raises(ClaimLostError):
            move(zombie)

    assert not ada.own(zombie)
    assert bob.own(taken)
    assert moves(jobs) == before


def test_owning_is_known_without_reading_however_long_ago_the_claim_was(ada: TaskClaims) -> None:
    claim = claimed(ada)
    for _beat in range(40):
        ada.heartbeat(claim)

    assert ada.own(claim)


def test_a_claim_can_be_saved_and_gone_on_with(jobs: Stream, ada: TaskClaims) -> None:
    saved = claimed(ada).save()

    again = TaskClaims(jobs, "ada")
    claim = again.restore(saved)

    assert not again.claim("build"), "a name alone proves nothing"
    assert again.own(claim)
    again.complete(claim)


def test_an_epoch_is_raised_only_over_the_move_that_was_seen(
    jobs: Stream, ada: TaskClaims, bob: TaskClaims
) -> None:
    claim = claimed(ada)
    stale = bob.stale(0)
    ada.heartbeat(claim)

    assert not bob._driver.run(bob._core.reclaim(stale[0]))

    ada.complete(claim)


def test_messages_that_others_wrote_do_not_count(
    jobs: Stream, ada: TaskClaims, bob: TaskClaims
) -> None:
    forged = state.insert(
        "task_claim",
        "build",
        {"owner": "eve", "status": "completed", "epoch": 9, "version": 0},
    )
    jobs.append(forged)
    jobs.append(forged, producer=Producing("task:other", 9, 0))
    jobs.append({"no": "state"})

    claimed(ada)
    assert not bob.claim("build")
    assert [one.owner for one in bob.open()] == ["ada"]


def test_a_claim_that_cannot_be_read_holds_the_task_and_disturbs_no_other(
    jobs: Stream, ada: TaskClaims
) -> None:
    strange = {"holder": "eve", "epoch": 0, "version": 0}
    jobs.append(
        state.insert("task_claim", "build", strange), producer=Producing("task:build", 0, 0)
    )

    assert not ada.claim("build")
    assert not ada.claim_with_timeout("build", 0)
    assert ada.open() == []
    claimed(ada, "another")


@pytest.mark.parametrize("name", ["a:b", "a/b*", "ünï", "x" * 200])
def test_tasks_may_have_any_name(ada: TaskClaims, bob: TaskClaims, name: str) -> None:
    claim = claimed(ada, name)

    assert not bob.claim(name)
    ada.release(claim)
    assert bob.claim(name)


def test_a_deleted_stream_is_forgotten(client: Client, ada: TaskClaims, bob: TaskClaims) -> None:
    claimed(ada)
    assert not bob.claim("build")
    path = ada._core._path
    client.stream(path).delete()
    client.create(path)

    assert bob.claim("build")


def test_winning_a_race_is_one_request_and_losing_it_reads_who_won(
    server_process: ServerProcess, jobs: Stream, ada: TaskClaims
) -> None:
    claimed(ada, "lost")
    with Cutting(server_process) as counting, fencepost.connect(counting.url) as near:
        bob = TaskClaims(near.stream(jobs.path), "bob")

        assert bob.claim("won")
        assert counting.requests == 1
        assert bob.claim("lost").owner == "ada"
        assert counting.requests == 3


def test_of_many_that_race_one_wins_each_time(jobs: Stream) -> None:
    actors = [TaskClaims(jobs, f"actor-{number}") for number in range(8)]
    barrier = threading.Barrier(len(actors))
    won: list[Claim] = []

    def compete(claims: TaskClaims) -> None:
        barrier.wait()
        claim = claims.claim("build")
        if claim:
            won.append(claim)

    for round in range(5):
        threads = [threading.Thread(target=compete, args=(claims,)) for claims in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == round + 1
        holder = next(one for one in actors if one._core._owner == won[-1].owner)
        holder.release(won[-1])


def test_a_claim_whose_answer_was_lost_is_still_ours(
    server_process: ServerProcess, jobs: Stream, bob: TaskClaims
) -> None:
    with (
        Cutting(server_process) as cutting,
        fencepost.connect(cutting.url, retries=fencepost.NO_RETRIES) as client,
    ):
        ada = TaskClaims(client.stream(jobs.path), "ada")
        cutting.answers_lost = 1
        with pytest.raises(fencepost.OutcomeUnknownError):
            ada.claim("build")
        assert not bob.claim("build")

        claim = claimed(ada)

        for move in (ada.heartbeat, ada.complete):
            cutting.answers_lost = 1
            with pytest.raises(fencepost.OutcomeUnknownError):
                move(claim)
            move(claim)
    assert [status for _owner, status, _epoch, _version in moves(jobs)] == [
        "claimed",
        "heartbeat",
        "heartbeat",
        "completed",
    ]


async def test_heartbeats_beside_the_work_do_not_disturb_it(
    server_process: ServerProcess, path: str
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        jobs = await client.create(path)
        claims = AsyncTaskClaims(jobs, "ada")
        claim = await claims.claim("build")
        assert claim
        async with asyncio.TaskGroup() as group:
            for _beat in range(20):
                group.create_task(claims.heartbeat(claim))

        await claims.complete(claim)

        seen = await claims.get("build")
        assert seen is not None
        assert seen.status == "completed"
        assert await claims.open() == await claims.stale(0) == []
        assert await claims.reclaim_stale(0) == []
        assert not await claims.claim_with_timeout("build", 0)
        assert not await claims.own(claim)
        other = await claims.claim("another")
        assert other
        await claims.release(other)


def test_a_holder_that_falls_silent_is_stale_by_the_clock_of_the_server(
    ada: TaskClaims, bob: TaskClaims
) -> None:
    claimed(ada)
    began = bob.get("build")
    assert began is not None

    while not bob.claim_with_timeout("build", 1.0):
        continue

    after = bob.get("build")
    assert after is not None
    assert (after.updated - began.updated).total_seconds() >= 1.0
    assert (after.previous_owner, after.owner) == ("ada", "bob")


def test_principals_hold_their_claims_against_each_other(tmp_path: Path) -> None:
    """With authorization the server itself says who may go on and who may take over."""
    both = (principal(name, ("jobs", ALL)) for name in ("one", "two"))
    with (
        place(tmp_path, *both) as here,
        fencepost.connect(here.process.url, token=token("one")) as first,
        fencepost.connect(here.process.url, token=token("two")) as second,
    ):
        one = TaskClaims(first.create("jobs"), "one")
        two = TaskClaims(second.stream("jobs"), "two")
        claim = claimed(one)
        one.heartbeat(claim)

        assert not two.claim("build")
        with pytest.raises(fencepost.EpochGuardedError) as early:
            two.claim_with_timeout("build", 0)
        assert early.value.retry_after
        with pytest.raises(fencepost.EpochGuardedError):
            two.reclaim_stale(0)
        assert one.own(claim)
        one.release(claim)
        second_claim = claimed(two)
        two.complete(second_claim)
        assert not one.claim_with_timeout("build", 0)


def test_a_service_puts_the_tasks_of_silent_holders_back_until_it_is_stopped(
    ada: TaskClaims, bob: TaskClaims
) -> None:
    lost = claimed(bob)
    stop = threading.Event()
    put_back: list[str] = []

    def told(tasks: list[str]) -> None:
        put_back.extend(tasks)
        stop.set()

    ada.keep_reclaiming(stop, timeout=0, every=0.05, on_reclaimed=told)

    assert put_back == ["build"]
    assert not bob.own(lost)
    assert claimed(ada).task == "build"


async def test_the_service_waits_for_a_server_that_is_away(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        async with fencepost.connect_async(server.url) as client:
            jobs = await client.create("jobs")
            ada = AsyncTaskClaims(jobs, "ada")
            assert await ada.claim("build")
            server.kill()
            stop = asyncio.Event()
            put_back: list[str] = []

            def told(tasks: list[str]) -> None:
                put_back.extend(tasks)
                stop.set()

            service = asyncio.create_task(
                ada.keep_reclaiming(stop, timeout=0, every=0.05, on_reclaimed=told)
            )
            await asyncio.to_thread(server.start)
            await asyncio.wait_for(service, 30)

    assert put_back == ["build"]
