"""A data folder or a database with something of everything in it, for tests that look at them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psycopg

from fencepost.protocol.appends import Append, Conditions
from fencepost.protocol.batches import digest
from fencepost.protocol.books import BooksRequest
from fencepost.protocol.commits import Commit, CommitItem, Committed, Part
from fencepost.protocol.creates import Create, Created
from fencepost.protocol.leases import Correlated, message_target
from fencepost.protocol.meshes import MeshSettings
from fencepost.protocol.offsets import START, Offset
from fencepost.protocol.retention import Cut, Retention
from fencepost.protocol.sends import Sent
from fencepost.protocol.streams import Lifetime
from fencepost.protocol.subscriptions import Config, Link, Subscription
from fencepost.protocol.writers import PositionRange, WriterBatch, WriterOpen
from fencepost.store import records
from fencepost.store.contract import Staged, Upload
from fencepost.store.group_contract import DeleteGroup, RenewLeases
from fencepost.store.maintain.jobs import Upkeep
from fencepost.store.mesh_contract import DropName, EndMesh
from fencepost.store.sqlite.maintain import SqliteUpkeep
from fencepost.store.sqlite.store import SqliteStore
from fencepost.store.write.decider import Decider
from fencepost.testing.clock import SimClock
from tests.contract import grouping, meshing
from tests.contract.subject import PostgresEngine, SqliteEngine, Subject, answered, append, batch_of

JSON = "application/json"


async def furnish(folder: Path) -> None:
    """Fill a new folder and leave it as a server that was stopped leaves it."""
    clock = SimClock()
    await _fill(Subject(SqliteEngine(folder, clock), clock))


async def furnish_database() -> str:
    """The same in a new database, whose address this is."""
    clock = SimClock()
    engine = PostgresEngine(Path(), clock)
    await _fill(Subject(engine, clock))
    with psycopg.connect(engine.settings.url) as connection:
        # As a node that leads leaves it: the subscriptions have heard of everything.
        connection.execute("UPDATE followed SET turn = (SELECT turn FROM counters)")
    return engine.settings.url


async def _fill(subject: Subject) -> None:
    # First, because time passes there, and would take what is made before along.
    await _retention(subject)
    await _streams(subject)
    await _producers(subject)
    await _forks(subject)
    await _commits(subject)
    await _books(subject)
    await _writers(subject)
    await _groups(subject)
    await _meshes(subject)
    await _subscriptions(subject)
    await subject.close()


async def _streams(subject: Subject) -> None:
    await subject.made("json", JSON, body=b'[1,"two",{"three":3}]')
    await subject.made("bytes", body=b"hello")
    await subject.made("short", lifetime=Lifetime(ttl_s=3600))
    await subject.made("dated", lifetime=Lifetime(expires_at_ms=subject.clock.now_ms() + 10**9))
    await subject.made("closed", JSON, body=b"[1]")
    await subject.append("closed", b"[2]", JSON, closes=True)
    await subject.made("gone", body=b"soon forgotten")
    await subject.appended("gone", b"more", producer=("p", 0, 0))
    await subject.delete("gone")


async def _producers(subject: Subject) -> None:
    for seq in range(20):
        subject.clock.advance(10)
        await subject.appended(
            "json", b"[%d,%d]" % (seq, seq), content_type=JSON, producer=("a", 0, seq)
        )
    for epoch in range(3):
        for seq in range(3):
            await subject.appended("bytes", b"<%d.%d>" % (epoch, seq), producer=("b", epoch, seq))
    await subject.append("closed-by", b"x")
    await subject.made("closed-by")
    await subject.appended("closed-by", b"x", producer=("closer", 4, 0))
    await subject.append("closed-by", closes=True, producer=("closer", 4, 1))


async def _forks(subject: Subject) -> None:
    made = await subject.fork("fork", "json", Offset(2, 6))
    assert isinstance(made, Created), made
    await subject.appended("fork", b'["mine"]', content_type=JSON)
    await subject.fork("fork/cut", "bytes", START, 3)
    await subject.fork("fork/of-fork", "fork")
    await subject.made("kept-for-its-fork", body=b"inherited")
    await subject.fork("heir", "kept-for-its-fork")
    await subject.delete("kept-for-its-fork")


async def _writers(subject: Subject) -> None:
    for name in ("idle", "busy"):
        await answered(subject.ask(subject.store.open_writer, WriterOpen(name, "q")))
    for number, read in enumerate((None, PositionRange(None, 4), PositionRange(4, 9))):
        batch = WriterBatch("busy", "q", 1, number, f"digest {number}", range=read)
        done = await answered(subject.ask(subject.store.commit, Commit((), writer=batch)))
        assert isinstance(done, Committed)


async def _groups(subject: Subject) -> None:
    """Targets in every state, a parked event, a replayed message, and a deleted group."""
    paths = [f"orders/{state}" for state in ("idle", "held", "blocked", "parked", "waiting")]
    group = await grouping.with_work(subject, *paths, retries_max=0)
    rows = {row.target: row for row in await grouping.claimed(subject, group)}
    assert await grouping.acked(subject, group, rows["orders/idle"]) == "acked"
    assert await grouping.failed(subject, group, rows["orders/blocked"]) == "blocked"
    assert await grouping.failed(subject, group, rows["orders/parked"], park=True) == "parked"
    release = RenewLeases(group.name, [grouping.ref(group, rows["orders/waiting"])], None)
    await grouping.ask(subject, release)
    queue = await grouping.made(subject, "queue", targets="message")
    [position] = await grouping.with_events(subject, "orders/queue")
    message = message_target("orders/queue", position)
    found = Correlated(message, "orders/queue", position)
    queue = await grouping.correlate(subject, queue, found, until=position)
    [row] = await grouping.claimed(subject, queue)
    assert await grouping.failed(subject, queue, row, park=True) == "parked"
    await grouping.ask(subject, grouping.parking(queue, (message, position), replay=True))
    told = await grouping.made(subject, "told", targets="computed")
    mine = [Correlated("skus/tea", "orders/**", at, note="note") for at in range(position + 1)]
    told = await grouping.correlate(subject, told, *mine, until=position)
    await _widened(subject, position)
    await grouping.made(subject, "gone")
    await grouping.ask(subject, DeleteGroup("gone"))


async def _widened(subject: Subject, until: int) -> None:
    """A computed target that parked an event of one stream, and got those of others later."""
    group = await grouping.made(subject, "widened", targets="computed")
    first = Correlated("skus/milk", "orders/idle", 0)
    group = await grouping.correlate(subject, group, first, until=0)
    [row] = await grouping.claimed(subject, group)
    assert await grouping.failed(subject, group, row, park=True) == "parked"
    more = Correlated("skus/milk", "orders/**", until)
    await grouping.correlate(subject, group, more, until=until)


async def _meshes(subject: Subject) -> None:
    """Two meshes with topics, members, queues and dedupe rows, one that is being deleted."""
    await meshing.a_mesh(subject)
    await meshing.a_mesh(subject, "club", MeshSettings(dedupe_mode="permanent"))
    for n in range(3):
        for mesh in ("shop", "club"):
            assert isinstance(await meshing.send(subject, meshing.a_send(f"m-{n}"), mesh), Sent)
    for kind, ref in (("dm", "ann"), ("queue", "jobs")):
        sent = await meshing.send(subject, meshing.a_send(f"to-{ref}", kind=kind, ref=ref))
        assert isinstance(sent, Sent)
    await meshing.named(subject, "topic", "old")
    assert isinstance(await meshing.send(subject, meshing.a_send("m-old", ref="old")), Sent)
    await meshing.ask(subject, DropName("shop", "topic", "old"))
    await meshing.a_mesh(subject, "ending")
    assert isinstance(await meshing.send(subject, meshing.a_send("m-end"), "ending"), Sent)
    await meshing.ask(subject, EndMesh("ending"))


async def _commits(subject: Subject) -> None:
    await subject.made("keyed", JSON)
    for number in range(3):
        keyed = append("keyed", b"[%d]" % number, JSON)
        outcome = await subject.ask(
            subject.store.append, _with(keyed, Conditions(key=f"k{number}"))
        )
        assert type(outcome).__name__ == "Appended", outcome
    for ordinal in range(2):
        upload = Upload(
            Part("txn", "one"),
            ordinal,
            JSON,
            _batch(b'["staged",%d]' % ordinal),
            b"%016d" % ordinal,
        )
        staged = await subject.ask(subject.store.stage, upload)
        assert isinstance(staged, Staged), staged
    upload = Upload(Part("txn", "waiting"), 0, JSON, _batch(b"[0]"), bytes(16))
    assert isinstance(await subject.ask(subject.store.stage, upload), Staged)
    item = CommitItem(append("keyed", producer=("stager", 0, 0)), (Part("txn", "one"),))
    other = CommitItem(append("bytes", b"beside"))
    outcome = await subject.ask(
        subject.store.commit, Commit((item, other), "commit-key", digest("", False, b""))
    )
    assert isinstance(outcome, Committed), outcome
    await subject.appended("keyed", b"[9]", content_type=JSON, producer=("stager", 0, 1))


async def _books(subject: Subject) -> None:
    """A stream with closed books, one that was retired, and a key of an append without data."""
    for path, retires in (("books", False), ("retired", True)):
        await subject.made(path, JSON, body=b"[1,2]")
        closing = _with(append(path), Conditions(books=BooksRequest("close"), key="close"))
        retiring = _with(append(path), Conditions(books=BooksRequest(truncate_before="now")))
        for request in (closing, retiring) if retires else (closing,):
            commit = Commit((CommitItem(request),))
            outcome = await subject.ask(subject.store.commit, commit)
            assert isinstance(outcome, Committed), outcome


async def _retention(subject: Subject) -> None:
    """Streams that were truncated, one of them purged; a deleted one that is gone for good."""
    await subject.ask(
        subject.store.create, Create("kept", JSON, retention=Retention(messages=1000))
    )
    for seq in range(30):
        await subject.appended("kept", b"[%d]" % seq, content_type=JSON, producer=("r", 0, seq))
    await subject.made("forgotten", body=b"x" * 100)
    await subject.appended("forgotten", b"y", producer=("f", 0, 0))
    await subject.append("forgotten", closes=True, producer=("f", 0, 1))
    await _truncated(subject, "forgotten")
    await subject.delete("forgotten")
    await _truncated(subject, "kept")
    subject.clock.advance(subject.kept.settings.log_retention_ms)
    store, clock = subject.store, subject.clock
    upkeep = Upkeep(subject.kept, clock)
    if isinstance(store, SqliteStore):
        upkeep = SqliteUpkeep(store, clock)
    for _ in range(4):
        for job in upkeep.jobs:
            await job()
    await subject.appended("kept", b'["after"]', content_type=JSON, producer=("r", 0, 30))
    await subject.made("cut", JSON, body=b"[1,2,3]")
    await _truncated(subject, "cut", Offset(1, 1))
    # Enough positions for some of them to be weighed.
    await subject.made("many", JSON)
    for _ in range(5):
        body = b"[%b]" % b",".join([b"0"] * 1000)
        await subject.appended("many", body, content_type=JSON)
    for job in upkeep.jobs:
        await job()


async def _truncated(subject: Subject, path: str, before: Offset | None = None) -> None:
    answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    subject.store.truncate(path, before, answer.set_result)
    assert isinstance(await answer, Cut)


def _with(request: Append, conditions: Conditions) -> Append:
    return Append(
        request.path,
        request.batch,
        request.media_type,
        request.closes,
        request.producer,
        request.seq,
        request.digest,
        conditions,
    )


def _batch(body: bytes) -> Any:
    return batch_of(body, JSON)


async def _subscriptions(subject: Subject) -> None:
    stream = await subject.info("json")
    subscription = Subscription(
        1,
        "watcher",
        Config("pull-wake", None, ("json",), None, "wakes", 30_000, None),
        base_url="http://127.0.0.1:4437",
        created_ms=subject.clock.now_ms(),
    )
    link = Link("json", explicit=True, glob=False, stream_id=stream.id)
    link.acked = stream.tail

    def save(decider: Decider) -> None:
        decider.group.statements += [
            ("save_secret", ("signing", b"secret" * 6, decider.tick())),
            ("insert_subscription", records.subscription_columns(subscription)),
            ("save_link", records.link_columns(subscription, link)),
        ]

    await subject.kept.decide(save)
