"""Whatever happens in whatever order, pending work is not lost and no generation has two holders.

Hypothesis makes up sequences of appends, deletions, claims, acks, releases, passing time, restarts
and failed commits. They run on a real store in a real file; beside it a model of a few lines says
what must be true. A failing sequence is printed in its shortest form.
"""

import asyncio
import json
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fencepost.protocol.appends import Append
from fencepost.protocol.batches import Malformed, json_batch
from fencepost.protocol.creates import Create
from fencepost.protocol.offsets import Offset
from fencepost.protocol.subscriptions import Ack, Claimed, Subscription
from fencepost.server.subscriptions.engine import Engine
from fencepost.server.subscriptions.registry import Acked, WakeName
from tests.integration.subscriptions_support import Opened, SimClock, opened, pull_config

STREAMS = ["events/a", "events/b", "events/c"]
LEASE_MS = 5_000

streams = st.sampled_from(STREAMS)
workers = st.sampled_from(["ann", "bob"])
# Mostly the newest claim speaks, at times one that is long over.
speakers = st.sampled_from([0, 0, 0, 0, 1, 2])
# What moves the work along is offered more often than what disturbs it, or nothing would get done.
step = st.one_of(
    st.tuples(st.just("append"), streams),
    st.tuples(st.just("append"), streams),
    st.tuples(st.just("append"), streams),
    st.tuples(st.just("claim"), workers),
    st.tuples(st.just("claim"), workers),
    st.tuples(st.just("claim"), workers),
    st.tuples(st.just("ack"), speakers, streams, st.booleans()),
    st.tuples(st.just("ack all"), speakers, st.booleans()),
    st.tuples(st.just("ack all"), speakers, st.booleans()),
    st.tuples(st.just("release"), speakers),
    st.tuples(st.just("delete"), streams),
    st.tuples(st.just("wait"), st.sampled_from([1, LEASE_MS // 2, LEASE_MS]), st.booleans()),
    st.tuples(st.just("restart")),
    st.tuples(st.just("spoil")),
)
steps = st.lists(step, min_size=10, max_size=30)

A, ANN, BOB = STREAMS[0], "ann", "bob"


class Run:
    """The real thing and the model, side by side."""

    def __init__(self, on: Opened, clock: SimClock) -> None:
        self.on = on
        self.clock = clock
        self.tails: dict[str, Offset] = {}
        self.acked: dict[str, Offset] = {}
        self.claims: list[tuple[WakeName, dict[str, Offset]]] = []
        self.spoilt = False

    @property
    def engine(self) -> Engine:
        return self.on.subscriptions.engine

    @property
    def subscription(self) -> Subscription:
        found = self.engine.find("s")
        assert found is not None
        return found

    async def step(self, step: tuple[object, ...]) -> None:
        kind, *values = step
        if kind == "spoil":
            self.spoilt = True
            return
        if kind == "wait":
            self.clock.ms += int(str(values[0]))
            if values[1]:  # else the timer is late, as timers are
                self.engine.fire()
                await self.on.store.commits.settled()
            return
        tails, acked, claims = dict(self.tails), dict(self.acked), list(self.claims)
        self.decide(str(kind), values)
        if self.spoilt:
            self.spoilt = False
            group = self.on.store.commits.group
            group.statements.append(("INSERT INTO nowhere VALUES (1)", ()))
            assert await self.on.store.durable() is not None
            # Nobody was told, so nothing of it may have happened.
            self.tails, self.acked, self.claims = tails, acked, claims
        assert await self.on.store.durable() is None
        await self.on.store.commits.settled()

    def decide(self, kind: str, values: list[object]) -> None:
        if kind == "append":
            self.append(str(values[0]))
        elif kind == "delete":
            path = str(values[0])
            self.on.store.delete(path, lambda _: None)
            self.tails.pop(path, None)
            self.acked.pop(path, None)
        elif kind == "claim":
            self.claim(str(values[0]))
        elif kind == "release":
            known = self.known(values[0])
            if known is not None:
                released = self.engine.release(self.subscription, known[0])
                assert released is None or not self.is_current(known[0])
        else:
            known = self.known(values[0])
            if known is not None:
                self.ack(known, None if kind == "ack all" else str(values[1]), bool(values[-1]))

    def append(self, path: str) -> None:
        batch = json_batch(b"[12345]")
        assert batch is not None
        assert not isinstance(batch, Malformed)
        before = self.tails.get(path)
        if before is None:
            request = Create(path, content_type="application/json", batch=batch)
            self.on.store.create(request, lambda _: None)
            before = self.acked[path] = Offset(0, 0)
        else:
            self.on.store.append(Append(path, batch, "application/json"), lambda _: None)
        self.tails[path] = Offset(before.messages + 1, before.bytes + 5)

    def claim(self, worker: str) -> None:
        before = self.subscription.wake
        free = before.holder is None or before.expired(self.engine.now_ms())
        outcome = self.engine.claim(self.subscription, worker)
        if isinstance(outcome, Claimed):
            assert free
            wake = outcome.wake
            assert wake.wake_id is not None
            name = WakeName(wake.generation, wake.generation, wake.wake_id)
            taken = {claim[0].generation for claim in self.claims}
            assert name.generation not in taken, "a generation has one holder"
            self.claims.append((name, {seen.path: seen.tail for seen in wake.snapshot}))
        elif free:
            assert not self.is_pending, "work without a holder can be claimed"

    def known(self, number: object) -> tuple[WakeName, dict[str, Offset]] | None:
        """A claim that was once granted; 0 is the newest."""
        index = len(self.claims) - 1 - int(str(number))
        return self.claims[index] if 0 <= index < len(self.claims) else None

    def is_current(self, name: WakeName) -> bool:
        wake = self.subscription.wake
        return wake.wake_id == name.wake_id and not wake.expired(self.engine.now_ms())

    def ack(self, known: tuple[WakeName, dict[str, Offset]], path: str | None, done: bool) -> None:
        name, seen = known
        current = self.is_current(name)
        acks = [Ack(one, tail) for one, tail in seen.items() if path in (None, one)]
        # A stream that was deleted and made again is not the one that the worker has read.
        same = {
            one.path
            for one in self.subscription.wake.snapshot
            if (link := self.subscription.links.get(one.path)) is not None
            and link.stream_id == one.stream_id
        }
        outcome = self.engine.ack(self.subscription, name, acks, done=done)
        assert isinstance(outcome, Acked) == current, "only the current holder is heard"
        if current:
            for one, offset in acks:
                if one in same and offset.bytes > self.acked[one].bytes:
                    self.acked[one] = offset

    @property
    def is_pending(self) -> bool:
        return any(self.tails[path].bytes > self.acked[path].bytes for path in self.tails)

    async def check(self) -> None:
        links = self.subscription.links
        assert {path: link.acked for path, link in links.items()} == self.acked
        assert {path: link.tail for path, link in links.items()} == self.tails
        wake = self.subscription.wake
        if self.is_pending and wake.is_idle:
            # Only a failed commit, a moment ago, is reason to wait with the wake.
            self.clock.ms += 1_000
            self.engine.fire()
            await self.on.store.commits.settled()
            wake = self.subscription.wake
            assert not wake.is_idle, "pending work is always on somebody's way"
        if not wake.is_idle and wake.holder is None:
            assert wake.next_attempt_ms is not None or wake.generation in await self.announced()

    async def announced(self) -> set[int]:
        """The generations that the wake stream has told of."""
        store = self.on.store
        info = await store.look("wake/pool", touch=False)
        chunk = await store.read(info, Offset(0, 0), bytes_max=1 << 20)  # type: ignore[arg-type]
        return {event["generation"] for event in json.loads(b"[%b]" % chunk.data)}  # type: ignore[union-attr]


async def run(folder: Path, sequence: list[tuple[object, ...]]) -> None:
    clock = SimClock()
    model: Run | None = None
    rest = list(sequence)
    while True:
        async with opened(folder, clock, synchronous="OFF") as on:
            if model is None:
                await on.create("wake/pool")
                await on.subscriptions.engine.create(
                    "s", pull_config(lease_ttl_ms=LEASE_MS), "http://localhost"
                )
                await on.settle()
                model = Run(on, clock)
            model.on = on
            await on.settle()
            await model.check()
            while rest and rest[0][0] != "restart":
                await model.step(rest.pop(0))
                await model.check()
        if not rest:
            return
        rest.pop(0)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
@example([("append", A), ("claim", ANN), ("ack all", 0, True), ("restart",)])
@example([("append", A), ("claim", ANN), ("ack", 0, A, False), ("restart",), ("release", 0)])
@example([("append", A), ("claim", ANN), ("delete", A), ("append", A), ("ack all", 0, True)])
@example([("append", A), ("claim", ANN), ("wait", LEASE_MS, False), ("ack all", 0, True)])
@example([("append", A), ("claim", ANN), ("wait", LEASE_MS, False), ("claim", BOB)])
@example([("append", A), ("claim", ANN), ("wait", LEASE_MS, True), ("restart",), ("claim", BOB)])
@example([("append", A), ("spoil",), ("claim", ANN), ("claim", BOB), ("ack all", 0, True)])
@example([("append", A), ("claim", ANN), ("spoil",), ("ack all", 0, True), ("restart",)])
@example([("spoil",), ("append", A), ("append", A), ("restart",), ("claim", ANN)])
def test_no_sequence_loses_work_or_lets_two_workers_hold_one_generation(
    sequence: list[tuple[object, ...]],
) -> None:
    """Pending work has a wake; a wake is claimed once; only its holder moves cursors."""
    # Nothing here pulls the plug, so the disk need not be waited for.
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder), sequence))
