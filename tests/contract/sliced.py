"""Engines that carry every commit out in slices of one append, whatever its size.

What a commit comes to must not depend on how it is carried out, so the suites about commits run on
these as well.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fencepost.store.settings import SqliteSettings
from fencepost.testing.clock import SimClock
from tests.contract.subject import ENGINES, PostgresEngine, SqliteEngine, Subject


class SqliteInSlices(SqliteEngine):
    """The embedded store with slices of one append."""

    def __init__(self, folder: Path, clock: SimClock) -> None:
        super().__init__(folder, clock)
        self._settings = SqliteSettings(folder=folder, commit_slice_appends=0)


class PostgresBesideTurns(PostgresEngine):
    """The shared store that writes every commit beside the turns, in slices of one append."""

    def __init__(self, folder: Path, clock: SimClock) -> None:
        super().__init__(folder, clock)
        self.settings = replace(self.settings, commit_slice_appends=0)


IN_SLICES = {"sqlite-slices": SqliteInSlices, "postgres-slices": PostgresBesideTurns}


@pytest.fixture(params=sorted({**ENGINES, **IN_SLICES}))
async def also_in_slices(
    request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock
) -> AsyncIterator[Subject]:
    """An empty store of each kind, those that carry out in slices included."""
    engines: dict[str, Any] = {**ENGINES, **IN_SLICES}
    made = Subject(engines[request.param](tmp_path / "data", clock), clock)
    yield made
    await made.close()
