"""The simulation finds nothing in the store, and finds each fault that is planted in it.

Every seed is a world of its own: `just simulate SEED` runs one again, to the same bytes.
FENCEPOST_FAULT_SEEDS=N runs N seeds instead of a few.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fencepost.store.contract import DataDamagedError
from fencepost.store.sqlite.connection import LedgerWriter
from fencepost.store.sqlite.store import SqliteStore, StoreBrokenError
from fencepost.store.write.behind import Behind, Piece
from fencepost.store.write.drafts import Draft
from fencepost.store.write.group_commit import GroupCommit
from fencepost.store.write.group_decider import GroupDecider
from fencepost.store.write.ledger import Ledger
from fencepost.store.write.loader import DiskLoader
from tests.simulation.clients import BrokenPromiseError
from tests.simulation.simulation import simulate
from tests.simulation.world import StuckError

SEEDS = range(int(os.environ.get("FENCEPOST_FAULT_SEEDS", "20")))
PER_TEST = 10
SEEDS_TO_FIND = 60
"""A planted fault must be found by one of so many seeds."""


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Full disks are logged each time, and there are many."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, len(SEEDS), PER_TEST))
def test_no_seed_breaks_a_promise(first: int, tmp_path: Path) -> None:
    for seed in SEEDS[first : first + PER_TEST]:
        result = simulate(seed, folder=tmp_path)

        assert result.messages > 20, f"seed {seed} does nearly nothing: {result}"


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    once, again, other = (simulate(seed, folder=tmp_path) for seed in (3, 3, 4))

    assert once == again
    assert once.digest != other.digest


# Faults on purpose: each is a mistake that a change to the store could make.


def answers_do_not_wait(plant: pytest.MonkeyPatch) -> None:
    real = GroupCommit.after

    def after(self: GroupCommit[Any], done: Callable[[Any], None], outcome: object = None) -> None:
        if outcome is None:  # a caller waits for the disk itself
            real(self, done)
            return
        done(outcome)
        self.flush()

    plant.setattr(GroupCommit, "after", after)


def producers_follow_one_transaction_late(plant: pytest.MonkeyPatch) -> None:
    late: dict[Any, Any] = {}
    real = LedgerWriter._write

    def write(self: LedgerWriter, sealed: Any) -> None:
        own = dict(sealed.producers)
        sealed.producers.clear()
        sealed.producers.update(late)
        # They are not left to be written behind: all of them come late.
        sealed.opened = set(late)
        real(self, sealed)
        sealed.producers.clear()
        sealed.producers.update(own)
        sealed.opened = set(own)
        late.clear()
        late.update(own)

    plant.setattr(LedgerWriter, "_write", write)


def what_is_behind_is_not_learned(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(Behind, "load", lambda self, _connection: self._drop({}, {}))


def rows_are_taken_for_written_too_early(plant: pytest.MonkeyPatch) -> None:
    real = Behind.piece

    def piece(self: Behind, group: Any) -> Piece:
        return real(self, group)._replace(written_to=group.counters[0])

    plant.setattr(Behind, "piece", piece)


def keys_are_not_written(plant: pytest.MonkeyPatch) -> None:
    real = LedgerWriter._write

    def write(self: LedgerWriter, sealed: Any) -> None:
        sealed.key_rows = []
        real(self, sealed)

    plant.setattr(LedgerWriter, "_write", write)


def views_are_published_before_they_are_durable(plant: pytest.MonkeyPatch) -> None:
    real = Ledger.seal

    def seal(self: Ledger, group: Any) -> None:
        real(self, group)
        for entry, view, _ in group.views:
            entry.view = view

    plant.setattr(Ledger, "seal", seal)


def leases_are_not_checked(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(GroupDecider, "check", lambda _self, _ref: None)


def a_failed_commit_leaves_its_decisions(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(SqliteStore, "reset", lambda _self: None)


def a_commit_forgets_its_last_append(plant: pytest.MonkeyPatch) -> None:
    real = Draft.carry_out

    def carry_out(self: Draft, group: Any) -> None:
        if len(self.decided) > 1:
            self.decided.pop()
        real(self, group)

    plant.setattr(Draft, "carry_out", carry_out)


def duplicates_are_stored_again(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(DiskLoader, "producer", lambda _self, _stream, _producer: None)


FOUND = (BrokenPromiseError, StuckError, DataDamagedError, StoreBrokenError)
"""How a fault shows. Any other error is one of the plant itself, which no longer fits the store."""
PLANTED = [
    answers_do_not_wait,
    producers_follow_one_transaction_late,
    what_is_behind_is_not_learned,
    rows_are_taken_for_written_too_early,
    keys_are_not_written,
    views_are_published_before_they_are_durable,
    leases_are_not_checked,
    a_failed_commit_leaves_its_decisions,
    a_commit_forgets_its_last_append,
    duplicates_are_stored_again,
]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault(monkeypatch)

    assert _finds_something(tmp_path)


@pytest.mark.parametrize("synchronous", ["OFF", "NORMAL"])
def test_a_disk_that_is_not_waited_for_is_found(synchronous: str, tmp_path: Path) -> None:
    assert _finds_something(tmp_path, synchronous=synchronous)


def _finds_something(folder: Path, *, synchronous: str = "FULL") -> bool:
    for seed in range(SEEDS_TO_FIND):
        try:
            simulate(seed, synchronous=synchronous, folder=folder)
        except FOUND as error:
            return any("just simulate" in note for note in error.__notes__)
    return False
