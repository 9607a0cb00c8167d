"""Workers, servers and the database killed and frozen under a group: every effect happens once.

Workers are processes. Each worker's effects and its ack are one commit under its lease, so that
what a lost worker still sends is refused. A frozen worker stops itself with a lease in hand, so
that it is certain to come too late; a server without the fence shows that the tests would notice.
FENCEPOST_SEED replays a run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost.testing.postgres import PostgresServer
from tests.engines import emptied, server_at
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.faults.group_worker import AWAY, POISON
from tests.serving import ServerProcess

LEASE_MS = 1_000
SECONDS_MAX = 120.0
STORM = int(os.environ.get("FENCEPOST_FAULT_KILLS", "0"))
"""How many more events each committer sends in the long run (`just faults`)."""


class Crew:
    """Processes that work for one group, with names that are never used twice."""

    def __init__(self, group: str, *urls: str) -> None:
        self.group = group
        self.urls = urls
        self.running: dict[str, subprocess.Popen[str]] = {}
        self._names = 0

    def hire(self, how: str = "work", *numbers: int) -> str:
        """Start a process, on one server after the other; its name."""
        url = self.urls[self._names % len(self.urls)]
        self._names += 1
        name = f"w{self._names}"
        arguments = (url, self.group, name, how, *map(str, numbers))
        command = [sys.executable, "-m", "tests.faults.group_worker", *arguments]
        self.running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return name

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.kill()
        process.send_signal(signal.SIGCONT)
        process.communicate()

    def heard(self, name: str) -> dict[str, str]:
        """The next thing that a process says."""
        output = self.running[name].stdout
        assert output is not None
        said: dict[str, str] = json.loads(output.readline())
        return said

    def frozen(self, name: str) -> str:
        """Wait until a process has stopped itself; the target that it holds."""
        target = self.heard(name)["holding"]
        _, status = os.waitpid(self.running[name].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the worker ended instead of stopping itself"
        return target

    def wake(self, name: str) -> dict[str, str]:
        """Wake a process that has stopped itself; what came of what it then tried."""
        self.running[name].send_signal(signal.SIGCONT)
        return self.heard(name)

    def finish(self, names: Sequence[str]) -> None:
        """Wait for processes that end by themselves."""
        for name in names:
            process = self.running.pop(name)
            process.communicate(timeout=SECONDS_MAX)
            assert process.returncode == 0


@contextmanager
def crew_of(group: str, *urls: str) -> Iterator[Crew]:
    crew = Crew(group, *urls)
    try:
        yield crew
    finally:
        for name in list(crew.running):
            crew.kill(name)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def effects_of(client: fencepost.Client, group: str) -> list[dict[str, Any]]:
    return list(client.stream(f"{group}-out").read())


def wait_for_effects(client: fencepost.Client, group: str, count: int) -> None:
    """Wait for so many effects, and until no worker holds a lease. (Targets are idle too before
    their work is correlated: that they are idle alone would say nothing.)
    """

    def is_done() -> bool:
        try:
            effects, stats = effects_of(client, group), client.group(group).stats()
        except AWAY:
            return False
        still = all(stats[state] == 0 for state in ("ready", "leased", "deferred", "blocked"))
        return len(effects) >= count and still

    wait_until(is_done)


def check_effects(client: fencepost.Client, group: str, committed: Counter[str]) -> None:
    """Each event has its effect once, those of one target in order, and versions are contiguous."""
    effects = effects_of(client, group)
    assert Counter(str(effect["n"]) for effect in effects) == committed
    for target in {effect["target"] for effect in effects}:
        by_writer: dict[str, list[int]] = {}
        for effect in effects:
            if effect["target"] == target:
                writer, _, n = str(effect["n"]).rpartition(":")
                by_writer.setdefault(writer, []).append(int(n))
        assert all(numbers == sorted(numbers) for numbers in by_writer.values())
    versions: dict[str, list[int | None]] = {}
    for row in client.log(match=[f"{group}-in/*", f"{group}-out"]):
        versions.setdefault(row.stream, []).append(row.version)
    assert all(found == list(range(len(found))) for found in versions.values())


def check_store(store: Path | str) -> None:
    """`fencepost check` finds nothing wrong, leases included."""
    where = ["--data", str(store)] if isinstance(store, Path) else ["--store", store]
    command = [sys.executable, "-m", "fencepost", "check", *where]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def fill(client: fencepost.Client, group: str, streams: int, each: int) -> Counter[str]:
    """Events in the streams of a group, and the stream of its effects."""
    client.create(f"{group}-out")
    names = [f"fill:{n}" for n in range(streams * each)]
    for n, name in enumerate(names):
        client.stream(f"{group}-in/{n % streams}").append(name, auto_create=True)
    return Counter(names)


def make(client: fencepost.Client, group: str, **settings: Any) -> fencepost.Group:
    made = client.group(group)
    made.make([f"{group}-in/*"], lease_ms=LEASE_MS, **{"lost_max": 50, **settings})
    return made


@pytest.fixture(scope="module")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the tests that do not kill it."""
    with emptied(engine, tmp_path_factory.mktemp("data")) as store, server_at(store) as running:
        yield running


@pytest.fixture
def chance() -> random.Random:
    """What a test leaves to chance, and the number that repeats it."""
    seed = int(os.environ.get("FENCEPOST_SEED", str(random.randrange(2**32))))
    sys.stderr.write(f"FENCEPOST_SEED={seed}\n")
    return random.Random(seed)


class Unfenced(ServerProcess):
    """A server that takes every lease for current."""

    def _command(self) -> list[str]:
        command = super()._command()
        return ["tests.faults.unfenced" if part == "fencepost" else part for part in command]


def freeze_and_wake(url: str, group: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """A worker sleeps through its lease with an event in hand, and another one handles the event;
    what came of what the first one tried afterwards, and all effects.
    """
    with fencepost.connect(url) as client, crew_of(group, url) as crew:
        make(client, group)
        fill(client, group, 1, 1)
        sleeper = crew.hire("freeze")
        assert crew.frozen(sleeper) == f"{group}-in/0"
        crew.hire()
        wait_for_effects(client, group, 1)
        return crew.wake(sleeper), effects_of(client, group)


def test_what_a_worker_sends_after_sleeping_through_its_lease_is_refused(
    server: ServerProcess,
) -> None:
    late, _ = freeze_and_wake(server.url, "sleeper")

    assert late == dict.fromkeys(("append", "commit", "renew", "ack"), "lost")
    with fencepost.connect(server.url) as client:
        assert [effect["by"] for effect in effects_of(client, "sleeper")] == ["w2"]


def test_without_the_fence_the_same_worker_would_write_twice(empty_store: Path | str) -> None:
    """Not about the server: this shows that the test above fails, every time, without the fence."""
    if isinstance(empty_store, Path):
        unfenced = Unfenced(empty_store)
    else:
        unfenced = Unfenced(store=empty_store)
    with unfenced, fencepost.connect(unfenced.url) as client:
        late, _ = freeze_and_wake(unfenced.url, "sleeper")

        assert late == {"append": "stored", "commit": "stored", "renew": "renewed", "ack": "acked"}
        assert len(effects_of(client, "sleeper")) == 3


def test_what_four_committers_write_four_workers_drain(
    server: ServerProcess, chance: random.Random
) -> None:
    each, streams = 25 + STORM, 10
    with fencepost.connect(server.url) as client, crew_of("churn", server.url) as crew:
        client.create("churn-out")
        make(client, "churn")
        committers = []
        for _ in range(4):
            crew.hire()
            committers.append(crew.hire("commit", each, streams))
        crew.finish(committers)
        wait_for_effects(client, "churn", 4 * each)

        committed = Counter(f"{name}:{n}" for name in committers for n in range(each))
        check_effects(client, "churn", committed)


def test_killed_workers_take_nothing_with_them(
    server: ServerProcess, chance: random.Random
) -> None:
    with fencepost.connect(server.url) as client, crew_of("killed", server.url) as crew:
        committed = fill(client, "killed", 12, 8)
        make(client, "killed")
        workers = [crew.hire() for _ in range(6)]
        for name in chance.sample(workers, 2):
            # It has done something by then, and there is more to do.
            wait_until(lambda: bool(effects_of(client, "killed")))
            crew.kill(name)
        wait_for_effects(client, "killed", 96)

        check_effects(client, "killed", committed)


def test_a_handler_that_kills_its_process_ends_blocked_and_the_error_says_so(
    server: ServerProcess,
) -> None:
    with fencepost.connect(server.url) as client, crew_of("poisoned", server.url) as crew:
        group = make(client, "poisoned", lost_max=1)
        for data in ("good", POISON, "never"):
            client.stream("poisoned-in/bad").append(data, auto_create=True)
        client.stream("poisoned-in/good").append("good", auto_create=True)
        deaths = 0
        while not (blocked := list(group.streams(state="blocked"))):
            worker = crew.hire("die")
            wait_until(
                lambda: (
                    crew.running[worker].poll() is not None  # noqa: B023
                    or bool(list(group.streams(state="blocked")))
                )
            )
            deaths += crew.running[worker].poll() == -signal.SIGKILL

        assert deaths == 2
        [row] = blocked
        assert row.target == "poisoned-in/bad"
        assert row.error is not None
        assert "2 workers in a row let the lease of this target expire" in row.error
        assert group.claim("late").leases == []


@contextmanager
def storm(urls: Sequence[str], group: str, chance: random.Random) -> Iterator[Crew]:
    """A group that three workers drain, one of them asleep with a lease in hand; at the end the
    sleeper is woken and refused, and every event has its effect.
    """
    with fencepost.connect(urls[0]) as client, crew_of(group, *urls) as crew:
        committed = fill(client, group, 12, 8)
        make(client, group)
        sleeper = crew.hire("freeze")
        crew.frozen(sleeper)
        for _ in range(3):
            crew.hire()
        wait_until(lambda: bool(effects_of(client, group)))
        yield crew
        awake = [name for name in crew.running if name != sleeper]
        crew.kill(chance.choice(awake))
        wait_for_effects(client, group, 96)
        assert crew.wake(sleeper) == dict.fromkeys(("append", "commit", "renew", "ack"), "lost")
        check_effects(client, group, committed)


def test_a_server_that_is_killed_under_a_drain_loses_and_doubles_nothing(
    empty_store: Path | str, chance: random.Random
) -> None:
    with server_at(empty_store) as server, storm([server.url], "storm", chance):
        server.kill()
        server.start()
    check_store(empty_store)


def test_two_nodes_share_a_group_and_one_of_them_is_killed(
    tmp_path: Path, chance: random.Random
) -> None:
    with emptied("postgres", tmp_path) as store, server_at(store) as one, server_at(store) as two:
        with storm([one.url, two.url], "nodes", chance):
            two.kill()
            two.start()
        check_store(store)


def test_a_database_that_is_killed_under_a_drain_loses_and_doubles_nothing(
    chance: random.Random,
) -> None:
    with PostgresServer() as postgres:
        store = postgres.new_database()
        with server_at(store) as server:
            with storm([server.url], "away", chance):
                postgres.kill()
                postgres.start()
            check_store(store)
