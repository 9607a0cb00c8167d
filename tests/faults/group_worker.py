"""A process that works for a group, commits to its sources, or dies of an event.

Arguments: the server's URL, the group, the worker's name, and what it does:

    work      effects and ack are one commit, for ever; killed at any point
    freeze    the same, but with its first lease in hand it says `holding`, stops itself (SIGSTOP),
              and when it is woken tries to append, commit and ack with that lease and says what
              came of each; then it goes on as `work`
    die       the worker loop of the client, one target at a time, with a handler that kills its
              process at the event `poison`
    fumble    claims like `work`, then does what chance says: handles all, fails on an event or a
              replayed one, parks, gives back, lets the lease expire; one more argument is the seed
    commit    appends events to the streams of the group, in turns, and ends; two more arguments
              say how many events, and to how many streams
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable

import msgspec

import fencepost
from fencepost import CommitAppend, EventFailure, GroupEvent, Lease, LeaseAck, ReplayedEvent

POISON = "poison"
AWAY = (
    fencepost.ConnectionFailedError,
    fencepost.UnavailableError,
    fencepost.OutcomeUnknownError,
)
"""What a worker meets while its server or the database is away. It claims again, and what it had
comes again if its commit did not arrive."""


def effects(group: str, worker: str, lease: Lease) -> list[CommitAppend]:
    """One message for each event of a lease."""
    return [
        CommitAppend(
            stream=f"{group}-out",
            messages=[{"target": lease.target, "n": event.data, "by": worker}],
            auto_create=True,
        )
        for event in lease.events
    ]


def work(client: fencepost.Client, name: str, worker: str, *, freezes: bool) -> None:
    group = client.group(name)
    while True:
        try:
            leases = group.claim(worker, streams_max=4, events_max=3, wait_ms=1_000).leases
            for lease in leases:
                if not lease.events:
                    continue
                if freezes:
                    freezes = False
                    freeze(client, group, worker, lease)
                    continue
                client.commit(effects(name, worker, lease), leases=[(lease.token, lease.read_to)])
        except (fencepost.LeaseLostError, *AWAY):
            continue


def fumble(client: fencepost.Client, name: str, worker: str, seed: int) -> None:
    group, chance = client.group(name), random.Random(f"{seed}:{worker}")
    while True:
        try:
            found = group.claim(worker, streams_max=4, events_max=5, wait_ms=300)
            for lease in found.leases:
                end(client, group, worker, lease, chance)
        except (fencepost.LeaseLostError, *AWAY):
            continue


def end(
    client: fencepost.Client,
    group: fencepost.Group,
    worker: str,
    lease: Lease,
    chance: random.Random,
) -> None:
    """End a lease in one of the ways that there are, with the effects of what was handled."""
    what = chance.choices(("expire", "release", "fail", "handle"), (1, 2, 4, 12))[0]
    if what == "expire":
        return
    if what == "release":
        group.release([lease.token])
        return
    handled, replayed, at, failure = [], [], lease.read_to, None
    for event in lease.events:
        if event.replayed:
            fails = chance.random() < 0.2
            replayed.append(
                ReplayedEvent(position=event.position, error="again" if fails else None)
            )
            handled += [] if fails else [event]
        elif what == "fail" and chance.random() < 0.5:
            parks = chance.random() < 0.5
            failure = EventFailure(position=event.position, error="boom", park=parks)
            before = [e.position for e in handled if not e.replayed]
            at = before[-1] if before else lease.at
            break
        else:
            handled.append(event)
    done = LeaseAck(token=lease.token, at=at, failure=failure, replayed=replayed)
    if handled:
        mine = msgspec.structs.replace(lease, events=handled)
        client.commit(effects(group.name, worker, mine), leases=[done])
    else:
        group.ack(done)


def freeze(client: fencepost.Client, group: fencepost.Group, worker: str, lease: Lease) -> None:
    """Stop with a lease in hand, and try everything with it after waking."""
    say(holding=lease.target)
    os.kill(os.getpid(), signal.SIGSTOP)
    out = client.stream(f"{group.name}-out")
    acked = [(lease.token, lease.read_to)]
    say(
        append=tried(lambda: out.append({"n": "late", "by": worker}, lease=lease.token)),
        commit=tried(lambda: client.commit(effects(group.name, worker, lease), leases=acked)),
        renew=tried(lambda: group.renew([lease.token])[0].outcome),
        ack=tried(
            lambda: group.ack(LeaseAck(token=lease.token, at=lease.read_to)).items[0].outcome
        ),
    )


def tried(attempt: Callable[[], object]) -> str:
    """What came of an attempt, made again while the server is away."""
    while True:
        try:
            outcome = attempt()
        except fencepost.LeaseLostError:
            return "lost"
        except AWAY:
            continue
        return outcome if isinstance(outcome, str) else "stored"


def die(client: fencepost.Client, name: str, worker: str) -> None:
    def handle(event: GroupEvent, lease: Lease) -> None:
        if event.data == POISON:
            os.kill(os.getpid(), signal.SIGKILL)

    client.group(name).work(handle, worker=worker, streams=1)


def commit(client: fencepost.Client, name: str, committer: str, count: int, streams: int) -> None:
    for n in range(count):
        path = f"{name}-in/{n % streams}"
        client.stream(path).append(f"{committer}:{n}", auto_create=True)


def say(**facts: str) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    url, name, worker, how, *numbers = sys.argv[1:]
    with fencepost.connect(url) as client:
        if how == "die":
            die(client, name, worker)
        elif how == "fumble":
            fumble(client, name, worker, *map(int, numbers))
        elif how == "commit":
            commit(client, name, worker, *map(int, numbers))
        else:
            work(client, name, worker, freezes=how == "freeze")


if __name__ == "__main__":
    main()
