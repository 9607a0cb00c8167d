"""Checks of writers, and of large commits that were under way when the server ended.

A large commit that is certain is finished by the next start from its slices. So they must all be
there from the first that is not carried out to the last, readable, and none of them half in the
tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from fencepost.store.check.report import Report, Rows
from fencepost.store.database import Row
from fencepost.store.large.recovery import CERTAIN, REDONE, UNDECIDED
from fencepost.store.large.slices import Slice, decode_slice


def check_writers(report: Report, writers: Iterable[Row], last_ms: int) -> None:
    """Writers agree with themselves: what they published is in the same row as who they are."""
    for name, query, epoch, batch, digest, opened_ms, updated_ms in writers:
        report.counts["writers"] += 1
        where = f"writer {name}"
        if not name or not query or epoch < 1 or (batch is not None and batch < 0):
            detail = f"query {query!r}, epoch {epoch}, batch {batch}"
            report.add("writer_wrong", where, detail)
        elif batch is None and digest is not None:
            report.add("writer_wrong", where, "the digest of a batch that was never published")
        if not opened_ms <= updated_ms <= last_ms:
            detail = f"opened {opened_ms}, used {updated_ms}, now {last_ms}"
            report.add("writer_time_wrong", where, detail)


class LargeCommitCheck:
    """The commits that wait to be finished."""

    def __init__(self, report: Report, rows: Rows) -> None:
        self._report = report
        self._rows = rows

    def run(self, next_position: int) -> None:
        """Look at all of them."""
        under_way = 0
        for first, last, state in self._rows("large_commits"):
            where = f"large commit at {first}"
            under_way += state < REDONE
            if state not in (UNDECIDED, CERTAIN, REDONE) or not first <= last < next_position:
                detail = f"state {state}, positions {first} to {last} of {next_position}"
                self._report.add("large_commit_wrong", where, detail)
            elif state == CERTAIN:
                self._check_slices(where, first)
        if under_way > 1:
            detail = f"{under_way} of them, where one is under way at a time"
            self._report.add("large_commit_wrong", "large commits", detail)

    def _check_slices(self, where: str, first: int) -> None:
        expected: int | None = None
        ended = False
        for number, carried, content in self._rows("slices_of", first):
            if carried:
                continue
            if number != (number if expected is None else expected):
                self._report.add("slice_missing", where, f"no slice {expected}, but {number}")
            expected = number + 1
            try:
                piece = decode_slice(content)
            except msgspec.DecodeError as error:
                detail = f"slice {number} cannot be read: {error}"
                self._report.add("slice_unreadable", where, detail)
                continue
            ended = piece.is_last
            self._check_uncarried(where, number, piece)
        if expected is None or not ended:
            self._report.add("slice_missing", where, "its last slice is not there")

    def _check_uncarried(self, where: str, number: int, piece: Slice) -> None:
        positions = json.dumps([row[0] for row in piece.log])
        [(found,)] = self._rows("rows_at", positions)
        if found:
            detail = f"{found} rows of slice {number} are in the log, and the slice is not done"
            self._report.add("slice_half_carried", where, detail)
