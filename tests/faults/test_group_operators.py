"""Operators at work on a group while its workers fail, park and lose leases, and servers die.

Parking, replaying, unblocking, deferring and giving priorities never let an event have its effect
twice, and never lose it. A reset gives events out again, and still loses none. FENCEPOST_SEED
replays a run.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import fencepost
from tests.engines import emptied, server_at
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.faults.group_worker import AWAY
from tests.faults.test_groups import chance as chance
from tests.faults.test_groups import check_store, crew_of, effects_of, fill, make, wait_until
from tests.serving import ServerProcess

NO_WAIT = {"kind": "fixed", "base_ms": 0, "cap_ms": 1_000, "jitter": 0.0}
STREAMS, EACH = 8, 5
ENDS = ("block", "park", "retry")
STEPS = 30 + int(os.environ.get("FENCEPOST_FAULT_KILLS", "0"))


class Operator:
    """An operator who does what chance says to a group."""

    def __init__(self, client: fencepost.Client, name: str, chance: random.Random) -> None:
        self.group = client.group(name)
        self.chance = chance
        of_messages = self.group.info().targets == "message"
        self.events = [
            (f"{row.stream}@{row.position}" if of_messages else row.stream, row.position)
            for row in client.log(match=[f"{name}-in/*"])
        ]
        self.done: Counter[str] = Counter()

    def meddle(self, *, resets: bool) -> None:
        """Do one thing."""
        target, _ = self.chance.choice(self.events)
        acts: dict[str, Callable[[], int]] = {
            "park": lambda: self.group.park(self.chance.sample(self.events, 4)),
            "replay": lambda: self.group.replay(filter={}, limit=self.chance.choice((1, 5, 50))),
            "unblock": lambda: self.group.unblock(filter={}),
            "defer": lambda: self.group.defer(
                int(time.time() * 1000) + self.chance.randrange(400), [target]
            ),
            "prioritize": lambda: self.group.prioritize(self.chance.randrange(9), [target]),
        }
        if resets:
            acts["reset"] = lambda: self.group.reset([target])
        what = self.chance.choice(sorted(acts))
        try:
            self.done[what] += acts[what]()
        except AWAY:
            self.done["away"] += 1
        except fencepost.NotFoundError:
            self.done["gone"] += 1  # The row of a message goes with its ack.

    def give_out_all(self) -> bool:
        """Let everything go on; whether nothing is left to do."""
        try:
            self.group.unblock(filter={})
            self.group.defer(0, filter={})
            self.group.replay(filter={}, limit=1_000)
            stats = self.group.stats()
        except AWAY:
            return False
        states = ("ready", "leased", "deferred", "blocked", "parked", "uncorrelated")
        return all(stats[state] == 0 for state in states)


def storm(
    servers: list[ServerProcess],
    name: str,
    chance: random.Random,
    *,
    resets: bool = False,
    targets: str = "stream",
) -> Counter[str]:
    """Workers that fumble and an operator who meddles, while servers are killed; what was done to
    each event.
    """
    urls = [server.url for server in servers]
    with fencepost.connect(urls[0]) as client, crew_of(name, *urls) as crew:
        committed = fill(client, name, STREAMS, EACH)
        settings = {"backoff": NO_WAIT, "retries_max": 1, "targets": targets}
        made = make(client, name, **settings, on_exhausted=chance.choice(ENDS))
        made.claim("first", lease_ms=1_000)  # The targets are known from now on.
        operator = Operator(client, name, chance)
        for _ in range(3):
            crew.hire("fumble", chance.randrange(2**32))
        for step in range(STEPS):
            operator.meddle(resets=resets)
            if step % 15 == 10:
                server = chance.choice(servers)
                server.kill()
                server.start()
                crew.kill(chance.choice(list(crew.running)))
                crew.hire("fumble", chance.randrange(2**32))
        wait_until(operator.give_out_all)
        sys.stderr.write(f"{dict(operator.done)}\n")
        handled = Counter(str(effect["n"]) for effect in effects_of(client, name))
        assert set(handled) == set(committed)
        return handled


@pytest.mark.parametrize(
    "resets", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["once", "resets"]
)
def test_what_operators_do_while_workers_work_loses_and_doubles_nothing(
    empty_store: Path | str, chance: random.Random, resets: bool
) -> None:
    with server_at(empty_store) as server:
        handled = storm([server], "meddled", chance, resets=resets)
    assert resets or set(handled.values()) == {1}, handled
    check_store(empty_store)


def test_what_operators_do_to_messages_loses_and_doubles_none(
    empty_store: Path | str, chance: random.Random
) -> None:
    with server_at(empty_store) as server:
        handled = storm([server], "queue", chance, targets="message")
    assert set(handled.values()) == {1}, handled
    check_store(empty_store)


def test_operators_of_two_nodes_lose_and_double_nothing(
    tmp_path: Path, chance: random.Random
) -> None:
    with emptied("postgres", tmp_path) as store, server_at(store) as one, server_at(store) as two:
        handled = storm([one, two], "shared", chance)
        assert set(handled.values()) == {1}, handled
        check_store(store)
