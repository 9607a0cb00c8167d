"""Events and handlers that go wrong in odd ways: each fails alone, and the rest goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import field
from typing import Any, Self

import msgspec
import pytest

import fencepost
from fencepost.events import (
    App,
    AppSettings,
    Context,
    DefinitionError,
    Entity,
    Event,
    EventInvalidError,
    Recorded,
    Retry,
    action,
    applies,
)
from tests.engines import engine as engine
from tests.integration.events_support import Opening, listed
from tests.integration.events_support import opening as opening
from tests.serving import ServerProcess
from tests.unit.events.shop import NO_WAIT, Order, Placed, Reserved, Stock, make_app

_numbers = itertools.count()


def fresh(word: str) -> str:
    """A name that no other test of this server has."""
    return f"{word}-{next(_numbers)}"


def app_of(client: fencepost.Client, called: Callable[[Recorded[Placed]], Any]) -> App:
    """An app that sees the events of this test alone, and notes each order in `noted/NAME`."""
    settings = AppSettings(start=client.log_head())
    app = App(fresh("odd"), entities=[Order], events=[Reserved], settings=settings)

    @app.reaction(Placed, to=lambda event: f"line/{event.data.sku}", retry=Retry(0))
    def note(event: Recorded[Placed], context: Context) -> None:
        called(event)
        context.append(f"noted/{app.name}", Reserved(order=event.stream, quantity=1))

    return app


@pytest.fixture
def client(server_process: ServerProcess) -> Any:
    with fencepost.connect(server_process.url) as client:
        yield client


async def outcome(
    opening: Opening, app: App, client: fencepost.Client
) -> tuple[list[str], dict[str, str | None]]:
    """The orders whose reaction was stored, and the errors of targets that are blocked."""
    async with opening(app) as opened:
        await opened.settle(timeout=20)
        noted = await listed(opened.query(stream=f"noted/{app.name}"))
    blocked = client.group(app.name).streams(state="blocked")
    return [event.data.order for event in noted], {row.target: row.error for row in blocked}


@pytest.mark.parametrize(
    "target",
    ["", "a//b", "../b", "a/", "a\0b", "t" * 2_000, "__groups/g", "\ud800", 7],
    ids=lambda target: repr(target)[:12],
)
async def test_a_target_that_cannot_be_fails_its_own_event_alone(
    opening: Opening, client: fencepost.Client, target: Any
) -> None:
    app = App(
        fresh("odd"),
        entities=[Order],
        events=[Reserved],
        settings=AppSettings(start=client.log_head()),
    )
    bad, good = fresh("o"), fresh("o")

    @app.reaction(
        Placed,
        to=lambda event: target if event.stream == f"orders/{bad}" else "line",
        retry=Retry(0),
    )
    def note(event: Recorded[Placed], context: Context) -> None:
        context.append(f"noted/{app.name}", Reserved(order=event.stream, quantity=1))

    async with opening(app) as shop:
        await shop.do(Order.place, bad, sku="tea")
        await shop.do(Order.place, good, sku="tea")

    noted, blocked = await outcome(opening, app, client)

    assert noted == [f"orders/{good}"]
    assert list(blocked) == [f"orders/{bad}"]
    assert "the target of note is" in str(blocked[f"orders/{bad}"])


async def test_a_resolver_that_raises_fails_its_own_event_and_never_handles_it_elsewhere(
    opening: Opening, client: fencepost.Client
) -> None:
    app = App(
        fresh("odd"),
        entities=[Order],
        events=[Reserved],
        settings=AppSettings(start=client.log_head()),
    )
    places = {"tea": "line/tea"}

    @app.reaction(Placed, to=lambda event: places[event.data.sku], retry=Retry(0))
    def note(event: Recorded[Placed], context: Context) -> None:
        context.append(f"noted/{app.name}", Reserved(order=event.stream, quantity=1))

    bad, good = fresh("o"), fresh("o")
    async with opening(app) as shop:
        await shop.do(Order.place, bad, sku="milk")
        await shop.do(Order.place, good, sku="tea")

    noted, blocked = await outcome(opening, app, client)

    assert noted == [f"orders/{good}"]
    assert blocked == {f"orders/{bad}": "KeyError: 'milk'"}


@pytest.mark.parametrize(
    "meta",
    [
        {"correlation": "c" * 300},
        {"correlation": ""},
        {"correlation": 7},
        {"correlation": "c", "traceparent": 7, "tracestate": ["x"]},
        {"correlation": "c", "causation": {}},
    ],
    ids=["long", "empty", "number", "trace", "cause"],
)
async def test_whatever_goes_with_an_event_its_reaction_runs(
    opening: Opening, client: fencepost.Client, meta: dict[str, Any]
) -> None:
    app, odd = app_of(client, lambda _event: None), fresh("o")
    message = {"name": "Placed", "data": {"sku": "tea", "quantity": 1}, "meta": meta}
    client.stream(f"orders/{odd}").append(message, auto_create=True)

    noted, blocked = await outcome(opening, app, client)

    assert (noted, blocked) == ([f"orders/{odd}"], {})


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (StopIteration(), "StopIteration: "),
        (ValueError("\ud800"), "ValueError: ?"),
        (SilentError(), "SilentError: what it says cannot be shown"),
    ],
    ids=["stop", "surrogate", "silent"],
)
async def test_whatever_a_handler_raises_is_the_failure_of_its_event(
    opening: Opening, client: fencepost.Client, error: Exception, said: str
) -> None:
    bad, good = fresh("o"), fresh("o")

    def called(event: Recorded[Placed]) -> None:
        if event.stream == f"orders/{bad}":
            raise error

    app = app_of(client, called)
    async with opening(app) as shop:
        await shop.do(Order.place, bad, sku="milk")
        await shop.do(Order.place, good, sku="tea")

    noted, blocked = await outcome(opening, app, client)

    assert (noted, blocked) == ([f"orders/{good}"], {"line/milk": said})


async def test_as_many_plain_handlers_run_at_once_as_a_worker_has_hands(
    opening: Opening, client: fencepost.Client
) -> None:
    """Their threads are their own: those of the loop are fewer, and it needs them itself."""
    hands = 24
    meeting = threading.Barrier(hands, timeout=60)
    app = app_of(client, lambda _event: meeting.wait())
    async with opening(app) as shop:
        for number in range(hands):
            await shop.do(Order.place, fresh("o"), sku=str(number))

        settled = await shop.settle(streams=hands, timeout=60)

    assert settled.leases == hands


async def test_a_worker_that_cannot_note_targets_says_so_and_goes_on_once_it_can(
    opening: Opening, client: fencepost.Client
) -> None:
    """One priority out of its bounds: the server refuses the whole note."""
    app = make_app(fresh("shop"), settings=AppSettings(start=client.log_head()), retry=NO_WAIT)
    tea, stopping = fresh("tea"), threading.Event()
    reaction = app.registry.reactions[0]
    app.registry._by_event["Placed"] = [_with_priority(reaction, 2**40)]
    said = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "cannot be noted" in record.getMessage():
                loop.call_soon_threadsafe(said.set)

    listener, logger = Listener(), logging.getLogger("fencepost.events.correlators")
    logger.addHandler(listener)
    async with opening(app) as shop:
        stop = stopping if hasattr(shop, "_wrapped") else asyncio.Event()
        working = asyncio.create_task(shop.work(stopping=stop))
        try:
            await shop.do(Order.place, fresh("o"), sku=tea, quantity=2)
            await asyncio.wait_for(said.wait(), 60)
            app.registry._by_event["Placed"] = [reaction]
            async with asyncio.timeout(60):
                while (await shop.load(Stock, tea)).state.left == 100:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            logger.removeHandler(listener)
            stop.set()
            await working


def _with_priority(reaction: Any, priority: int) -> Any:
    return msgspec.structs.replace(reaction, priority=priority)


class Weighed(Event):
    grams: dict[int, float]


class Scale(Entity, stream="scales/{id}"):
    grams: dict[int, float] = field(default_factory=dict)
    mean: float = 0.0

    @action
    def weigh(self, grams: dict[int, float]) -> Weighed:
        return Weighed(grams=grams)

    @applies
    def weighed(self, event: Weighed) -> Self:
        mean = sum(event.grams.values()) * (1e308 if 13 in event.grams else 1)
        return self.replace(grams=event.grams, mean=mean)


async def test_a_state_is_read_as_it_was_when_its_books_are_closed(
    opening: Opening, client: fencepost.Client
) -> None:
    for group in client.groups():  # a group without workers would keep the books from being closed
        client.group(group.group).delete()
    scale = fresh("s")
    app = App(fresh("scales"), entities=[Scale])
    async with opening(app) as first, opening(app) as second:
        await first.do(Scale.weigh, scale, grams={7: 1.5})

        closed = await first.books.close(Scale, scale)

        assert closed.outcome == "restarted"
        assert (await second.load(Scale, scale)).state.grams == {7: 1.5}


async def test_books_are_not_closed_over_a_state_that_no_one_could_read_again(
    opening: Opening,
) -> None:
    scale = fresh("s")
    app = App(fresh("scales"), entities=[Scale])
    async with opening(app) as scales:
        await scales.do(Scale.weigh, scale, grams={13: 1e308})

        with pytest.raises(EventInvalidError, match="no NaN and no infinity"):
            await scales.books.close(Scale, scale)

        after = await scales.do(Scale.weigh, scale, grams={1: 1.0})
        assert after.version == 1  # nothing was guarded
        assert after.state.mean == 1.0


async def test_an_event_that_no_reader_could_read_is_not_stored(opening: Opening) -> None:
    scale = fresh("s")
    async with opening(App(fresh("scales"), entities=[Scale])) as scales:
        with pytest.raises(EventInvalidError, match="Weighed: JSON has no NaN"):
            await scales.do(Scale.weigh, scale, grams={1: float("nan")})

        assert (await scales.load(Scale, scale)).version == -1


@pytest.mark.parametrize(("named", "word"), [({"to": "a//b"}, "a//b"), ({"lane": ""}, "lane")])
def test_a_target_or_lane_that_cannot_be_is_refused_where_it_is_declared(
    named: dict[str, Any], word: str
) -> None:
    with pytest.raises(DefinitionError, match=word):
        App("odd").reaction(Placed, **named)
