"""Reactions on Spark: the handlers of an app, drained on executors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from typer.testing import CliRunner

import fencepost
from fencepost.cli.pipeline import app as cli
from fencepost.client.errors import ResponseError
from fencepost.client.groups import Lease
from fencepost.events import (
    App,
    Context,
    NonRetryableError,
    OpenApp,
    ProjectionLostError,
    Recorded,
    Retry,
)
from fencepost.events.projections.stores import Taken
from fencepost.pipeline import reactions, rebuilds
from fencepost.pipeline.connection import Connection
from fencepost.pipeline.errors import OptionError
from fencepost.pipeline.rebuilds import rebuild
from fencepost.testing.postgres import shared_server
from tests.pipeline.reaction_app import Asked, Job, app, async_app, tally_1, tally_2
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODULE = "tests.pipeline.reaction_app"
NAME = f"{MODULE}:app"
JOBS, NUMBERS = 5, 12


def _ask(url: str, *, poison: int | None = None) -> None:
    with fencepost.connect(url) as client, app.open(client) as opened:
        for job in range(JOBS):
            for number in range(NUMBERS):
                bad = poison == number and job == 0
                opened.do(Job.ask, str(job), number=job * NUMBERS + number, poison=bad)


def _noted(url: str) -> list[tuple[str, int]]:
    """Each effect: the total it is in and its number, in the order of the log."""
    with fencepost.connect(url) as client:
        found = client.log(match="spark-totals/*")
        return [(one.stream, one.data["data"]["number"]) for one in found]


def test_every_event_is_handled_once_and_in_order_per_target(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    _ask(own_server.url)

    first = reactions.drain(spark, NAME, options={"url": own_server.url}, streams=2)
    again = reactions.drain(spark, NAME, options={"url": own_server.url})

    noted = _noted(own_server.url)
    assert sorted(number for _, number in noted) == list(range(JOBS * NUMBERS))
    for stream in {stream for stream, _ in noted}:
        own = [number for one, number in noted if one == stream]
        # Numbers were asked for job by job, so the order of events is the order of numbers.
        assert own == sorted(own)
    assert first.acked == first.claimed > 0
    assert (again.rounds, again.claimed) == (0, 0)


def test_the_command_says_what_it_did(spark: SparkSession, own_server: ServerProcess) -> None:
    assert spark is not None  # the command goes on with the session that there is
    _ask(own_server.url)
    result = CliRunner().invoke(cli, ["react", NAME, "--url", own_server.url, "--json"])
    missing = CliRunner().invoke(cli, ["react", "nowhere_at_all:app", "--url", own_server.url])

    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout.splitlines()[-1])
    assert done["acked"] == done["claimed"] > 0
    assert len(_noted(own_server.url)) == JOBS * NUMBERS
    assert missing.exit_code == 2
    assert "nowhere_at_all" in missing.output


def test_an_app_travels_as_an_object_and_its_failures_are_parked(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    _ask(own_server.url, poison=3)

    reactions.drain(spark, app, options={"url": own_server.url}, tasks=2)

    noted = Counter(number for _, number in _noted(own_server.url))
    assert noted == Counter(set(range(JOBS * NUMBERS)) - {3})
    with fencepost.connect(own_server.url) as client:
        [parked] = client.group("spark-app").parked()
    assert "poison" in parked.error


def test_a_drain_in_which_all_is_blocked_ends_with_the_bound_that_it_has_reached(
    spark: SparkSession, tmp_path: Path
) -> None:
    stuck = App("spark-stuck", entities=[Job])

    @stuck.reaction(Asked, retry=Retry(0))
    def fail(_event: Recorded[Asked], _context: Context) -> None:
        raise NonRetryableError("not yet")

    with ServerProcess(tmp_path, environment={"FENCEPOST_GROUPS_TOLD_MAX": "3"}) as server:
        _ask(server.url)

        with pytest.raises(ResponseError, match="told_max"):
            reactions.drain(spark, stuck, options={"url": server.url}, tasks=1)


def test_async_handlers_run_on_executors_too(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    _ask(own_server.url)

    reactions.drain(spark, async_app, options={"url": own_server.url})

    assert len(_noted(own_server.url)) == JOBS * NUMBERS


def test_a_second_attempt_of_a_task_changes_nothing(
    spark: SparkSession, own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round is run twice, as by speculation: both attempts hold the same tokens."""
    _ask(own_server.url)
    once = reactions._handle
    seconds: list[int] = []

    def twice(session: SparkSession, round_: Any) -> int:
        first = once(session, round_)
        seconds.append(once(session, round_))
        return first

    monkeypatch.setattr(reactions, "_handle", twice)
    drained = reactions.drain(spark, NAME, options={"url": own_server.url})

    assert drained.acked == drained.claimed
    assert seconds
    assert set(seconds) == {0}
    assert sorted(number for _, number in _noted(own_server.url)) == list(range(JOBS * NUMBERS))


def test_plain_workers_and_spark_share_one_group(
    spark: SparkSession, own_server: ServerProcess
) -> None:
    _ask(own_server.url)
    with fencepost.connect(own_server.url) as client, app.open(client) as opened:
        group = opened.group
        driver = reactions._Claims(client, app, "driver", None, 3, 10)
        assert driver.note()
        held, _ = driver.next()
        assert len(held) == 3
        # A plain worker cannot take what the driver holds.
        taken = {lease.target for lease in group.claim("plain", streams_max=100).leases}
        assert taken.isdisjoint(lease.target for lease in held)
        assert len(taken) > 0
    encoded = msgspec.msgpack.encode(held)
    assert msgspec.msgpack.decode(encoded, type=list[Lease]) == held


@pytest.mark.parametrize("name", ["app", "nowhere_at_all:app", "tests.pipeline.reaction_app:PARTS"])
def test_an_app_that_is_not_there_is_said_by_its_name(name: str) -> None:
    with pytest.raises((OptionError, reactions.AppMissingError), match=name.split(":")[0]):
        reactions.app_of(name)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "tally.db")
        return
    postgres = shared_server()
    url = postgres.new_database()
    yield url
    postgres.drop_database(url)


def test_a_projection_is_built_in_parallel_beside_the_live_one(
    spark: SparkSession, own_server: ServerProcess, database: str
) -> None:
    _ask(own_server.url)
    options = {"url": own_server.url}
    with (
        fencepost.connect(own_server.url) as client,
        tally_1.open(client, projections=database) as old,
    ):
        old.projections.settle()
        before = _tallied(old)

        built = rebuild(spark, f"{MODULE}:tally_2", "tally", database, options=options, parts=3)
        after = _tallied(old)
        statuses = [(one.version, one.live, one.position) for one in old.projections.statuses()]
        again = rebuild(spark, f"{MODULE}:tally_2", "tally", database, options=options, anew=True)

        fold = {
            (entry.stream, entry.data["data"]["number"])
            for entry in client.log(match="spark-jobs/*", names="Asked")
        }
        assert before == fold
        assert after == {(stream, 2 * number) for stream, number in fold} == _tallied(old)
        assert (built.parts, built.version, built.position) == (3, 2, client.log_head())
        assert statuses == [(1, False, built.position), (2, True, built.position)]
        assert again.position == built.position


def test_what_was_built_of_a_projection_before_a_kill_is_not_applied_again(
    own_server: ServerProcess, database: str
) -> None:
    """Two of three parts are done when the driver dies: without Spark, as a task does its part."""
    _ask(own_server.url)
    connection = Connection(own_server.url)
    with connection.client() as client:
        run = rebuilds._running(tally_2, "tally", database, client)
        until = client.log_head()
        run.store.prepare(run.projection)

        def building(taken: list[Taken]) -> rebuilds._Building:
            return rebuilds._Building(
                app=tally_2,
                name="tally",
                database=database,
                connection=connection,
                until=until,
                parts=taken,
            )

        dead = building(run.store.take_parts(run.projection, 3))
        for part in (0, 1):
            rebuilds._apply(dead, part)
        assert not run.store.join_parts(run.projection, dead.parts[0].fence, until)
        after_kill = building(run.store.take_parts(run.projection, 3))
        # A task of the dead driver that wakes up has lost its part.
        with pytest.raises(ProjectionLostError):
            rebuilds._apply(dead, 2)
        assert [one.position for one in after_kill.parts] == [until, until, -1]
        rebuilds._apply(after_kill, 2)
        assert run.store.join_parts(run.projection, after_kill.parts[0].fence, until)
        rows = run.store.read("select count(*), count(distinct number) from tally")
        assert tuple(rows[0]) == (JOBS * NUMBERS, JOBS * NUMBERS)

        # A plain worker that takes a projection in parts begins it anew.
        halves = building(run.store.take_parts(run.projection, 2))
        taken = run.store.take(run.projection)
        assert taken.position == -1
        with pytest.raises(ProjectionLostError):
            rebuilds._apply(halves, 0)
        run.store.close()


def _tallied(opened: OpenApp) -> set[tuple[str, int]]:
    found = opened.projections.read("select job, number from tally")
    assert len(found) == JOBS * NUMBERS
    return {(row[0], row[1]) for row in found}
