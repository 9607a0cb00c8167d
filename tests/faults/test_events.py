"""Apps under commit storms, churn and kills: versions have no gap, and every effect happens once.

Writers and workers are processes. A worker that is paused in the middle of a reaction wakes up late
for certain, and what it then commits is refused; a server without the fence shows that the test
would notice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

import fencepost
from fencepost.events import OpenApp
from fencepost.testing.postgres import PostgresServer
from tests.engines import emptied, server_at
from tests.engines import empty_store as empty_store
from tests.engines import engine as engine
from tests.faults.events_worker import declare
from tests.faults.test_groups import Unfenced, wait_until
from tests.faults.test_postgres_away import IMPATIENT, frozen, is_ready
from tests.serving import ServerProcess


class Crew:
    """Processes of one app, with names that are never used twice."""

    def __init__(self, url: str, app: str) -> None:
        self.url = url
        self.app = app
        self.running: dict[str, subprocess.Popen[str]] = {}

    def hire(self, how: str, *numbers: int, on: str | None = None) -> str:
        """Start one; those of a crew are on the sync and on the async client in turns."""
        name = f"w{len(self.running)}"
        client = on or ("sync", "async")[len(self.running) % 2]
        arguments = (self.url, self.app, name, how, *map(str, numbers), client)
        command = [sys.executable, "-m", "tests.faults.events_worker", *arguments]
        self.running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return name

    def finish(self, *names: str) -> None:
        for name in names:
            self.running[name].communicate()
            assert self.running[name].returncode == 0

    def heard(self, name: str) -> dict[str, str]:
        output = self.running[name].stdout
        assert output is not None
        said: dict[str, str] = json.loads(output.readline())
        return said

    def kill(self, name: str) -> None:
        process = self.running[name]
        if process.poll() is None:
            process.kill()
            process.send_signal(signal.SIGCONT)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def crew_of(url: str, app: str) -> Iterator[Crew]:
    crew = Crew(url, app)
    try:
        yield crew
    finally:
        for name in crew.running:
            crew.kill(name)


@pytest.fixture(scope="module")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with emptied(engine, tmp_path_factory.mktemp("data")) as store, server_at(store) as running:
        yield running


@contextmanager
def opened(url: str, app: str) -> Iterator[OpenApp]:
    with fencepost.connect(url) as client, declare(app, "test").app.open(client) as found:
        yield found


def numbers(found: OpenApp, folder: str) -> Counter[str]:
    """The numbers in the streams of a folder, whose versions have no gap and no double.

    Each was decided on the state behind all events before it.
    """
    versions: dict[str, list[int]] = {}
    counted: Counter[str] = Counter()
    for event in found.query(stream=f"{found.app.name}-{folder}/*"):
        versions.setdefault(event.stream, []).append(event.version)
        counted[event.data.number] += 1
        assert event.data.count == event.version, f"{event.stream} decided on an older state"
    assert all(seen == list(range(len(seen))) for seen in versions.values())
    return counted


def expected(names: list[str], count: int) -> Counter[str]:
    return Counter(f"{name}:{n}" for name in names for n in range(count))


def wait_for_totals(found: OpenApp, count: int) -> None:
    wait_until(lambda: sum(numbers(found, "totals").values()) >= count)
    wait_until(lambda: found.group.stats()["leased"] == 0)


class Size(NamedTuple):
    """How much a scenario does."""

    writers: int
    events: int
    streams: int
    workers: int = 0
    killed: int = 0


def sizes(small: Size, full: Size) -> pytest.MarkDecorator:
    """A scenario in seconds, and in full, which `just faults` runs."""
    return pytest.mark.parametrize(
        "size", [small, pytest.param(full, marks=pytest.mark.soak)], ids=["small", "full"]
    )


@sizes(Size(4, 10, 10), Size(8, 1_000, 80))
def test_a_commit_storm_over_many_streams_is_all_there(server: ServerProcess, size: Size) -> None:
    commit_from_all(server.url, f"storm{size.events}", "act", size)


@sizes(Size(4, 10, 1), Size(8, 100, 1))
def test_all_writers_on_one_stream_retry_their_conflicts(server: ServerProcess, size: Size) -> None:
    commit_from_all(server.url, f"same{size.events}", "collide", size)


def commit_from_all(url: str, app: str, how: str, size: Size) -> None:
    with opened(url, app) as found, crew_of(url, app) as crew:
        writers = [crew.hire(how, size.events, size.streams) for _ in range(size.writers)]
        crew.finish(*writers)

        assert numbers(found, "jobs") == expected(writers, size.events)


@sizes(Size(2, 15, 5, workers=2), Size(4, 250, 40, workers=4))
def test_what_is_committed_under_churn_is_drained_once(server: ServerProcess, size: Size) -> None:
    app = f"churn{size.events}"
    with opened(server.url, app) as found, crew_of(server.url, app) as crew:
        for _ in range(size.workers):
            crew.hire("work")
        writers = [crew.hire("act", size.events, size.streams) for _ in range(size.writers)]
        crew.finish(*writers)
        wait_for_totals(found, size.writers * size.events)

        committed = numbers(found, "jobs")
        assert committed == expected(writers, size.events)
        assert numbers(found, "totals") == committed


@sizes(Size(1, 40, 5, workers=3, killed=1), Size(2, 500, 40, workers=8, killed=2))
def test_killed_workers_take_nothing_with_them(server: ServerProcess, size: Size) -> None:
    app = f"killed{size.events}"
    with opened(server.url, app) as found, crew_of(server.url, app) as crew:
        workers = [crew.hire("work") for _ in range(size.workers)]
        writers = [crew.hire("act", size.events, size.streams) for _ in range(size.writers)]
        wait_until(lambda: bool(numbers(found, "totals")))
        for worker in workers[: size.killed]:
            crew.kill(worker)
        crew.finish(*writers)
        wait_for_totals(found, size.writers * size.events)

        assert numbers(found, "totals") == expected(writers, size.events)


@sizes(Size(2, 40, 5, workers=2, killed=1), Size(4, 500, 40, workers=6, killed=3))
def test_a_deploy_that_rolls_while_workers_are_killed_handles_each_event_once(
    server: ServerProcess, size: Size
) -> None:
    """Workers of two versions tell targets of events at once, and each handles what the others
    told; then a third version takes over what is left."""
    app = f"rolls{size.events}"
    with opened(server.url, app) as found, crew_of(server.url, app) as crew:
        old = [crew.hire("work", 3) for _ in range(size.workers)]
        writers = [crew.hire("act", size.events, size.streams) for _ in range(size.writers)]
        wait_until(lambda: bool(numbers(found, "totals")))
        new = [crew.hire("work", 4) for _ in range(size.workers)]
        for worker in old[: size.killed]:
            crew.kill(worker)
        crew.finish(*writers)
        for worker in (*old, *new):
            crew.kill(worker)
        late = crew.hire("act", size.events, size.streams)
        crew.finish(late)
        crew.hire("work", 5)
        wait_for_totals(found, (size.writers + 1) * size.events)

        assert numbers(found, "totals") == expected([*writers, late], size.events)
        assert found.group.stats()["told"] == 0


@sizes(Size(2, 30, 5, workers=2), Size(4, 500, 40, workers=4))
def test_a_database_that_dies_and_freezes_under_an_app_costs_nothing(size: Size) -> None:
    with (
        PostgresServer() as postgres,
        server_at(postgres.new_database(), environment=IMPATIENT) as server,
        opened(server.url, "away") as found,
        crew_of(server.url, "away") as crew,
    ):
        for _ in range(size.workers):
            crew.hire("work")
        writers = [crew.hire("act", size.events, size.streams) for _ in range(size.writers)]
        wait_until(lambda: bool(numbers(found, "totals")))
        postgres.kill()
        postgres.start()
        wait_until(lambda: is_ready(server))
        with frozen(postgres):
            wait_until(lambda: not is_ready(server))
        wait_until(lambda: is_ready(server))
        crew.finish(*writers)
        wait_for_totals(found, size.writers * size.events)

        committed = numbers(found, "jobs")
        assert committed == expected(writers, size.events)
        assert numbers(found, "totals") == committed


def freeze_and_wake(url: str, client: str) -> tuple[str, Counter[str]]:
    """A worker sleeps through its lease in the middle of a reaction, and another one handles the
    event; what came of the first one's commit, and all effects.
    """
    app = f"frozen-{client}"
    with opened(url, app) as found, crew_of(url, app) as crew:
        writer = crew.hire("act", 1, 1)
        crew.finish(writer)
        sleeper = crew.hire("freeze", on=client)
        crew.heard(sleeper)
        _, status = os.waitpid(crew.running[sleeper].pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "the worker ended instead of stopping itself"
        crew.hire("work")
        wait_until(lambda: any(found.query(stream=f"{app}-totals/*")))
        crew.running[sleeper].send_signal(signal.SIGCONT)
        late = crew.heard(sleeper)["late"]
        stored = found.query(stream=f"{app}-totals/*")
        return late, Counter(event.data.number for event in stored)


@pytest.mark.parametrize("client", ["sync", "async"])
def test_a_worker_that_slept_through_its_lease_stores_nothing(
    server: ServerProcess, client: str
) -> None:
    late, totals = freeze_and_wake(server.url, client)

    assert late == "lost"
    assert list(totals.values()) == [1]


def test_without_the_fence_its_effects_would_be_stored_twice(empty_store: Path | str) -> None:
    """Not about the server: this shows that the test above fails, every time, without the fence."""
    if isinstance(empty_store, Path):
        unfenced = Unfenced(empty_store)
    else:
        unfenced = Unfenced(store=empty_store)
    with unfenced:
        late, totals = freeze_and_wake(unfenced.url, "sync")

    assert late == "committed"
    assert list(totals.values()) == [2]
