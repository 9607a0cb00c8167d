"""The audit finds every kind of defect where it was planted, and nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw
import httpx
import pytest

import fencepost
from fencepost.client.operations import CommitAppend, Producing, WriterBatch
from fencepost.pipeline.audit import Listed, all_defects, audit, reports
from fencepost.pipeline.audit.log import Span
from fencepost.pipeline.audit.rules import FACTS, KINDS, counts, facts_of, numbered
from fencepost.pipeline.audit.writers import BatchRow, ListedWriters, WriterRow
from fencepost.pipeline.source.columns import log_schema
from tests.engines import server_at
from tests.integration.mesh_support import Shop
from tests.integration.test_orphan_check import PLANTED as PLANTED_SENDS
from tests.integration.test_orphan_check import execute
from tests.serving import ServerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
SIZE = 10


class Fact(NamedTuple):
    """A row of the facts."""

    stream: str
    offset: str
    version: int | None
    position: int
    timestamp: datetime
    producer_id: str | None = None
    producer_epoch: int | None = None
    producer_seq: int | None = None
    size: int | None = SIZE
    marker: str | None = None
    identity: str | None = None


class Planting:
    """A sound log that grows stream by stream, with what the server would list of it."""

    def __init__(self) -> None:
        self._positions = count()
        self.facts: list[Fact] = []
        self.streams: list[tuple[str, int, str, bool, bool]] = []
        self.producers: list[tuple[str, str, int, int]] = []
        self.keys: list[tuple[str, int, str, str, int]] = []
        self.writers: list[WriterRow] = []
        self.batches: list[BatchRow] = []

    def writer(self, name: str, **fields: Any) -> None:
        """A writer that published one batch of one row, which is there."""
        fact = self.sound(name, messages=1, producer=None)[0]
        at_ms = round(fact.timestamp.timestamp() * 1000)
        digest = "v1 rows=1 streams=1 0"
        row = WriterRow(name, None, 0, 0, digest, digest)
        batch = BatchRow(name, None, 0, at_ms, 1, 10_000, 0)
        of_batch = {key: one for key, one in fields.items() if key in BatchRow._fields[3:]}
        self.batches.append(batch._replace(**of_batch))
        of_writer = {key: one for key, one in fields.items() if key not in of_batch}
        self.writers.append(row._replace(**of_writer))

    def sound(self, stream: str, *, messages: int = 4, producer: str | None = "p") -> list[Fact]:
        """A stream of messages, a batch each, listed as it is."""
        made = [self.message(stream, version, producer, version) for version in range(messages)]
        self.streams.append((stream, messages - 1, _offset(messages), False, False))
        if producer is not None:
            self.producers.append((stream, producer, 0, messages - 1))
        return made

    def message(
        self, stream: str, version: int, producer: str | None, seq: int, epoch: int = 0
    ) -> Fact:
        position = next(self._positions)
        sent = (None, None, None) if producer is None else (producer, epoch, seq)
        at = NOON + timedelta(seconds=position)
        self.facts.append(Fact(stream, _offset(version), version, position, at, *sent))
        return self.facts[-1]

    def marker(self, stream: str, kind: str, version: int) -> None:
        position = next(self._positions)
        at = NOON + timedelta(seconds=position)
        self.facts.append(
            Fact(stream, _offset(version), None, position, at, size=None, marker=kind)
        )

    def change(self, fact: Fact, **fields: Any) -> None:
        self.facts[self.facts.index(fact)] = fact._replace(**fields)

    def relist(self, stream: str, **fields: Any) -> None:
        names = ("stream", "version", "tail", "closed", "forked")
        (known,) = [one for one in self.streams if one[0] == stream]
        whole = dict(zip(names, known, strict=True)) | fields
        self.streams[self.streams.index(known)] = tuple(whole.values())  # type: ignore[assignment]


def _offset(version: int) -> str:
    return f"{version:016d}_{version * SIZE:016d}"


def _gap(log: Planting, stream: str) -> None:
    log.facts.remove(log.sound(stream, producer=None)[1])


def _twice(log: Planting, stream: str) -> None:
    log.sound(stream, producer=None)
    log.message(stream, 3, None, 0)


def _broken_offset(log: Planting, stream: str) -> None:
    first, second, *_ = log.sound(stream, producer=None)
    log.change(second, size=SIZE + 1)
    assert first.version == 0


def _no_beginning(log: Planting, stream: str) -> None:
    log.facts.remove(log.sound(stream, producer=None)[0])


def _seq_gap(log: Planting, stream: str) -> None:
    made = log.sound(stream)
    log.change(made[2], producer_id=None, producer_epoch=None, producer_seq=None)


def _seq_twice(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.message(stream, 4, "p", 3)
    log.relist(stream, version=4, tail=_offset(5))


def _seq_disordered(log: Planting, stream: str) -> None:
    made = log.sound(stream)
    log.change(made[1], producer_seq=2)
    log.change(made[2], producer_seq=1)


def _stale_epoch(log: Planting, stream: str) -> None:
    made = log.sound(stream, messages=2)
    log.change(made[0], producer_epoch=1, producer_seq=0)
    log.change(made[1], producer_seq=0)
    log.producers[-1] = (stream, "p", 1, 0)


def _same_again(log: Planting, stream: str) -> None:
    made = log.sound(stream)
    for fact, identity in zip(made, ("1", "2", "1", None), strict=True):
        log.change(fact, identity=identity)


def _after_close(log: Planting, stream: str) -> None:
    log.sound(stream, messages=1, producer=None)
    log.marker(stream, "closed", 1)
    log.message(stream, 1, None, 0)
    log.relist(stream, version=1, tail=_offset(2), closed=True)


def _closed_twice(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.marker(stream, "closed", 4)
    log.marker(stream, "closed", 4)
    log.relist(stream, closed=True)


def _closure_lost(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.marker(stream, "closed", 4)


def _closure_unmarked(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.relist(stream, closed=True)


def _stream_lost(log: Planting, stream: str) -> None:
    log.sound(stream, producer=None)
    log.streams.pop()


def _tail_missing(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.relist(stream, version=9, tail=_offset(10))


def _tail_behind(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.relist(stream, version=2, tail=_offset(3))


def _tail_wrong(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.relist(stream, tail=_offset(7))


def _producer_lost(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.producers.pop()


def _producer_ahead(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.producers[-1] = (stream, "p", 0, 5)


def _producer_behind(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.producers[-1] = (stream, "p", 0, 2)


def _orphan_key(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.keys.append((stream, 1, "k", _offset(3), 10_000))


def _two_keys(log: Planting, stream: str) -> None:
    made = log.sound(stream)
    log.keys += [(stream, 1, key, made[0].offset, made[0].position) for key in ("k", "l")]


def _wrong_key(log: Planting, stream: str) -> None:
    made = log.sound(stream)
    log.keys.append((stream, 1, "k", made[2].offset, made[0].position))


def _damaged(log: Planting, stream: str) -> None:
    log.sound(stream)
    log.marker(stream, "damaged", 4)


def _writer_with(**fields: Any) -> Callable[[Planting, str], None]:
    return lambda log, name: log.writer(name, **fields)


PLANTED: dict[str, Callable[[Planting, str], None]] = {
    "data_damaged": _damaged,
    "version_gap": _gap,
    "version_repeated": _twice,
    "offset_broken": _broken_offset,
    "beginning_missing": _no_beginning,
    "seq_gap": _seq_gap,
    "seq_repeated": _seq_twice,
    "seq_disordered": _seq_disordered,
    "epoch_stale": _stale_epoch,
    "message_repeated": _same_again,
    "written_after_close": _after_close,
    "closed_twice": _closed_twice,
    "closure_lost": _closure_lost,
    "closure_unmarked": _closure_unmarked,
    "stream_lost": _stream_lost,
    "tail_missing": _tail_missing,
    "tail_behind": _tail_behind,
    "tail_wrong": _tail_wrong,
    "producer_lost": _producer_lost,
    "producer_ahead": _producer_ahead,
    "producer_behind": _producer_behind,
    "writer_ahead": _writer_with(batch=10),
    "writer_behind": _writer_with(batch=None, digest=None),
    "writer_digest_wrong": _writer_with(digest="v1 rows=1 streams=1 1"),
    "writer_rows_missing": _writer_with(rows=2),
    "writer_range_ahead": _writer_with(until=10_001),
    "key_without_message": _orphan_key,
    "key_repeated": _two_keys,
    "key_offset_wrong": _wrong_key,
}


def _plant_sound(log: Planting) -> None:
    """What must not be taken for a defect."""
    log.writer("sound/writer")
    made = log.sound("sound/plain")
    log.keys.append(("sound/plain", 1, "k", made[1].offset, made[1].position))
    # Others may have the same identity, and some have none.
    for stream in ("sound/plain", "sound/same"):
        fact = made[0] if stream == "sound/plain" else log.sound(stream)[0]
        log.change(fact, identity="1")
    # A batch of three messages under one number.
    at = NOON + timedelta(days=1)
    for version in range(3):
        log.change(log.message("sound/batch", version, "p", 0), timestamp=at)
    log.streams.append(("sound/batch", 2, _offset(3), False, False))
    log.producers.append(("sound/batch", "p", 0, 0))
    # Deleted, and made again: versions, numbers and the closure begin anew.
    log.sound("sound/again")
    log.marker("sound/again", "closed", 4)
    log.marker("sound/again", "deleted", 4)
    log.streams.pop()
    log.producers.pop()
    log.sound("sound/again", messages=2)
    # A bare close takes a producer's number and leaves only a marker.
    log.sound("sound/closed")
    log.marker("sound/closed", "closed", 4)
    log.relist("sound/closed", closed=True)
    log.producers[-1] = ("sound/closed", "p", 0, 4)
    # A new epoch begins at 0; a fork begins where it was forked, and may have nothing of its own.
    log.sound("sound/epochs", messages=1)
    log.message("sound/epochs", 1, "p", 0, epoch=3)
    log.relist("sound/epochs", version=1, tail=_offset(2))
    log.producers[-1] = ("sound/epochs", "p", 3, 0)
    log.message("sound/fork", 7, None, 0)
    log.streams.append(("sound/fork", 7, _offset(8), False, True))
    log.streams.append(("sound/bare-fork", 7, _offset(8), False, True))
    log.streams.append(("sound/empty", -1, _offset(0), False, False))


def test_every_kind_of_defect_is_found_where_it_was_planted_and_nowhere_else(
    spark: SparkSession,
) -> None:
    log = Planting()
    _plant_sound(log)
    for kind, plant in PLANTED.items():
        plant(log, f"planted/{kind}")
    head = max(fact.position for fact in log.facts)
    writers = ListedWriters(log.writers, log.batches)
    listed = Listed(head, head, log.streams, log.producers, log.keys, writers)
    facts = numbered(spark.createDataFrame(log.facts, FACTS)).persist()

    defects = all_defects(facts, Span(-1, head, len(log.facts), -1), listed, once=True).collect()

    facts.unpersist()
    found = {(row.kind, row.stream) for row in defects}
    assert set(PLANTED) == set(KINDS)
    for kind in PLANTED:
        assert (kind, f"planted/{kind}") in found, kind
    assert [one for one in found if not one[1].startswith("planted/")] == []


def test_defects_in_messages_of_the_source_are_found_without_lists(spark: SparkSession) -> None:
    rows = [
        ("s", _offset(n), n, n, NOON, "application/json", "p", 0, n, b"x" * SIZE) for n in range(5)
    ]
    messages = spark.createDataFrame(rows, log_schema())
    span = Span(-1, 4, 5, -1)

    clean = all_defects(numbered(facts_of(messages)), span, None).count()
    torn = all_defects(numbered(facts_of(messages.where("version != 2"))), span, None).collect()

    assert clean == 0
    assert {row.kind for row in torn} == {"version_gap", "seq_gap"}


def test_messages_are_counted_by_stream_and_by_day_of_utc(spark: SparkSession) -> None:
    log = Planting()
    first = log.sound("a", messages=3, producer=None)[0]
    log.change(first, timestamp=datetime(2026, 11, 15, 23, 59, tzinfo=UTC))

    found = counts(numbered(spark.createDataFrame(log.facts, FACTS))).orderBy("day").collect()

    assert [(str(row.day), row.messages, row.bytes) for row in found] == [
        ("2026-11-15", 1, SIZE),
        ("2026-11-16", 2, 2 * SIZE),
    ]


def _furnish(url: str) -> None:
    """Something of everything, through the front door."""
    with fencepost.connect(url) as client:
        for name in ("lost", "doubled", "reopened", "orphaned", "moved", "fine"):
            stream = client.stream(f"audited/{name}")
            for seq in range(4):
                stream.append_many(
                    [{"n": seq}, {"m": seq}],
                    auto_create=True,
                    producer=Producing("writer", 0, seq),
                )
            stream.append({"keyed": True}, key=f"key-of-{name}")
        client.stage("audit", "part", [b"first\n"], content_type="text/plain")
        client.stage("audit", "part", [b"second\n"], chunk=1, content_type="text/plain")
        client.stage("audit", "part", [b"third\n"], chunk=2, content_type="text/plain")
        client.commit(
            [
                CommitAppend(
                    stream="audited/cut",
                    content_type="text/plain",
                    parts=[("audit", "part", 3)],
                    auto_create=True,
                )
            ]
        )
        client.stream("audited/reopened").close()
        client.stream("audited/fine").fork("audited/fork").append({"own": 1})
        client.stream("audited/fine").truncate(before="now")
        again = client.stream("audited/again")
        for _life in range(2):
            again.append("x", auto_create=True)
            again.close()
            again.delete()
        again.append("x", auto_create=True)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose file was damaged while it was stopped."""
    server = ServerProcess(tmp_path / "data")
    with server:
        _furnish(server.url)
    (file,) = (tmp_path / "data").glob("*.db")
    with apsw.Connection(str(file)) as database:
        ids = dict(database.execute("SELECT path, id FROM streams WHERE state = 0"))
        damage = {
            # A batch is gone from the middle of a stream.
            "DELETE FROM log WHERE stream = ? AND kind = 0 AND producer_seq = 2": "audited/lost",
            # Some of the data that was uploaded for a commit is gone.
            "UPDATE chunks SET data = x'' WHERE ordinal = 1 AND ? > 0": "audited/cut",
            # The newest batch of a producer is forgotten: its retry would be stored again.
            "UPDATE producers SET seq = seq - 1 WHERE stream = ?": "audited/doubled",
            # A closed stream is open again.
            "UPDATE streams SET closed = 0 WHERE id = ?": "audited/reopened",
            # A key stands for a message that never was.
            "UPDATE keys SET position = position + 1000000 WHERE stream = ?": "audited/orphaned",
            # The tail of a stream has moved on without messages.
            "UPDATE streams SET tail_messages = tail_messages + 1, tail_bytes = tail_bytes + 1"
            " WHERE id = ?": "audited/moved",
        }
        for statement, path in damage.items():
            database.execute(statement, (ids[path],))
            assert database.changes() > 0, statement
    with server:
        yield server


def test_damage_in_the_file_of_a_server_is_found_over_http(
    spark: SparkSession, damaged: ServerProcess, tmp_path: Path
) -> None:
    report = audit(spark, match="audited/**", options={"url": damaged.url})

    found = {(one.kind, one.stream.removeprefix("audited/")) for one in report.samples}
    assert found >= {
        ("data_damaged", "lost"),
        ("version_gap", "lost"),
        ("data_damaged", "cut"),
        ("version_gap", "cut"),
        ("seq_gap", "lost"),
        ("producer_behind", "doubled"),
        ("closure_lost", "reopened"),
        ("key_without_message", "orphaned"),
        ("tail_missing", "moved"),
    }
    assert {stream for _kind, stream in found} == {
        *("lost", "cut", "doubled", "reopened", "orphaned", "moved")
    }
    assert not report.is_clean
    reports.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_with_something_of_everything_is_clean_also_while_it_is_written(
    spark: SparkSession, server: ServerProcess
) -> None:
    _furnish(server.url)

    with fencepost.connect(server.url) as client:
        busy = client.create("audited/busy")

        def write(_step: str) -> None:
            busy.append_many([{"n": number} for number in range(100)])

        report = audit(spark, match="audited/**", options={"url": server.url}, tell=write)

    assert report.defects == {}
    assert report.is_clean
    assert report.lists_compared
    assert sum(day.messages for day in report.days) == report.messages >= 54
    for counted in (report.largest, report.by_stream_and_day):
        assert sum(one.messages for one in counted) == report.messages
    assert {one.day for one in report.by_stream_and_day} == {day.name for day in report.days}


def test_damage_to_writers_is_found_over_http(spark: SparkSession, tmp_path: Path) -> None:
    other = "v1 rows=9 streams=1 0"
    damage = {
        "UPDATE writers SET batch = batch + 10 WHERE name = 'ahead'": ("writer_ahead", "ahead"),
        f"UPDATE writers SET digest = '{other}' WHERE name = 'digest'": (
            "writer_digest_wrong",
            "digest",
        ),
        f"UPDATE writer_history SET digest = '{other}' WHERE name = 'rows' AND batch = 0": (
            "writer_rows_missing",
            "rows",
        ),
    }
    with ServerProcess(tmp_path / "data") as server, fencepost.connect(server.url) as client:
        for name in ("ahead", "digest", "rows", "fine"):
            epoch = client.open_writer(name, "query").epoch
            for number in range(2):
                batch = WriterBatch(
                    name=name,
                    query="query",
                    epoch=epoch,
                    batch=number,
                    digest="v1 rows=2 streams=1 0",
                )
                rows = CommitAppend(stream=f"of-{name}", messages=[1, 2], auto_create=True)
                client.commit([rows], writer=batch)
        server.stop()
        (file,) = (tmp_path / "data").glob("*.db")
        with apsw.Connection(str(file)) as database:
            for statement in damage:
                database.execute(statement)
                assert database.changes() == 1
        server.restart()

        report = audit(spark, options={"url": server.url})

    assert {(one.kind, one.stream) for one in report.samples} == set(damage.values())


def _worked(url: str) -> None:
    """A group whose targets were handled."""
    with fencepost.connect(url) as client:
        for name in ("ahead", "back", "again", "sound"):
            client.stream(f"audited/{name}").append_many([{"n": 1}, {"n": 2}], auto_create=True)
        group = client.group("auditors")
        group.make(["audited/*"], targets="stream")
        group.work(lambda _event, _lease: None, worker="w", until_idle=True)


def test_leases_that_went_wrong_are_found_while_the_server_runs(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "data") as server:
        _worked(server.url)
        (file,) = (tmp_path / "data").glob("*.db")

        def damage(step: str) -> None:
            if step != "reading the log":  # the first look is over then
                return
            with apsw.Connection(str(file)) as database:
                database.set_busy_timeout(10_000)
                for change, name in {
                    "at_position = work_to + 1": "ahead",
                    "at_position = at_position - 1": "back",
                    "token = token - 1": "again",
                }.items():
                    statement = f"UPDATE leases SET {change} WHERE target = ?"
                    database.execute(statement, (f"audited/{name}",))
                    assert database.changes() == 1

        sound = audit(spark, options={"url": server.url})
        report = audit(spark, options={"url": server.url}, tell=damage)

    assert sound.is_clean
    assert {(one.kind, one.stream) for one in report.samples} == {
        ("lease_ahead", "audited/ahead"),
        ("lease_back", "audited/back"),
        ("lease_token_repeated", "audited/again"),
    }
    assert report.defects == dict.fromkeys(("lease_ahead", "lease_back", "lease_token_repeated"), 1)


def test_every_planted_defect_of_sends_is_found(spark: SparkSession, tmp_path: Path) -> None:
    """The counts are those of the server's own check, which the audit asks for each mesh."""
    with server_at(tmp_path) as server, httpx.Client(base_url=server.url) as http:
        shop = Shop(http, "shop")
        for name in ("sound", "row-lost", "other-content"):
            assert shop.send(name, body=name).status_code == 201
        assert shop.send("no-message", kind="queue", ref="jobs").status_code == 201
        assert audit(spark, options={"url": server.url}).is_clean
    lost, _, *others = [one for one in PLANTED_SENDS if "other-sender" not in one]
    execute(tmp_path, [lost, *others])
    with server_at(tmp_path) as server:
        report = audit(spark, options={"url": server.url})

    assert report.defects == {"send_missing": 1, "send_repeated": 1, "send_without_message": 2}
    assert {one.stream for one in report.samples} == {"__mesh/shop"}
