"""Every test of the contract runs once for each engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fencepost.testing.clock import SimClock
from tests.contract.subject import ENGINES, Subject


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture(params=sorted(ENGINES))
async def subject(
    request: pytest.FixtureRequest, tmp_path: Path, clock: SimClock
) -> AsyncIterator[Subject]:
    """An empty store."""
    made = Subject(ENGINES[request.param](tmp_path / "data", clock), clock)
    yield made
    await made.close()
