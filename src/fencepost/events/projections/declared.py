"""What a projection is: handlers of events that write into tables of the user's own database.

A projection has a version. Tables that its schema names in braces, `{orders}`, exist once per
version (`orders_v1`), and readers use the view `orders`, which shows the version that is live. So a
new version can be built beside the live one, and the view is switched in one transaction.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from fencepost.client.errors import require
from fencepost.events.errors import DefinitionError, EventsError
from fencepost.events.registry import Reaction
from fencepost.events.retry import Retry
from fencepost.events.types import Event, event_classes

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TABLE = re.compile(r"\{([a-z][a-z0-9_]{0,39})\}")
VERSION_MAX = 1_000_000
STATEMENTS_MAX = 1_000
"""Statements of handlers whose tables are named once, the newest ones."""


class ProjectionLostError(EventsError):
    """Another worker took the projection over, so nothing was written. Stop, or take it again."""


class Handler(msgspec.Struct, frozen=True):
    """A function and the events that it is for."""

    events: tuple[type[Event], ...]
    function: Callable[..., Any]
    names: frozenset[str]
    """What the log calls the events."""


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """A projection of an app."""

    app: str
    name: str
    version: int
    schema: tuple[str, ...]
    handlers: list[Handler]
    retry: Retry

    @property
    def group(self) -> str:
        """The group whose lease a worker of this projection holds."""
        return f"{self.app}.{self.name}.v{self.version}"

    @property
    def tables(self) -> list[str]:
        """The tables that exist once per version."""
        return list(dict.fromkeys(name for text in self.schema for name in _TABLE.findall(text)))

    @property
    def schema_text(self) -> str:
        """The schema without what makes no difference in SQL."""
        return "; ".join(" ".join(text.split()) for text in self.schema)

    def sql(self, text: str) -> str:
        """A statement with the names of this version's tables."""
        return _named(text, self.version)

    def reactions(self) -> list[Reaction]:
        """The handlers as reactions to one target: the projection is one line of events."""
        return [
            Reaction(
                name=f"{self.name}-{number}",
                events=handler.events,
                handler=handler.function,
                to=self.name,
                retry=self.retry,
            )
            for number, handler in enumerate(self.handlers)
        ]


@lru_cache(STATEMENTS_MAX)
def _named(text: str, version: int) -> str:
    return _TABLE.sub(rf"\1_v{version}", text)


def events_of(function: Callable[..., Any]) -> tuple[type[Event], ...]:
    """The events that the annotation of a handler's first parameter names."""
    first = next(iter(inspect.signature(function).parameters), None)
    try:
        hint = typing.get_type_hints(function).get(first or "")
    except NameError as error:
        raise DefinitionError(f"{function.__name__}: {error}; give events=[...]") from None
    found = tuple(dict.fromkeys(event_classes(hint)))
    if not found:
        raise DefinitionError(f"{function.__name__} does not say its events: Recorded[Placed]")
    return found


def declare(
    app: str, name: str, version: int, schema: str | Sequence[str], retry: Retry | None
) -> Projection:
    """A projection without handlers yet; raises `InvalidArgumentError` for a bad name."""
    require(bool(_NAME.fullmatch(name)), f"the projection {name!r} is not of [a-z][a-z0-9_]*")
    require(1 <= version <= VERSION_MAX, "the version of a projection is from 1 on")
    chosen = retry or Retry()
    require(chosen.on_exhausted != "park", "a projection keeps the order: it blocks or retries")
    return Projection(
        app=app,
        name=name,
        version=version,
        schema=(schema,) if isinstance(schema, str) else tuple(schema),
        handlers=[],
        retry=chosen,
    )
