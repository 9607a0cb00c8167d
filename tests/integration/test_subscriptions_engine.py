"""The engine on a real store with a clock that the tests move: restarts, failed commits, limits."""

import asyncio
import threading
from pathlib import Path

from fencepost.protocol.creates import Create
from fencepost.protocol.streams import Lifetime
from fencepost.protocol.subscriptions import (
    Ack,
    AlreadyClaimed,
    Claimed,
    Config,
    Fenced,
    Subscription,
)
from fencepost.server.subscriptions.engine import Engine
from fencepost.server.subscriptions.registry import Acked, Made, TooMany, WakeName
from fencepost.server.subscriptions.settings import SubscriptionSettings
from fencepost.store.contract import Failed
from tests.integration.subscriptions_support import (
    DONE,
    Opened,
    Receiver,
    Reply,
    SimClock,
    opened,
    pull_config,
    webhook_config,
)

BASE_URL = "http://127.0.0.1:4437/v1/stream/__ds"


async def subscribe(on: Opened, config: Config, name: str = "s") -> Subscription:
    made = await on.subscriptions.engine.create(name, config, BASE_URL)
    assert isinstance(made, Made)
    await on.settle()
    return made.subscription


def named(subscription: Subscription) -> WakeName:
    wake = subscription.wake
    assert wake.wake_id is not None
    return WakeName(wake.generation, wake.generation, wake.wake_id)


def found(engine: Engine, name: str = "s") -> Subscription:
    subscription = engine.find(name)
    assert subscription is not None
    return subscription


def poison(on: Opened) -> None:
    """Make the open commit fail, with everything that is in it."""
    on.store.commits.group.statements.append(("INSERT INTO nowhere VALUES (1)", ()))


async def test_a_stop_between_wake_and_delivery_loses_nothing(tmp_path: Path) -> None:
    clock = SimClock()
    with Receiver(DONE) as receiver:
        async with opened(tmp_path, clock) as on:
            subscription = await subscribe(on, webhook_config(receiver.url))
            await on.create("events/a", 1)
            await on.settle()
            wake_id = subscription.wake.wake_id
            assert wake_id is not None
            assert receiver.is_empty

        async with opened(tmp_path, clock) as on:
            running = asyncio.create_task(on.subscriptions.engine.run())
            got = await asyncio.to_thread(receiver.next)
            running.cancel()

        assert got.wake["wake_id"] == wake_id
        assert got.wake["generation"] == 1


async def test_a_retry_is_not_made_before_its_time_even_after_a_restart(tmp_path: Path) -> None:
    clock = SimClock()
    with Receiver(Reply(500)) as receiver:
        async with opened(tmp_path, clock) as on:
            engine = on.subscriptions.engine
            subscription = await subscribe(on, webhook_config(receiver.url))
            await on.create("events/a", 1)
            await on.settle()
            running = asyncio.create_task(engine.run())
            await asyncio.to_thread(receiver.next)
            while subscription.wake.attempts == 0:
                await on.settle()
                await asyncio.to_thread(lambda: None)
            due_ms = subscription.wake.next_attempt_ms
            assert due_ms == clock.ms + 1000
            running.cancel()

        clock.ms += 999
        async with opened(tmp_path, clock) as on:
            engine = on.subscriptions.engine
            again = found(engine)
            engine.fire()
            assert (again.wake.next_attempt_ms, again.wake.attempts) == (due_ms, 1)
            running = asyncio.create_task(engine.run())
            await on.settle()
            assert receiver.is_empty

            clock.ms += 1
            engine.fire()
            got = await asyncio.to_thread(receiver.next)
            running.cancel()

        assert got.wake["generation"] == 1


async def test_a_failed_commit_takes_the_ack_back_and_the_worker_can_repeat_it(
    tmp_path: Path,
) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock) as on:
        engine = on.subscriptions.engine
        await on.create("wake/pool")
        subscription = await subscribe(on, pull_config())
        await on.create("events/a", 1)
        claimed = engine.claim(subscription, "ann")
        assert isinstance(claimed, Claimed)
        await on.settle()
        wake = named(subscription)

        poison(on)
        assert engine.ack(subscription, wake, [], done=True) == Acked(next_wake=True)
        assert await on.store.durable() == Failed(full=False)
        reloaded = found(engine)
        assert reloaded is not subscription
        assert (reloaded.wake.generation, reloaded.wake.holder) == (1, "ann")

        assert engine.ack(reloaded, wake, [], done=True) == Acked(next_wake=True)
        assert await on.store.durable() is None


async def test_a_failed_commit_is_followed_by_calm_and_then_by_the_wake(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock) as on:
        engine = on.subscriptions.engine
        before = await subscribe(on, pull_config())
        await on.create("wake/pool")
        poisons = iter([poison])
        # Called after the engine, in the same stretch: what it spoils is the commit of the wake.
        on.store.listen(lambda _: next(poisons, lambda _: None)(on))
        await on.create("events/a", 1)
        await on.settle()
        assert found(engine) is not before

        engine.fire()
        assert found(engine).wake.is_idle
        assert found(engine).pending

        clock.ms += 1000
        engine.fire()
        await on.settle()
        assert found(engine).wake.generation == 1


async def test_a_wall_clock_set_back_does_not_keep_a_lease_alive(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock) as on:
        await on.create("wake/pool")
        subscription = await subscribe(on, pull_config())
        await on.create("events/a", 1)
        on.subscriptions.engine.claim(subscription, "ann")
        await on.settle()

    clock.ms -= 3_600_000
    async with opened(tmp_path, clock) as on:
        engine = on.subscriptions.engine
        assert isinstance(engine.claim(found(engine), "bob"), AlreadyClaimed)

        clock.ms += 30_000
        engine.fire()
        await on.settle()

        assert found(engine).wake.generation == 2
        assert found(engine).wake.holder is None


async def test_a_lease_is_over_at_its_time_even_if_no_timer_has_looked(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock) as on:
        engine = on.subscriptions.engine
        await on.create("wake/pool")
        subscription = await subscribe(on, pull_config())
        await on.create("events/a", 1)
        engine.claim(subscription, "ann")
        wake = named(subscription)

        clock.ms += 30_000
        late = engine.ack(subscription, wake, [], done=True)
        taken = engine.claim(subscription, "bob")

        assert isinstance(late, Fenced)
        assert isinstance(taken, Claimed)
        assert taken.wake.generation == 2


async def test_streams_made_while_a_subscription_looks_for_them_are_not_missed(
    tmp_path: Path,
) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock) as on:
        engine = on.subscriptions.engine
        await on.create("events/old", 1)
        store = on.store
        store.create(Create("events/before", content_type="text/plain"), lambda _: None)
        creating = asyncio.create_task(engine.create("s", pull_config(), BASE_URL))
        while not engine.is_scanning:
            await asyncio.to_thread(lambda: None)
        store.create(Create("events/during", content_type="text/plain"), lambda _: None)
        store.delete("events/old", lambda _: None)
        await creating
        store.create(Create("events/after", content_type="text/plain"), lambda _: None)
        await on.settle()

        assert set(found(engine).links) == {"events/before", "events/during", "events/after"}

    async with opened(tmp_path, clock) as on:
        links = found(on.subscriptions.engine).links
        assert set(links) == {"events/before", "events/during", "events/after"}


async def test_a_wake_lists_so_many_streams_and_the_next_one_the_rest(tmp_path: Path) -> None:
    settings = SubscriptionSettings(wake_streams_max=2)
    async with opened(tmp_path, SimClock(), settings) as on:
        engine = on.subscriptions.engine
        subscription = await subscribe(on, pull_config())
        for name in "abc":
            await on.create(f"events/{name}", 1)

        engine.claim(subscription, "ann")
        seen = subscription.wake.snapshot
        engine.ack(
            subscription, named(subscription), [Ack(one.path, one.tail) for one in seen], done=True
        )

        assert [one.path for one in seen] == ["events/a", "events/b"]
        assert [one.path for one in subscription.wake.snapshot] == ["events/c"]


async def test_there_are_only_so_many_subscriptions_and_streams_by_name(tmp_path: Path) -> None:
    settings = SubscriptionSettings(subscriptions_max=1, explicit_streams_max=2)
    async with opened(tmp_path, SimClock(), settings) as on:
        engine = on.subscriptions.engine
        subscription = await subscribe(on, pull_config())

        second = await engine.create("t", pull_config(), BASE_URL)
        third = await engine.link(subscription, ["a", "b", "c"])
        allowed = await engine.link(subscription, ["a", "b", "b"])

        assert second == TooMany("subscriptions_max", 1)
        assert third == TooMany("explicit_streams_max", 2)
        assert allowed is None


async def test_only_so_many_webhooks_are_called_at_once(tmp_path: Path) -> None:
    settings = SubscriptionSettings(deliveries_max=1)
    hold = threading.Event()
    with Receiver(Reply(body=b'{"done": true}', hold=hold)) as receiver:
        async with opened(tmp_path, SimClock(), settings) as on:
            engine = on.subscriptions.engine
            for name in "abc":
                await subscribe(on, webhook_config(receiver.url), name)
            await on.create("events/a", 1)
            running = asyncio.create_task(engine.run())

            first = await asyncio.to_thread(receiver.next)
            assert engine.deliveries_count == 1
            assert receiver.is_empty
            hold.set()
            others = [await asyncio.to_thread(receiver.next) for _ in range(2)]
            running.cancel()

        names = {got.wake["subscription_id"] for got in (first, *others)}
        assert names == {"a", "b", "c"}


async def test_stopping_waits_for_the_deliveries_under_way(tmp_path: Path) -> None:
    hold = threading.Event()
    with Receiver(Reply(body=b'{"done": true}', hold=hold)) as receiver:
        async with opened(tmp_path, SimClock()) as on:
            engine = on.subscriptions.engine
            subscription = await subscribe(on, webhook_config(receiver.url))
            await on.create("events/a", 1)
            running = asyncio.create_task(engine.run())
            await asyncio.to_thread(receiver.next)

            draining = asyncio.create_task(engine.drain(20))
            hold.set()
            await draining
            running.cancel()

            assert subscription.wake.is_idle
            assert not subscription.pending


async def test_an_expired_stream_is_no_longer_watched(tmp_path: Path) -> None:
    clock = SimClock()
    async with opened(tmp_path, clock) as on:
        subscription = await subscribe(on, pull_config())
        short = Create("events/a", content_type="text/plain", lifetime=Lifetime(ttl_s=5))
        on.store.create(short, lambda _: None)
        await on.settle()
        assert set(subscription.links) == {"events/a"}

        clock.ms += 10_000
        assert on.store.decider.expire("events/a")

        assert not subscription.links
        await on.settle()

    async with opened(tmp_path, clock) as on:
        assert not found(on.subscriptions.engine).links


async def test_a_wake_whose_streams_have_gone_is_not_delivered(tmp_path: Path) -> None:
    with Receiver() as receiver:
        async with opened(tmp_path, SimClock()) as on:
            engine = on.subscriptions.engine
            subscription = await subscribe(on, webhook_config(receiver.url))
            await on.create("events/a", 1)
            await on.settle()
            on.store.delete("events/a", lambda _: None)

            engine.fire()
            await on.settle()

            assert subscription.wake.is_idle
            assert subscription.wake.generation == 1
