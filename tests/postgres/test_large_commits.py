"""Large commits on PostgreSQL: whole or not at all, on all nodes, while everybody else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from fencepost.clock import SystemClock
from fencepost.protocol.appends import Appended, TailMoved
from fencepost.protocol.batches import digest
from fencepost.protocol.commits import (
    CommitKeyReused,
    CommitRefused,
    CommitReplayed,
    CommittedInSlices,
    Part,
    PartUsed,
)
from fencepost.protocol.creates import Create, Created, ForkFrom
from fencepost.protocol.logs import Selection
from fencepost.protocol.offsets import START
from fencepost.protocol.streams import Lifetime
from fencepost.protocol.writers import BatchDone, WriterBatch, WriterOpen
from fencepost.store.contract import Deleted, Failed, PartClosed, StreamInfo, Upload
from fencepost.store.log_contract import LogQuery
from fencepost.store.maintain.jobs import Upkeep
from tests.contract.subject import batch_of
from tests.postgres.large_support import (
    COUNT,
    JSON,
    PATHS,
    STOP,
    Database,
    Node,
    answered,
    item,
    items,
    node,
)

TWICE = 3


@pytest.fixture
def database(postgres_dsn: str) -> Database:
    return Database(postgres_dsn)


@pytest.fixture
async def here(postgres_dsn: str) -> AsyncIterator[Node]:
    async with node(postgres_dsn) as made:
        await answered(made.append(STOP, b"0"))
        yield made


@pytest.fixture
async def there(postgres_dsn: str) -> AsyncIterator[Node]:
    async with node(postgres_dsn) as made:
        yield made


def whole(value: bytes) -> dict[str, bytes]:
    """What all streams hold after a commit."""
    return {path: b"0," + value if path == STOP else value for path in PATHS}


async def contents(of: Node) -> dict[str, bytes]:
    return {path: await of.content(path) for path in PATHS}


BEFORE = {path: b"0" if path == STOP else b"" for path in PATHS}


async def positions(of: Node) -> list[int]:
    """All positions that can be read."""
    query = LogQuery(Selection([], [], None), -1, None, 10_000, 1 << 20)
    read: Any = await of.logs.read(query, lambda rows: list(rows.positions))
    found: list[int] = read[1] or []
    return found


# Who waits, and who does not


async def test_other_streams_are_written_on_every_node_while_a_large_commit_is_under_way(
    here: Node, there: Node, database: Database
) -> None:
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        for number in range(TWICE):
            assert isinstance(await answered(here.append(f"here/{number}")), Appended)
            assert isinstance(await answered(there.append(f"there/{number}")), Appended)
        assert await contents(here) == await contents(there) == BEFORE
        assert not done.done()

    assert isinstance(await answered(done), CommittedInSlices)
    assert await contents(here) == await contents(there) == whole(b"1")
    await database.until_over()


async def test_who_comes_for_a_held_stream_waits_and_is_decided_afterwards_in_order(
    here: Node, there: Node, database: Database
) -> None:
    """Also for one that the commit makes, and has not come to yet."""
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        asked = [
            there.append(PATHS[0], b"2"),
            there.append(PATHS[0], b"3"),
            there.append(PATHS[-1], b"2", makes=False),
            there.commit(item("free", b"4"), item(PATHS[0], b"4")),
            here.append(PATHS[1], b"2"),
            there.append(PATHS[2], b"2", if_match=START),
            there.ask(there.store.delete, PATHS[3]),
            there.ask(there.store.create, Create("fork", fork_from=ForkFrom(PATHS[4], None, 0))),
            there.ask(there.store.truncate, PATHS[5], None),
        ]
        assert isinstance(await answered(there.append("other")), Appended)
        assert not any(one.done() for one in asked)

    assert isinstance(await answered(done), CommittedInSlices)
    outcomes = [await answered(one) for one in asked]
    assert isinstance(outcomes[5], TailMoved)
    assert outcomes[6] == Deleted()
    assert isinstance(outcomes[7], Created)
    assert await there.content(PATHS[0]) == b"1,2,3,4"
    assert await there.content(PATHS[-1]) == await here.content(PATHS[1]) == b"1,2"
    assert await there.content("fork") == b"1"
    info = await there.store.look(PATHS[5], touch=False)
    assert isinstance(info, StreamInfo)
    assert info.first == info.tail != START


async def test_parts_writers_and_keys_of_a_large_commit_wait_on_other_nodes(
    here: Node, there: Node, database: Database
) -> None:
    def upload(part: str, ordinal: int = 0) -> Upload:
        batch = batch_of(b"7", JSON)
        assert batch is not None
        return Upload(Part("t", part), ordinal, JSON, batch, digest(JSON, False, batch.data))

    for number in range(COUNT):
        await answered(there.ask(there.store.stage, upload(f"p{number}")))
    await answered(there.ask(there.store.open_writer, WriterOpen("w", "q")))
    batch = WriterBatch("w", "q", 1, 0, "d")
    sent = [item(path, parts=(f"p{number}",)) for number, path in enumerate(PATHS)]
    with database.stopping():
        done = here.commit(*sent, key="k", writer=batch)
        await database.until_stopped()
        late = there.ask(there.store.stage, upload("p0", 1))
        dropped = there.ask(there.store.unstage, Part("t", "p1"))
        used = there.commit(item("x", parts=("p2",)))
        repeated = there.commit(writer=batch)
        same = there.commit(*sent, key="k")
        other = there.commit(item("x"), key="k", mark=b"n" * 16)
        fencing = there.ask(there.store.open_writer, WriterOpen("w", "q"))
        assert isinstance(await answered(there.append("other")), Appended)
        waiting = (late, dropped, used, repeated, same, other, fencing)
        assert not any(one.done() for one in waiting)

    assert isinstance(await answered(done), CommittedInSlices)
    assert isinstance(await answered(late), PartClosed)
    assert isinstance(await answered(dropped), PartUsed)
    refused = await answered(used)
    assert isinstance(refused, CommitRefused)
    assert isinstance(refused.outcome, PartUsed)
    assert await answered(repeated) == BatchDone(0, True)
    replayed = await answered(same)
    assert isinstance(replayed, CommitReplayed)
    assert isinstance(await answered(other), CommitKeyReused)
    assert (await answered(fencing)).writer.batch == 0
    assert await contents(there) == whole(b"7")


async def test_two_large_commits_of_two_nodes_happen_one_after_the_other(
    here: Node, there: Node, database: Database
) -> None:
    sent = [of.commit(*items(value)) for value, of in ((1, here), (2, there), (3, here))]
    for one in sent:
        assert isinstance(await answered(one), CommittedInSlices)

    found = {
        content.removeprefix(b"0,") if path == STOP else content
        for path, content in (await contents(there)).items()
    }
    assert len(found) == 1
    assert sorted(found.pop().split(b",")) == [b"1", b"2", b"3"]
    await database.until_over()


async def test_a_fork_of_a_held_stream_ends_after_the_commit(
    here: Node, there: Node, database: Database
) -> None:
    """Ending a fork changes what it was forked from; so does ending a fork of the fork."""
    await answered(here.append(PATHS[0], b"0"))
    for path, source in (("fork", PATHS[0]), ("fork of fork", "fork")):
        made = there.ask(there.store.create, Create(path, fork_from=ForkFrom(source, None, 0)))
        assert isinstance(await answered(made), Created)
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        ended = [there.ask(there.store.delete, path) for path in ("fork of fork", "fork")]
        assert isinstance(await answered(there.append("other")), Appended)
        assert not any(one.done() for one in ended)

    await answered(done)
    assert [await answered(one) for one in ended] == [Deleted()] * 2
    assert await here.content(PATHS[0]) == b"0,1"
    forked = "SELECT forks_count FROM streams WHERE path = '{}' AND state < 2"
    assert database.rows(forked.format(PATHS[0])) == [(0,)]


# What happens unasked


async def test_upkeep_and_reads_leave_a_held_stream_alone_until_it_was_appended_to(
    here: Node, there: Node, database: Database
) -> None:
    mortal = PATHS[0]
    made = Create(mortal, content_type=JSON, lifetime=Lifetime(ttl_s=1))
    assert isinstance(await answered(here.ask(here.store.create, made)), Created)
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        await database.until(
            lambda: bool(
                database.rows(
                    "SELECT 1 FROM streams WHERE deadline_ms"
                    " < extract(epoch FROM clock_timestamp()) * 1000"
                )
            ),
            "the stream's time is over",
        )
        swept = asyncio.create_task(Upkeep(there.store, SystemClock()).expire())
        seen = await there.store.look(mortal, touch=True)
        assert isinstance(await answered(there.append("other")), Appended)
        assert isinstance(seen, StreamInfo)
        assert not swept.done()

    await answered(done)
    await swept
    [(messages,)] = database.rows(f"SELECT tail_messages FROM streams WHERE path = '{mortal}'")
    assert messages == 1


async def test_streams_whose_time_was_over_before_are_made_anew(
    here: Node, there: Node, database: Database
) -> None:
    made = Create(PATHS[0], content_type=JSON, lifetime=Lifetime(ttl_s=1))
    assert isinstance(await answered(here.ask(here.store.create, made)), Created)
    await answered(here.append(PATHS[0], b"0"))
    query = "SELECT 1 FROM streams WHERE deadline_ms < extract(epoch FROM clock_timestamp()) * 1000"
    await database.until(lambda: bool(database.rows(query)), "the stream's time is over")

    await answered(here.commit(*items()))

    assert await contents(there) == whole(b"1")
    states = database.rows(f"SELECT state FROM streams WHERE path = '{PATHS[0]}' ORDER BY id")
    assert states == [(2,), (0,)]


# The log


async def test_readers_of_the_log_see_all_of_a_large_commit_or_nothing_and_skip_no_position(
    here: Node, there: Node, database: Database
) -> None:
    told: list[str] = []
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        before = await positions(there)
        behind = await answered(there.append("other"))
        assert await positions(there) == await positions(here) == before
        assert await there.logs.head() < behind.position
        there.store.listen(lambda changes: told.extend(change.info.path for change in changes))
        here.store.listen(lambda changes: told.extend(change.info.path for change in changes))

    await answered(done)
    after = await positions(there)
    assert after == await positions(here) == list(range(len(before) + COUNT + 1))
    assert behind.position in after
    expected = {*PATHS, "other"}
    await database.until(
        lambda: expected <= set(told) and told.count("other") >= len((here, there)),
        "the readers of both nodes were told of everything that they can see now",
    )


# What comes to nothing


async def test_a_refused_large_commit_leaves_nothing_and_lets_everybody_go_on(
    here: Node, there: Node, database: Database
) -> None:
    refused = await answered(here.commit(*items(), item(STOP, b"9", if_match=START), key="k"))

    assert isinstance(refused, CommitRefused)
    assert refused.item == COUNT
    assert isinstance(refused.outcome, TailMoved)
    assert await contents(there) == BEFORE
    await database.until_over()
    after = await answered(there.append(PATHS[0]))
    assert after.position == await here.logs.head(), "the log is held back no longer"
    done = await answered(there.commit(*items(2), key="k"))
    assert isinstance(done, CommittedInSlices)


async def test_a_large_commit_whose_session_ends_is_undone_and_others_go_on(
    here: Node, there: Node, database: Database
) -> None:
    with database.stopping():
        done = here.commit(*items(), key="k")
        await database.until_stopped()
        waiting = there.append(PATHS[0], b"2")
        assert isinstance(await answered(there.append("other")), Appended)
        database.end_large_session()
        assert await answered(done) == Failed(full=False)
        assert isinstance(await answered(waiting), Appended)

    assert await contents(there) == {**BEFORE, PATHS[0]: b"2"}
    assert isinstance(await answered(there.commit(*items(1), key="k")), CommittedInSlices)


async def test_a_node_that_closes_gives_its_large_commit_up(
    here: Node, postgres_dsn: str, database: Database
) -> None:
    with database.stopping() as stop:
        async with node(postgres_dsn) as leaving:
            done = leaving.commit(*items())
            await database.until_stopped()
            waiting = here.append(PATHS[0], b"2")
            assert isinstance(await answered(here.append("other")), Appended)
            closing = asyncio.create_task(leaving.store.close())
            await asyncio.sleep(0)
            late = leaving.commit(*items(3))
            stop.rollback()
            assert await answered(done) == Failed(full=False)
            assert await answered(late) == Failed(full=False)
            await closing

    assert isinstance(await answered(waiting), Appended)
    assert await contents(here) == {**BEFORE, PATHS[0]: b"2"}


async def test_a_node_that_closes_does_not_wait_for_the_large_commits_of_others(
    here: Node, postgres_dsn: str, database: Database
) -> None:
    with database.stopping():
        done = here.commit(*items())
        await database.until_stopped()
        async with node(postgres_dsn) as leaving:
            waiting = leaving.append(PATHS[0], b"2")
            assert isinstance(await answered(leaving.append("other")), Appended)
        assert await answered(waiting) == Failed(full=False)
        assert not done.done()

    assert isinstance(await answered(done), CommittedInSlices)


async def test_a_server_that_knows_of_no_holds_cannot_tear_a_large_commit_apart(
    here: Node, there: Node, database: Database, postgres_dsn: str
) -> None:
    """As in the middle of an upgrade: it takes its turn and writes to a stream that is held."""

    def close_as_before() -> bool:
        try:
            with psycopg.connect(postgres_dsn) as old:
                old.execute("SELECT 1 FROM counters FOR UPDATE")
                old.execute(f"UPDATE streams SET closed = true WHERE path = '{STOP}'".encode())
        except psycopg.errors.DeadlockDetected:
            return False
        return True

    await answered(here.append(PATHS[-1], b"0"))
    with database.stopping(PATHS[-1]):
        done = here.commit(*items())
        await database.until_stopped()
        closing = asyncio.create_task(asyncio.to_thread(close_as_before))
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '{}%'"
        await database.until(
            lambda: bool(database.rows(waits.format("UPDATE streams"))), "the old server waits"
        )

    outcome = await answered(done)
    is_closed = await closing
    info = await there.store.look(STOP, touch=False)
    assert isinstance(info, StreamInfo)
    assert info.closed == is_closed
    if isinstance(outcome, CommittedInSlices):
        assert not is_closed
        assert (await there.content(PATHS[0]), await there.content(PATHS[-1])) == (b"1", b"0,1")
    else:
        assert outcome == Failed(full=False)
        assert (await there.content(PATHS[0]), await there.content(PATHS[-1])) == (b"", b"0")
    assert isinstance(await answered(there.append("other")), Appended)


async def test_a_commit_of_a_hundred_thousand_streams_is_one_commit(postgres_dsn: str) -> None:
    count = 100_000
    async with node(postgres_dsn, commit_slice_appends=128) as one:
        done = one.commit(*[item(f"many/{number:06}") for number in range(count)])
        others = 0
        while not done.done():
            assert isinstance(await answered(one.append("other")), Appended)
            others += 1
        assert isinstance(await done, CommittedInSlices)

        database = Database(postgres_dsn)
        assert others > count // 1000
        assert await one.logs.head() == count + others - 1
        counted = (
            "SELECT count(*), sum(tail_messages)::bigint FROM streams WHERE path LIKE 'many/%'"
        )
        assert database.rows(counted) == [(count, count)]
        assert await one.content(f"many/{count - 1:06}") == b"1"
