"""The life of a row in an outbox: every cell, and what no order of events can do."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fencepost.outbox.states import (
    RETRY_AFTER_MS_MAX,
    STATUSES,
    AlreadyDelivered,
    AlreadyQueued,
    Conflict,
    Dropped,
    Event,
    Failed,
    IdUsed,
    Looked,
    NotOpen,
    Queued,
    Rejected,
    Requeued,
    Restarted,
    Row,
    Status,
    Step,
    Stored,
    Successor,
    Taken,
    advance,
    choose,
    decide_accept,
    decide_drop,
    decide_requeue,
    event_of_answer,
)

MAX_AGE_MS = 100_000
SAME, OTHER = b"\x11" * 32, b"\x22" * 32


def a_row(status: Status = "pending", **fields: Any) -> Row:
    known: dict[str, Any] = {
        "id": "row-1",
        "mesh": "shop",
        "client_message_id": "alert-17",
        "request_fingerprint": SAME,
        "destination": "topic:alerts",
        "payload": b"{}",
        "priority": "next",
        "enqueued_ms": 1000,
        "next_attempt_ms": 1000,
        "status": status,
    }
    return Row(**{**known, **fields})


def after(row: Row, event: Event, now_ms: int = 2000) -> Step:
    return advance(row, event, now_ms=now_ms, max_age_ms=MAX_AGE_MS)


# Accepting.


def test_a_new_id_is_queued() -> None:
    assert decide_accept(None, a_row()) == Queued(a_row())


@pytest.mark.parametrize(
    ("status", "fingerprint", "expected"),
    [
        ("pending", SAME, "202"),
        ("inflight", SAME, "202"),
        ("done", SAME, "200"),
        ("dead", SAME, "outbox_dead_fingerprint_match"),
        ("aborted", SAME, "outbox_aborted_fingerprint_match"),
        ("pending", OTHER, "outbox_pending_fingerprint_mismatch"),
        ("inflight", OTHER, "outbox_inflight_fingerprint_mismatch"),
        ("done", OTHER, "outbox_done_fingerprint_mismatch"),
        ("dead", OTHER, "outbox_dead_fingerprint_mismatch"),
        ("aborted", OTHER, "outbox_aborted_fingerprint_mismatch"),
    ],
)
def test_every_cell_of_the_lookup_table(status: Status, fingerprint: bytes, expected: str) -> None:
    known = a_row(status, last_error="410 gone", broker_message_id="m1.2")

    outcome = decide_accept(known, a_row(request_fingerprint=fingerprint))

    match outcome:
        case AlreadyQueued(row):
            assert (expected, row) == ("202", known)
        case AlreadyDelivered(row):
            assert (expected, row.broker_message_id) == ("200", "m1.2")
        case Conflict():
            reason = "410 gone" if status == "dead" else None
            assert outcome == Conflict(expected, "1" * 16, reason)
        case _:
            pytest.fail(f"unexpected: {outcome}")


# Events.


def test_a_pending_row_is_taken_and_counts_its_attempt() -> None:
    taken = after(a_row(), Taken()).row

    assert (taken.status, taken.attempts) == ("inflight", 1)


def test_what_was_in_flight_at_a_restart_is_pending_again_at_once() -> None:
    row = after(a_row("inflight", attempts=3, next_attempt_ms=500), Restarted()).row

    assert (row.status, row.attempts, row.next_attempt_ms) == ("pending", 3, 2000)


def test_a_stored_message_is_done() -> None:
    step = after(a_row("inflight", last_error="503"), Stored("m1.2"))

    assert (step.row.status, step.row.broker_message_id) == ("done", "m1.2")
    assert (step.row.delivered_ms, step.row.last_error) == (2000, None)
    assert step.notices == ()


def test_an_answer_that_comes_after_its_wait_still_counts() -> None:
    assert after(a_row("pending"), Stored("m1.2")).row.status == "done"


@pytest.mark.parametrize(
    ("available", "kind", "level"),
    [(True, "duplicate", "info"), (False, "history_pruned", "warning")],
)
def test_a_duplicate_is_done_and_noticed(available: bool, kind: str, level: str) -> None:
    step = after(a_row("inflight"), Stored("m1.2", True, available))

    assert step.row.status == "done"
    assert [(notice.kind, notice.level) for notice in step.notices] == [(kind, level)]


def test_a_rejected_message_is_dead_and_loud() -> None:
    step = after(a_row("inflight"), Rejected("404 destination_not_found"))

    assert (step.row.status, step.row.last_error) == ("dead", "404 destination_not_found")
    assert [(notice.kind, notice.level) for notice in step.notices] == [("dead", "error")]


@pytest.mark.parametrize(
    ("attempts", "random", "wait_ms"),
    [
        (1, 0.5, 500),
        (2, 0.5, 1000),
        (3, 0.5, 2000),
        (7, 0.5, 30_000),
        (500, 0.5, 30_000),
        (1, 0.0, 375),
        (1, 1.0, 625),
        (7, 0.0, 22_500),
    ],
)
def test_failures_back_off_from_half_a_second_to_half_a_minute(
    attempts: int, random: float, wait_ms: int
) -> None:
    row = after(a_row("inflight", attempts=attempts), Failed("503", random)).row

    assert (row.status, row.next_attempt_ms - 2000, row.last_error) == ("pending", wait_ms, "503")


@pytest.mark.parametrize(
    ("retry_after_ms", "wait_ms"),
    [(100, 500), (7000, 7000), (10 * RETRY_AFTER_MS_MAX, RETRY_AFTER_MS_MAX)],
)
def test_a_longer_wait_that_the_server_asks_for_is_honoured(
    retry_after_ms: int, wait_ms: int
) -> None:
    row = after(a_row("inflight", attempts=1), Failed("429", 0.5, retry_after_ms)).row

    assert row.next_attempt_ms - 2000 == wait_ms


@pytest.mark.parametrize("event", [Looked(), Taken()])
def test_a_row_dies_at_its_age_and_not_one_tick_before(event: Event) -> None:
    young = after(a_row(last_error="503"), event, now_ms=1000 + MAX_AGE_MS - 1)
    old = after(a_row(last_error="503"), event, now_ms=1000 + MAX_AGE_MS)

    assert young.row.status != "dead"
    assert old.row.status == "dead"
    assert old.row.last_error is not None
    assert "503" in old.row.last_error


def test_an_attempt_that_is_under_way_may_end_after_the_age() -> None:
    late_ms = 1000 + MAX_AGE_MS

    assert after(a_row("inflight"), Looked(), late_ms).row.status == "inflight"
    assert after(a_row("inflight"), Stored("m1.2"), late_ms).row.status == "done"
    assert after(a_row("inflight", attempts=1), Failed("503", 0.5), late_ms).row.status == "dead"


def test_a_clock_that_was_set_back_kills_no_row() -> None:
    assert after(a_row(), Looked(), now_ms=0).row.status == "pending"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (201, {"broker_message_id": "m1.2"}, Stored),
        (200, {"broker_message_id": "m1.2", "duplicate": True}, Stored),
        (201, {}, Failed),
        (200, {"broker_message_id": 7}, Failed),
        (204, {}, Failed),
        (301, {}, Failed),
        (408, {}, Failed),
        (425, {}, Failed),
        (429, {}, Failed),
        (500, {}, Failed),
        (503, {}, Failed),
        (507, {}, Failed),
        (400, {}, Rejected),
        (401, {}, Rejected),
        (403, {}, Rejected),
        (404, {}, Rejected),
        (409, {"code": "idempotency_key_reused"}, Rejected),
        (413, {}, Rejected),
    ],
)
def test_what_each_answer_of_the_server_means(
    status: int, body: dict[str, object], kind: type
) -> None:
    assert isinstance(event_of_answer(status, body, random=0.5), kind)


def test_an_answer_is_kept_as_the_reason() -> None:
    body = {"code": "destination_not_found", "detail": "the mesh has no topic 'x'"}

    event = event_of_answer(404, body, random=0.5)

    assert event == Rejected("404 destination_not_found the mesh has no topic 'x'")


# Requeue and drop.


def test_a_requeue_aborts_the_row_and_sends_the_same_under_a_fresh_id() -> None:
    row = a_row("dead", last_error="404", attempts=4)

    outcome = decide_requeue(
        row, Successor("row-2", "fresh"), id_is_used=False, by="ann", now_ms=9000
    )

    assert isinstance(outcome, Requeued)
    assert outcome.old == msgspec.structs.replace(
        row, status="aborted", aborted_ms=9000, aborted_by="ann", superseded_by="row-2"
    )
    assert outcome.new == a_row(
        id="row-2", client_message_id="fresh", enqueued_ms=9000, next_attempt_ms=9000
    )


def test_a_patched_payload_has_its_own_fingerprint() -> None:
    successor = Successor("row-2", "fresh", b'{"a":1}', OTHER)

    outcome = decide_requeue(a_row("dead"), successor, id_is_used=False, by="ann", now_ms=9000)

    assert isinstance(outcome, Requeued)
    assert (outcome.new.payload, outcome.new.request_fingerprint) == (b'{"a":1}', OTHER)
    assert outcome.new.destination == "topic:alerts"


def test_a_requeue_never_takes_an_id_that_was_used() -> None:
    taken = decide_requeue(
        a_row("dead"), Successor("row-2", "other"), id_is_used=True, by="ann", now_ms=9000
    )
    same = decide_requeue(
        a_row("dead"), Successor("row-2", "alert-17"), id_is_used=False, by="ann", now_ms=9000
    )

    assert taken == IdUsed("other")
    assert same == IdUsed("alert-17")


@pytest.mark.parametrize("status", ["done", "aborted"])
def test_what_is_over_can_be_neither_requeued_nor_dropped(status: Status) -> None:
    successor = Successor("row-2", "fresh")

    assert decide_drop(a_row(status), by="ann", now_ms=0) == NotOpen(status)
    assert decide_requeue(
        a_row(status), successor, id_is_used=False, by="ann", now_ms=0
    ) == NotOpen(status)


def test_a_late_answer_does_not_revive_an_aborted_row() -> None:
    dropped = decide_drop(a_row("inflight"), by="ann", now_ms=1500)
    assert isinstance(dropped, Dropped)

    step = after(dropped.row, Stored("m1.2"))

    assert step.row == dropped.row
    assert [notice.kind for notice in step.notices] == ["late"]


# Properties.

EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.just(Taken()),
    st.just(Restarted()),
    st.just(Looked()),
    st.builds(Stored, st.just("m1.2"), st.booleans(), st.booleans()),
    st.builds(Failed, st.text(max_size=5), st.floats(0, 1), st.none() | st.integers(0, 10**9)),
    st.builds(Rejected, st.text(max_size=5)),
)
ALLOWED: dict[Status, set[Status]] = {
    "pending": {"pending", "inflight", "done", "dead"},
    "inflight": {"inflight", "pending", "done", "dead"},
    "done": {"done"},
    "dead": {"dead"},
    "aborted": {"aborted"},
}


@given(st.sampled_from(STATUSES), EVENTS, st.integers(0, 300_000))
def test_every_status_takes_every_event_and_ends_where_it_may(
    status: Status, event: Event, now_ms: int
) -> None:
    """No event leads out of done, dead or aborted, and none changes what identifies a row."""
    row = a_row(status)

    moved = after(row, event, now_ms).row

    assert moved.status in ALLOWED[status]
    assert moved.attempts >= row.attempts
    if status in ("done", "dead", "aborted"):
        assert moved == row
    for field in ("id", "mesh", "client_message_id", "request_fingerprint", "destination"):
        assert getattr(moved, field) == getattr(row, field)
    assert moved.payload == row.payload


IDS = st.sampled_from(["a", "b", "c", "d"])
MESHES = st.sampled_from(["shop", "bank"])


class OutboxModel(RuleBasedStateMachine):
    """An outbox in memory under every order of sends, events, requeues and drops."""

    @initialize()
    def make(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.aborted: dict[str, Row] = {}
        self.answers: dict[tuple[str, str], bytes] = {}
        self.number = 0
        self.now_ms = 1000

    def fresh(self) -> str:
        self.number += 1
        return f"row-{self.number}"

    @rule(mesh=MESHES, client_id=IDS, fingerprint=st.sampled_from([SAME, OTHER]))
    def accept(self, mesh: str, client_id: str, fingerprint: bytes) -> None:
        key = mesh, client_id
        offered = a_row(
            id=self.fresh(),
            mesh=mesh,
            client_message_id=client_id,
            request_fingerprint=fingerprint,
            enqueued_ms=self.now_ms,
            next_attempt_ms=self.now_ms,
        )

        outcome = decide_accept(self.rows.get(key), offered)

        assert isinstance(outcome, Queued) == (key not in self.answers)
        if isinstance(outcome, Queued):
            self.rows[key] = outcome.row
            self.answers[key] = fingerprint
        elif not isinstance(outcome, Conflict):
            assert self.answers[key] == fingerprint

    @rule(mesh=MESHES, client_id=IDS, event=EVENTS, passed_ms=st.integers(-5000, 60_000))
    def happen(self, mesh: str, client_id: str, event: Event, passed_ms: int) -> None:
        self.now_ms = max(0, self.now_ms + passed_ms)
        row = self.rows.get((mesh, client_id))
        if row is not None:
            self.rows[mesh, client_id] = after(row, event, self.now_ms).row

    @rule(mesh=MESHES, client_id=IDS, new_id=IDS)
    def requeue(self, mesh: str, client_id: str, new_id: str) -> None:
        row = self.rows.get((mesh, client_id))
        if row is None:
            return
        outcome = decide_requeue(
            row,
            Successor(self.fresh(), new_id),
            id_is_used=(mesh, new_id) in self.rows,
            by="ann",
            now_ms=self.now_ms,
        )
        if isinstance(outcome, Requeued):
            self.rows[mesh, client_id] = outcome.old
            assert (mesh, new_id) not in self.answers
            self.rows[mesh, new_id] = outcome.new
            self.answers[mesh, new_id] = outcome.new.request_fingerprint
            self.aborted[outcome.old.id] = outcome.old

    @rule(mesh=MESHES, client_id=IDS)
    def drop(self, mesh: str, client_id: str) -> None:
        row = self.rows.get((mesh, client_id))
        if row is not None:
            outcome = decide_drop(row, by="ann", now_ms=self.now_ms)
            if isinstance(outcome, Dropped):
                self.rows[mesh, client_id] = outcome.row
                self.aborted[outcome.row.id] = outcome.row

    @invariant()
    def no_row_leaves_aborted_and_no_id_is_free_again(self) -> None:
        now = {row.id: row for row in self.rows.values()}
        assert all(now[row_id] == row for row_id, row in self.aborted.items())
        assert self.rows.keys() == self.answers.keys()
        for key, row in self.rows.items():
            assert row.request_fingerprint == self.answers[key]


OutboxModel.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestOutboxModel = OutboxModel.TestCase


# Choosing.


def chosen(rows: list[Row], **limits: int) -> list[str]:
    bounds = {"now_ms": 5000, "destination_max": 2, "rows_max": 10, **limits}
    return [row.id for row in choose(rows, **bounds)]


def test_due_rows_go_by_priority_and_then_by_age() -> None:
    rows = [
        a_row(id="low", priority="low", enqueued_ms=1, destination="dm:a"),
        a_row(id="young", enqueued_ms=3, destination="dm:b"),
        a_row(id="old", enqueued_ms=2, destination="dm:c"),
        a_row(id="now", priority="now", enqueued_ms=4, destination="dm:d"),
    ]

    assert chosen(rows) == ["now", "old", "young", "low"]


def test_an_older_row_that_waits_holds_up_its_own_lane_only() -> None:
    rows = [
        a_row(id="waits", enqueued_ms=1, next_attempt_ms=9000),
        a_row(id="behind", enqueued_ms=2),
        a_row(id="urgent", enqueued_ms=3, priority="now"),
        a_row(id="elsewhere", enqueued_ms=4, destination="dm:a"),
        a_row(id="other-mesh", enqueued_ms=5, mesh="bank"),
    ]

    assert chosen(rows) == ["urgent", "elsewhere", "other-mesh"]


def test_a_destination_and_the_whole_outbox_have_bounds() -> None:
    rows = [
        a_row("inflight", id="flies", priority="low"),
        a_row(id="one", priority="now"),
        a_row(id="two"),
        a_row(id="away", destination="dm:a"),
    ]

    assert chosen(rows) == ["one", "away"]
    assert chosen(rows, rows_max=2) == ["one"]
    assert chosen(rows, rows_max=1) == []


ROWS = st.lists(
    st.builds(
        lambda status, lane, enqueued_ms, wait_ms: (status, lane, enqueued_ms, wait_ms),
        st.sampled_from(["pending", "inflight"]),
        st.tuples(st.sampled_from(["dm:a", "dm:b"]), st.sampled_from(["now", "next", "low"])),
        st.integers(0, 50),
        st.integers(-10, 10),
    ),
    max_size=15,
)


@given(ROWS, st.integers(1, 3), st.integers(0, 6))
def test_the_order_of_a_lane_is_kept_and_no_bound_is_passed(
    drawn: list[tuple[Any, Any, int, int]], destination_max: int, rows_max: int
) -> None:
    """A chosen row is due, has no older open row in its lane, and fits into every bound."""
    rows = [
        a_row(
            status,
            id=f"{number:03}",
            destination=destination,
            priority=priority,
            enqueued_ms=enqueued_ms,
            next_attempt_ms=5000 + wait_ms,
        )
        for number, (status, (destination, priority), enqueued_ms, wait_ms) in enumerate(drawn)
    ]
    flying = [row for row in rows if row.status == "inflight"]

    picked = choose(rows, now_ms=5000, destination_max=destination_max, rows_max=rows_max)

    for row in picked:
        assert row.next_attempt_ms <= 5000
        older = [
            other
            for other in rows
            if other.lane == row.lane and (other.enqueued_ms, other.id) < (row.enqueued_ms, row.id)
        ]
        assert older == []
        assert all(other.lane != row.lane for other in flying)
    assert len(picked) <= max(0, rows_max - len(flying))
    for destination in ("dm:a", "dm:b"):
        new = sum(row.destination == destination for row in picked)
        before = sum(row.destination == destination for row in flying)
        assert new == 0 or new + before <= destination_max
