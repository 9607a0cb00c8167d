"""Workers of apps on real servers: how they run and stop, renew and lose leases, keep to lanes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    AsyncContext,
    Context,
    Recorded,
)
from tests.engines import engine as engine
from tests.integration.events_support import (
    Opening,
    fresh,
    here,
    is_async_app,
    kinds,
    listed,
    watching,
)
from tests.integration.events_support import begin as begin
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import Order, Placed, Stock, make_app


async def test_a_worker_runs_until_it_is_stopped(opening: Opening) -> None:
    app = make_app(fresh("shop"), settings=here())
    tea = fresh("tea")
    seen = watching(app)
    done = threading.Event()
    app.hook("acked")(lambda _crumb: done.set())
    async with opening(app) as shop:
        stopping: Any = asyncio.Event() if is_async_app(shop) else threading.Event()
        working = asyncio.create_task(shop.work(worker="ann", stopping=stopping))

        await shop.do(Order.place, fresh("o"), sku=tea, quantity=2)
        assert await asyncio.to_thread(done.wait, 60)
        stopping.set()
        await asyncio.wait_for(working, 60)

        assert (await shop.load(Stock, tea)).state.left == 98
        assert {crumb.worker for crumb in seen if crumb.kind == "claimed"} == {"ann"}
        assert (await shop.group.stats())["leased"] == 0


async def test_a_lease_is_renewed_while_its_handler_works_and_while_its_worker_ends(
    opening: Opening, server_process: ServerProcess
) -> None:
    app = App(fresh("shop"), entities=[Order], settings=AppSettings(lease_ms=1_000))
    order = fresh("o")
    handled: list[int] = []
    began, gate = threading.Event(), threading.Event()

    @app.reaction(Placed)
    def wait(event: Recorded[Placed], context: Context) -> None:
        if event.stream == f"orders/{order}":
            began.set()
            assert gate.wait(60)
            handled.append(event.position)

    with fencepost.connect(server_process.url) as looking:

        def row() -> Any:
            [found] = looking.group(app.name).streams(match=f"orders/{order}")
            return found

        async with opening(app) as shop:
            await shop.do(Order.place, order, sku="tea")
            stopping: Any = asyncio.Event() if is_async_app(shop) else threading.Event()
            working = asyncio.create_task(shop.work(worker="ann", stopping=stopping))
            try:
                assert await asyncio.to_thread(began.wait, 60)
                first_ms = (await asyncio.to_thread(row)).lease_until_ms
                stopping.set()
                # Longer than two leases: without a renewal another worker had taken it.
                async with asyncio.timeout(60):
                    while (await asyncio.to_thread(row)).lease_until_ms < first_ms + 2_000:
                        claimed = await asyncio.to_thread(looking.group(app.name).claim, "bob")
                        assert f"orders/{order}" not in [one.target for one in claimed.leases]
            finally:
                gate.set()
                await asyncio.wait_for(working, 60)
            ended = await asyncio.to_thread(row)

    assert len(handled) == 1
    assert (ended.state, ended.lost) == ("idle", 0)


async def test_an_async_handler_whose_lease_is_lost_is_cancelled(
    server_process: ServerProcess,
) -> None:
    app = App(fresh("shop"), entities=[Order], settings=AppSettings(lease_ms=1_000))
    order = fresh("o")
    runs: list[str] = []
    ended: list[str] = []

    @app.reaction(Placed)
    async def hang(event: Recorded[Placed], context: AsyncContext) -> None:
        if event.stream != f"orders/{order}":
            return
        runs.append(event.stream)
        if len(runs) > 1:
            return
        await shop.group.reset([event.stream])  # an operator takes the target away
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async with fencepost.connect_async(server_process.url) as client, app.open(client) as shop:
        await shop.do(Order.place, order, sku="tea")

        await asyncio.wait_for(shop.settle(), 60)

    assert ended == ["cancelled"]


async def test_a_worker_serves_its_lane_alone_and_the_group_knows_priorities(
    opening: Opening,
) -> None:
    app = App(fresh("shop"), entities=[Order], settings=here())
    tea = fresh("tea")
    handled: list[str] = []
    done = threading.Event()

    def declare(name: str, lane: str, priority: int) -> None:
        @app.reaction(Placed, name=name, to=f"{tea}/{name}", lane=lane, priority=priority)
        def note(event: Recorded[Placed], context: Context) -> None:
            if event.data.sku == tea:
                handled.append(name)
                if len(handled) == 3:
                    done.set()

    declared = [
        ("later", "fast", 0),
        ("urgent", "fast", 9),
        ("soon", "fast", 5),
        ("slow", "slow", 99),
    ]
    for name, lane, priority in declared:
        declare(name, lane, priority)
    async with opening(app) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea)
        stopping: Any = asyncio.Event() if is_async_app(shop) else threading.Event()
        working = asyncio.create_task(shop.work(lane="fast", streams=1, stopping=stopping))

        assert await asyncio.to_thread(done.wait, 60)
        stopping.set()
        await asyncio.wait_for(working, 60)

        assert sorted(handled) == ["later", "soon", "urgent"]
        found = shop.group.streams(match=f"{tea}/*")
        rows = await listed(found) if is_async_app(shop) else list(found)
        assert {(row.target, row.lane, row.priority) for row in rows} == {
            (f"{tea}/{name}", lane, priority) for name, lane, priority in declared
        }
        assert [row.lane for row in rows if row.at < row.work_to] == ["slow"]
        await shop.settle()
        assert handled[3:] == ["slow"]


async def test_effects_of_a_lost_lease_are_refused(
    opening: Opening, server_process: ServerProcess
) -> None:
    app = App(fresh("shop"), entities=[Order, Stock], settings=here())
    tea, order = fresh("tea"), fresh("o")
    seen = watching(app)
    runs = 0

    @app.reaction(Placed)
    def reserve(event: Recorded[Placed], context: Context) -> None:
        nonlocal runs
        if event.stream != f"orders/{order}":
            return
        runs += 1
        context.do(Stock.reserve, event.data.sku, order=event.stream, quantity=1)
        if runs == 1:  # an operator takes the target away while its handler works
            operator.group(app.name).reset([event.stream])

    with fencepost.connect(server_process.url) as operator:
        async with opening(app) as shop:
            await shop.do(Order.place, order, sku=tea)
            seen.clear()

            await shop.settle()

            assert runs == 2
            assert (await shop.load(Stock, tea)).state.left == 99
    ours = [crumb for crumb in seen if crumb.target == f"orders/{order}"]
    assert kinds(ours, "claimed", "committed", "acked", "lost") == [
        "claimed",
        "lost",
        "claimed",
        "committed",
        "acked",
    ]
    assert seen[-1].kind == "settled"
