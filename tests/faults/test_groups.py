"""Workers and the server killed and frozen under a group: every event has its effect exactly once.

Workers are processes. Some are killed hard, one is stopped past its lease and woken again, and the
server is killed in between. Each worker's effects and ack are one commit under its lease, so that
what a lost worker still sends is refused. FENCEPOST_SEED replays a run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fencepost
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.engines import server_at

GROUP = "crew"
STREAMS, EACH = 12, 8
LEASE_MS = 1_000
SECONDS_MAX = 120.0


class Crew:
    """Processes that work, with names that are never used twice."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._names = 0

    def hire(self) -> None:
        self._names += 1
        name = f"w{self._names}"
        arguments = (self.url, GROUP, name)
        command = [sys.executable, "-m", "tests.faults.group_worker", *arguments]
        self.running[name] = subprocess.Popen(command)

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def freeze(self, chance: random.Random, group: fencepost.Group) -> str:
        """A worker to freeze: one that holds leases, if one does just now."""
        holding = [row.worker for row in group.workers() if row.worker in self.running]
        return chance.choice(holding or list(self.running))

    def wake(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)


def is_drained(stats: dict[str, Any]) -> bool:
    states = {name: int(stats[name]) for name in ("idle", "ready", "leased", "deferred", "blocked")}
    return states == {**dict.fromkeys(states, 0), "idle": STREAMS}


def is_handled(client: fencepost.Client, events: int) -> bool:
    """Whether so many events have effects. Targets are idle too before their work is correlated."""
    return len(list(client.stream(f"{GROUP}-out").read())) >= events


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("FENCEPOST_SEED", str(random.randrange(2**32))))


def test_every_effect_happens_once_although_workers_and_server_die(
    empty_store: Path | str, seed: int
) -> None:
    sys.stderr.write(f"FENCEPOST_SEED={seed}\n")
    chance = random.Random(seed)
    with server_at(empty_store) as server, fencepost.connect(server.url) as client:
        group = client.group(GROUP)
        group.make(["in/**"], lease_ms=LEASE_MS, lost_max=50)
        client.create(f"{GROUP}-out")  # the first effect may come after the last event
        crew = Crew(server.url)
        try:
            for _ in range(3):
                crew.hire()
            for n in range(STREAMS * EACH):
                client.stream(f"in/{n % STREAMS}").append(n, auto_create=True)
                if n == STREAMS * 2:
                    crew.kill(chance.choice(list(crew.running)))
                    crew.hire()
                if n == STREAMS * 3:
                    crew.running[crew.freeze(chance, group)].send_signal(signal.SIGSTOP)
                if n == STREAMS * 5:
                    server.kill()
                    server.start()
            # The frozen worker is woken when the others have taken all that it held.
            wait_until(lambda: is_handled(client, STREAMS * EACH))
            wait_until(lambda: is_drained(group.stats()))
            crew.wake()
            client.stream("in/0").append(STREAMS * EACH)
            wait_until(lambda: is_handled(client, STREAMS * EACH + 1))
            wait_until(lambda: is_drained(group.stats()))
        finally:
            crew.wake()
            for name in list(crew.running):
                crew.kill(name)

        effects = list(client.stream(f"{GROUP}-out").read())

    assert sorted(effect["n"] for effect in effects) == list(range(STREAMS * EACH + 1))
    for stream in range(STREAMS):
        order = [effect["n"] for effect in effects if effect["target"] == f"in/{stream}"]
        assert order == sorted(order)
