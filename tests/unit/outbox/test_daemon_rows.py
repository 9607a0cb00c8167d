"""The rows of outbox.db: each rule in a transaction of its own, on a real file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fencepost.outbox.daemon import rows
from fencepost.outbox.daemon.database import (
    File,
    FileRefusedError,
    load_queries,
    make_folder,
    open_file,
)
from fencepost.outbox.daemon.rows import NEVER_MS
from fencepost.outbox.states import (
    STATUSES,
    AlreadyDelivered,
    AlreadyQueued,
    Conflict,
    Dropped,
    Failed,
    Queued,
    Rejected,
    Requeued,
    Row,
    Status,
    Stored,
    Successor,
)

SAME, OTHER = b"\x11" * 32, b"\x22" * 32
LANE = ("shop", "topic:alerts", "next")


def a_row(number: int = 1, **fields: Any) -> Row:
    known: dict[str, Any] = {
        "id": f"{number:026}",
        "mesh": "shop",
        "client_message_id": f"id-{number}",
        "request_fingerprint": SAME,
        "destination": "topic:alerts",
        "payload": b'{"kind":"topic"}',
        "priority": "next",
        "enqueued_ms": 1000,
        "next_attempt_ms": 1000,
    }
    return Row(**{**known, **fields})


def opened(folder: Path) -> File:
    queries = load_queries("outbox.sql")
    return open_file(folder / "outbox.db", queries, vfs=None, first=lambda _: None)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    found = opened(tmp_path)
    yield found
    found.raw.close()


def put(file: File, row: Row) -> Row:
    file.execute("insert", *rows.columns(row))
    return row


def take(file: File, now_ms: int = 2000, max_age_ms: int = NEVER_MS) -> rows.Settled:
    return rows.do_take(file, LANE, now_ms=now_ms, max_age_ms=max_age_ms)


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("fingerprint", [SAME, OTHER])
def test_every_cell_of_the_table(file: File, status: Status, fingerprint: bytes) -> None:
    put(file, a_row(status=status, broker_message_id="b-1", last_error="because"))

    offered = a_row(2, client_message_id="id-1", request_fingerprint=fingerprint)
    outcome = rows.do_accept(file, offered)

    assert not isinstance(outcome, Queued)
    if fingerprint == SAME and status in ("pending", "inflight"):
        assert isinstance(outcome, AlreadyQueued)
    elif fingerprint == SAME and status == "done":
        assert isinstance(outcome, AlreadyDelivered)
        assert outcome.row.broker_message_id == "b-1"
    else:
        word = "match" if fingerprint == SAME else "mismatch"
        assert isinstance(outcome, Conflict)
        assert outcome.conflict == f"outbox_{status}_fingerprint_{word}"
        assert outcome.reason == ("because" if status == "dead" else None)
    assert sum(rows.counts(file).values()) == 1


def test_the_same_id_in_another_mesh_is_another_send(file: File) -> None:
    put(file, a_row())

    outcome = rows.do_accept(file, a_row(2, client_message_id="id-1", mesh="ops"))

    assert isinstance(outcome, Queued)


def test_a_row_survives_a_reopening_byte_by_byte(tmp_path: Path) -> None:
    file = opened(tmp_path)
    row = put(file, a_row(payload=b'{"json":1.0}', last_error="é", attempts=3))
    file.raw.close()

    file = opened(tmp_path)

    assert rows.get(file, row.id) == row
    file.raw.close()


def test_the_oldest_row_of_a_lane_holds_up_those_behind_it(file: File) -> None:
    put(file, a_row(1, next_attempt_ms=5000))
    put(file, a_row(2))

    assert take(file).taken is None
    assert take(file).due_ms == 5000
    found = take(file, now_ms=5000)
    assert found.taken is not None
    assert (found.taken.id, found.taken.status, found.taken.attempts) == (
        a_row(1).id,
        "inflight",
        1,
    )
    assert take(file, now_ms=6000).taken is None


def test_the_next_row_is_taken_in_the_transaction_that_settles_the_one_before(file: File) -> None:
    put(file, a_row(1))
    put(file, a_row(2))
    first = take(file).taken
    assert first is not None

    settled = rows.do_settle(
        file, first, Stored("b-1"), now_ms=3000, max_age_ms=NEVER_MS, goes_on=True
    )

    assert settled.step.row.status == "done"
    assert settled.taken is not None
    assert settled.taken.id == a_row(2).id
    assert dict(rows.counts(file)) == {"done": 1, "inflight": 1}


def test_a_row_that_is_too_old_dies_and_the_next_one_is_taken(file: File) -> None:
    put(file, a_row(1, enqueued_ms=0))
    put(file, a_row(2, enqueued_ms=1900))

    found = take(file, now_ms=2000, max_age_ms=1000)

    assert found.taken is not None
    assert found.taken.id == a_row(2).id
    assert rows.get(file, a_row(1).id).status == "dead"  # type: ignore[union-attr]
    assert [kind for _, kind, *_ in file.fetch("events_list", 0, 10)] == ["dead"]


def test_a_refusal_is_an_event_in_the_same_transaction(file: File) -> None:
    put(file, a_row())
    row = take(file).taken
    assert row is not None

    event = Rejected("404 destination_not_found")
    rows.do_settle(file, row, event, now_ms=3000, max_age_ms=NEVER_MS, goes_on=False)

    [(_, kind, mesh, at, data)] = file.fetch("events_list", 0, 10)
    assert (kind, mesh, at) == ("dead", "shop", 3000)
    assert msgspec.json.decode(data)["last_error"] == "404 destination_not_found"


def test_what_was_in_flight_is_sent_again_after_a_start(file: File) -> None:
    put(file, a_row())
    assert take(file).taken is not None

    assert rows.do_restart(file, now_ms=9000, latest_ms=10_000) == 1

    row = rows.get(file, a_row().id)
    assert row is not None
    assert (row.status, row.next_attempt_ms) == ("pending", 9000)


def test_a_clock_that_was_set_back_does_not_hold_rows_up(file: File) -> None:
    """A row whose next attempt lies further away than any wait may be is due at once."""
    put(file, a_row(1, next_attempt_ms=10**12))
    put(file, a_row(2, destination="dm:ann", next_attempt_ms=9500))

    rows.do_restart(file, now_ms=9000, latest_ms=10_000)

    assert rows.lanes(file) == {LANE: 9000, ("shop", "dm:ann", "next"): 9500}


def test_a_late_answer_does_not_bring_a_dropped_row_back(file: File) -> None:
    put(file, a_row())
    row = take(file).taken
    assert row is not None
    dropped = rows.do_drop(file, row.id, by="ann", now_ms=2500)
    assert isinstance(dropped, rows.Done)
    assert dropped.before == "inflight"
    assert isinstance(dropped.outcome, Dropped)

    settled = rows.do_settle(
        file, row, Stored("b-1"), now_ms=3000, max_age_ms=NEVER_MS, goes_on=True
    )

    assert settled.step.row.status == "aborted"
    assert [notice.kind for notice in settled.step.notices] == ["late"]
    assert rows.get(file, row.id).status == "aborted"  # type: ignore[union-attr]


def test_a_requeue_is_both_rows_or_neither(file: File) -> None:
    put(file, a_row(1, status="dead"))

    done = rows.do_requeue(file, a_row(1).id, Successor("Z" * 26, "fresh"), by="ann", now_ms=5000)

    assert isinstance(done, rows.Done)
    outcome = done.outcome
    assert isinstance(outcome, Requeued)
    assert [row.status for row in rows.chain(file, a_row(1).id)] == ["aborted", "pending"]
    assert outcome.new.destination == "topic:alerts"
    assert [kind for _, kind, *_ in file.fetch("events_list", 0, 10)] == ["requeued"]


def test_the_sweep_forgets_delivered_rows_and_no_others(file: File) -> None:
    for number, status in enumerate(STATUSES):
        put(file, a_row(number, status=status, delivered_ms=10 if status == "done" else None))

    assert rows.do_sweep(file, done_before_ms=100, events_before_ms=100) == 1
    assert "done" not in rows.counts(file)
    assert sum(rows.counts(file).values()) == 4


def test_a_failure_waits_for_its_backoff(file: File) -> None:
    put(file, a_row())
    row = take(file).taken
    assert row is not None

    settled = rows.do_settle(
        file, row, Failed("503", 0.5), now_ms=3000, max_age_ms=NEVER_MS, goes_on=True
    )

    assert settled.taken is None
    assert settled.due_ms == settled.step.row.next_attempt_ms > 3000


def test_a_file_that_is_no_outbox_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    path.write_bytes(b"this is no database, and was here before" * 100)
    with pytest.raises(FileRefusedError, match="no database"):
        opened(tmp_path)
    assert path.read_bytes().startswith(b"this is no database")


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.raw.pragma("user_version", 99)
    file.raw.close()

    with pytest.raises(FileRefusedError, match="newer fencepost"):
        opened(tmp_path)


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    import apsw

    with apsw.Connection(str(tmp_path / "outbox.db")) as other:
        other.execute("CREATE TABLE theirs (a)")
    other.close()

    with pytest.raises(FileRefusedError, match="another program"):
        opened(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = opened(tmp_path)
    for number in range(500):
        put(file, a_row(number, payload=b"x" * 1000))
    file.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    file.raw.close()
    path = tmp_path / "outbox.db"
    data = bytearray(path.read_bytes())
    for page in range(5, len(data) // 4096, 3):
        data[page * 4096 : page * 4096 + 200] = b"\xff" * 200
    path.write_bytes(bytes(data))

    with pytest.raises(FileRefusedError):
        opened(tmp_path)


def test_a_list_shows_sizes_and_leaves_payloads_in_the_file(file: File) -> None:
    for number in range(3):
        put(file, a_row(number, payload=b"x" * (1000 + number)))

    for status in (None, "pending"):
        shown = rows.listed(file, status, "shop", "", 2)

        assert [row["bytes"] for row in shown] == [1000, 1001]
        assert "payload" not in shown[0]
        assert shown[0]["client_message_id"] == "id-0"


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine")
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")

    for name in ("open", "link"):
        with pytest.raises(FileRefusedError, match="others may write"):
            make_folder(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_or_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "mine")
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.lchown(tmp_path / "link", 12345, 12345)

    for name in ("theirs", "link"):
        with pytest.raises(FileRefusedError, match="another user"):
            make_folder(tmp_path / name)
