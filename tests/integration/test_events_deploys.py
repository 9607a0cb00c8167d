"""Deploys of apps on real servers: workers of other code, with work pending, or all at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, Self

import pytest

import fencepost
from fencepost.client.errors import ResponseError
from fencepost.events import (
    App,
    AppSettings,
    Context,
    Entity,
    Event,
    NonRetryableError,
    Recorded,
    Retry,
    SettleTimeoutError,
    applies,
)
from tests.engines import engine as engine
from tests.integration.events_support import (
    Opening,
    correlate_all,
    fresh,
    here,
    listed,
    parked_events,
)
from tests.integration.events_support import begin as begin
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import Order, Placed, Reserved


async def test_a_resolver_that_changes_between_correlation_and_match_strands_nothing(
    opening: Opening,
) -> None:
    name, handled = fresh("shop"), list[tuple[int, str]]()

    def version(prefix: str) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(Placed, to=lambda event: f"{prefix}/{event.data.sku}")
        def note(event: Recorded[Placed], context: Context) -> None:
            handled.append((event.data.quantity, context.target))

        return app

    old, new = version("old"), version("new")
    tea = fresh("tea")
    async with opening(old) as shop:
        for quantity in (1, 2, 3):
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=quantity)
        await correlate_all(shop)
    async with opening(new) as shop:
        await shop.do(Order.place, fresh("o"), sku=tea, quantity=4)

        await shop.settle()

        assert sorted(handled) == [
            (1, f"old/{tea}"),
            (2, f"old/{tea}"),
            (3, f"old/{tea}"),
            (4, f"new/{tea}"),
        ]
        stats = await shop.group.stats()
        assert (stats["ready"], stats["blocked"]) == (0, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda n: f"old/{n % 3}", lambda n: f"new/{n % 4}"),
        (lambda n: f"shard/{n % 3}", lambda n: f"shard/{n % 4}"),
        (lambda n: "early" if n < 6 else "late", lambda _: "late"),
    ],
    ids=["other names", "other shards", "all to one"],
)
async def test_a_changed_resolver_leaves_each_event_to_one_of_many_targets(
    opening: Opening, before: Callable[[int], str], after: Callable[[int], str]
) -> None:
    """Targets share a source, so each sees the events of the others, and must leave them alone."""
    name = fresh("shop")

    def version(resolver: Callable[[int], str]) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(Placed, to=lambda event: resolver(event.data.quantity))
        def note(event: Recorded[Placed], context: Context) -> None:
            context.append(f"{name}-notes", Reserved(order="", quantity=event.data.quantity))

        return app

    async with opening(version(before)) as shop:
        for quantity in range(12):
            await shop.do(Order.place, fresh("o"), sku=fresh("tea"), quantity=quantity)
        await correlate_all(shop)
    async with opening(version(after)) as shop:
        await shop.settle()

        noted = await listed(shop.query(stream=f"{name}-notes"))
        assert sorted(event.data["quantity"] for event in noted) == list(range(12))
        assert (await shop.group.stats())["blocked"] == 0


async def test_a_changed_resolver_handles_nothing_again_while_older_work_waits(
    opening: Opening,
) -> None:
    name = fresh("shop")

    def version(resolver: Callable[[int], str], *, fails: bool) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(Placed, to=lambda event: resolver(event.data.quantity))
        def note(event: Recorded[Placed], context: Context) -> None:
            if fails and context.target == "even":
                raise NonRetryableError("not yet")
            context.append(f"{name}-notes", Reserved(order="", quantity=event.data.quantity))

        return app

    async with opening(version(lambda n: ("even", "odd")[n % 2], fails=True)) as shop:
        for quantity in range(3):
            await shop.do(Order.place, fresh("o"), sku=fresh("tea"), quantity=quantity)
        await shop.settle()
    async with opening(version(lambda _: "even", fails=False)) as shop:
        await shop.group.unblock(filter={})
        await shop.settle()

        noted = await listed(shop.query(stream=f"{name}-notes"))
        assert sorted(event.data["quantity"] for event in noted) == [0, 1, 2]


async def test_a_worker_of_the_old_code_blocks_nothing_that_newer_code_can_handle(
    opening: Opening,
) -> None:
    """A deploy rolls: a newer program writes events that older workers meet."""
    name, folder = fresh("shop"), fresh("o")
    handled: list[str] = []

    class Shipped(Event):
        pass

    class Parcel(Entity, stream="orders/{id}"):
        sent: bool = False

        @applies
        def shipped(self, event: Placed | Shipped) -> Self:
            return self.replace(sent=isinstance(event, Shipped))

    def declared(entity: Any) -> App:
        app = App(name, entities=[entity], settings=here())

        @app.reaction(Placed, retry=Retry(1, "fixed", base_ms=0, on_exhausted="park"))
        def look(event: Recorded[Placed], context: Context) -> None:
            if event.stream == f"orders/{folder}":
                context.load(entity, folder)
                handled.append(entity.__name__)

        return app

    async with opening(declared(Order)) as old, opening(declared(Parcel)) as new:
        await new.commit(f"orders/{folder}", [Placed(sku="tea", quantity=1), Shipped()])
        with pytest.raises(SettleTimeoutError):
            await old.settle(timeout=0.5)
        await new.settle()

        assert handled == ["Parcel"]
        assert await parked_events(new) == []


async def test_a_new_reaction_sees_what_comes_and_in_an_app_of_its_own_what_was(
    opening: Opening,
) -> None:
    """As docs/guides/reactions.md says of deploys: what old workers took is past for it."""
    name, folder = fresh("shop"), fresh("o")
    seen: dict[str, list[int]] = {"old": [], "new": [], "own": []}

    def declared(app_name: str, *reactions: str) -> App:
        app = App(app_name, entities=[Order], settings=here())
        for reaction in reactions:

            @app.reaction(Placed, name=reaction)
            def note(event: Recorded[Placed], context: Context, by: str = reaction) -> None:
                if event.stream == f"orders/{folder}":
                    seen[by].append(event.version)

        return app

    async with opening(declared(name, "old")) as old, opening(declared(name, "old", "new")) as new:
        await old.do(Order.place, folder, sku="a")
        await old.settle()
        await old.do(Order.place, folder, sku="b")
        await new.settle()
        await old.do(Order.place, folder, sku="c")
        await old.settle()  # in a deploy that rolls

    alone = App(f"{name}.own", entities=[Order])

    @alone.reaction(Placed)
    def own(event: Recorded[Placed], context: Context) -> None:
        if event.stream == f"orders/{folder}":
            seen["own"].append(event.version)

    async with opening(alone) as shop:
        await shop.settle()

    assert seen == {"old": [0, 1, 2], "new": [1], "own": [0, 1, 2]}


class Version:
    """One version of an app's code: it notes every event that it handles, and some of them fail."""

    def __init__(
        self,
        name: str,
        resolver: Callable[[int], str],
        failing: set[int],
        on_exhausted: Literal["block", "park"] = "park",
        *,
        start: Literal["first"] | None = None,
    ) -> None:
        settings = here() if start is None else AppSettings(start=start)
        self.app = App(name, entities=[Order], settings=settings)
        self.notes = f"{name}-notes"

        @self.app.reaction(
            Placed,
            to=lambda event: resolver(event.data.quantity),
            retry=Retry(0, on_exhausted=on_exhausted),
        )
        def note(event: Recorded[Placed], context: Context) -> None:
            if event.data.quantity in failing:
                raise RuntimeError("not yet")
            context.append(self.notes, Reserved(order=context.target, quantity=event.data.quantity))


async def handled_by(shop: Any, version: Version) -> list[tuple[int, str]]:
    noted = await listed(shop.query(stream=version.notes))
    return sorted((event.data["quantity"], event.data["order"]) for event in noted)


async def place(shop: Any, *quantities: int) -> None:
    for quantity in quantities:
        await shop.do(Order.place, fresh("o"), sku=fresh("tea"), quantity=quantity)


async def test_a_parked_event_is_replayed_at_the_target_that_was_told_of_it(
    opening: Opening,
) -> None:
    name, failing = fresh("shop"), {1, 3}
    old = Version(name, lambda n: f"old/{n % 2}", failing)
    new = Version(name, lambda _: "new", failing)
    async with opening(old.app) as shop:
        await place(shop, 1, 2, 3)
        await shop.settle()
        assert len(await parked_events(shop)) == 2
        failing.clear()
    async with opening(new.app) as shop:
        await shop.group.replay(filter={})
        await shop.settle()

        assert await handled_by(shop, new) == [(1, "old/1"), (2, "old/0"), (3, "old/1")]
        stats = await shop.group.stats()
        assert (stats["parked"], stats["told"]) == (0, 0)


async def test_a_reset_gives_parked_events_back_and_lets_the_code_of_today_sort_the_others(
    opening: Opening,
) -> None:
    name, failing = fresh("shop"), {1}
    old = Version(name, lambda n: "odd" if n % 2 else "even", failing)
    new = Version(name, lambda _: "even", failing)
    async with opening(old.app) as shop:
        await place(shop, 0, 1, 2, 3)
        await shop.settle()
        failing.clear()
    async with opening(new.app) as shop:
        await shop.group.reset(["odd"])
        await shop.settle()

        # 3 is of another target today, and was handled; what was parked is still of this one.
        assert await handled_by(shop, new) == [(0, "even"), (1, "odd"), (2, "even"), (3, "odd")]
        assert await parked_events(shop) == []


async def test_a_resolver_that_raised_may_say_by_now_that_an_event_is_not_for_it(
    opening: Opening,
) -> None:
    name = fresh("shop")
    ran: list[int] = []

    def version(resolver: Callable[[int], str | None]) -> App:
        app = App(name, entities=[Order], settings=here())

        @app.reaction(
            Placed,
            to=lambda event: resolver(event.data.quantity),
            retry=Retry(0, on_exhausted="block"),
        )
        def note(event: Recorded[Placed], context: Context) -> None:
            ran.append(event.data.quantity)

        return app

    def broken(_: int) -> str:
        raise RuntimeError("boom")

    async with opening(version(broken)) as shop:
        await place(shop, 1, 2)
        await shop.settle()
        assert ran == []
    async with opening(version(lambda n: "all" if n == 1 else None)) as shop:
        await shop.group.unblock(filter={})
        await shop.settle()

        assert ran == [1]
        assert (await shop.group.stats())["told"] == 0


async def test_reactions_that_swap_their_targets_each_run_once(opening: Opening) -> None:
    """The targets that were told of the event are the same; which reaction is whose is not."""
    name = fresh("shop")
    ran: list[tuple[str, str]] = []

    def version(**targets: str) -> App:
        app = App(name, entities=[Order], settings=here())
        for reaction, target in targets.items():

            @app.reaction(Placed, name=reaction, to=target)
            def note(event: Recorded[Placed], context: Context, by: str = reaction) -> None:
                ran.append((by, context.target))

        return app

    async with opening(version(one="a", two="b", three="a")) as shop:
        await place(shop, 1)
        await correlate_all(shop)
    async with opening(version(one="b", two="a", three="c", four="b")) as shop:
        await shop.settle()

    assert sorted(ran) == [("one", "a"), ("three", "a"), ("two", "b")]


async def test_a_renamed_reaction_gets_what_its_target_was_told_of(opening: Opening) -> None:
    name = fresh("shop")
    ran: list[str] = []

    def version(*reactions: str) -> App:
        app = App(name, entities=[Order], settings=here())
        for reaction in reactions:

            @app.reaction(Placed, name=reaction, to="ledger")
            def note(event: Recorded[Placed], context: Context, by: str = reaction) -> None:
                ran.append(by)

        return app

    async with opening(version("stays", "before")) as shop:
        await place(shop, 1)
        await correlate_all(shop)
    async with opening(version("after", "stays")) as shop:
        await shop.settle()

    assert sorted(ran) == ["after", "stays"]


async def test_workers_of_both_versions_at_once_handle_each_event_once(opening: Opening) -> None:
    name = fresh("shop")
    old = Version(name, lambda n: f"shard/{n % 3}", set())
    new = Version(name, lambda n: f"shard/{n % 4}", set())
    async with opening(old.app) as one, opening(new.app) as other:
        for first in (0, 20):
            placing = [place(one, *range(first, first + 20))]
            await asyncio.gather(*placing, one.settle(events=2), other.settle(events=2))
        await asyncio.gather(one.settle(), other.settle())

        assert [quantity for quantity, _ in await handled_by(one, old)] == list(range(40))


RESOLVERS: tuple[Callable[[int], str], ...] = (
    lambda n: f"shard/{n % 3}",
    lambda n: f"shard/{n % 4}",
    lambda n: "early" if n < 20 else "late",
    lambda _: "late",
    lambda n: f"other/{n % 2}",
)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_is_deployed_when_each_event_is_handled_once(
    opening: Opening, seed: int
) -> None:
    """Property: versions with other resolvers tell, work, fail, park and replay in any order."""
    dice = random.Random(seed)
    name, failing = fresh("shop"), set[int]()
    ends: Literal["block", "park"] = "block" if seed % 2 else "park"
    versions = [Version(name, resolver, failing, ends) for resolver in RESOLVERS]
    async with AsyncExitStack() as stack:
        shops = [await stack.enter_async_context(opening(one.app)) for one in versions]
        await correlate_all(shops[0])  # makes the group
        count = 0
        for _ in range(30):
            shop = dice.choice(shops)
            match dice.randrange(6):
                case 0 | 1:
                    for _ in range(dice.randrange(1, 5)):
                        if dice.random() < 0.3:
                            failing.add(count)
                        await place(shop, count)
                        count += 1
                case 2:
                    await correlate_all(shop)
                case 3:
                    await shop.settle(events=dice.randrange(1, 4))
                case 4:
                    failing -= set(dice.sample(sorted(failing), len(failing) // 2))
                    await shop.group.unblock(filter={})
                case _:
                    await shop.group.replay(filter={})
        failing.clear()
        shop = dice.choice(shops)
        await shop.settle()
        await shop.group.unblock(filter={})
        await shop.group.replay(filter={})
        await shop.settle()

        handled = [quantity for quantity, _ in await handled_by(shop, versions[0])]
        assert handled == list(range(count)), f"seed {seed}"
        stats = await shop.group.stats()
        assert [stats[what] for what in ("ready", "leased", "blocked", "parked", "told")] == [0] * 5


def test_an_app_that_is_told_more_than_fits_handles_some_before_it_is_told_the_rest(
    tmp_path: Path,
) -> None:
    name = "shop"
    version = Version(name, RESOLVERS[0], set(), start="first")
    with (
        ServerProcess(tmp_path, environment={"FENCEPOST_GROUPS_TOLD_MAX": "3"}) as server,
        fencepost.connect(server.url) as client,
        version.app.open(client) as shop,
    ):
        for quantity in range(20):
            shop.do(Order.place, f"o{quantity}", sku="tea", quantity=quantity)

        shop.settle()

        noted = [event.data["quantity"] for event in shop.query(stream=version.notes)]
        assert sorted(noted) == list(range(20))
        assert shop.group.stats()["told"] == 0


async def test_an_app_whose_targets_are_all_blocked_settles_with_the_bound_that_it_has_reached(
    tmp_path: Path,
) -> None:
    version = Version("shop", RESOLVERS[0], set(range(9)), "block", start="first")
    with ServerProcess(tmp_path, environment={"FENCEPOST_GROUPS_TOLD_MAX": "3"}) as server:
        with fencepost.connect(server.url) as client, version.app.open(client) as shop:
            for quantity in range(9):
                shop.do(Order.place, f"o{quantity}", sku="tea", quantity=quantity)
            with pytest.raises(ResponseError) as refused:
                shop.settle()
        async with fencepost.connect_async(server.url) as other, version.app.open(other) as again:
            with pytest.raises(ResponseError) as refused_again:
                await again.settle()

    for error in (refused.value, refused_again.value):
        assert error.problem["limit"] == "told_max"
