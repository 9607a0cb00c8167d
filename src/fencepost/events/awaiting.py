"""A context that notices calls whose `await` was forgotten.

Such a call does nothing, and its event would be acked without its effect. So a reaction that leaves
one behind has failed.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import Any, ParamSpec, TypeVar

from fencepost.events.aio.contexts import AsyncContext
from fencepost.events.errors import DefinitionError
from fencepost.events.loading import Loaded
from fencepost.events.types import Action, EntityT, Event

P = ParamSpec("P")
T = TypeVar("T")


class WatchedContext(AsyncContext):
    """The context of one call of a reaction; `check` ends it."""

    _calls: list[tuple[str, Coroutine[Any, Any, Any]]]

    def do(
        self,
        action: Action[EntityT, P, Any],
        entity_id: str,
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Coroutine[Any, Any, EntityT]:
        return self._noted("do", super().do(action, entity_id, *arguments, **named))

    def load(self, kind: type[EntityT], entity_id: str) -> Coroutine[Any, Any, Loaded[EntityT]]:
        return self._noted("load", super().load(kind, entity_id))

    def append(self, stream: str, *events: Event) -> Coroutine[Any, Any, None]:
        return self._noted("append", super().append(stream, *events))

    def check(self, reaction: str) -> None:
        """Raise `DefinitionError` if a call was not awaited."""
        for name, call in self.__dict__.pop("_calls", ()):
            if inspect.getcoroutinestate(call) == inspect.CORO_CREATED:
                call.close()
                raise DefinitionError(f"{reaction} calls context.{name}(...) without await")

    def _noted(self, name: str, call: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        self.__dict__.setdefault("_calls", []).append((name, call))
        return call


def check_plain(reaction: str, returned: object) -> None:
    """Raise `DefinitionError` if a plain function gave back what must be awaited."""
    if inspect.iscoroutine(returned):
        returned.close()
        raise DefinitionError(f"{reaction} returns a coroutine: declare it with async def")
