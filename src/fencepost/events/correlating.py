"""Telling targets of events: the log behind the watermark of a group, read page by page.

Operations without I/O. What the resolvers of the app say of an event is stored once, target by
target, in one compare-and-swap for each page (`notes.py`). Of two workers that read the same page,
with the same code or with other code, one tells of its events and the other goes on behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fencepost.client import groups
from fencepost.client.effects import Operation
from fencepost.client.errors import CorrelationMovedError, GroupExistsError, ResponseError
from fencepost.client.operations import query_of
from fencepost.client.reading import LogReader
from fencepost.client.results import LogEntry
from fencepost.client.settings import ClientSettings
from fencepost.events.commits import is_event
from fencepost.events.errors import EventsError
from fencepost.events.registry import Correlated, Registry

TARGETS_MAX = 5_000
"""What one correlation tells; the server takes 10,000."""
IDLE_POSITIONS_MAX = 1_000
"""Positions without any event for a reaction that the watermark may lag behind the log."""
FULL = frozenset(("told_max", "told_events_per_principal_max"))
"""Bounds past which targets are told of no more events before they have handled some."""

# Attempts, waits and what happens after the last are decided by each reaction. The group only
# keeps them: it never gives up by itself, and takes waits of any length.
GROUP = {
    "sources": ["**"],
    "targets": "computed",
    "retries_max": 0,
    "on_exhausted": "retry",
    "backoff": {"kind": "fixed", "base_ms": 1_000, "cap_ms": 7 * 86_400_000, "jitter": 0.0},
}


def make_group(settings: ClientSettings, name: str, start: int | str) -> Operation[int]:
    """Make the group of an app, or find it; the position up to which it is correlated."""
    try:
        info = yield from groups.make_group(settings, name, {**GROUP, "start": start})
    except GroupExistsError:
        info = yield from groups.show_group(settings, name)
        if info.targets != "computed":
            raise
    return info.correlated


class Correlating:
    """Reads the log behind the watermark of the group and notes what events concern."""

    def __init__(
        self, settings: ClientSettings, group: str, registry: Registry, *, notes: bool = True
    ) -> None:
        """Without notes, targets are told how far there is work, and find their own events."""
        self._notes = notes
        self._settings = settings
        self._group = group
        self._registry = registry
        self._watermark: int | None = None
        self._began_at: int | None = None

    def to_head(self, *, is_moving: bool = True) -> Operation[bool]:
        """Correlate what there is, or as much as the server takes before some of it is handled;
        whether there was anything for a reaction.

        When nothing is being handled (`is_moving`), it raises where the server takes none at all.
        """
        try:
            return (yield from self._go_on(live=False, stopped=lambda: False))
        except ResponseError as error:
            if error.problem.get("limit") not in FULL:
                raise
            if not is_moving and self._watermark == self._began_at:
                raise
            return True

    def catch_up(self) -> Operation[None]:
        """Correlate what there is, up to the very head; raises if there is no such group."""
        yield from self._go_on(live=False, stopped=lambda: False, idle_positions_max=0)

    def follow(self, stopped: Callable[[], bool]) -> Operation[None]:
        """Correlate what there is and what comes, until `stopped`."""
        yield from self._go_on(live=True, stopped=stopped)

    def _go_on(
        self,
        *,
        live: bool,
        stopped: Callable[[], bool],
        idle_positions_max: int = IDLE_POSITIONS_MAX,
    ) -> Operation[bool]:
        info = yield from groups.show_group(self._settings, self._group)
        self._watermark = self._began_at = info.correlated
        query = query_of({**self._registry.selection(), "pruned": "skip"})
        reader = LogReader(self._settings, query, after=info.correlated, until=None, live=live)
        reader.stopped = stopped
        # A group that never learns of events that concern none of its targets would lag on their
        # streams for ever, and keep their books from being closed.
        reader.tells_idle = live
        noted = False
        while (page := (yield from reader.next())) is not None:
            if page.entries or page.next > self._watermark:
                yield from self._note(page.entries, page.next)
            noted = noted or bool(page.entries)
        scanned = reader.after
        if isinstance(scanned, int) and scanned - self._watermark > idle_positions_max:
            yield from self._note([], scanned)
        return noted

    def _note(self, entries: list[LogEntry], until: int) -> Operation[None]:
        found = [correlated for entry in entries for correlated in self.targets(entry)]
        for start in range(0, max(len(found), 1), TARGETS_MAX):
            piece = found[start : start + TARGETS_MAX]
            last = start + TARGETS_MAX >= len(found)
            # Events of one position stay together: their targets are noted in one step.
            end = until if last else piece[-1].position - 1
            yield from self._swap(found, end)

    def _swap(self, found: list[Correlated], until: int) -> Operation[None]:
        assert self._watermark is not None
        while until > self._watermark:
            items = [item for item in found if self._watermark < item.position <= until]
            targets = [_body(item) for item in (items if self._notes else newest(items))]
            try:
                self._watermark = yield from groups.correlate(
                    self._settings, self._group, self._watermark, until, targets
                )
            except CorrelationMovedError as moved:
                if moved.watermark is None or moved.watermark <= self._watermark:
                    raise
                self._watermark = moved.watermark
            except ResponseError as error:
                positions = sorted({item.position for item in items})
                if error.problem.get("limit") not in FULL or len(positions) < 2:
                    raise
                # As many of the events as still fit; then the others are tried.
                yield from self._swap(found, positions[len(positions) // 2] - 1)

    def targets(self, entry: LogEntry) -> list[Correlated]:
        """The targets that an entry of the log concerns."""
        if entry.marker is not None or not is_event(entry.data):
            return []
        if not self._registry.concerns(entry.stream, entry.data["name"]):
            return []
        try:
            event = self._registry.codec.recorded(entry)
        except EventsError:
            # Its worker reports it: an event that cannot be read fails at its own stream.
            name = entry.data["name"]
            return [self._registry.unreadable(entry.stream, entry.position, name)]
        return self._registry.targets(event)


def newest(found: list[Correlated]) -> list[Correlated]:
    """Without notes: one entry for each target, and the first one, since when work waits."""
    by_target: dict[str, list[Correlated]] = {}
    for item in found:
        by_target.setdefault(item.target, []).append(msgspec.structs.replace(item, note=None))
    chosen = []
    for items in by_target.values():
        chosen.append(items[0])
        if len(items) > 1:
            chosen.append(items[-1])
    return sorted(chosen, key=lambda item: item.position)


def _body(item: Correlated) -> dict[str, Any]:
    return {key: value for key, value in msgspec.structs.asdict(item).items() if value is not None}
