"""Deliveries when the disk is full, and when a server answers what no server should."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from fencepost import clock as clock_module
from fencepost.client.errors import ConnectionFailedError
from fencepost.client.errors.answers import error_of
from fencepost.client.meshes import SendReceipt
from fencepost.clock import SystemClock
from fencepost.outbox.daemon import delivering, rows
from fencepost.outbox.daemon.database import File, Writer, load_queries, open_file
from fencepost.outbox.daemon.delivering import Deliveries, Road
from fencepost.outbox.daemon.rows import NEVER_MS, Change
from fencepost.outbox.daemon.settings import OutboxSettings
from fencepost.outbox.delivery import event_of_failure
from fencepost.outbox.states import RETRY_AFTER_MS_MAX, Failed, Row
from fencepost.protocol.meshes import DedupeMode
from fencepost.testing import SimClock

LANE = ("shop", "topic:alerts", "next")


class Way:
    """A way to a mesh that answers from a list, then well."""

    mesh = "shop"
    sender: str | None = None
    mode: DedupeMode | None = "permanent"
    retention_days = 7
    max_age_ms = NEVER_MS

    def __init__(self, answers: list[Exception | None]) -> None:
        self._answers = answers
        self.sent: list[bytes] = []
        self.asked = asyncio.Event()
        self.is_open = True

    @property
    def sends(self) -> Way | None:
        return self if self.is_open else None

    async def send_encoded(self, data: bytes) -> SendReceipt:
        self.sent.append(data)
        self.asked.set()
        answer = self._answers.pop(0) if self._answers else None
        if answer is not None:
            raise answer
        return SendReceipt(
            broker_message_id="b", client_message_id="m", history_id="1", duplicate=False
        )

    def failed(self) -> None:
        pass

    def shut(self) -> None:
        self.is_open = False


def a_row(number: int, accepted_ms: int = 1) -> Row:
    return Row(
        id=f"{number:026}",
        mesh="shop",
        client_message_id=f"m-{number}",
        request_fingerprint=b"\x11" * 32,
        destination="topic:alerts",
        payload=b'{"kind":"topic"}',
        priority="next",
        enqueued_ms=accepted_ms,
        next_attempt_ms=1,
    )


class Running:
    def __init__(self, file: File, writer: Writer, way: Way, folder: Path) -> None:
        self.file, self.writer, self.way = file, writer, way
        self.counts = rows.counts(file)
        self.swept = 0
        self._news = asyncio.Event()
        ways: dict[str, Road] = {"shop": way}
        settings = OutboxSettings(folder=folder)
        self.deliveries = Deliveries(
            writer, ways, settings, SystemClock(), self._changed, self._swept
        )

    def _changed(self, changes: Iterable[Change]) -> None:
        for before, row in changes:
            if before is not None:
                self.counts[before] -= 1
            self.counts[row.status] += 1
        self._news.set()

    def _swept(self, count: int) -> None:
        self.swept += count

    async def until(self, **wanted: int) -> None:
        async with asyncio.timeout(30):
            while {name: count for name, count in self.counts.items() if count} != wanted:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def running(
    folder: Path,
    answers: list[Exception | None],
    *,
    accepted_ms: int = 1,
    max_age_ms: int = NEVER_MS,
) -> AsyncIterator[Running]:
    path = folder / "outbox.db"
    file = open_file(path, load_queries("outbox.sql"), vfs=None, first=lambda _: None)
    for number in range(2):
        file.execute("insert", *rows.columns(a_row(number, accepted_ms)))
    writer = Writer(file, path, None)
    way = Way(answers)
    way.max_age_ms = max_age_ms
    made = Running(file, writer, way, folder)
    made.deliveries.wakes(LANE)
    task = asyncio.create_task(made.deliveries.run())
    try:
        yield made
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await writer.close()


async def test_a_full_disk_while_an_outcome_is_noted_loses_neither_row_nor_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row stays in flight until its outcome is written, and is not sent a second time."""
    monkeypatch.setattr(delivering, "RETRY_WRITE_SECONDS", 0.01)
    settle, failures = rows.do_settle, [0]

    def full(*what: Any, **more: Any) -> rows.Settled:
        failures[0] += 1
        if failures[0] <= 3:
            raise apsw.FullError("database or disk is full")
        return settle(*what, **more)

    monkeypatch.setattr(rows, "do_settle", full)
    async with running(tmp_path, []) as made:
        await made.until(done=2)

        assert len(made.way.sent) == 2
        assert rows.counts(made.file) == {"done": 2}


async def test_an_answer_that_cannot_be_understood_is_a_failed_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.outbox.states.delay_ms", lambda *_: 1)
    async with running(tmp_path, [ValueError("what is this?"), None]) as made:
        await made.until(done=2)

        assert made.deliveries.counters.events == {"failed": 1, "stored": 2}


async def test_a_server_that_does_not_know_our_token_gets_nothing_more(tmp_path: Path) -> None:
    """The contract has 401 kill its row; the next row waits until the token is good again."""
    refusal = error_of(401, {"content-type": "application/problem+json"}, b'{"code":"x"}')
    async with running(tmp_path, [refusal]) as made:
        await made.until(dead=1, pending=1)
        assert len(made.way.sent) == 1

        made.way.is_open = True
        made.deliveries.look()
        await made.until(dead=1, done=1)


# The machine's clock is set while rows wait.

HOUR_MS = 3_600_000


class SetClock:
    """The module `time` for a clock, with a wall clock that was set by so much."""

    def __init__(self) -> None:
        self.set_ms = 0

    def time_ns(self) -> int:
        return time.time_ns() + self.set_ms * 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    found = SetClock()
    monkeypatch.setattr(clock_module, "time", found)
    return found


@pytest.mark.parametrize("set_ms", [-24 * HOUR_MS, 24 * HOUR_MS])
async def test_a_row_in_its_backoff_is_sent_again_whatever_the_clock_is_set_to(
    tmp_path: Path, machine: SetClock, monkeypatch: pytest.MonkeyPatch, set_ms: int
) -> None:
    monkeypatch.setattr("fencepost.outbox.states.delay_ms", lambda *_: 200)
    async with running(tmp_path, [ConnectionFailedError("away")]) as made:
        await made.way.asked.wait()
        await made.until(pending=2)
        machine.set_ms = set_ms

        await made.until(done=2)


@pytest.mark.parametrize(("age_ms", "ends"), [(-1, "done"), (60_000, "dead")])
async def test_a_row_dies_at_its_age_when_the_clock_is_set_forwards(
    tmp_path: Path, machine: SetClock, age_ms: int, ends: str
) -> None:
    """The server remembers ids by its own clock: an outbox that jumped must not be late."""
    max_age_ms = 144 * HOUR_MS
    accepted_ms = time.time_ns() // 1_000_000
    # A minute is room for a slow machine: the tick itself is in the tests of `states`.
    machine.set_ms = max_age_ms + (age_ms if age_ms > 0 else -60_000)
    async with running(tmp_path, [], accepted_ms=accepted_ms, max_age_ms=max_age_ms) as made:
        await made.until(**{ends: 2})

        assert len(made.way.sent) == (2 if ends == "done" else 0)


@pytest.mark.parametrize(("mode", "counted"), [("retention_scoped", 1), ("permanent", 0)])
async def test_12_a_retry_after_the_mesh_may_have_forgotten_the_id_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: DedupeMode, counted: int
) -> None:
    """Only a clock that jumps makes a row this old; its first attempt cannot be a repetition."""
    monkeypatch.setattr("fencepost.outbox.states.delay_ms", lambda *_: 1)
    monkeypatch.setattr(Way, "mode", mode)
    accepted_ms = time.time_ns() // 1_000_000 - 8 * 24 * HOUR_MS
    answers: list[Exception | None] = [ConnectionFailedError("away")]
    async with running(tmp_path, answers, accepted_ms=accepted_ms) as made:
        await made.until(done=2)

        assert len(made.way.sent) == 3
        assert made.deliveries.counters.retries_after_expiry == counted


async def test_delivered_rows_that_are_forgotten_are_told(tmp_path: Path) -> None:
    async with running(tmp_path, []) as made:
        await made.until(done=2)  # delivered long ago, as this clock has it
        file = made.file
        await made.writer.write(lambda _: file.raw.execute("UPDATE outbox SET delivered_at = 1"))
        await made.deliveries._sweep()

        assert made.swept == 2
        assert not rows.counts(file)


@pytest.mark.parametrize("asked", ["9" * 400, "99999999"])
def test_a_server_cannot_ask_for_an_endless_wait(asked: str) -> None:
    headers = {"content-type": "application/problem+json", "retry-after": asked}

    event = event_of_failure(error_of(503, headers, b'{"code":"x"}'), SimClock())

    assert isinstance(event, Failed)
    assert event.retry_after_ms == RETRY_AFTER_MS_MAX


def test_a_refusal_in_a_session_may_ask_to_wait_too() -> None:
    body = b'{"code":"too_fast","retry_after_ms":1500}'

    event = event_of_failure(error_of(429, {"content-type": "application/json"}, body), SimClock())

    assert isinstance(event, Failed)
    assert event.retry_after_ms == 1500
