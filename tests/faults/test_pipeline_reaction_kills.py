"""Reactions on a real Spark cluster, with its driver, executors, a worker and the server killed.

Every number that is asked for must be noted once, in the total that it belongs to, in order, and no
target may ever go back. `just faults` runs the cluster; `./test` the driver that sleeps.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fencepost
from fencepost.store.sqlite.check import check
from tests.faults.pipeline_cluster import PATHS, Cluster, Process, start_driver
from tests.faults.pipeline_reaction_app import HOLD_ENV, TOTALS, Job, app
from tests.faults.pipeline_reactions import Job as Drain
from tests.faults.test_groups import Unfenced
from tests.faults.test_pipeline_kills import JVM, LOCAL, TARGETS, dice_for, say, wait_for
from tests.serving import ServerProcess

KILLS = int(os.environ.get("FENCEPOST_FAULT_KILLS", "16")) // 4
JOBS, ASKED = 4, 6
HOLD_SECONDS = 3.0

pytestmark = pytest.mark.timeout(3600)


class Reacting:
    """An app under test: its events, its driver and its server."""

    def __init__(self, server: ServerProcess, master: str, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.asked = 0
        self.driver: Process | None = None
        self.hold = folder / "hold"
        self._at: dict[str, int] = {}
        scratch = str(folder / "scratch")
        conf: dict[str, Any] = {
            "spark.cores.max": 2,
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": JVM,
            "spark.executor.extraJavaOptions": JVM,
            "spark.driver.host": "127.0.0.1",
            "spark.task.maxFailures": 30,
            "spark.local.dir": scratch,
            "spark.executorEnv.PYTHONPATH": PATHS,
        }
        self._job = Drain(master=master, url=server.url, conf=conf)

    def start(self) -> Process:
        environment = {HOLD_ENV: str(self.hold)}
        module = "tests.faults.pipeline_reactions"
        self.driver = start_driver(self._job, self.folder, module, environment)
        return self.driver

    def end(self) -> None:
        if self.driver is not None:
            self.driver.kill()

    def ask(self) -> None:
        """More numbers, from every job in turns."""
        with fencepost.connect(self.server.url) as client, app.open(client) as opened:
            for _ in range(ASKED):
                for job in range(JOBS):
                    opened.do(Job.ask, str(job), number=self.asked)
                    self.asked += 1

    def noted(self) -> dict[str, list[int]]:
        """The numbers of each total, in order."""
        with fencepost.connect(self.server.url) as client:
            found: dict[str, list[int]] = {f"totals/{one}": [] for one in range(TOTALS)}
            for entry in client.log(match="totals/*"):
                found[entry.stream].append(entry.data["data"]["number"])
            return found

    def count(self) -> int:
        return sum(map(len, self.noted().values()))

    def look(self) -> None:
        """No target goes back."""
        with fencepost.connect(self.server.url) as client:
            for target in client.group(app.name).streams():
                assert target.at >= self._at.get(target.target, -1), target
                self._at[target.target] = target.at

    def wait_until(self, count: int) -> None:
        """Wait for so many effects; a driver that gave up is started again."""

        def holds() -> bool:
            assert self.driver is not None
            if self.driver.ended:
                self.start()
            return self.count() >= count

        try:
            wait_for(holds, f"{count} effects")
        except AssertionError as error:
            assert self.driver is not None
            error.add_note(f"noted {self.noted()}\ndriver:\n{self.driver.output}")
            raise

    def check(self) -> None:
        """What was asked for was noted, once, in order."""
        for total, numbers in self.noted().items():
            part = int(total.removeprefix("totals/"))
            assert numbers == list(range(part, self.asked, TOTALS)), total


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.mark.soak  # a cluster of its own takes a minute
def test_every_event_is_handled_once_and_in_order_whatever_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    dice = dice_for("reactions")
    with ServerProcess(tmp_path / "data") as server:
        reacting = Reacting(server, cluster.url, tmp_path)
        reacting.ask()
        reacting.start()
        try:
            for number in range(KILLS):
                target = TARGETS[number % len(TARGETS)]
                say(f"kill {number + 1} of {KILLS}: {target}")
                before = reacting.count()
                reacting.ask()
                reacting.wait_until(before + 1)
                reacting.look()
                # Not a wait for anything: the moment of the kill is to be any moment of a round.
                threading.Event().wait(dice.uniform(0.0, 1.0))
                kill(reacting, cluster, target, dice)
            reacting.ask()
            reacting.wait_until(reacting.asked)
            reacting.look()
            reacting.check()
        finally:
            reacting.end()
        server.stop()
        assert check(tmp_path / "data").findings == []
        server.restart()


def kill(reacting: Reacting, cluster: Cluster, target: str, dice: random.Random) -> None:
    if target == "driver":
        reacting.end()
        reacting.start()
    elif target == "server":
        reacting.server.kill()
        reacting.server.restart()
    elif target == "worker":
        cluster.kill_worker(dice.randrange(2))
    else:
        chosen = dice.randrange(2)
        if not (cluster.kill_executor(chosen) or cluster.kill_executor(1 - chosen)):
            say("there was no executor")


def frozen_and_woken(server: ServerProcess, folder: Path) -> dict[str, list[int]]:
    """Driver and tasks are stopped in a handler until a plain worker has handled everything."""
    reacting = Reacting(server, LOCAL, folder)
    reacting.ask()
    reacting.hold.write_text(str(HOLD_SECONDS))
    driver = reacting.start()
    try:
        wait_for(lambda: not reacting.hold.exists(), "a handler that holds an event")
        driver.signal(signal.SIGSTOP)
        with fencepost.connect(server.url) as client, app.open(client) as opened:
            opened.settle()
        driver.signal(signal.SIGCONT)
        # The driver is there again once it handles what is new.
        reacting.ask()
        reacting.wait_until(reacting.asked)
        wait_for(lambda: not _held(server.url), "the end of every lease")
        return reacting.noted()
    finally:
        reacting.end()


def _held(url: str) -> bool:
    with fencepost.connect(url) as client:
        return any(True for _ in client.group(app.name).streams(state="leased"))


def _doubled(noted: dict[str, list[int]]) -> int:
    return sum(len(numbers) - len(set(numbers)) for numbers in noted.values())


def test_a_driver_that_slept_through_its_leases_changes_nothing(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        noted = frozen_and_woken(server, tmp_path)

        assert _doubled(noted) == 0
        assert sorted(number for one in noted.values() for number in one) == list(
            range(2 * JOBS * ASKED)
        )


@pytest.mark.soak  # it is a test of the test above: that it fails when the fence is taken out
def test_without_the_fence_the_same_driver_doubles_effects(tmp_path: Path) -> None:
    with Unfenced(tmp_path / "data") as server:
        assert _doubled(frozen_and_woken(server, tmp_path)) > 0
