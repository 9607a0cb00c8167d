"""A unit of work: what the reactions to the events of one lease want to store, until it is stored.

Actions decide on the state with everything that the unit has gathered so far, so the second event
of a lease sees what the first one did. One commit then stores all of it and acks the events: all
happens or nothing. An event whose reaction fails takes back only what that event gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.operations import CommitAppend
from fencepost.events.codec import encoded
from fencepost.events.deciding import Deciding
from fencepost.events.loading import Loaded, load
from fencepost.events.types import Action, Entity, EntityT, Event, Recorded


class Turn(msgspec.Struct, frozen=True):
    """An event whose turn has come at a target, and which attempt this is, from 1 on."""

    target: str
    event: Recorded[Any]
    attempt: int


class _Gathered(msgspec.Struct, frozen=True):
    stream: str
    message: dict[str, Any]


class Unit:
    """Effects of reactions, gathered to be stored with the ack of their lease in one commit."""

    def __init__(self, app: Deciding) -> None:
        self._app = app
        self._gathered: list[_Gathered] = []
        self._states: dict[tuple[type[Entity], str], Loaded[Any]] = {}
        self._kept = 0
        self._kept_states: dict[tuple[type[Entity], str], Loaded[Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def keep(self) -> None:
        """The event is handled: what it gathered stays."""
        self._kept = len(self._gathered)
        self._kept_states = dict(self._states)

    def take_back(self) -> None:
        """The event failed: what it gathered goes."""
        del self._gathered[self._kept :]
        self._states = dict(self._kept_states)

    def load(self, kind: type[EntityT], entity_id: str) -> Operation[Loaded[EntityT]]:
        """An entity as it will be when the unit is stored."""
        path = kind.__entity__.path_of(entity_id)
        key = (kind, path)
        if key not in self._states:
            self._states[key] = yield from self._fresh(kind, entity_id)
        found: Loaded[EntityT] = self._states[key]
        return found

    def _fresh(self, kind: type[EntityT], entity_id: str) -> Operation[Loaded[EntityT]]:
        app = self._app
        known = app.cache.get(kind, kind.__entity__.path_of(entity_id))
        loaded = yield from load(
            app.settings, app.codec, kind, entity_id, known, snapshots=app.snapshots
        )
        app.cache.put(loaded)
        return loaded

    def do(
        self,
        action: Action[EntityT, Any, Any],
        entity_id: str,
        arguments: tuple[Any, ...],
        named: Mapping[str, Any],
        meta: Mapping[str, Any],
    ) -> Operation[Loaded[EntityT]]:
        """Let an action decide, and gather its events; the state behind them."""
        kind: type[EntityT] = action.entity  # type: ignore[assignment]
        loaded = yield from self.load(kind, entity_id)
        events = action.decide(loaded.state, loaded.stream, arguments, named)
        self._app.codec.require_known(events, action.name)
        return self._apply(loaded, events, meta)

    def _apply(
        self, loaded: Loaded[EntityT], events: Sequence[Event], meta: Mapping[str, Any]
    ) -> Loaded[EntityT]:
        self.append(loaded.stream, events, meta)
        after: Loaded[EntityT] = self._states[type(loaded.state), loaded.stream]
        return after

    def append(self, stream: str, events: Sequence[Event], meta: Mapping[str, Any]) -> None:
        """Gather events for a stream; states of it that were loaded follow."""
        self._gathered += [_Gathered(stream, encoded(event, meta, stream)) for event in events]
        for key, loaded in self._states.items():
            if key[1] != stream:
                continue
            state = loaded.state
            for event in events:
                state = state.__entity__.apply(state, event)
            version = loaded.version + len(events)
            self._states[key] = msgspec.structs.replace(loaded, state=state, version=version)

    def appends(self) -> list[CommitAppend]:
        """One append for each stream, its events in their order.

        They have no version to fit: they answer past events, and their stream has gone on since.
        The lease that the commit acks keeps other reactions of the target away.
        """
        by_stream: dict[str, list[Any]] = {}
        for gathered in self._gathered:
            by_stream.setdefault(gathered.stream, []).append(gathered.message)
        return [
            CommitAppend(stream=stream, messages=messages, auto_create=True)
            for stream, messages in by_stream.items()
        ]

    def streams(self) -> list[tuple[type[Entity], str]]:
        """The entities whose cached state is old once the unit is stored."""
        return list(self._states)
