"""Groups in a turn: the rows that its requests name or may claim are loaded in one round trip.

For the requests that wait when the turn begins, it is the round trip in which the turn is waited
for. Only if more came meanwhile, the rows of all of them are loaded in one of their own.

Rows of groups are loaded for each turn anew, because any node may have changed them, and forgotten
after it, because there may be very many. A node remembers only the number and the lanes of a group
that it met, so that it can ask for candidates together with the group itself. If that memory is
out of date, the rows that were loaded are of no use, and what is needed is asked for one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from fencepost.protocol.groups import Group
from fencepost.protocol.leases import LeaseRef, Slots, Target, share_slots
from fencepost.store.group_contract import (
    AckLeases,
    ClaimTargets,
    Correlate,
    ForgetReplays,
    GroupRequest,
    Operate,
    ParkEvents,
    RenewLeases,
)
from fencepost.store.postgres.driver.pipeline import WritingConnection
from fencepost.store.postgres.driver.statements import Query
from fencepost.store.sql import Connection, Row
from fencepost.store.write.groups import GroupRows, group_from_row, target_from_row

KNOWN_MAX = 10_000
"""Groups whose number and lanes a node remembers."""


class Met(NamedTuple):
    """Number, lanes and kind of a group, as a node remembers them."""

    id: int
    lanes: tuple[str, ...]
    targets: str


class Wanted:
    """How many candidates the claims of a turn may take, of one lane of one group."""

    __slots__ = ("fair", "leading", "total")

    def __init__(self) -> None:
        self.fair = self.leading = self.total = 0

    def add(self, slots: Slots) -> None:
        self.fair += slots.fair
        self.leading += slots.leading
        self.total += sum(slots)

    def covers(self, other: Wanted) -> bool:
        """Whether these are as many as the others."""
        return (
            self.fair >= other.fair and self.leading >= other.leading and self.total >= other.total
        )


class Plan(NamedTuple):
    """What is to be loaded for some requests about groups."""

    names: Sequence[str]
    places: Sequence[tuple[int, str]]
    """Targets, each by its group."""
    wanted: Mapping[tuple[int, str], Wanted]
    """Candidates of claims, by group and lane."""
    operated: frozenset[str]
    """Groups that an operator changes: each of their claims asks for itself."""
    told: Sequence[int] = ()
    """Groups whose targets are told of events: how many they were told of bounds that."""

    def queries(self) -> list[Query]:
        """What to ask, in the order in which `TurnGroupRows.take` takes the rows."""
        queries: list[Query] = [("find_groups", (self.names,))]
        if self.places:
            columns = [list(column) for column in zip(*self.places, strict=True)]
            queries.append(("find_leases", columns))
        if self.told:
            queries.append(("count_told_of", (self.told,)))
        for place, count in self.wanted.items():
            queries += [
                ("claim_urgent", (*place, count.total)),
                ("claim_oldest", (*place, count.fair)),
                ("claim_newest", (*place, count.leading)),
                ("first_due", (*place, count.total + 1)),
            ]
        return queries

    def covers(self, other: Plan) -> bool:
        """Whether nothing is missing of what the other one loads."""
        return (
            self.operated == other.operated
            and set(self.names).issuperset(other.names)
            and set(self.places).issuperset(other.places)
            and set(self.told).issuperset(other.told)
            and all(
                place in self.wanted and self.wanted[place].covers(count)
                for place, count in other.wanted.items()
            )
        )


class TurnGroupRows(GroupRows):
    """Rows that a turn has loaded; others are looked for one by one."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._met: dict[str, Met] = {}
        self.loaded_groups: dict[str, Group | None] = {}
        """The groups that requests of this turn name; empty when nothing was loaded for it."""
        self._loaded: dict[tuple[int, str], Target | None] = {}
        self._candidates: dict[tuple[int, str], list[Target]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        """For how many targets candidates were loaded."""
        self._due: dict[tuple[int, str], tuple[list[Target], bool]] = {}
        """The first rows with an end, and whether these are all."""
        self._told: dict[int, int] = {}
        """How many events the targets of groups were told of."""

    def plan(self, requests: Sequence[GroupRequest], leases: Collection[LeaseRef]) -> Plan:
        """Plan which rows to load for requests about groups, and for the leases of appends."""
        names = sorted({*(r.group for r in requests), *(ref.group for ref in leases)})
        named = {(ref.group_id, ref.target) for ref in leases}
        # An operator may change more rows than can be guessed: then each claim asks for itself.
        operated = frozenset(r.group for r in requests if isinstance(r, Operate | ParkEvents))
        places = sorted(named.union(self._places(requests)))
        told = sorted(self._telling(requests))
        return Plan(names, places, self._wanted(requests, operated), operated, told)

    async def load(self, connection: WritingConnection, plan: Plan) -> None:
        """Have the rows of a plan at hand."""
        self.take(plan, await connection.fetch_all(plan.queries()))

    def take(self, plan: Plan, rows: Iterable[list[Row]]) -> None:
        """Have what was loaded at hand."""
        found = iter(rows)
        self._take_groups(plan.names, next(found))
        if plan.places:
            self._take_targets(plan.places, next(found))
        if plan.told:
            self._told = dict.fromkeys(plan.told, 0)
            self._told.update((group_id, int(told)) for group_id, told in next(found))
        for place, count in plan.wanted.items():
            ready = {row[0]: target_from_row(row) for _ in range(3) for row in next(found)}
            due = [target_from_row(row) for row in next(found)]
            self._candidates[place] = [*ready.values(), *due]
            self._due[place] = due, len(due) <= count.total
            self._counts[place] = count.total

    def _take_groups(self, names: Sequence[str], rows: Sequence[Row]) -> None:
        self.loaded_groups = dict.fromkeys(names)
        if len(self._met) > KNOWN_MAX:
            self._met.clear()
        for row in rows:
            group = group_from_row(row)
            self.loaded_groups[group.name] = group
            self._met[group.name] = Met(group.id, group.lanes, group.settings.targets)

    def _take_targets(self, places: Sequence[tuple[int, str]], rows: Sequence[Row]) -> None:
        self._loaded = dict.fromkeys(places)
        for group_id, *row in rows:
            self._loaded[group_id, row[0]] = target_from_row(tuple(row))

    def _places(self, requests: Sequence[GroupRequest]) -> Iterator[tuple[int, str]]:
        """The rows that requests name."""
        for request in requests:
            met = self._met.get(request.group)
            match request:
                case AckLeases():
                    yield from ((ref.group_id, ref.target) for ref, _ in request.items)
                case RenewLeases():
                    yield from ((ref.group_id, ref.target) for ref in request.leases)
                case ForgetReplays():
                    yield from ((request.group_id, target) for target, _ in request.events)
                case Correlate() if met is not None and met.targets != "message":
                    yield from ((met.id, item.target) for item in request.found)
                case Operate() if met is not None:
                    yield from ((met.id, target) for target in request.targets or ())
                case ParkEvents() if met is not None:
                    yield from ((met.id, target) for target, _ in request.events or ())
                case _:
                    pass

    def _telling(self, requests: Sequence[GroupRequest]) -> set[int]:
        """Groups with computed targets that some requests tell of events."""
        names = {request.group for request in requests if isinstance(request, Correlate)}
        met = [self._met[name] for name in names if name in self._met]
        return {group.id for group in met if group.targets == "computed"}

    def _wanted(
        self, requests: Sequence[GroupRequest], operated: frozenset[str]
    ) -> dict[tuple[int, str], Wanted]:
        """The candidates that the claims among some requests may take."""
        wanted: dict[tuple[int, str], Wanted] = {}
        for request in requests:
            asked = request.claim if isinstance(request, AckLeases) else request
            if not isinstance(asked, ClaimTargets) or asked.may_read is not None:
                continue
            met = self._met.get(asked.group)
            if met is None or asked.group in operated:
                continue
            claim = asked.claim
            slots = share_slots(claim.streams_max, claim.lagging_share, claim.cycle)
            for lane in met.lanes if claim.lane is None else (claim.lane,):
                wanted.setdefault((met.id, lane), Wanted()).add(slots)
        return wanted

    def forget(self) -> None:
        """A turn is over."""
        self.loaded_groups.clear()
        self._loaded.clear()
        self._candidates.clear()
        self._counts.clear()
        self._due.clear()
        self._told.clear()

    # Finding

    def group(self, name: str) -> Group | None:
        if name in self.loaded_groups:
            return self.loaded_groups[name]
        return super().group(name)

    def target(self, group_id: int, target: str) -> Target | None:
        place = (group_id, target)
        return self._loaded[place] if place in self._loaded else super().target(*place)

    def in_order(
        self,
        group_id: int,
        lane: str,
        slots: Slots,
        now_ms: int,
        changed: Mapping[str, Target | None],
    ) -> Iterator[Target]:
        loaded = self._candidates.get((group_id, lane))
        # A claim whose worker may not read every source looks at more than was loaded for others.
        if loaded is not None and sum(slots) <= self._counts[group_id, lane]:
            return (row for row in loaded if row.target not in changed)
        return super().in_order(group_id, lane, slots, now_ms, changed)

    def due_in_order(self, group_id: int, lane: str, now_ms: int, rows_max: int) -> Sequence[Row]:
        due, is_all = self._due.get((group_id, lane), ([], False))
        later = [(row.due_ms, row.target) for row in due if row.due_ms > now_ms]
        if later or is_all:
            return later
        return super().due_in_order(group_id, lane, now_ms, rows_max)

    def told_count(self, group_id: int) -> int:
        told = self._told.get(group_id)
        return super().told_count(group_id) if told is None else told
