"""Reading requests about groups: typed, bounded, and refused with a named code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from fencepost.http.messages import Request
from fencepost.protocol.acks import Ack, Failure, ReplayResult
from fencepost.protocol.groups import (
    POSITION_MAX,
    PRIORITY_MAX,
    Filter,
    FilterInvalid,
    GroupInvalid,
    GroupLimits,
    GroupSettings,
    check_group_name,
    check_settings,
    check_text,
    make_filter,
    within,
)
from fencepost.protocol.leases import Claim, Correlated, LeaseRef
from fencepost.protocol.limits import Limits
from fencepost.protocol.told import check_note
from fencepost.server.handlers import fields
from fencepost.server.handlers.fields import RefusedError, bad, check_path
from fencepost.server.handlers.parsing import lease_of
from fencepost.server.handlers.rendering import with_fields
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.store.group_contract import Operate, Operation, ParkEvents

TIME_MS_MAX = 2**53 - 1
STREAMS_DEFAULT = 10
EVENTS_DEFAULT = 10


class TargetBody(msgspec.Struct, forbid_unknown_fields=True):
    target: str
    source: str
    position: int
    lane: str | None = None
    priority: int | None = None
    note: str | None = None


class CorrelateBody(msgspec.Struct, forbid_unknown_fields=True):
    after: int
    until: int
    targets: list[TargetBody] = []


class ClaimBody(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    streams_max: int = STREAMS_DEFAULT
    events_max: int = EVENTS_DEFAULT
    lease_ms: int | None = None
    lane: str | None = None
    wait_ms: int = 0
    take: bool = False


class FailureBody(msgspec.Struct, forbid_unknown_fields=True):
    position: int
    error: str
    permanent: bool = False
    park: bool = False
    delay_ms: int | None = None


class ReplayedBody(msgspec.Struct, forbid_unknown_fields=True):
    position: int
    error: str | None = None


class _EndBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    token: str
    failure: FailureBody | None = None
    replayed: list[ReplayedBody] = []


class AckItemBody(_EndBody, kw_only=True):
    at: int | None = None


class LeaseBody(_EndBody, kw_only=True):
    """A lease of a commit, which must say how far the effects of the commit reach."""

    at: int


class AckBody(msgspec.Struct, forbid_unknown_fields=True):
    items: list[AckItemBody]
    claim: ClaimBody | None = None


class TokensBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[str]
    lease_ms: int | None = None


class FilterBody(msgspec.Struct, forbid_unknown_fields=True):
    target: str | None = None
    source: str | None = None
    blocked: bool | None = None
    lane: str | None = None


class OperateBody(msgspec.Struct, forbid_unknown_fields=True):
    targets: list[str] | None = None
    filter: FilterBody | None = None
    after: str = ""
    at: int | None = None
    until_ms: int | None = None
    priority: int | None = None


class EventBody(msgspec.Struct, forbid_unknown_fields=True):
    target: str
    position: int


class ParkBody(msgspec.Struct, forbid_unknown_fields=True):
    events: list[EventBody] | None = None
    filter: FilterBody | None = None
    limit: int = 100
    after: str = ""


BodyT = TypeVar("BodyT")


def parse(request: Request, kind: type[BodyT]) -> BodyT:
    """The body of a request as a typed record."""
    try:
        return msgspec.json.decode(request.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad("group_invalid", f"the body is not understood: {error}") from None
    except RecursionError:
        raise bad("group_invalid", "the body is nested too deeply") from None


def good(refused: GroupInvalid | FilterInvalid | None) -> None:
    """Raise the refusal, if there is one."""
    if isinstance(refused, GroupInvalid):
        raise bad("group_invalid", refused.detail)
    if isinstance(refused, FilterInvalid):
        raise bad("filter_invalid", refused.detail)


class Bodies:
    """The checks that need the limits."""

    def __init__(self, limits: Limits, groups: GroupLimits, tokens: LeaseTokens) -> None:
        self._limits = limits
        self._groups = groups
        self._tokens = tokens

    def name(self, raw: bytes) -> str:
        """The name of a group from its place in the URL."""
        name = raw.decode("latin-1")
        good(check_group_name(name, of_mesh=True))
        return name

    def settings(self, request: Request) -> GroupSettings:
        """What a group is made with."""
        settings = parse(request, GroupSettings)
        good(check_settings(settings, self._groups))
        return settings

    def correlated(self, body: CorrelateBody) -> list[Correlated]:
        """The targets of a correlation."""
        if len(body.targets) > self._groups.claim_events_max:
            raise limit_exceeded("claim_events_max", self._groups.claim_events_max)
        good(within("after", body.after, -1, POSITION_MAX))
        good(within("until", body.until, -1, POSITION_MAX))
        items = body.targets
        # Most of thousands of entries have texts that others have too.
        targets = {text: self.target(text) for text in {item.target for item in items}}
        sources = {text: self._source(text) for text in {item.source for item in items}}
        for lane in {item.lane for item in items if item.lane is not None}:
            good(check_text("lane", lane))
        for note in {item.note for item in items if item.note is not None}:
            good(check_note(_encodable(note)))
        for item in items:
            if not 0 <= item.position <= POSITION_MAX:
                good(within("position", item.position, 0, POSITION_MAX))
            if item.priority is not None:
                good(within("priority", item.priority, -PRIORITY_MAX, PRIORITY_MAX))
        return [
            Correlated(
                targets[item.target],
                sources[item.source],
                item.position,
                item.lane,
                item.priority,
                item.note,
            )
            for item in items
        ]

    def target(self, text: str) -> str:
        """The name of a target, which is written as a path."""
        if len(text.encode("utf-8", "replace")) > self._limits.path_bytes_max:
            raise bad("group_invalid", f"a target has at most {self._limits.path_bytes_max} bytes")
        return _encodable(check_path(text))

    def _source(self, text: str) -> str:
        made = make_filter(source=text)
        if isinstance(made, FilterInvalid):
            raise bad("group_invalid", made.detail)
        return _encodable(text)

    def claim(self, body: ClaimBody, lease_ms: int, *, share: float, cycle: int) -> Claim:
        """What a worker asks for; `lease_ms` is the group's."""
        groups = self._groups
        good(check_text("worker", _encodable(body.worker)))
        if body.lane is not None:
            good(check_text("lane", _encodable(body.lane)))
        if body.streams_max > groups.claim_streams_max:
            raise limit_exceeded("claim_streams_max", groups.claim_streams_max)
        if body.events_max > groups.claim_events_max:
            raise limit_exceeded("claim_events_max", groups.claim_events_max)
        good(within("streams_max", body.streams_max, 1, groups.claim_streams_max))
        good(within("events_max", body.events_max, 0, groups.claim_events_max))
        good(within("wait_ms", body.wait_ms, 0, TIME_MS_MAX))
        asked_ms = self.lease_ms(body.lease_ms, lease_ms)
        return Claim(body.worker, body.streams_max, asked_ms, body.lane, share, cycle, body.take)

    def lease_ms(self, asked: int | None, default: int) -> int:
        """How long a lease is to last."""
        if asked is None:
            return default
        good(within("lease_ms", asked, self._groups.lease_ms_min, self._groups.lease_ms_max))
        return asked

    def leases(self, group: str, tokens: Sequence[str]) -> list[LeaseRef]:
        """The leases that tokens speak of, all of the group that the URL names."""
        if len(tokens) > self._groups.claim_streams_max:
            raise limit_exceeded("claim_streams_max", self._groups.claim_streams_max)
        found = [lease_of(token, self._tokens) for token in tokens]
        for ref in found:
            if ref.group != group:
                raise bad("lease_invalid", "a lease token is of another group than the URL names")
        return found

    def acks(self, group: str, body: AckBody) -> list[tuple[LeaseRef, Ack]]:
        """The items of an ack."""
        refs = self.leases(group, [item.token for item in body.items])
        items = zip(refs, body.items, strict=True)
        return [(ref, ack_of(ref, item, self._groups)) for ref, item in items]

    # Operators

    def operation(self, group: str, operation: Operation, body: OperateBody) -> Operate:
        """What an operator asks for."""
        if (body.targets is None) == (body.filter is None):
            raise bad("filter_invalid", "give targets or filter, one of them; {} matches all")
        if body.targets is not None and len(body.targets) > self._groups.claim_streams_max:
            raise limit_exceeded("claim_streams_max", self._groups.claim_streams_max)
        targets = None if body.targets is None else [self.target(text) for text in body.targets]
        if body.at is not None:
            good(within("at", body.at, -1, POSITION_MAX))
        if operation == "defer":
            if body.until_ms is None:
                raise bad("group_invalid", "defer needs until_ms")
            good(within("until_ms", body.until_ms, 0, TIME_MS_MAX))
        if operation == "prioritize":
            if body.priority is None:
                raise bad("group_invalid", "prioritize needs priority")
            good(within("priority", body.priority, -PRIORITY_MAX, PRIORITY_MAX))
        return Operate(
            group,
            operation,
            targets,
            filter_of(body.filter),
            _encodable(body.after),
            body.at,
            body.until_ms or 0,
            body.priority or 0,
        )

    def parking(self, group: str, body: ParkBody, *, replay: bool) -> ParkEvents:
        """Which events to set aside, or to give out again."""
        if (body.events is None) == (body.filter is None):
            raise bad("filter_invalid", "give events or filter, one of them; {} matches all")
        if body.events is not None and len(body.events) > self._groups.claim_streams_max:
            raise limit_exceeded("claim_streams_max", self._groups.claim_streams_max)
        good(within("limit", body.limit, 1, self._groups.claim_streams_max))
        events = None
        if body.events is not None:
            for event in body.events:
                good(within("position", event.position, 0, POSITION_MAX))
            events = [(self.target(event.target), event.position) for event in body.events]
        after = place_of(_encodable(body.after)) if replay else (_encodable(body.after), -1)
        return ParkEvents(group, replay, events, filter_of(body.filter), body.limit, after=after)


def ack_of(ref: LeaseRef, item: AckItemBody | LeaseBody, limits: GroupLimits) -> Ack:
    """How a lease ends, in a request to ack or in a commit."""
    failure = item.failure
    failed = None
    if failure is not None:
        if failure.delay_ms is not None and not 0 <= failure.delay_ms <= TIME_MS_MAX:
            raise bad("ack_invalid", "delay_ms is an integer from 0 on")
        failed = Failure(
            failure.position,
            error_text(_encodable(failure.error), limits),
            failure.permanent,
            failure.park,
            failure.delay_ms,
        )
    if len(item.replayed) > limits.claim_events_max:
        raise limit_exceeded("claim_events_max", limits.claim_events_max)
    replayed = [replay_result(r.position, r.error, limits) for r in item.replayed]
    return Ack(ref.number, item.at, failed, replayed)


def place_of(after: str) -> tuple[str, int]:
    """The target and the position to go on after; nothing: the beginning."""
    if not after:
        return "", -1
    target, sign, position = after.rpartition("@")
    if not sign or not (position.isascii() and position.isdecimal()) or len(position) > 16:
        raise bad("after_invalid", "after is the next of the page before")
    return target, int(position)


def filter_of(body: FilterBody | None) -> Filter:
    """A filter; without one it matches every target."""
    if body is None:
        return Filter()
    fields: dict[str, Any] = msgspec.structs.asdict(body)
    for value in fields.values():
        if isinstance(value, str):
            _encodable(value)
    made = make_filter(**fields)
    if isinstance(made, FilterInvalid):
        raise bad("filter_invalid", made.detail)
    return made


def _encodable(text: str) -> str:
    """Text that a database can keep."""
    if "\0" in text:
        _refuse_nul()
    return text


def _refuse_nul() -> NoReturn:
    raise bad("group_invalid", "texts have no NUL")


def replay_result(position: int, error: str | None, limits: GroupLimits) -> ReplayResult:
    """How a replayed event ended, as a request says it."""
    if not 0 <= position <= fields.INTEGER_MAX:
        raise bad("ack_invalid", "the position of a replayed event is an integer from 0 to 2^53-1")
    return ReplayResult(position, None if error is None else error_text(error, limits))


def limit_exceeded(limit: str, maximum: int) -> RefusedError:
    """A 413 that names the limit."""
    detail = f"the request goes past {limit}, which is {maximum}"
    error = RefusedError(413, "limit_exceeded", "Limit exceeded", detail)
    error.response = with_fields(error.response, limit=limit)
    return error


def error_text(error: str, limits: GroupLimits) -> str:
    """The error of a failure, which is kept and shown."""
    if "\0" in error:
        raise bad("ack_invalid", "the error of a failure has no NUL")
    if len(error.encode()) > limits.failure_bytes_max:
        raise limit_exceeded("failure_bytes_max", limits.failure_bytes_max)
    return error
