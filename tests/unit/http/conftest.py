"""The front end runs under uvloop in production, so its tests do too."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test of this folder gets a uvloop loop of its own."""
    return {"uvloop": uvloop.new_event_loop}
