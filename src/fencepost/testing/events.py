"""Given, when, then: entities and reactions of an app without a server.

    given(Stock, Delivered(quantity=5)).when(Stock.reserve, "7", quantity=2).then(Reserved(...))

    shop = given_app(app, {"stock/tea": [Delivered(quantity=5)]})
    shop.when("orders/7", Placed(sku="tea")).then({"stock/tea": [Reserved(...)]})

The entity or the reactions see the events that were given, and `then` compares what they would
store. Workers, retries and time are the server's: `sim_app` has an app on a real server whose
clock stands still until `settle` has to wait, and then jumps to where work comes due.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, ParamSpec, Self, TypeVar

from fencepost.client.aio.client import AsyncClient
from fencepost.client.aio.connections import AsyncDriver
from fencepost.client.effects import Operation
from fencepost.client.http import parse_url
from fencepost.client.settings import ClientSettings
from fencepost.client.sync.connections import Driver
from fencepost.events import App, AsyncOpenApp, Context, InvariantError
from fencepost.events.awaiting import WatchedContext, check_plain
from fencepost.events.codec import Place, envelope
from fencepost.events.commits import meta_of
from fencepost.events.deciding import Deciding
from fencepost.events.loading import Cache, Loaded
from fencepost.events.types import Action, EntityT, Event, Recorded
from fencepost.events.units import Turn, Unit
from fencepost.store.opener import AnyStoreSettings
from fencepost.testing.clock import SimClock
from fencepost.testing.server import TestServer

P = ParamSpec("P")
T = TypeVar("T")


def folded(kind: type[EntityT], events: Iterable[Event]) -> EntityT:
    """The state that events add up to."""
    state = kind()
    for event in events:
        state = kind.__entity__.apply(state, event)
    return state


def given(kind: type[EntityT], *events: Event) -> Given[EntityT]:
    """An entity to which these events have happened."""
    return Given(kind, list(events))


class Given(Generic[EntityT]):
    """An entity, and then what an action made of it."""

    def __init__(self, kind: type[EntityT], events: list[Event]) -> None:
        self._kind = kind
        self._events = events
        self._emitted: list[Event] | None = None
        self._refused: InvariantError | None = None

    @property
    def state(self) -> EntityT:
        """The state after everything that happened, what the action did included."""
        return folded(self._kind, [*self._events, *(self._emitted or ())])

    def when(
        self, action: Action[EntityT, P, Any], /, *arguments: P.args, **named: P.kwargs
    ) -> Self:
        """Let the entity act. A broken invariant is kept for `refused`."""
        try:
            self._emitted = action.decide(self.state, "given", arguments, named)
        except InvariantError as error:
            self._refused = error
        return self

    def then(self, *events: Event) -> None:
        """Assert that the action emitted just these events."""
        if self._refused is not None:
            raise AssertionError(f"it was refused: {self._refused.reason}") from self._refused
        assert self._emitted is not None, "call when(...) first"
        assert self._emitted == list(events), f"emitted {self._emitted}, expected {list(events)}"

    def refused(self, reason: str | None = None) -> None:
        """Assert that an invariant refused the action, for this reason if one is given."""
        assert self._refused is not None, f"it was not refused, and emitted {self._emitted}"
        assert reason in (None, self._refused.reason), f"refused with {self._refused.reason!r}"


def given_app(app: App, streams: Mapping[str, Sequence[Event]] | None = None) -> GivenApp:
    """An app whose streams hold these events."""
    return GivenApp(app, streams or {})


class GivenApp:
    """Streams of an app, and then what its reactions to an event would store."""

    def __init__(self, app: App, streams: Mapping[str, Sequence[Event]]) -> None:
        self._app = app
        self._streams = {path: list(events) for path, events in streams.items()}
        self._stored: dict[str, list[Event]] = {}
        self.error: Exception | None = None
        """What a reaction raised; then nothing is stored."""
        self.targets: list[str] = []
        """The targets that the event concerns."""

    def when(self, stream: str, event: Event) -> Self:
        """Let an event happen to a stream, and run every reaction to it."""
        registry = self._app.registry
        given = self._streams.setdefault(stream, [])
        given.append(event)
        position = sum(len(events) for events in self._streams.values()) - 1
        recorded: Recorded[Any] = Recorded(
            data=event,
            name=event.__event__.name,
            stream=stream,
            version=len(given) - 1,
            position=position,
            timestamp_ms=0,
            correlation="given",
        )
        deciding = Deciding(
            settings=_settings(SimClock()),
            codec=registry.codec,
            cache=Cache(1),
            conflicts_max=0,
            snapshots=False,
        )
        unit = _GivenUnit(deciding, self._streams)
        told = registry.targets(recorded)
        self.targets = [found.target for found in told]
        try:
            for found in told:
                for reaction in registry.matching(recorded, found.target, found.note):
                    _run(reaction.handler, recorded, unit, found.target, self._app.name)
        except Exception as error:
            self.error = error
            return self
        for append in unit.appends():
            place = Place(append.stream, None)
            self._stored.setdefault(append.stream, []).extend(
                registry.codec.decode(envelope(message, place), place)
                for message in append.messages
            )
        return self

    def then(self, streams: Mapping[str, Sequence[Event]]) -> None:
        """Assert that the reactions would store just these events, in these streams."""
        if self.error is not None:
            raise AssertionError(f"a reaction raised {self.error!r}") from self.error
        expected = {path: list(events) for path, events in streams.items() if events}
        assert self._stored == expected, f"stored {self._stored}, expected {expected}"

    def fails(self, kind: type[Exception]) -> None:
        """Assert that a reaction raised this error, so that nothing is stored."""
        assert isinstance(self.error, kind), f"expected {kind.__name__}, found {self.error!r}"


class _GivenUnit(Unit):
    """A unit of work over the streams that were given."""

    def __init__(self, deciding: Deciding, streams: Mapping[str, Sequence[Event]]) -> None:
        super().__init__(deciding)
        self._streams = streams

    def _fresh(self, kind: type[EntityT], entity_id: str) -> Operation[Loaded[EntityT]]:
        yield from ()  # an operation that asks for nothing
        path = kind.__entity__.path_of(entity_id)
        events = self._streams.get(path, ())
        return Loaded(state=folded(kind, events), stream=path, version=len(events) - 1)


def _run(handler: Any, event: Recorded[Any], unit: Unit, target: str, group: str) -> None:
    settings = _settings(SimClock())
    meta = meta_of(settings, event.correlation, str(event.position))
    turn = Turn(target, event, attempt=1)
    if not inspect.iscoroutinefunction(handler):
        plain = Context(Driver(settings), unit, meta, group, turn)
        check_plain(handler.__name__, handler(event, plain))
        return
    context = WatchedContext(AsyncDriver(settings), unit, meta, group, turn)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(handler(event, context))
            context.check(handler.__name__)
        except BaseException as error:
            raised.append(error)

    # In a thread of its own: the test may be in an event loop already.
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _settings(clock: SimClock, url: str = "http://127.0.0.1") -> ClientSettings:
    return ClientSettings(address=parse_url(url), clock=clock)


# Workers on a clock that stands still

SETTLE_SECONDS = 100 * 365 * 86_400
"""The deadline of a settle on the simulated clock, which may jump over years of backoffs."""


class SimApp:
    """An app on a server of its own, both on one clock that a test moves."""

    def __init__(self, opened: AsyncOpenApp, clock: SimClock) -> None:
        self.opened = opened
        self.clock = clock

    async def settle(self) -> None:
        """Run reactions until nothing is left. Where all wait for a retry, time jumps to it."""
        await self.opened.settle(timeout=SETTLE_SECONDS, on_wait=self._jump)

    def _jump(self, due_ms: int) -> None:
        self.clock.advance(max(due_ms - self.clock.now_ms(), 0))


@asynccontextmanager
async def sim_app(
    app: App, store: AnyStoreSettings, *, clock: SimClock | None = None
) -> AsyncIterator[SimApp]:
    """An app on a server in this event loop, whose time is a `SimClock`: backoffs cost no time."""
    clock = clock or SimClock()
    async with (
        TestServer(store, clock=clock) as server,
        AsyncClient(_settings(clock, server.url)) as client,
        app.open(client) as opened,
    ):
        yield SimApp(opened, clock)
