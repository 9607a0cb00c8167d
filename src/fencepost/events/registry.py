"""What an app is made of: its entities, events and reactions, and which target an event concerns.

A reaction has a target: the stream of its event by default, a fixed name, or what a resolver makes
of the event. Events of one target are handled one after the other, targets side by side. Everything
here is pure. A resolver says where an event goes once, when a worker tells its target of it
(correlation); which reactions it was told for goes with it (`notes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from fencepost.client.errors import require
from fencepost.events.codec import Codec
from fencepost.events.errors import DefinitionError
from fencepost.events.notes import Note, decode_note, encode_note, fits_note
from fencepost.events.retry import Retry
from fencepost.events.types import Entity, Event, Recorded, require_entity
from fencepost.protocol.globs import Glob
from fencepost.protocol.limits import Limits
from fencepost.protocol.paths import check_path

TARGET_BYTES_MAX = Limits().path_bytes_max
NAMES_MAX = 64
"""Names that one request of the log may ask for."""
EVERYWHERE = "**"
SOURCES_MAX = 10_000
"""Streams of which a registry remembers whether they are sources."""

Resolver = Callable[[Recorded[Any]], str | None]
Hook = Callable[["Breadcrumb"], None]
HOOKS = (
    "committed",
    "claimed",
    "acked",
    "failed",
    "blocked",
    "parked",
    "lost",
    "settled",
    "closed",
)


class Breadcrumb(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the app did, for hooks and logs."""

    kind: str
    app: str
    stream: str | None = None
    target: str | None = None
    position: int | None = None
    events: int = 0
    worker: str | None = None
    error: str | None = None
    correlation: str | None = None


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """A handler, the events that it is for, and how it is tried again."""

    name: str
    events: tuple[type[Event], ...]
    handler: Callable[..., Any]
    to: str | Resolver | None = None
    retry: Retry = Retry()
    lane: str | None = None
    priority: int | None = None

    def target(self, event: Recorded[Any]) -> str | None:
        """The target of an event; None: it concerns none."""
        if self.to is None:
            return event.stream
        if isinstance(self.to, str):
            return self.to
        found = self.to(event)
        if found is not None and (wrong := target_refused(found)) is not None:
            raise DefinitionError(f"the target of {self.name} is {str(found)[:80]!r}: {wrong}")
        return found


def target_refused(target: Any) -> str | None:
    """Why the server takes no such target; one that it refuses would hold up all events."""
    if not isinstance(target, str):
        return "a target is a text"
    if len(target.encode("utf-8", "replace")) > TARGET_BYTES_MAX:
        return f"a target has at most {TARGET_BYTES_MAX} bytes"
    if not target.isascii() and target.encode("utf-8", "replace").decode() != target:
        return "a target is Unicode"
    refused = check_path(target)
    return None if refused is None else refused.detail


class Correlated(msgspec.Struct, frozen=True):
    """A target that an event concerns; `source` is where the target's events come from."""

    target: str
    source: str
    position: int
    lane: str | None = None
    priority: int | None = None
    note: str | None = None


class Registry:
    """The declarations of an app."""

    def __init__(
        self,
        entities: Iterable[type[Entity]],
        events: Iterable[type[Event]],
        sources: Iterable[str],
    ) -> None:
        require(not isinstance(entities, type), "entities is a list of classes: entities=[Order]")
        self.entities = tuple(entities)
        for entity in self.entities:
            require_entity(entity)
        require(not isinstance(sources, str), "sources is a list of globs: sources=['imports/*']")
        require(not isinstance(events, type), "events is a list of classes: events=[Placed]")
        self.codec = Codec(events)
        for entity in self.entities:
            require(
                bool(entity.__entity__.template),
                f"{entity.__name__} has no stream: give its class stream='.../{{id}}'",
            )
            for kind in entity.__entity__.events():
                self.codec.add(kind)
        self._others = tuple(sources)
        self.sources = tuple(
            dict.fromkeys([*(entity.__entity__.glob for entity in self.entities), *self._others])
        )
        self._globs = [Glob(source) for source in self.sources]
        self._entity_globs = [Glob(entity.__entity__.glob) for entity in self.entities]
        self._known_sources: dict[str, bool] = {}
        self.reactions: list[Reaction] = []
        self._by_event: dict[str, list[Reaction]] = {}
        self._shared_source = EVERYWHERE

    def add(self, reaction: Reaction) -> None:
        """Know one more reaction."""
        if any(known.name == reaction.name for known in self.reactions):
            raise DefinitionError(f"two reactions are named {reaction.name!r}: give one a name")
        self.reactions.append(reaction)
        for kind in reaction.events:
            self.codec.add(kind)
            name = kind.__event__.name
            declared = self._by_event.setdefault(name, [])
            if not fits_note(one.name for one in (*declared, reaction)):
                raise DefinitionError(f"the reactions to {name} have too long names together")
            declared.append(reaction)
        self._shared_source = self._find_shared_source()

    def _find_shared_source(self) -> str:
        """Where the events of computed targets come from: one kind of entity, or anywhere.

        A narrow source is read faster, and needs fewer grants.
        """
        globs = set()
        for name in self._by_event:
            emitting = [
                entity.__entity__.glob
                for entity in self.entities
                if any(kind.__event__.name == name for kind in entity.__entity__.events())
            ]
            globs.update(emitting or [EVERYWHERE])
        return globs.pop() if len(globs) == 1 and not self._others else EVERYWHERE

    @property
    def names(self) -> list[str]:
        """The names of the events that reactions are for."""
        return sorted(self._by_event)

    def require_readable(self, stream: str, events: Iterable[Event]) -> None:
        """Raise `DefinitionError` for an event with which an entity of the app cannot be loaded."""
        if any(glob.matches(stream) for glob in self._entity_globs):
            self.codec.require_known(events, f"the commit to {stream!r}")

    def selection(self) -> dict[str, list[str] | None]:
        """What to ask the log for; what is more than it takes is left out, and filtered here."""
        names, sources = self.names, list(self.sources)
        return {
            "name": names if len(names) <= NAMES_MAX else None,
            "match": sources if 0 < len(sources) <= NAMES_MAX else None,
        }

    def concerns(self, stream: str, name: str) -> bool:
        """Whether a reaction is for events of this name in this stream."""
        return name in self._by_event and self._is_source(stream)

    def _is_source(self, stream: str) -> bool:
        """Whether events of a stream are for this app; the answer for many streams is kept."""
        known = self._known_sources.get(stream)
        if known is None:
            known = not self._globs or any(glob.matches(stream) for glob in self._globs)
            if len(self._known_sources) == SOURCES_MAX:
                self._known_sources.clear()
            self._known_sources[stream] = known
        return known

    def targets(self, event: Recorded[Any]) -> list[Correlated]:
        """The targets that an event concerns, each once, with the reactions that it is told for."""
        by_target: dict[str, list[Reaction]] = {}
        raised: list[str] = []
        for reaction in self._by_event.get(event.name, ()):
            try:
                target = reaction.target(event)
            except Exception:
                target = event.stream
                raised.append(reaction.name)
            if target is not None:
                by_target.setdefault(target, []).append(reaction)
        found = []
        for target, told in by_target.items():
            source = event.stream if target == event.stream else self._shared_source
            here = tuple(one.name for one in told)
            others = (one for name, more in by_target.items() if name != target for one in more)
            elsewhere = tuple(one.name for one in others)
            failed = tuple(raised) if target == event.stream else ()
            note = encode_note(Note(here, elsewhere, failed))
            first = told[0]
            found.append(
                Correlated(target, source, event.position, first.lane, first.priority, note)
            )
        return found

    def unreadable(self, stream: str, position: int, name: str) -> Correlated:
        """Where an event goes that cannot be read: its own stream, for all reactions to it."""
        names = tuple(reaction.name for reaction in self._by_event.get(name, ()))
        note = encode_note(Note(names, (), names))  # what they say of it is not known
        return Correlated(stream, stream, position, note=note)

    def matching(self, event: Recorded[Any], target: str, note: str | None) -> list[Reaction]:
        """The reactions to an event that its target was told of it for.

        Without a note (workers of before gave none, and a reset may have taken it), it is the
        reactions that have this target by now. So is it for reactions of other names, where the
        event was told for one that is not declared any more: it may have been renamed.
        """
        declared = self._by_event.get(event.name, ())
        told = decode_note(note)
        if told is None:
            return [one for one in declared if self.target_of(one, event) == target]
        known = {one.name for one in declared}
        renames = not known.issuperset(told.here)
        named = {*told.here, *told.elsewhere}
        return [
            one
            for one in declared
            if one.name in told.here
            or (renames and one.name not in named and self.target_of(one, event) == target)
        ]

    @staticmethod
    def target_of(reaction: Reaction, event: Recorded[Any]) -> str | None:
        """The target of an event for a reaction.

        A resolver that raises sends its event to the event's own stream: there the worker calls it
        once more, and what it raises is a failure of that event alone.
        """
        try:
            return reaction.target(event)
        except Exception:
            return event.stream

    def retry_of(self, name: str) -> Retry:
        """How an event that cannot even be read is tried again: as its first reaction is."""
        found: Sequence[Reaction] = self._by_event.get(name, ())
        return found[0].retry if found else Retry()
