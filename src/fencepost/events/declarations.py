"""What an app declares: its entities, reactions and hooks, and the bounds that it has.

Nothing here speaks to a server; `app.py` opens it.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar, overload

import msgspec

from fencepost.client.errors import require
from fencepost.events import tracing
from fencepost.events.closing import Archive, Policy, Then
from fencepost.events.errors import DefinitionError
from fencepost.events.projections.declared import Handler, Projection, declare, events_of
from fencepost.events.registry import (
    HOOKS,
    Breadcrumb,
    Hook,
    Reaction,
    Registry,
    target_refused,
)
from fencepost.events.retry import Retry
from fencepost.events.types import Entity, Event, Recorded, is_event_class, require_entity
from fencepost.protocol.groups import check_text

E = TypeVar("E", bound=Event)
E2 = TypeVar("E2", bound=Event)
E3 = TypeVar("E3", bound=Event)
ContextT = TypeVar("ContextT")
ResultT = TypeVar("ResultT")
Projected = TypeVar("Projected", bound=Callable[..., None])

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._-]{1,128}")
MOMENTS = {"acked": "ack", "failed": "fail", "blocked": "block", "parked": "park", "lost": "lose"}
"""Breadcrumbs that are spans too; commits, claims and handlers have spans with a length."""


class AppSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of an app."""

    snapshot_every: int | None = 100
    """Events of an entity between two snapshots; None: no snapshots."""
    cache_max: int = 1_000
    """Entities whose newest state is kept."""
    conflicts_max: int = 20
    """Conflicts with other writers after which `do` gives up."""
    lease_ms: int = 10_000
    """How long a worker may be silent before another one takes its targets."""
    books_wait_ms: int = 15_000
    """How long closing books waits for groups that lag, once the stream takes no events."""
    start: int | Literal["first", "now"] = "first"
    """Where the reactions of a new app begin: at the first event, behind the newest one when its
    first worker starts, or behind a position."""

    def __post_init__(self) -> None:
        for name in ("cache_max", "conflicts_max", "lease_ms", "books_wait_ms"):
            number = getattr(self, name)
            require(
                isinstance(number, int) and number >= 0,
                f"{name} is a whole number, not {number!r}",
            )
        every: Any = self.snapshot_every
        require(
            every is None or (isinstance(every, int) and every > 0),
            "snapshot_every is a number of events, or None",
        )
        require(
            self.start in ("first", "now") or isinstance(self.start, int),
            f"start is 'first', 'now' or a position, not {self.start!r}",
        )


class Declarations:
    """The declarations of an application. Its group on the server has the app's name."""

    def __init__(
        self,
        name: str,
        *,
        entities: Iterable[type[Entity]] = (),
        events: Iterable[type[Event]] = (),
        sources: Iterable[str] = (),
        settings: AppSettings | None = None,
    ) -> None:
        """Declare an app.

        Args:
            name: The name of the app and of its group.
            entities: The entities; the events that their methods name are known by that.
            events: Further events that no entity names.
            sources: Streams, as globs, whose events reactions are for, beside those of entities.
            settings: Bounds, where they differ from the defaults.
        """
        require(bool(_NAME.fullmatch(name)), f"the name {name!r} is not of [A-Za-z0-9._-]{{1,128}}")
        self.name = name
        require(
            isinstance(settings, AppSettings | None),
            "settings is AppSettings(lease_ms=...), or None",
        )
        self.settings = settings or AppSettings()
        self.registry = Registry(entities, events, sources)
        self.projections: dict[str, Projection] = {}
        self.policies: list[Policy] = []
        self._hooks: dict[str, list[Hook]] = {kind: [] for kind in HOOKS}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @overload
    def reaction(
        self,
        event: type[E],
        /,
        *,
        to: str | Callable[[Recorded[E]], str | None] | None = None,
        retry: Retry | None = None,
        name: str | None = None,
        lane: str | None = None,
        priority: int | None = None,
    ) -> Reacts[E]: ...

    @overload
    def reaction(
        self,
        event: type[E],
        second: type[E2],
        /,
        *,
        to: str | Callable[[Recorded[E | E2]], str | None] | None = None,
        retry: Retry | None = None,
        name: str | None = None,
        lane: str | None = None,
        priority: int | None = None,
    ) -> Reacts[E | E2]: ...

    @overload
    def reaction(
        self,
        event: type[E],
        second: type[E2],
        third: type[E3],
        /,
        *,
        to: str | Callable[[Recorded[E | E2 | E3]], str | None] | None = None,
        retry: Retry | None = None,
        name: str | None = None,
        lane: str | None = None,
        priority: int | None = None,
    ) -> Reacts[E | E2 | E3]: ...

    @overload
    def reaction(
        self,
        event: type[Event],
        /,
        *more: type[Event],
        to: str | Callable[[Recorded[Any]], str | None] | None = None,
        retry: Retry | None = None,
        name: str | None = None,
        lane: str | None = None,
        priority: int | None = None,
    ) -> Reacts[Any]: ...

    def reaction(
        self,
        event: type[Any],
        /,
        *more: type[Any],
        to: str | Callable[[Recorded[Any]], str | None] | None = None,
        retry: Retry | None = None,
        name: str | None = None,
        lane: str | None = None,
        priority: int | None = None,
    ) -> Reacts[Any]:
        """Have a function called for every event of a kind, once its target's turn has come.

        Args:
            event: The class of the event; `more` are others that the function takes too.
            to: The target: events of one target are handled one after the other, targets side by
                side. A fixed name, or a pure function of the event; by default its stream. The
                function runs twice for each event.
            retry: How a failure is tried again, and what happens after the last attempt.
            name: The name of the reaction; by default that of the function.
            lane: Workers may serve one lane alone.
            priority: Targets with a greater number are claimed first.
        """
        for kind in (event, *more):
            if not is_event_class(kind):
                raise DefinitionError(
                    f"a reaction is declared with @app.reaction(Placed), the class of its event: "
                    f"{kind!r} is none"
                )
        if isinstance(to, str) and (wrong := target_refused(to)) is not None:
            raise DefinitionError(f"the target {to[:80]!r} is none: {wrong}")
        if lane is not None and (refused := check_text("lane", lane)) is not None:
            raise DefinitionError(refused.detail)
        _require_retry(retry)
        return Reacts(self, (event, *more), to, retry or Retry(), name, lane, priority)

    def projection(
        self,
        name: str,
        *,
        version: int = 1,
        schema: str | Sequence[str] = (),
        events: Sequence[type[Event]] = (),
        retry: Retry | None = None,
    ) -> Callable[[Projected], Projected]:
        """Have a function write events into tables of your database, each event exactly once.

        The function gets the event and a `Transaction`, which stores its rows, the checkpoint and
        the fence together. The same name again adds a function for other events.

        Args:
            name: The name of the projection.
            version: Raise it when tables or handlers change: the new version is built beside the
                live one.
            schema: Statements that make the tables; `{orders}` is a table of this version.
            events: The events, where the annotation of the function's event does not say it.
            retry: How a failure is tried again.
        """

        def note(function: Projected) -> Projected:
            if inspect.iscoroutinefunction(function):
                raise DefinitionError(
                    f"the projection {name} is async: its handlers are plain functions, which run "
                    "inside a transaction"
                )
            require_parameters(function, "its event and a Transaction")
            _require_retry(retry)
            known = self.projections.get(name)
            if known is None:
                known = declare(self.name, name, version, schema, retry)
                self.projections[name] = known
            elif version != known.version:
                raise DefinitionError(f"the projection {name} has two versions in this program")
            elif schema or retry is not None:
                raise DefinitionError(
                    f"the projection {name} is declared already: its schema and its retry go with "
                    "its first function"
                )
            kinds = tuple(events) or events_of(function)
            for kind in kinds:
                self.registry.codec.add(kind)
            names = frozenset(kind.__event__.name for kind in kinds)
            known.handlers.append(Handler(kinds, function, names))
            return function

        return note

    def books(
        self,
        entity: type[Entity],
        *,
        then: Then = "restart",
        final: type[Event] | Sequence[type[Event]] = (),
        age: timedelta | None = None,
        archive: Archive | None = None,
    ) -> None:
        """Declare when the books of an entity are closed, by `books.close_due()` of an open app.

        Args:
            entity: The class of the entity.
            then: `restart` begins a new period with the state, `retire` ends the stream, `window`
                drops what is older than `age` while the stream stays live.
            final: Events after which an entity is due, such as one that was shipped.
            age: Its newest event must be as old. With neither, its books are closed by hand alone.
            archive: Called with each `Period` before its events go; it may be called again for the
                same period.
        """
        require_entity(entity)
        if entity not in self.registry.entities:
            raise DefinitionError(f"{entity.__name__} is no entity of the app {self.name}")
        kinds = (final,) if isinstance(final, type | str) else tuple(final)
        for kind in kinds:
            if not is_event_class(kind):
                raise DefinitionError(f"final is a class of events, or several: {kind!r} is none")
        if not isinstance(age, timedelta | None):
            raise DefinitionError(f"age is a timedelta(days=...), not {age!r}")
        names = tuple(kind.__event__.name for kind in kinds)
        policy = Policy(entity=entity, then=then, final=names, age=age, archive=archive)
        self.policies.append(policy)

    def hook(self, kind: str) -> Callable[[Hook], Hook]:
        """Have a function called when something happens: committed, claimed, acked, blocked, ...

        It gets a `Breadcrumb`. What it raises is logged and changes nothing.
        """
        if kind not in self._hooks:
            raise DefinitionError(f"there is no hook {kind!r}: {', '.join(HOOKS)}")

        def note(hook: Hook) -> Hook:
            self._hooks[kind].append(hook)
            return hook

        return note

    def tell(self, crumb: Breadcrumb) -> None:
        """Log what happened, and call the hooks for it."""
        log.debug("%s %s", crumb.app, crumb.kind, extra={"fields": facts(crumb)})
        if crumb.kind in MOMENTS:
            tracing.mark(MOMENTS[crumb.kind], facts(crumb))
        for hook in self._hooks.get(crumb.kind, ()):
            try:
                hook(crumb)
            except Exception:
                log.exception("a hook for %s failed", crumb.kind)


def _require_retry(retry: Retry | None) -> None:
    if not isinstance(retry, Retry | None):
        raise DefinitionError(f"retry is Retry({retry!r}), not {retry!r}")


def facts(crumb: Breadcrumb) -> dict[str, Any]:
    """What a breadcrumb says, for a line of a structured log."""
    given = msgspec.structs.asdict(crumb)
    return {name: value for name, value in given.items() if value not in (None, 0)}


def require_parameters(function: Callable[..., Any], what: str) -> None:
    """Raise `DefinitionError` if a function cannot be called with two arguments."""
    name = getattr(function, "__name__", repr(function))
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise DefinitionError(f"{name} is called with two arguments, {what}") from None


class Reacts(Generic[E]):
    """The decorator that `App.reaction` gives."""

    def __init__(
        self,
        app: Declarations,
        events: tuple[type[E], ...],
        to: Any,
        retry: Retry,
        name: str | None,
        lane: str | None,
        priority: int | None,
    ) -> None:
        self._app = app
        self._events = events
        self._to = to
        self._retry = retry
        self._name = name
        self._lane = lane
        self._priority = priority

    def __call__(
        self, handler: Callable[[Recorded[E], ContextT], ResultT]
    ) -> Callable[[Recorded[E], ContextT], ResultT]:
        require_parameters(handler, "its event and a context")
        self._app.registry.add(
            Reaction(
                name=self._name or handler.__name__,
                events=self._events,
                handler=handler,
                to=self._to,
                retry=self._retry,
                lane=self._lane,
                priority=self._priority,
            )
        )
        return handler
