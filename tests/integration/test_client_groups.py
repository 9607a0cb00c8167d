"""Groups through the client, sync and async: typed calls, fenced effects, the worker's loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost import CommitAppend, EventFailure, Lease, LeaseAck, PermanentError, ReplayedEvent
from fencepost.client.group_tasks import async_work_leases
from fencepost.client.group_threads import work_leases
from fencepost.client.group_worker import Breaker, Working
from tests.engines import engine as engine
from tests.serving import ServerProcess

_names = itertools.count()
NO_WAIT = {"kind": "fixed", "base_ms": 0, "cap_ms": 1_000, "jitter": 0.0}


@pytest.fixture
def client(server_process: ServerProcess) -> Iterator[fencepost.Client]:
    with fencepost.connect(server_process.url) as found:
        yield found


@pytest.fixture
def group(client: fencepost.Client) -> fencepost.Group:
    name = f"crew-{next(_names)}"
    found = client.group(name)
    found.make([f"{name}/**"], backoff=NO_WAIT, retries_max=1, on_exhausted="park")
    return found


class Paused(logging.Handler):
    """When the breaker of a worker said how long it waits."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.at: list[float] = []
        self.enough = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "the server fails, the worker waits" in record.getMessage():
            self.at.append(record.created)
            if len(self.at) == 4:
                self.enough.set()


@pytest.fixture
def paused() -> Iterator[Paused]:
    logger = logging.getLogger("fencepost.client.group_worker")
    found, level = Paused(), logger.level
    logger.addHandler(found)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(found)
    logger.setLevel(level)


@pytest.mark.parametrize("how", ["async", "sync"])
def test_a_worker_waits_longer_each_time_that_its_server_fails_and_then_goes_on(
    how: str, paused: Paused, tmp_path: Path
) -> None:
    """Without the breaker the worker would end, or ask a server that is away without a pause."""
    once = fencepost.Retries(attempts_max=1)
    done = threading.Event()
    options = Working(worker="ann", lease_ms=10_000)
    ends: list[BaseException] = []

    def handle(lease: Lease, _is_lost: Any = None) -> LeaseAck:
        done.set()
        return LeaseAck(token=lease.token, at=lease.read_to)

    async def async_handle(lease: Lease) -> LeaseAck:
        return handle(lease)

    async def async_run() -> None:
        async with fencepost.connect_async(server.url, retries=once) as own:
            stopping = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                crew = own.group("crew")
                work = async_work_leases(
                    crew, async_handle, options, breaker=Breaker(), stopping=stopping
                )
                tasks.create_task(work)
                await asyncio.to_thread(stop.wait)
                stopping.set()

    def run() -> None:
        try:
            if how == "async":
                asyncio.run(async_run())
            else:
                with fencepost.connect(server.url, retries=once) as own:
                    crew = own.group("crew")
                    work_leases(crew, handle, options, breaker=Breaker(), stopping=stop)
        except BaseException as error:
            ends.append(error)

    stop = threading.Event()
    with ServerProcess(tmp_path) as server:
        with fencepost.connect(server.url) as client:
            client.group("crew").make(["work/**"])
        server.kill()
        worker = threading.Thread(target=run)
        worker.start()
        try:
            assert paused.enough.wait(60)
            server.restart()
            with fencepost.connect(server.url) as client:
                client.stream("work/1").append({"n": 1}, auto_create=True)
            assert done.wait(60)
        finally:
            stop.set()
            worker.join(60)
    assert not ends
    waited = [after - before for before, after in itertools.pairwise(paused.at[:4])]
    # It waits before it looks again, 0.2 s at first; clocks of logs are not exact.
    assert all(found >= least for found, least in zip(waited, (0.19, 0.39, 0.79), strict=True))


def fill(client: fencepost.Client, group: fencepost.Group, streams: int, each: int = 1) -> None:
    for n in range(streams * each):
        path = f"{group.name}/{n % streams}"
        client.stream(path).append({"n": n}, auto_create=True)


def test_a_group_is_made_shown_listed_and_deleted(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    info = group.info()

    assert (info.group, info.on_exhausted, info.correlated) == (group.name, "park", -1)
    assert [found.group for found in client.groups(match=group.name)] == [group.name]
    with pytest.raises(fencepost.GroupExistsError):
        group.make(["other"])
    group.delete()
    with pytest.raises(fencepost.GroupNotFoundError):
        group.info()


def test_a_lease_is_renewed_acked_and_then_lost(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1, each=2)

    [lease] = group.claim("ann").leases
    [renewed] = group.renew([lease.token])
    acked = group.ack(LeaseAck(token=lease.token, at=lease.read_to))
    again = group.ack(LeaseAck(token=lease.token, at=lease.read_to))

    assert [event.data for event in lease.events] == [{"n": 0}, {"n": 1}]
    assert renewed.outcome == "renewed"
    assert [item.outcome for item in acked.items] == ["acked"]
    assert [item.outcome for item in again.items] == ["lost"]
    assert not again.uncertain


def test_effects_are_stored_only_while_the_lease_is_current(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1)
    [lease] = group.claim("ann").leases
    out = f"{group.name}-out"
    effect = CommitAppend(stream=out, messages=[1], auto_create=True)

    client.stream(out).append(0, auto_create=True, lease=lease.token)
    client.commit([effect], leases=[(lease.token, lease.read_to)])

    with pytest.raises(fencepost.LeaseLostError):
        client.commit([effect], leases=[(lease.token, lease.read_to)])
    with pytest.raises(fencepost.LeaseLostError):
        client.stream(out).append(2, lease=lease.token)
    assert list(client.stream(out).read()) == [0, 1]


def test_parked_events_are_listed_and_replayed(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1)
    [lease] = group.claim("ann").leases
    failure = EventFailure(position=lease.events[0].position, error="boom", park=True)
    group.ack(LeaseAck(token=lease.token, failure=failure))

    [parked] = group.parked()
    assert (parked.error, group.replay(filter={})) == ("boom", 1)
    [again] = group.claim("ann").leases
    assert [event.replayed for event in again.events] == [True]
    done = ReplayedEvent(position=again.events[0].position)
    group.ack(LeaseAck(token=again.token, replayed=[done]))
    assert list(group.parked()) == []


def test_a_filter_replays_up_to_a_count_however_many_are_parked(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    path = f"{group.name}/0"
    client.stream(path).append_many([{"n": n} for n in range(130)], auto_create=True)
    [lease] = group.claim("ann", events_max=200).leases
    group.release([lease.token])
    group.park((path, event.position) for event in lease.events)

    assert group.replay(filter={}) == 100
    assert group.replay(filter={}, limit=20) == 20
    assert group.replay(filter={}, limit=500) == 10
    assert group.replay(filter={}, limit=500) == 0


def test_operators_change_targets_by_name_and_by_filter(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 3)
    leases = group.claim("ann").leases

    assert group.prioritize(4, filter={}) == 3
    assert group.reset([leases[0].target]) == 1
    assert [worker.leases for worker in group.workers()] == [2]
    assert group.skip(filter={"target": f"{group.name}/*"}, at=leases[0].until) >= 0
    assert {target.priority for target in group.streams()} == {4}
    assert group.stats()["targets"] == 3
    assert group.unblock(filter={"blocked": True}) == 0


def test_a_worker_handles_every_event_in_order_and_retries_what_fails(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 5, each=4)
    handled: dict[str, list[int]] = {}
    failures = itertools.count()
    guard = threading.Lock()

    def handle(event: fencepost.GroupEvent, lease: Lease) -> None:
        if event.data["n"] == 7 and next(failures) == 0:
            raise RuntimeError("the first time")
        if event.data["n"] == 11:
            raise PermanentError("never")
        with guard:
            handled.setdefault(lease.target, []).append(event.data["n"])

    group.work(handle, worker="ann", streams=3, until_idle=True)

    assert sorted(n for ns in handled.values() for n in ns) == sorted({*range(20)} - {11})
    assert all(ns == sorted(ns) for ns in handled.values())
    assert [event.error for event in group.parked()] == ["PermanentError: never"]


def test_a_worker_acks_what_has_ended_and_claims_the_next_in_one_request(
    client: fencepost.Client, group: fencepost.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(client, group, 9)
    acked = group.ack_and_claim
    together: list[int] = []

    def counted(items: list[LeaseAck], *args: Any, **more: Any) -> Any:
        together.append(len(items))
        return acked(items, *args, **more)

    monkeypatch.setattr(group, "ack_and_claim", counted)
    monkeypatch.setattr(group, "ack", never)
    all_three = threading.Barrier(3)

    group.work(lambda *_: (all_three.wait(20), None)[1], worker="ann", streams=3, until_idle=True)

    assert sum(together) == 9


def never(*_: Any) -> None:
    raise AssertionError("the ack could have claimed as well")


def test_a_worker_looks_through_the_whole_log_before_it_says_that_there_is_nothing(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    client.stream(f"foreign-{group.name}").append_many([0] * 10_500, auto_create=True)
    fill(client, group, 1)
    handled: list[Any] = []

    group.work(lambda event, _: handled.append(event.data), worker="ann", until_idle=True)

    assert handled == [{"n": 0}]


def test_a_worker_can_be_stopped_and_its_handlers_finish_first(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 2)
    stopping = threading.Event()
    handled: list[Any] = []

    def handle(event: fencepost.GroupEvent, _lease: Lease) -> None:
        stopping.set()
        handled.append(event.data)

    group.work(handle, worker="ann", stopping=stopping)

    assert sorted(one["n"] for one in handled) == [0, 1]
    assert {target.state for target in group.streams()} == {"idle"}


def test_a_handler_that_ends_its_program_ends_the_worker_and_keeps_the_event(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1)

    def handle(_event: fencepost.GroupEvent, _lease: Lease) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        group.work(handle, worker="ann", until_idle=True)

    assert [target.state for target in group.streams()] == ["leased"]


@pytest.mark.parametrize(
    ("handler", "said"),
    [(lambda _event: None, "event, lease"), (asyncio.sleep, "async"), ("handle", "function")],
)
def test_a_handler_that_cannot_handle_is_told_before_anything_is_claimed(
    client: fencepost.Client, group: fencepost.Group, handler: Any, said: str
) -> None:
    fill(client, group, 1)

    with pytest.raises(fencepost.InvalidArgumentError, match=said):
        group.work(handler, worker="w", until_idle=True)
    with pytest.raises(fencepost.InvalidArgumentError, match="list"):
        client.group("texts").make("orders/**")

    assert len(group.claim("w").leases) == 1


def test_what_a_handler_raises_is_in_the_log_of_its_worker(
    client: fencepost.Client, group: fencepost.Group, caplog: pytest.LogCaptureFixture
) -> None:
    """Also an async function that hides in another one: its event was acked without a word."""
    fill(client, group, 1)

    async def hidden() -> None:
        pass

    group.work(lambda _event, _lease: hidden(), worker="w", until_idle=True)

    assert [parked.error for parked in group.parked()] == [
        "FencepostError: a sync client cannot await: give it plain functions"
    ]
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert said[0].exc_info is not None
    assert f"{group.name}/0" in said[0].getMessage()


async def test_an_async_worker_takes_plain_functions_too(server_process: ServerProcess) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        group = client.group(f"crew-{next(_names)}")
        await group.make([f"{group.name}/**"])
        await client.stream(f"{group.name}/a").append({"n": 1}, auto_create=True)
        seen: list[Any] = []

        await group.work(lambda event, _lease: seen.append(event.data), worker="w", until_idle=True)

        assert seen == [{"n": 1}]
        assert (await group.stats())["ready"] == 0


def test_an_ack_that_is_refused_undoes_no_other(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 3)
    all_three = threading.Barrier(3)

    def handle(lease: Lease, _is_lost: Any) -> LeaseAck:
        all_three.wait(20)
        wrong = lease.target.endswith("/1")
        return LeaseAck(token=lease.token, at=lease.read_to + 10**9 * wrong)

    options = Working(worker="ann", streams=3, until_idle=True)
    with pytest.raises(fencepost.BadRequestError) as refused:
        work_leases(group, handle, options)

    assert refused.value.code == "ack_invalid"
    states = {target.target[-1]: target.state for target in group.streams()}
    assert states == {"0": "idle", "1": "leased", "2": "idle"}


def test_an_error_that_no_text_can_carry_is_a_failure_like_others(
    client: fencepost.Client, group: fencepost.Group
) -> None:
    fill(client, group, 1)

    def handle(_event: fencepost.GroupEvent, _lease: Lease) -> None:
        raise PermanentError("no file \udcff\0")

    group.work(handle, worker="ann", until_idle=True)

    assert [event.error for event in group.parked()] == ["PermanentError: no file ?"]


async def test_async_workers_share_the_targets(server_process: ServerProcess) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        group = client.group(f"crew-{next(_names)}")
        await group.make([f"{group.name}/**"])
        for n in range(12):
            await client.stream(f"{group.name}/{n % 6}").append(n, auto_create=True)
        handled: list[Any] = []

        async def handle(event: fencepost.GroupEvent, _lease: Lease) -> None:
            await asyncio.sleep(0)
            handled.append(event.data)

        async with asyncio.TaskGroup() as workers:
            for name in ("ann", "bob", "cid"):
                workers.create_task(group.work(handle, worker=name, streams=2, until_idle=True))

        assert sorted(handled) == list(range(12))


async def test_async_acks_that_are_refused_undo_no_other(server_process: ServerProcess) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        group = client.group(f"crew-{next(_names)}")
        await group.make([f"{group.name}/**"])
        for n in range(3):
            await client.stream(f"{group.name}/{n}").append(n, auto_create=True)

        async def handle(lease: Lease) -> LeaseAck:
            wrong = lease.target.endswith("/1")
            return LeaseAck(token=lease.token, at=lease.read_to + 10**9 * wrong)

        options = Working(worker="ann", until_idle=True)
        with pytest.raises(fencepost.BadRequestError) as refused:
            await async_work_leases(group, handle, options)

        assert refused.value.code == "ack_invalid"
        states = {target.target[-1]: target.state async for target in group.streams()}
        assert states == {"0": "idle", "1": "leased", "2": "idle"}


async def test_an_async_worker_stops_and_its_handlers_finish_first(
    server_process: ServerProcess,
) -> None:
    async with fencepost.connect_async(server_process.url) as client:
        group = client.group(f"crew-{next(_names)}")
        await group.make([f"{group.name}/**"])
        for n in range(2):
            await client.stream(f"{group.name}/{n}").append(n, auto_create=True)
        stopping = asyncio.Event()

        async def handle(_event: fencepost.GroupEvent, _lease: Lease) -> None:
            stopping.set()
            await asyncio.sleep(0)

        await group.work(handle, worker="ann", stopping=stopping)

        assert [target.state async for target in group.streams()] == ["idle", "idle"]
