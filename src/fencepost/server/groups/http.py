"""The handlers of `/v1/groups`.

Grants on a group are grants on the path `__groups/NAME`: `claim` to work, `read` to look, `create`,
`delete`, and `admin` to operate. A claim passes over targets of whose source the principal may not
read everything; events are never left out of a lease for want of a grant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fencepost.clock import Clock
from fencepost.http.messages import Answer, Request, Response, StreamingResponse
from fencepost.protocol.globs import Glob
from fencepost.protocol.grants import ADMIN, CLAIM, CREATE, DELETE, GROUPS, READ
from fencepost.protocol.groups import Group, GroupMade
from fencepost.server import access
from fencepost.server.groups import answers
from fencepost.server.groups.answers import json_answer, raw_answer, refusal
from fencepost.server.groups.bodies import (
    AckBody,
    Bodies,
    ClaimBody,
    CorrelateBody,
    OperateBody,
    ParkBody,
    TokensBody,
    parse,
    place_of,
)
from fencepost.server.groups.feed import Feed
from fencepost.server.groups.gauges import Gauges
from fencepost.server.groups.working import Working
from fencepost.server.handlers import parsing
from fencepost.server.handlers.fields import bad
from fencepost.server.handlers.querying import Parameters, glob_of, list_limit
from fencepost.server.handlers.rendering import BROWSER, BROWSER_BLOCK
from fencepost.server.handlers.waiting import WaiterLimit
from fencepost.server.lease_tokens import LeaseTokens
from fencepost.server.settings import ServerSettings
from fencepost.store.contract import Store
from fencepost.store.group_contract import (
    AckDone,
    AckLeases,
    Changed,
    ClaimDone,
    ClaimTargets,
    Correlate,
    CorrelationDone,
    DeleteGroup,
    EventSpan,
    GroupDeleted,
    GroupReads,
    MakeGroup,
    Operation,
    RenewDone,
    RenewLeases,
    SpanEvents,
    TargetMissing,
)

STATES = ("idle", "ready", "leased", "deferred", "blocked")
PARK_PIECE = 100
"""Events that are looked up together before they are parked."""
SCAN_ROWS = 1_000
"""Targets that one page of a list looks through for those that it shows."""


def is_inbox(name: str) -> bool:
    """Whether a group is that of a member's inbox."""
    return name.startswith("mesh:") and name.split(":")[2] == "inbox"


class Groups:
    """The handlers of groups."""

    def __init__(
        self,
        store: Store,
        reads: GroupReads,
        clock: Clock,
        settings: ServerSettings,
        tokens: LeaseTokens,
        waiters: WaiterLimit,
        *,
        is_shared: bool,
    ) -> None:
        self._waiters = waiters
        waiters.include(lambda: self.waiters_count)
        self._reads = reads
        self._clock = clock
        self._settings = settings
        self._limits = settings.limits
        self._groups = settings.groups
        self._tokens = tokens
        self._bodies = Bodies(settings.limits, settings.groups, tokens)
        self._feed = Feed()
        self.gauges = Gauges(reads, clock)
        self.working = Working(store, reads, clock, self._feed, is_shared=is_shared)

    @property
    def waiters_count(self) -> int:
        """Claims and feeds that wait."""
        return self.working.waiters_count + self._feed.listeners_count

    def stop_waiting(self) -> None:
        """Answer every claim that waits: the server is going down."""
        self.working.stop_waiting()
        self._feed.stop()

    # Groups themselves

    async def put(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, CREATE)
        settings = self._bodies.settings(request)
        if ":" in name:
            raise bad("group_invalid", "names with : are for the groups of meshes")
        owner = access.name_of(request.principal)
        outcome = await self.working.work(MakeGroup(name, settings, owner))
        if not isinstance(outcome, GroupMade):
            return refusal(name, outcome)
        if outcome.fresh:
            self.working.forget(name)
        return json_answer(answers.shown_group(outcome.group), 201 if outcome.fresh else 200)

    async def show(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, READ)
        Parameters(request, once=(), repeatable=())
        group = await self._reads.find(name)
        if group is None:
            return answers.group_missing(name)
        return json_answer(answers.shown_group(group))

    async def delete(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, DELETE)
        outcome = await self.working.work(DeleteGroup(name))
        if not isinstance(outcome, GroupDeleted):
            return refusal(name, outcome)
        self.working.forget(name)
        return Response(204, [], b"", BROWSER_BLOCK)

    async def list(self, request: Request) -> Answer:
        parameters = Parameters(request, once=("match", "after", "limit"), repeatable=())
        match = parameters.get("match")
        glob = None if match is None else glob_of(match, "match", self._limits)
        limit = list_limit(parameters, self._limits)
        principal = request.principal
        shown: list[Group] = []
        after = self._after(parameters)
        while len(shown) <= limit:
            page = await self._reads.groups(after, SCAN_ROWS)
            shown += [
                group
                for group in page
                if (glob is None or glob.matches(group.name))
                and (principal is None or principal.may(READ, f"{GROUPS}/{group.name}"))
            ]
            if len(page) < SCAN_ROWS:
                break
            after = page[-1].name
        more = len(shown) > limit
        shown = shown[:limit]
        following = shown[-1].name if more else None
        return json_answer({"groups": [answers.shown_group(g) for g in shown], "next": following})

    # Workers

    async def correlate(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, CLAIM)
        body = parse(request, CorrelateBody)
        found = self._bodies.correlated(body)
        outcome = await self.working.work(Correlate(name, body.after, body.until, found))
        if not isinstance(outcome, CorrelationDone):
            return refusal(name, outcome)
        return json_answer({"correlated": outcome.group.watermark})

    async def claim(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, CLAIM)
        body = parse(request, ClaimBody)
        claim = await self._claim(request, name, body)
        if isinstance(claim, Response):
            return claim
        outcome = await self.working.claim(
            claim, wait_ms=self._wait_ms(body), principal=request.principal
        )
        if not isinstance(outcome, ClaimDone):
            return refusal(name, outcome)
        return raw_answer(b"{%b}" % await self._leases(outcome, body))

    async def ack(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, CLAIM)
        body = parse(request, AckBody)
        items = self._bodies.acks(name, body)
        claim, more = None, False
        if body.claim is not None:
            found = await self._claim(request, name, body.claim)
            if isinstance(found, Response):
                return found
            claim = found
            known = await self.working.find(name)
            more = known is not None and await self.working.correlate(known)
        outcome = await self.working.work(AckLeases(name, items, self._clock.random(), claim))
        if not isinstance(outcome, AckDone):
            return refusal(name, outcome)
        shown = answers.encode(
            [
                {"target": item.target, "outcome": item.outcome, "at": item.at}
                for item in outcome.items
            ]
        )
        if body.claim is None or claim is None:
            return raw_answer(b'{"items":%b}' % shown)
        claimed = outcome.claimed
        assert claimed is not None
        # An inbox that another worker has by now is not taken back by waiting for it.
        if not claimed.leases and not body.claim.take and (more or body.claim.wait_ms):
            waited = await self.working.claim(
                claim, wait_ms=self._wait_ms(body.claim), principal=request.principal
            )
            # The acks are done, whatever comes of waiting for more work.
            claimed = waited if isinstance(waited, ClaimDone) else claimed
        leases = await self._leases(claimed, body.claim)
        return raw_answer(b'{"items":%b,%b}' % (shown, leases))

    async def renew(self, request: Request, raw: bytes) -> Answer:
        return await self._renew(request, raw, releases=False)

    async def release(self, request: Request, raw: bytes) -> Answer:
        return await self._renew(request, raw, releases=True)

    async def _renew(self, request: Request, raw: bytes, *, releases: bool) -> Answer:
        name = self._name(request, raw, CLAIM)
        body = parse(request, TokensBody)
        refs = self._bodies.leases(name, body.tokens)
        lease_ms = None
        if not releases:
            known = await self.working.find(name)
            if known is None:
                return answers.group_missing(name)
            lease_ms = self._bodies.lease_ms(body.lease_ms, known.group.settings.lease_ms)
        outcome = await self.working.work(RenewLeases(name, refs, lease_ms))
        if not isinstance(outcome, RenewDone):
            return refusal(name, outcome)
        word = "released" if releases else "renewed"
        items: list[dict[str, Any]] = []
        for ref, until_ms in zip(refs, outcome.until_ms, strict=True):
            item: dict[str, Any] = {"target": ref.target}
            item["outcome"] = "lost" if until_ms is None else word
            if not releases:
                item["lease_until_ms"] = until_ms
            items.append(item)
        return json_answer({"items": items})

    async def _claim(self, request: Request, name: str, body: ClaimBody) -> ClaimTargets | Response:
        if body.wait_ms and (too_many := self._waiters.refusal(request)) is not None:
            return too_many
        known = await self.working.find(name)
        if known is None:
            return answers.group_missing(name)
        if body.take and not is_inbox(name):
            raise bad("group_invalid", "take is for the groups of inboxes: mesh:MESH:inbox:MEMBER")
        known.cycle += 1
        claim = self._bodies.claim(
            body, known.group.settings.lease_ms, share=known.share, cycle=known.cycle
        )
        owner = access.name_of(request.principal)
        return ClaimTargets(name, claim, _reads_all_of(request), owner)

    def _wait_ms(self, body: ClaimBody) -> int:
        return min(body.wait_ms, self._settings.long_poll_ms)

    async def _leases(self, done: ClaimDone, body: ClaimBody) -> bytes:
        spans: list[SpanEvents] = await self.working.events(
            done, body.events_max, self._groups.claim_bytes_max
        )
        return answers.leases_body(done, spans, self._tokens)

    # Operators

    async def unblock(self, request: Request, raw: bytes) -> Answer:
        return await self._operate(request, raw, "unblock")

    async def reset(self, request: Request, raw: bytes) -> Answer:
        return await self._operate(request, raw, "reset")

    async def defer(self, request: Request, raw: bytes) -> Answer:
        return await self._operate(request, raw, "defer")

    async def prioritize(self, request: Request, raw: bytes) -> Answer:
        return await self._operate(request, raw, "prioritize")

    async def skip(self, request: Request, raw: bytes) -> Answer:
        return await self._operate(request, raw, "skip")

    async def _operate(self, request: Request, raw: bytes, operation: Operation) -> Answer:
        name = self._name(request, raw, ADMIN)
        body = parse(request, OperateBody)
        asked = self._bodies.operation(name, operation, body)
        if body.at is not None and body.at > await self._reads.head():
            raise bad("after_beyond_head", f"at is {body.at}, which lies behind the log's head")
        principal, reason = self._operator(request)
        outcome = await self.working.work(asked._replace(principal=principal, reason=reason))
        if not isinstance(outcome, Changed):
            return refusal(name, outcome)
        return json_answer({"changed": len(outcome.targets), "next": outcome.next})

    async def park(self, request: Request, raw: bytes) -> Answer:
        return await self._set_aside(request, raw, replay=False)

    async def replay(self, request: Request, raw: bytes) -> Answer:
        return await self._set_aside(request, raw, replay=True)

    async def _set_aside(self, request: Request, raw: bytes, *, replay: bool) -> Answer:
        name = self._name(request, raw, ADMIN)
        asked = self._bodies.parking(name, parse(request, ParkBody), replay=replay)
        if not replay and (missing := await self._not_there(name, asked.events or ())):
            return refusal(name, TargetMissing(missing))
        principal, reason = self._operator(request)
        outcome = await self.working.work(asked._replace(principal=principal, reason=reason))
        if not isinstance(outcome, Changed):
            return refusal(name, outcome)
        return json_answer({"changed": outcome.events, "next": outcome.next})

    async def _not_there(self, name: str, events: Sequence[tuple[str, int]]) -> str | None:
        """The first of some events that its target does not have; None when there is none.

        What is parked must be an event, or the number of another stream's event is set aside for
        the one that is meant, and can never be given out again. Of a computed target it must be one
        that it was told of, as far as that is known: what it was told of next says so. Unknown
        targets are told later.
        """
        group = await self._reads.find(name) if events else None
        if group is None:
            return None
        rows = {target: await self._reads.target(group.id, target) for target, _ in events}
        asked = [(row, position) for target, position in events if (row := rows[target])]
        spans = [EventSpan(row.source, position - 1, position) for row, position in asked]
        if group.settings.targets == "computed":
            spans = [
                span._replace(until=max(position, row.work_to), told=(group.id, row.target))
                for span, (row, position) in zip(spans, asked, strict=True)
            ]
        names, bytes_max = group.settings.names, self._groups.claim_bytes_max
        for at in range(0, len(spans), PARK_PIECE):
            piece = spans[at : at + PARK_PIECE]
            found = await self._reads.events(piece, names, events_max=1, bytes_max=bytes_max)
            for (row, position), answer in zip(asked[at:], found, strict=False):
                found_at = next((event.position for event in answer.events), answer.read_to + 1)
                if found_at > position:
                    return f"{row.target}@{position}"
        return None

    def _operator(self, request: Request) -> tuple[str | None, str]:
        actor = access.actor_of(request, GROUPS)
        return (None, "") if actor is None else (actor.name, actor.reason)

    # Looking

    async def streams(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, READ)
        parameters = Parameters(
            request, once=("match", "state", "lane", "after", "limit"), repeatable=()
        )
        state = parameters.get("state")
        if state is not None and state not in STATES:
            raise bad("filter_invalid", f"state is one of {', '.join(STATES)}")
        lane = parameters.get("lane")
        match = parameters.get("match")
        glob = None if match is None else glob_of(match, "match", self._limits)
        limit = list_limit(parameters, self._limits)
        group = await self._reads.find(name)
        if group is None:
            return answers.group_missing(name)
        now_ms = self._clock.now_ms()
        shown: list[dict[str, object]] = []
        after = self._after(parameters)
        page = await self._reads.targets(group.id, after, SCAN_ROWS, blocked=state == "blocked")
        following = None
        for row in page:
            if len(shown) == limit:
                break
            after = row.target
            if (
                (glob is None or glob.matches(row.target))
                and lane in (None, row.lane)
                and state in (None, answers.state_of(row, now_ms))
            ):
                shown.append(answers.shown_target(row, now_ms))
        if len(page) == SCAN_ROWS or (page and after != page[-1].target):
            following = after
        return json_answer({"streams": shown, "next": following})

    async def parked(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, READ)
        parameters = Parameters(request, once=("match", "after", "limit"), repeatable=())
        match = parameters.get("match")
        glob = None if match is None else glob_of(match, "match", self._limits)
        limit = list_limit(parameters, self._limits)
        place = place_of(self._after(parameters))
        group = await self._reads.find(name)
        if group is None:
            return answers.group_missing(name)
        page = await self._reads.parked(group.id, place, limit)
        following = f"{page[-1].target}@{page[-1].position}" if len(page) == limit else None
        events = [e for e in page if glob is None or glob.matches(e.target)]
        return json_answer(
            {"parked": [answers.shown_parked(event) for event in events], "next": following}
        )

    async def workers(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, READ)
        parameters = Parameters(request, once=("after", "limit"), repeatable=())
        limit = list_limit(parameters, self._limits)
        group = await self._reads.find(name)
        if group is None:
            return answers.group_missing(name)
        page = await self._reads.workers(group.id, self._after(parameters), limit)
        following = page[-1].worker if len(page) == limit else None
        return json_answer({"workers": [row._asdict() for row in page], "next": following})

    async def stats(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, READ)
        Parameters(request, once=(), repeatable=())
        group = await self._reads.find(name)
        if group is None:
            return answers.group_missing(name)
        lag = await self.gauges.lag_of(group)
        shown = answers.shown_stats(lag.lanes, group, lag.told, lag.head, lag.at_ms)
        return json_answer(shown)

    async def events(self, request: Request, raw: bytes) -> Answer:
        name = self._name(request, raw, READ)
        Parameters(request, once=(), repeatable=())
        if (too_many := self._waiters.refusal(request)) is not None:
            return too_many
        if await self._reads.find(name) is None:
            return answers.group_missing(name)
        headers = [
            (b"Content-Type", b"text/event-stream"),
            (b"Cache-Control", b"no-cache"),
            *BROWSER,
        ]
        if request.method == "HEAD":
            return Response(200, headers)
        return StreamingResponse(
            200, headers, self._feed.follow(name, self._settings.sse_ms / 1000)
        )

    def _name(self, request: Request, raw: bytes, verb: int) -> str:
        """The group that the URL names, if the principal may do this to it."""
        if request.repeated:
            parsing.refuse_repeated(request)
        name = self._bodies.name(raw)
        if request.principal is not None:
            access.require(request.principal, verb, f"{GROUPS}/{name}")
        return name

    @staticmethod
    def _after(parameters: Parameters) -> str:
        after = parameters.get("after") or ""
        if "\0" in after:
            raise bad("after_invalid", "after has no NUL")
        return after


def _reads_all_of(request: Request) -> Callable[[str], bool] | None:
    """Whether the principal may read the whole of a source; None: it may read everything."""
    principal = request.principal
    if principal is None or principal.is_admin:
        return None

    def reads_all_of(source: str) -> bool:
        glob = Glob(source)
        return principal.may_read(source) if glob.is_exact else principal.may_read_all_of(glob)

    return reads_all_of
