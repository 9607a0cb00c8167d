"""Requests about groups, as generators without I/O, and the records that they answer with.

What a group and a lease are is in docs/guides/groups.md. A claim whose answer was lost holds its
leases until they expire; repeating it takes others. An ack that is repeated answers `lost` for the
items that the first attempt has acked, and `Acked.uncertain` says that this may be so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from fencepost.client.effects import Operation
from fencepost.client.errors import GroupNotFoundError
from fencepost.client.http import Request, target_of
from fencepost.client.operations import decoded, encode_json
from fencepost.client.results import AckedItem, LogEntry
from fencepost.client.retry import Answer, Kind, exchange
from fencepost.client.settings import JSON, ClientSettings

PIECE_EVENTS = 100
"""Events of a filter that one request parks or gives out again."""


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A group: its settings, and how far it is correlated."""

    group: str
    incarnation: int
    sources: list[str]
    names: list[str]
    targets: Literal["stream", "message", "computed"]
    lease_ms: int
    retries_max: int
    backoff: dict[str, Any]
    on_exhausted: Literal["block", "park", "retry"]
    lost_max: int
    start: int | str
    correlated: int
    targets_count: int
    parked_count: int
    lanes: list[str]
    created_ms: int


class GroupEvent(LogEntry, frozen=True, kw_only=True):
    """An event of a lease. `replayed`: it was parked and is given out again.

    `note` is what a worker gave with it when it told a computed target of the event.
    """

    replayed: bool = False
    note: str | None = None


class Pruned(msgspec.Struct, frozen=True, rename={"first": "from", "last": "to"}):
    """Positions between which events are gone from the log; an ack passes them."""

    first: int
    last: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A target that this worker has, and its events. Ack `read_to` when all are handled."""

    target: str
    source: str
    token: str
    at: int
    until: int
    read_to: int
    lease_until_ms: int
    retry: int
    events: list[GroupEvent]
    pruned: Pruned | None = None
    untold_to: int | None = None
    """Of a computed target: if it is not known what it was told of behind `read_to`, up to where.
    There it gets all events of its source, and the worker picks those that are its own."""

    def effect_key(self, group: str, event: GroupEvent) -> str:
        """A name for the effects of an event elsewhere: the same on every attempt."""
        return f"{group}/{self.target}/{event.position}"


class Leases(msgspec.Struct, frozen=True, kw_only=True):
    """What a claim got; `due_ms` is when the next target can be claimed, if none can be now.

    It is 0 when the server has not looked through the whole log yet: claim again.
    """

    leases: list[Lease]
    due_ms: int | None = None


class EventFailure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event that could not be handled."""

    position: int
    error: str
    permanent: bool = False
    park: bool = False
    delay_ms: int | None = None


class ReplayedEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a replayed event ended; without an error it was handled."""

    position: int
    error: str | None = None


class LeaseAck(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The end of a lease: how far its worker got, and what failed."""

    token: str
    at: int | None = None
    failure: EventFailure | None = None
    replayed: list[ReplayedEvent] = []


class Acked(msgspec.Struct, frozen=True, kw_only=True):
    """What became of every lease, and the next leases if they were asked for."""

    items: list[AckedItem]
    leases: list[Lease] = []
    due_ms: int | None = None
    uncertain: bool = False
    """Whether an attempt before may have arrived: `lost` may then mean that it was acked."""


class RenewedItem(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a lease goes on, or was given back."""

    target: str
    outcome: Literal["renewed", "released", "lost"]
    lease_until_ms: int | None = None


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows an operation changed; `next` is where to go on, if there may be more."""

    changed: int
    next: str | None = None


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A target as lists show it."""

    target: str
    source: str
    state: Literal["idle", "ready", "leased", "deferred", "blocked"]
    lane: str
    priority: int
    at: int
    work_to: int
    waits_from: int
    """No event before this position waits."""
    worker: str | None
    lease_until_ms: int | None
    lease_number: int = 0
    """Grows with every claim, block, unblock, reset and skip, and never falls."""
    retry: int
    lost: int
    blocked: bool
    error: str | None
    failed: int | None
    deferred_until_ms: int | None
    replaying: int
    updated_ms: int


class ParkedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An event that was set aside."""

    target: str
    source: str
    position: int
    error: str
    attempts: int
    parked_ms: int
    replaying: bool
    note: str | None = None


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and the leases that it holds."""

    worker: str
    leases: int
    first_end_ms: int
    last_end_ms: int


def group_target(name: str, what: str = "") -> str:
    """The target of a request about a group."""
    return target_of(f"/v1/groups/{name}" + (f"/{what}" if what else ""))


def make_group(
    settings: ClientSettings, name: str, values: Mapping[str, Any]
) -> Operation[GroupInfo]:
    """Make a group; fine if it exists with these settings."""
    given = {key: value for key, value in values.items() if value is not None}
    body = encode_json(given)
    request = Request("PUT", group_target(name), (("Content-Type", JSON),), body)
    answer = yield from exchange(settings, request, Kind.WRITE)
    return decoded(answer.response, GroupInfo)


def show_group(settings: ClientSettings, name: str) -> Operation[GroupInfo]:
    """A group as it stands."""
    answer = yield from exchange(settings, Request("GET", group_target(name)), Kind.READ)
    return decoded(answer.response, GroupInfo)


def delete_group(settings: ClientSettings, name: str) -> Operation[None]:
    """Remove a group; if an attempt may have arrived, finding none means it is done."""
    try:
        yield from exchange(settings, Request("DELETE", group_target(name)), Kind.WRITE)
    except GroupNotFoundError as error:
        if not error.uncertain:
            raise


def stats_of(settings: ClientSettings, name: str) -> Operation[dict[str, Any]]:
    """Counts of a group, in all and lane by lane."""
    request = Request("GET", group_target(name, "stats"))
    answer = yield from exchange(settings, request, Kind.READ)
    found: dict[str, Any] = decoded(answer.response, dict[str, Any])
    return found


def _post(settings: ClientSettings, name: str, what: str, body: Any) -> Operation[Answer]:
    request = Request(
        "POST", group_target(name, what), (("Content-Type", JSON),), encode_json(body)
    )
    answer = yield from exchange(settings, request, Kind.WRITE)
    return answer


def claim(settings: ClientSettings, name: str, asked: Mapping[str, Any]) -> Operation[Leases]:
    """Take leases."""
    answer = yield from _post(settings, name, "claim", asked)
    return decoded(answer.response, Leases)


def ack(
    settings: ClientSettings,
    name: str,
    items: Iterable[LeaseAck],
    asked: Mapping[str, Any] | None,
) -> Operation[Acked]:
    """End leases, and take the next ones."""
    body: dict[str, Any] = {"items": list(items)}
    if asked is not None:
        body["claim"] = asked
    answer = yield from _post(settings, name, "ack", body)
    acked = decoded(answer.response, Acked)
    return msgspec.structs.replace(acked, uncertain=bool(answer.uncertain))


class _Renewed(msgspec.Struct):
    items: list[RenewedItem]


def renew(
    settings: ClientSettings, name: str, tokens: Iterable[str], lease_ms: int | None
) -> Operation[list[RenewedItem]]:
    """Keep leases for longer."""
    body: dict[str, Any] = {"tokens": list(tokens)}
    if lease_ms is not None:
        body["lease_ms"] = lease_ms
    answer = yield from _post(settings, name, "renew", body)
    return decoded(answer.response, _Renewed).items


def release(
    settings: ClientSettings, name: str, tokens: Iterable[str]
) -> Operation[list[RenewedItem]]:
    """Give leases back."""
    answer = yield from _post(settings, name, "release", {"tokens": list(tokens)})
    return decoded(answer.response, _Renewed).items


def correlate(
    settings: ClientSettings,
    name: str,
    after: int,
    until: int,
    targets: Iterable[Mapping[str, Any]],
) -> Operation[int]:
    """Note which targets events concern; the new watermark."""
    body = {"after": after, "until": until, "targets": list(targets)}
    answer = yield from _post(settings, name, "correlate", body)
    found: dict[str, int] = decoded(answer.response, dict[str, int])
    return found["correlated"]


def operate(
    settings: ClientSettings, name: str, operation: str, body: Mapping[str, Any]
) -> Operation[Changed]:
    """Change targets, page by page until there are no more; how many were changed."""
    changed = 0
    after: str | None = ""
    while after is not None:
        given = {key: value for key, value in body.items() if value is not None}
        answer = yield from _post(settings, name, operation, {**given, "after": after})
        page = decoded(answer.response, Changed)
        changed += page.changed
        after = page.next
    return Changed(changed=changed)


def set_aside(
    settings: ClientSettings,
    name: str,
    operation: str,
    body: Mapping[str, Any],
    limit: int | None = None,
) -> Operation[Changed]:
    """Park events, or have parked ones given out again: of a filter up to `limit`, in pieces."""
    given = {key: value for key, value in body.items() if value is not None}
    if "filter" not in given:
        answer = yield from _post(settings, name, operation, given)
        return decoded(answer.response, Changed)
    changed = 0
    wanted = PIECE_EVENTS if limit is None else limit
    after: str | None = ""
    while after is not None and changed < wanted:
        piece = {"limit": min(wanted - changed, PIECE_EVENTS), "after": after}
        answer = yield from _post(settings, name, operation, {**given, **piece})
        page = decoded(answer.response, Changed)
        changed += page.changed
        after = page.next
    return Changed(changed=changed)
