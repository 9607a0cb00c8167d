"""Subscriptions: durable cursors that wake a worker, as records and the rules that move them.

A subscription watches streams through links, each with the offset up to which its worker is done.
As long as some link is behind its stream there is pending work, and pending work means a wake: a
number (`generation`) and a name (`wake_id`) that everything the worker then says must carry. There
is at most one wake, so a worker that was given up on and comes back is told so, never obeyed.

The life of a wake, with what is set in each phase:

    idle       no `wake_id`
    due        `next_attempt_ms`: to be delivered (webhook) or announced (pull-wake), perhaps again
    announced  neither: a pull-wake that waits for a worker to claim it
    leased     `lease_until_ms`: a worker is at it, and time is running

`decide_*` functions take a `Wake` and return the next one or why there is none. They never change
anything; the engine stores what they return. Acks only ever move a cursor forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

from fencepost.protocol.globs import Glob
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.timing import Backoff, delay_ms, fence_fits, has_passed

WEBHOOK: Literal["webhook"] = "webhook"
PULL_WAKE: Literal["pull-wake"] = "pull-wake"
Kind = Literal["webhook", "pull-wake"]

LEASE_MS_DEFAULT = 30_000

BACKOFF_MS_MIN = 1_000
BACKOFF_MS_MAX = 60_000
_BACKOFF = Backoff("exponential", BACKOFF_MS_MIN, BACKOFF_MS_MAX, jitter=0.2)


class Config(NamedTuple):
    """What a client asked for, normalised: fields that its type does not use are None."""

    type: Kind
    pattern: str | None
    streams: tuple[str, ...]  # sorted, each once
    webhook_url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None

    def canonical(self) -> bytes:
        """The same bytes for the same configuration, whatever order it was written in."""
        return json.dumps(self._asdict(), sort_keys=True, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """What tells one configuration from another when it is sent again."""
        return hashlib.sha256(self.canonical()).digest()


def normalised(
    kind: Kind,
    *,
    pattern: str | None,
    streams: Iterable[str],
    webhook_url: str | None,
    wake_stream: str | None,
    lease_ttl_ms: int | None,
    description: str | None,
) -> Config:
    """A configuration in its one form."""
    return Config(
        kind,
        pattern,
        tuple(sorted(set(streams))),
        webhook_url if kind == WEBHOOK else None,
        wake_stream if kind == PULL_WAKE else None,
        LEASE_MS_DEFAULT if lease_ttl_ms is None else lease_ttl_ms,
        description,
    )


class Seen(NamedTuple):
    """A stream as a wake showed it. The incarnation tells it from a later one of the same name."""

    path: str
    stream_id: int
    tail: Offset


class Wake(NamedTuple):
    """Where a subscription's delivery stands; see the module's table of phases."""

    generation: int = 0
    wake_id: str | None = None
    holder: str | None = None
    lease_until_ms: int | None = None
    attempts: int = 0  # failed ones, since the last that worked
    next_attempt_ms: int | None = None
    snapshot: tuple[Seen, ...] = ()

    @property
    def is_idle(self) -> bool:
        return self.wake_id is None

    @property
    def status(self) -> Literal["active", "failed"]:
        """`failed` while a retry is scheduled."""
        return "failed" if self.attempts and self.next_attempt_ms is not None else "active"

    def ended(self) -> Wake:
        """No wake any more; only the generation stays, so that it never repeats."""
        return Wake(self.generation)

    def expired(self, now_ms: int) -> bool:
        """Whether the worker's time is over. While an attempt is due, none is running."""
        return (
            self.wake_id is not None
            and self.next_attempt_ms is None
            and has_passed(self.lease_until_ms, now_ms)
        )

    def due_ms(self) -> int | None:
        """When the engine has to act without a request, or None."""
        if self.wake_id is None:
            return None
        return self.lease_until_ms if self.next_attempt_ms is None else self.next_attempt_ms


IDLE = Wake()
"""A subscription that was never woken."""


class Link:
    """A stream that a subscription watches: how far its worker is, and how far the stream is."""

    __slots__ = ("acked", "explicit", "glob", "path", "stream_id", "tail")

    def __init__(
        self,
        path: str,
        *,
        explicit: bool,
        glob: bool,
        stream_id: int | None = None,
        acked: Offset = START,
        tail: Offset = START,
    ) -> None:
        self.path = path
        self.explicit = explicit
        self.glob = glob
        self.stream_id = stream_id  # None while there is no stream at the path
        self.acked = acked
        self.tail = tail

    @property
    def is_pending(self) -> bool:
        return self.stream_id is not None and self.tail.bytes > self.acked.bytes

    @property
    def type(self) -> Literal["explicit", "glob"]:
        """How the link is shown: `explicit` wins."""
        return "explicit" if self.explicit else "glob"


class Subscription:
    """A subscription as decided so far. `id` is its incarnation, `name` what clients call it."""

    __slots__ = (
        "base_url",
        "config",
        "created_ms",
        "glob",
        "id",
        "links",
        "may_read",
        "name",
        "owner",
        "pending",
        "wake",
    )

    def __init__(
        self,
        subscription_id: int,
        name: str,
        config: Config,
        *,
        base_url: str,
        created_ms: int,
        wake: Wake = IDLE,
        owner: str = "",
    ) -> None:
        self.id = subscription_id
        self.name = name
        self.config = config
        self.glob = None if config.pattern is None else Glob(config.pattern)
        self.base_url = base_url
        self.created_ms = created_ms
        self.wake = wake
        self.owner = owner  # the principal that made it; empty without authorization
        self.may_read: Callable[[str], bool] | None = None  # what its owner may; None: everything
        self.links: dict[str, Link] = {}
        self.pending: dict[str, None] = {}  # paths behind their stream, the longest waiting first

    def matches(self, path: str) -> bool:
        """Whether the pattern takes `path` in. A subscription is never woken by its own wakes."""
        return (
            self.glob is not None
            and path != self.config.wake_stream
            and self.glob.matches(path)
            and self.shows(path)
        )

    def restrict(self, may_read: Callable[[str], bool]) -> None:
        """Let it see what its owner may read by now; it forgets the links to other streams.

        Their cursors stay on disk: the grant may come back.
        """
        self.may_read = may_read
        for path in [path for path in self.links if not may_read(path)]:
            del self.links[path]
            self.pending.pop(path, None)

    def shows(self, path: str) -> bool:
        """Whether its owner may read a stream: a wake tells of no others."""
        return self.may_read is None or self.may_read(path)

    def note(self, link: Link) -> None:
        """Take down whether `link` is pending; one that still is goes to the end of the queue."""
        self.pending.pop(link.path, None)
        if link.is_pending:
            self.pending[link.path] = None

    def snapshot(self, streams_max: int) -> tuple[Seen, ...]:
        """The pending streams to show in a wake, the longest waiting first."""
        seen: list[Seen] = []
        for path in self.pending:
            if len(seen) == streams_max:
                break
            link = self.links[path]
            assert link.stream_id is not None
            seen.append(Seen(path, link.stream_id, link.tail))
        return tuple(seen)


# Outcomes


class Fenced(NamedTuple):
    """The wake that was named is not the current one: stop, another worker has the work."""

    generation: int


class AlreadyClaimed(NamedTuple):
    """Another worker has the lease."""

    holder: str
    generation: int


class NothingPending(NamedTuple):
    """There is no work to claim."""


class Claimed(NamedTuple):
    """The lease is granted. `fresh` when the claim itself made the wake, and none was announced."""

    wake: Wake
    fresh: bool


class BadAck(NamedTuple):
    """An ack names a place that its stream does not have; nothing of the request was applied."""

    path: str
    detail: str


class Ack(NamedTuple):
    """A worker is done with a stream up to and including an offset."""

    path: str
    offset: Offset


# Rules


def decide_wake(wake: Wake, *, wake_id: str, snapshot: tuple[Seen, ...], now_ms: int) -> Wake:
    """The next wake of an idle subscription that has pending work."""
    assert wake.is_idle, "there is at most one wake"
    assert snapshot, "a wake is about something"
    return Wake(wake.generation + 1, wake_id, next_attempt_ms=now_ms, snapshot=snapshot)


def decide_announced(wake: Wake) -> Wake:
    """The wake event is in the wake stream: wait for a claim."""
    return wake._replace(attempts=0, next_attempt_ms=None)


def decide_again(wake: Wake, *, now_ms: int) -> Wake:
    """There is a reason to try at once what is scheduled for later, or was done in vain."""
    return wake._replace(next_attempt_ms=now_ms)


def decide_delivered(wake: Wake, *, started_ms: int, lease_ttl_ms: int) -> Wake:
    """The webhook took the wake and will call back; its lease runs since the attempt began.

    A callback may have come before the answer did and moved the lease further already.
    """
    until_ms = max(started_ms + lease_ttl_ms, wake.lease_until_ms or 0)
    return wake._replace(attempts=0, next_attempt_ms=None, lease_until_ms=until_ms)


def decide_failed(wake: Wake, *, now_ms: int, random: float) -> Wake:
    """The attempt failed: the same wake is tried again later."""
    attempts = wake.attempts + 1
    return wake._replace(
        attempts=attempts,
        next_attempt_ms=now_ms + backoff_ms(attempts, random),
        lease_until_ms=None,
    )


def backoff_ms(attempts: int, random: float) -> int:
    """How long to wait after so many failures in a row: 1 s, doubling to 60 s, jittered by 20%."""
    return delay_ms(_BACKOFF, attempts, random, floor_ms=BACKOFF_MS_MIN)


def decide_claim(
    wake: Wake,
    *,
    worker: str,
    wake_id: str,
    snapshot: tuple[Seen, ...],
    lease_ttl_ms: int,
    now_ms: int,
) -> Claimed | AlreadyClaimed | NothingPending:
    """Who gets the lease. A worker need not have seen the wake event, pending work is enough."""
    if wake.holder is not None and not wake.expired(now_ms):
        return AlreadyClaimed(wake.holder, wake.generation)
    if not snapshot:
        return NothingPending()
    # A lease that ran out takes its generation with it: its old holder must not fit the new one.
    fresh = wake.is_idle or wake.holder is not None
    generation = wake.generation + 1 if fresh else wake.generation
    name = wake_id if fresh else wake.wake_id
    return Claimed(Wake(generation, name, worker, now_ms + lease_ttl_ms, snapshot=snapshot), fresh)


def check_fence(
    wake: Wake, *, token_generation: int, generation: int, wake_id: str, now_ms: int
) -> Fenced | None:
    """Whether a worker may still speak: token, generation and wake must all be the current ones."""
    current = (
        wake.wake_id is not None
        and wake.wake_id == wake_id
        and fence_fits(wake.generation, generation, token_generation)
        and not wake.expired(now_ms)
    )
    return None if current else Fenced(wake.generation)


def decide_acks(
    links: Mapping[str, Link], snapshot: Iterable[Seen], acks: Iterable[Ack]
) -> dict[str, Offset] | BadAck:
    """How far each cursor moves, or why none does.

    A stream that is no longer linked, or that was deleted and made again since the wake, has
    nothing to move and is passed over: the worker could not know. A place past the tail is refused,
    because it would hide messages that no worker has seen.
    """
    incarnations = {seen.path: seen.stream_id for seen in snapshot}
    moved: dict[str, Offset] = {}
    for path, offset in acks:
        link = links.get(path)
        if link is None or link.stream_id is None:
            continue
        if incarnations.get(path, link.stream_id) != link.stream_id:
            continue
        if offset.bytes > link.tail.bytes or (
            offset.bytes == link.tail.bytes and offset != link.tail
        ):
            return BadAck(
                path, f"{offset} is not an offset of this stream, which ends at {link.tail}"
            )
        if offset.bytes > moved.get(path, link.acked).bytes:
            moved[path] = offset
    return moved


def snapshot_acks(snapshot: Iterable[Seen]) -> list[Ack]:
    """What `{"done": true}` acknowledges: everything that the wake showed."""
    return [Ack(seen.path, seen.tail) for seen in snapshot]


def decide_heartbeat(wake: Wake, *, lease_ttl_ms: int, now_ms: int) -> Wake:
    """The worker is alive: its lease runs from now, and no retry of the delivery is needed."""
    return wake._replace(lease_until_ms=now_ms + lease_ttl_ms, attempts=0, next_attempt_ms=None)
