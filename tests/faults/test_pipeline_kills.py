"""Source -> transform -> sink on a standalone cluster, while everything in it is killed at random.

Driver, executors, a worker and the server die by SIGKILL. Whatever happens, the output must be the
input, each row once, in order for each key; the audit, run by the same Spark, must be clean; and
the checkpoint must say that nothing is behind. FENCEPOST_FAULT_KILLS=200 makes it the long run
(`just faults`: 50 kills). That the checks can fail is shown with a sink that appends as it goes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fencepost
from fencepost.pipeline.audit.reports import Report
from fencepost.pipeline.lag import lag, reached
from fencepost.pipeline.recovery import recovery
from tests.faults.pipeline_cluster import Cluster, Process, start_driver
from tests.faults.pipeline_query import AUDITED, FAILED, SINK_NAME, Job
from tests.pipeline.sink_support import messages, waiting_parts
from tests.serving import ServerProcess

KILLS_ENV = "FENCEPOST_FAULT_KILLS"
SEED_ENV = "FENCEPOST_FAULT_SEED"
KILLS_DEFAULT = "16"
KILLS = int(os.environ.get(KILLS_ENV, KILLS_DEFAULT)) // 4
KEYS = ("a", "b", "c")
ROWS_PER_KEY = 20
PROGRESS_SECONDS_MAX = 300.0
POLL_SECONDS = 0.05
TARGETS = ("driver", "server", "executor", "worker")
LOCAL = "local[2,8]"
# These processes live for seconds: starting fast is worth more to them than running fast.
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ATTEMPTS_MAX = 20

pytestmark = pytest.mark.timeout(3600)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds, for as long as a loaded machine may take."""
    waiting = threading.Event()
    for _ in range(int(PROGRESS_SECONDS_MAX / POLL_SECONDS)):
        if condition():
            return
        waiting.wait(POLL_SECONDS)
    raise AssertionError(f"{what}: not within {PROGRESS_SECONDS_MAX} s")


class Pipeline:
    """A query under test: its input, its output, its driver and its server."""

    def __init__(self, server: ServerProcess, job: Job, folder: Path) -> None:
        self.server = server
        self.job = job
        self.folder = folder
        self.fed = 0
        self.driver: Process | None = None

    def start(self) -> Process:
        self.driver = start_driver(self.job, self.folder)
        return self.driver

    def kill_driver(self) -> None:
        assert self.driver is not None
        self.driver.kill()
        self.start()

    def feed(self) -> None:
        """More input for every key, in small appends that differ in size."""
        with fencepost.connect(self.server.url) as client:
            for key in KEYS:
                stream = client.stream(f"in/{key}")
                rows = [{"key": key, "n": self.fed + index} for index in range(ROWS_PER_KEY)]
                for start in range(0, ROWS_PER_KEY, 7):
                    stream.append_many(rows[start : start + 7], auto_create=True)
        self.fed += ROWS_PER_KEY

    def feed_little(self) -> None:
        """One row more for every key."""
        with fencepost.connect(self.server.url) as client:
            for key in KEYS:
                client.stream(f"in/{key}").append({"key": key, "n": self.fed})
        self.fed += 1

    def output(self) -> dict[str, list[int]]:
        """What was written for each key, in order."""
        return {key: [row["n"] for row in messages(self.server.url, f"out/{key}")] for key in KEYS}

    def written(self) -> int:
        """How many messages the output has; asked often, so nothing is read."""
        with fencepost.connect(self.server.url) as client:
            return sum(one.version + 1 for one in client.streams(match="out/*"))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the query to get somewhere; a driver that gave up is started again."""

        def holds() -> bool:
            assert self.driver is not None
            if self.driver.ended:
                assert self.driver.wait() == FAILED, self.driver.output
                self.start()
            return condition()

        try:
            wait_for(holds, what)
        except AssertionError as error:
            error.add_note(self._report())
            raise

    def end(self) -> None:
        if self.driver is not None:
            self.driver.kill()

    def finish(self) -> None:
        """Let the query write everything it was fed."""
        wanted = self.fed * len(KEYS)
        self.wait_until(lambda: self.written() >= wanted, f"{wanted} rows of output")

    def rest(self) -> None:
        """Let the query note that all of its batches are done: it writes no more then."""
        self.wait_until(lambda: self.messages_behind() == 0, "a checkpoint that is not behind")

    def check_so_far(self) -> None:
        """What is there is the beginning of what will be: nothing twice, left out or early."""
        for key, rows in self.output().items():
            assert rows == list(range(len(rows))), f"out/{key}: {rows}"

    def check(self) -> None:
        """The output is the input, once, in order."""
        for key, rows in self.output().items():
            repeated = {n: count for n, count in Counter(rows).items() if count > 1}
            assert not repeated, f"out/{key}: written more than once: {repeated}"
            assert sorted(rows) == list(range(self.fed)), f"out/{key}: rows are missing"
            assert rows == sorted(rows), f"out/{key}: not in order"

    def messages_behind(self) -> int:
        """What the query's checkpoint has still to do, as `fencepost pipeline lag` tells it."""
        with fencepost.connect(self.server.url) as client:
            [behind] = [lag(client, one, "in/*") for one in reached(Path(self.job.checkpoint))]
        return behind.messages

    def audit(self) -> Report:
        """Everything on the server, as `fencepost pipeline audit --once n` sees it."""
        assert self.driver is not None
        Path(self.job.audit_file).touch()
        said = self.driver.wait_for(f"{AUDITED}(.*)\n", PROGRESS_SECONDS_MAX)
        return msgspec.json.decode(said[1], type=Report)

    def prove(self) -> None:
        """Everything was written, once, in order; the audit finds no fault, and nothing is left."""
        self.finish()
        self.rest()
        self.check()
        report = self.audit()
        assert report.defects == {}, report.samples
        assert report.lists_compared
        assert report.messages == 2 * self.fed * len(KEYS)

    def _report(self) -> str:
        assert self.driver is not None
        return f"written {self.output()}\ndriver:\n{self.driver.output}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


def dice_for(name: str) -> random.Random:
    """Random choices that a failed run names, so that they can be made again."""
    seed = int(os.environ.get(SEED_ENV, random.SystemRandom().randrange(10**9)))
    path = "tests/faults/test_pipeline_kills.py"
    kills = os.environ.get(KILLS_ENV, KILLS_DEFAULT)
    say(f"replay: {SEED_ENV}={seed} {KILLS_ENV}={kills} ./test {path} -k {name}")
    return random.Random(f"{seed}/{name}")


def say(line: str) -> None:
    """A line that pytest shows when the test fails."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def job_for(master: str, url: str, folder: Path, **fields: Any) -> Job:
    conf = {
        "spark.cores.max": 2,
        "spark.executor.memory": "512m",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": JVM,
        "spark.executor.extraJavaOptions": JVM,
        "spark.driver.host": "127.0.0.1",
        "spark.task.maxFailures": 30,
        "spark.sql.shuffle.partitions": 2,
        "spark.local.dir": str(folder / "scratch"),
        **fields.pop("conf", {}),
    }
    return Job(
        master=master,
        url=url,
        checkpoint=str(folder / "checkpoint"),
        audit_file=str(folder / "audit"),
        conf=conf,
        **fields,
    )


SPECULATION = {
    "spark.speculation": True,
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": 0.1,
    "spark.speculation.multiplier": 1.01,
    "spark.speculation.minTaskRuntime": "100ms",
}


@pytest.mark.parametrize(
    "speculation", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["plain", "speculation"]
)
def test_the_output_is_the_input_once_and_in_order_whatever_is_killed(
    cluster: Cluster, tmp_path: Path, speculation: bool
) -> None:
    dice = dice_for("speculation" if speculation else "plain")
    kills = targets_of(max(1, KILLS // 4) if speculation else KILLS, dice)
    attempts = tmp_path / "attempts"
    with ServerProcess(tmp_path / "data") as server:
        slow = {"slow_task_seconds": 2.0, "attempts_file": str(attempts)}
        more: dict[str, Any] = slow if speculation else {}
        conf = SPECULATION if speculation else {}
        job = job_for(cluster.url, server.url, tmp_path, conf=conf, **more)
        pipeline = Pipeline(server, job, tmp_path)
        pipeline.feed()
        pipeline.start()
        try:
            for number, target in enumerate(kills, 1):
                say(f"kill {number} of {len(kills)}: {target}")
                kill_one(pipeline, cluster, target, dice)
            pipeline.prove()
            if speculation:
                assert "1" in attempts.read_text().split(), "no task was ever run twice at once"
        finally:
            pipeline.end()


def targets_of(count: int, dice: random.Random) -> list[str]:
    """What to kill, each target as often as the others, in random order."""
    order = dice.sample(TARGETS, len(TARGETS))
    kills = [order[index % len(order)] for index in range(count)]
    dice.shuffle(kills)
    return kills


def kill_one(pipeline: Pipeline, cluster: Cluster, target: str, dice: random.Random) -> None:
    """Let the query work, and kill something at a random moment of that."""
    before = pipeline.written()
    pipeline.feed()
    pipeline.wait_until(lambda: pipeline.written() > before, "progress before the next kill")
    pipeline.check_so_far()
    pipeline.feed()
    # Not a wait for anything: the moment of the kill is to be any moment of a batch.
    threading.Event().wait(dice.uniform(0.0, 1.5))
    if target == "driver":
        pipeline.kill_driver()
    elif target == "server":
        pipeline.server.kill()
        threading.Event().wait(dice.uniform(0.0, 1.0))
        pipeline.server.restart()
    elif target == "worker":
        cluster.kill_worker(dice.randrange(2))
    else:
        chosen = dice.randrange(2)
        assert cluster.kill_executor(chosen) or cluster.kill_executor(1 - chosen)


@pytest.mark.soak  # it is a test of the check above: that it sees rows which are there twice
def test_a_sink_that_appends_as_it_goes_doubles_rows(tmp_path: Path) -> None:
    """The same query, input and check, and a driver killed once its rows begin to appear."""
    with ServerProcess(tmp_path / "data") as server:
        # One large batch, so that the kill comes before its end.
        job = job_for(LOCAL, server.url, tmp_path, sink="naive", rows_per_batch=1_000)
        pipeline = Pipeline(server, job, tmp_path)
        for _ in range(10):
            pipeline.feed()
        pipeline.start()
        try:
            pipeline.wait_until(lambda: pipeline.written() > 0, "the first rows")
            pipeline.kill_driver()
            # Rows that are written twice are as many as expected before all of them are there.
            pipeline.finish()
            pipeline.rest()

            with pytest.raises(AssertionError, match="written more than once"):
                pipeline.check()
            report = pipeline.audit()
            doubled = pipeline.written() - pipeline.fed * len(KEYS)
            assert report.defects == {"message_repeated": doubled}, report.samples
            assert {one.stream for one in report.samples} <= {f"out/{key}" for key in KEYS}
        finally:
            pipeline.end()


@pytest.mark.soak  # tests/pipeline/test_sink_uploads.py is the short form
def test_uploads_that_expire_under_a_slow_driver_fail_the_batch_and_lose_nothing(
    tmp_path: Path,
) -> None:
    """The driver stands still between its tasks' uploads and its commit, until they are gone."""
    environment = {"FENCEPOST_STORE_STAGING_TTL_S": "5"}
    with ServerProcess(tmp_path / "data", environment=environment) as server:
        pipeline = Pipeline(server, job_for(LOCAL, server.url, tmp_path), tmp_path)
        pipeline.feed()
        pipeline.start()
        try:
            for _ in range(ATTEMPTS_MAX):
                pipeline.feed()
                stop_with_uploads(pipeline)
                pipeline.wait_until(lambda: waiting_parts(server.data) == 0, "expired uploads")
                if resumed_and_failed(pipeline, "StagingExpiredError"):
                    break
            else:
                raise AssertionError("the driver never stood between uploads and commit")
            # A machine under load may need more than five seconds for a batch as well.
            server.stop()
            server.environment.clear()
            server.restart()
            pipeline.prove()
        finally:
            pipeline.end()


@pytest.mark.soak  # test_pipeline_sleepers.py is the short form, with many more moments
def test_a_driver_that_slept_while_another_took_over_is_fenced(tmp_path: Path) -> None:
    """Each has a checkpoint of its own, as on storage that lets two drivers write one file.

    So only the epoch of the run stands between the sleeper and the output.
    """
    with ServerProcess(tmp_path / "data") as server:
        sleeper = Pipeline(server, job_for(LOCAL, server.url, tmp_path), tmp_path)
        sleeper.feed()
        sleeper.start()
        other: Pipeline | None = None
        try:
            sleeper.wait_until(lambda: sleeper.written() > 0, "the first rows")
            sleeper.feed()
            stop_with_uploads(sleeper)
            folder = tmp_path / "other"
            shutil.copytree(tmp_path / "checkpoint", folder / "checkpoint")
            other = Pipeline(server, job_for(LOCAL, server.url, folder), tmp_path)
            other.fed = sleeper.fed
            other.start()
            other.finish()

            assert sleeper.driver is not None
            sleeper.driver.signal(signal.SIGCONT)
            # The batch that the sleeper was stopped in may be published: its commit may have been
            # on its way. With more to read it has another batch to commit, which must be refused.
            other.feed()
            wait_for(lambda: ended(sleeper), "the end of the sleeper")
            assert "FencedRunError" in sleeper.driver.output, sleeper.driver.output
            other.prove()
        finally:
            sleeper.end()
            if other is not None:
                other.end()


@pytest.mark.soak  # tests/pipeline/test_sink_ranges.py is the short form
def test_an_older_checkpoint_fails_and_what_recover_says_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    """A copy of the checkpoint is restored after the query has gone on without it.

    Its next batch is planned over more rows than the batch of that number had. The query must fail,
    at every start, and must not take it for written; then a new checkpoint goes on behind.
    """
    with ServerProcess(tmp_path / "data") as server:
        job = job_for(LOCAL, server.url, tmp_path)
        pipeline = Pipeline(server, job, tmp_path)
        checkpoint, copy = Path(job.checkpoint), tmp_path / "copy"
        pipeline.feed()
        pipeline.start()
        try:
            pipeline.finish()
            pipeline.rest()
            pipeline.end()
            shutil.copytree(checkpoint, copy)
            pipeline.start()
            # Batches of less than a batch may have: the restored query plans more into the first.
            for _ in range(2):
                pipeline.feed_little()
                pipeline.finish()
            pipeline.rest()
            pipeline.end()
            shutil.rmtree(checkpoint)
            shutil.copytree(copy, checkpoint)

            for _ in range(2):
                failed = pipeline.start()
                wait_for(lambda: ended(pipeline), "the end of a query with an old checkpoint")
                assert failed.wait() == FAILED, failed.output
                assert "OldCheckpointError" in failed.output, failed.output
                pipeline.check()

            with fencepost.connect(server.url) as client:
                found = recovery(client, SINK_NAME)
            pipeline.job = msgspec.structs.replace(
                job,
                checkpoint=str(tmp_path / "new"),
                starting_position=found.source_options["startingPosition"],
                new_checkpoint=True,
            )
            pipeline.feed()
            pipeline.start()
            pipeline.prove()
        finally:
            pipeline.end()


@pytest.mark.soak
def test_a_checkpoint_that_was_moved_is_gone_on_with(tmp_path: Path) -> None:
    """The query is the one that the checkpoint names, wherever its folder is."""
    with ServerProcess(tmp_path / "data") as server:
        job = job_for(LOCAL, server.url, tmp_path)
        pipeline = Pipeline(server, job, tmp_path)
        pipeline.feed()
        pipeline.start()
        try:
            pipeline.wait_until(lambda: pipeline.written() > 0, "the first rows")
            pipeline.feed()
            pipeline.end()  # killed, in a batch or between two
            moved = tmp_path / "elsewhere" / "checkpoint"
            moved.parent.mkdir()
            shutil.move(job.checkpoint, moved)
            pipeline.job = msgspec.structs.replace(job, checkpoint=str(moved))
            pipeline.feed()
            pipeline.start()
            pipeline.prove()
        finally:
            pipeline.end()


def ended(pipeline: Pipeline) -> bool:
    return pipeline.driver is not None and pipeline.driver.ended


def stop_with_uploads(pipeline: Pipeline) -> None:
    """Stop the driver after a look at the server has shown uploads that wait for their commit.

    A fast driver commits between two looks, so it is fed again until a look finds uploads. The
    commit may still be on its way when the driver stops: the caller has to allow for both.
    """

    def uploads_wait() -> bool:
        if waiting_parts(pipeline.server.data) > 0:
            return True
        if pipeline.written() >= pipeline.fed * len(KEYS):
            pipeline.feed()
        return False

    pipeline.wait_until(uploads_wait, "uploads")
    assert pipeline.driver is not None
    pipeline.driver.signal(signal.SIGSTOP)


def resumed_and_failed(pipeline: Pipeline, error: str) -> bool:
    """Let a driver go on; whether its query then failed by `error`, or wrote the next batch."""
    driver = pipeline.driver
    assert driver is not None
    before = pipeline.written()
    driver.signal(signal.SIGCONT)
    wait_for(lambda: driver.ended or pipeline.written() > before, "the driver's answer")
    if not driver.ended:
        return False
    assert driver.wait() == FAILED
    assert error in driver.output, driver.output
    return True
