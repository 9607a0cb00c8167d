"""`do`: load the state, let the action decide, commit at the version that was loaded.

A conflict means that another writer came first. Then the cached state is dropped, what it wrote is
read, and the action decides again, a bounded number of times. A caller that pinned the version has
decided by itself, so its conflict is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

import msgspec

from fencepost.client.effects import Operation, Sleep
from fencepost.client.settings import ClientSettings
from fencepost.events.codec import Codec
from fencepost.events.commits import commit
from fencepost.events.errors import ConcurrencyError, InvariantError
from fencepost.events.loading import Cache, Loaded, load
from fencepost.events.types import Action, EntityT, Event, Recorded

CONFLICT_DELAY_S, CONFLICT_DELAY_S_MAX = 0.002, 0.1


class Done(msgspec.Struct, Generic[EntityT], frozen=True, kw_only=True):
    """What an action did: the events that it stored, and the state behind them."""

    state: EntityT
    stream: str
    version: int
    events: list[Recorded[Any]]


class Deciding(msgspec.Struct, frozen=True, kw_only=True):
    """What `do` needs beside the action: the app's events, its cache, its bounds."""

    settings: ClientSettings
    codec: Codec
    cache: Cache
    conflicts_max: int
    snapshots: bool


def do(
    app: Deciding,
    action: Action[EntityT, Any, Any],
    entity_id: str,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
    *,
    meta: Mapping[str, Any],
    pinned: int | None = None,
) -> Operation[tuple[Done[EntityT], Loaded[EntityT]]]:
    """The events of an action, stored; raises what keeps them from being stored."""
    kind: type[EntityT] = action.entity  # type: ignore[assignment]
    path = kind.__entity__.path_of(entity_id)
    known = app.cache.get(kind, path)
    fresh = False
    conflicts = 0
    while True:
        if known is None or fresh:
            known = yield from load(
                app.settings, app.codec, kind, entity_id, known, snapshots=app.snapshots
            )
            app.cache.put(known)
        if pinned is not None and known.version != pinned:
            if not fresh:
                fresh = True  # the cache may be old
                continue
            raise ConcurrencyError(path, pinned, known.version, ())
        try:
            events = action.decide(known.state, path, arguments, named)
        except InvariantError:
            if fresh:
                raise
            fresh = True  # it may hold on the state of today
            continue
        if not events:
            return Done(state=known.state, stream=path, version=known.version, events=[]), known
        # An event that cannot be folded must not be stored: no load of the entity would work after.
        app.codec.require_known(events, action.name)
        state = folded(known.state, events)
        try:
            stored = yield from commit(app.settings, path, events, known.version, meta)
        except ConcurrencyError as conflict:
            app.cache.drop(kind, path)
            conflicts += 1
            if conflict.last_version is None or conflict.last_version < known.version:
                known = None  # the stream is another one now
            if pinned is not None or conflicts > app.conflicts_max:
                raise
            fresh = True
            yield Sleep(conflict_delay(conflicts, app.settings.clock.random()))
            continue
        version = stored.events[-1].version
        after = msgspec.structs.replace(known, state=state, version=version, offset=stored.offset)
        app.cache.put(after)
        return Done(state=state, stream=path, version=version, events=stored.events), after


def folded(state: EntityT, events: list[Event]) -> EntityT:
    """The state after events."""
    for event in events:
        state = state.__entity__.apply(state, event)
    return state


def conflict_delay(conflicts: int, dice: float) -> float:
    """Seconds before the action decides again: more after every conflict, and never the same."""
    bound = min(CONFLICT_DELAY_S * 2.0**conflicts, CONFLICT_DELAY_S_MAX)
    return bound * dice
