# Generated from src/fencepost/events/aio/contexts.py by `just twins`: change that file.
"""What a reaction gets beside its event: the way to act, and to name effects elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ParamSpec

from fencepost.client.sync.connections import Driver
from fencepost.events.loading import Loaded
from fencepost.events.types import Action, EntityT, Event, require_action
from fencepost.events.units import Turn, Unit

P = ParamSpec("P")


class Context:
    """The way of a reaction to the app. What it does is stored with the ack of its event.

    Until then it is only gathered: other readers see nothing of it, and a reaction that raises
    takes back what it did. `load` shows the state with everything that was gathered.
    """

    def __init__(
        self,
        driver: Driver,
        unit: Unit,
        meta: Mapping[str, Any],
        group: str,
        turn: Turn,
    ) -> None:
        self._driver = driver
        self._unit = unit
        self._meta = meta
        self.effect_key = f"{group}/{turn.target}/{turn.event.position}"
        """A name for effects elsewhere, such as a payment: the same on every attempt."""
        self.target = turn.target
        self.attempt = turn.attempt
        """1 at first, and one more after each failure."""

    def do(
        self,
        action: Action[EntityT, P, Any],
        entity_id: str,
        /,
        *arguments: P.args,
        **named: P.kwargs,
    ) -> EntityT:
        """Let an entity act; the state behind its events. Raises `InvariantError` if it may not."""
        require_action(action)
        done = self._driver.run(self._unit.do(action, entity_id, arguments, named, self._meta))
        return done.state

    def load(self, kind: type[EntityT], entity_id: str) -> Loaded[EntityT]:
        """An entity as it will be when what was gathered is stored."""
        return self._driver.run(self._unit.load(kind, entity_id))

    def append(self, stream: str, *events: Event) -> None:
        """Add events to a stream that is no entity's."""
        self._unit.append(stream, events, self._meta)
